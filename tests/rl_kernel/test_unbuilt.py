"""A checkout that is not built, in whose folder the installed package is asked for."""

import shutil
import subprocess
import sys
from pathlib import Path

import rl_kernel


def test_sources_that_are_not_built_say_so_and_what_to_do(tmp_path: Path) -> None:
    sources = Path(rl_kernel.__file__).parent
    for name in ("__init__.py", "reference/__init__.py"):
        (tmp_path / "rl_kernel" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(sources / name, tmp_path / "rl_kernel" / name)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from rl_kernel.reference import _reference"
    # -S: no editable install that would find the compiled part elsewhere.
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "rl_kernel is not built in" in done.stderr.splitlines()[-1]
    assert "python -P" in done.stderr.splitlines()[-1]
