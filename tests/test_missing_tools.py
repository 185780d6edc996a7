"""What tests/conftest.py makes of a skip: a failure in CI if it is about a tool, by mark, call or module."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ABOUT_TOOLS = {
    "marked": "import pytest\n@pytest.mark.skipif(True, reason='helm is missing: make it')\ndef test_it(): pass\n",
    "called": "import pytest\ndef test_it(): pytest.skip('hadolint is missing')\n",
    "module": "import pytest\npytest.importorskip('no_such_module', reason='no_such_module is missing')\n",
}
OTHER = "import pytest\ndef test_it(): pytest.skip('this CPU cannot flush subnormals')\n"


def said(folder: Path, **environment: str) -> str:
    for name, program in {**ABOUT_TOOLS, "other": OTHER}.items():
        (folder / f"test_{name}.py").write_text(program)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-rA", "--continue-on-collection-errors", "-p", "tests.conftest"]
    clean = {name: value for name, value in os.environ.items() if name != "CI"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", str(folder)],
        env=clean | environment, cwd=folder, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip


def test_a_missing_tool_is_a_skip_by_hand_and_a_failure_in_ci_and_another_skip_stays_one(tmp_path: Path) -> None:
    assert re.search("= 4 skipped in", said(tmp_path))
    assert re.search("= 1 failed, 1 skipped, 2 errors in", in_ci := said(tmp_path, CI="true"))
    assert "CI is set, so this is no skip" in in_ci
