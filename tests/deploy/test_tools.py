"""deploy/tools.sh where it may not install Debian's packages."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "tools.sh"


def test_without_root_the_last_lines_say_what_was_left_out_and_what_follows(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can start a program as somebody else")
    if not all((SCRIPT.parents[1] / "build/tools" / name).exists() for name in ("helm-3", "helm-4", "trixie", "forky")):
        pytest.skip("it would go and get helm and other releases' packages first: make ops-tools")
    (tmp_path / "status").touch()  # of packages: there is none
    os.chmod(tmp_path.parent, 0o755)
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "bash", str(SCRIPT), "--images"]
    done = subprocess.run(
        command, env={**os.environ, "DPKG_ADMINDIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said, consequence = done.stderr.splitlines()[-2:]
    assert said.startswith("NOT INSTALLED, for this is not root: prometheus prometheus-alertmanager chromium")
    assert "fail where CI is set. As root: apt-get install prometheus " in consequence
    assert "docker.io" in consequence
