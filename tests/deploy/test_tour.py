"""`make tour`, as a person takes it: a real job whose sync fails, a real page, pictures, and the cause by name."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.browser import needs_chromium

REPOSITORY = Path(__file__).parents[2]
# tests/deploy/test_dashboards.py has them all.
FAULTS_OF_OTHER_KINDS = {
    "Failed calls and requests",
    "Records retired",
    "Refused records by reason",
    "Runs that left /metrics",
    "Samples given up",
    "Samples that could not be recomputed",
    "Samples without room to wait for the reference",
    "Token rows written",  # `evidence` is off
    "Tokens explained by arithmetic",
    "Workers replaced",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_chromium
@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is missing: make ops-tools")
def test_the_tour_ends_with_a_page_pictures_and_the_cause(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.tour.main", "--out", str(tmp_path), "--steps", "6", "--clean", "4"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    pictures = {path.name for path in folder.glob("*.png") if path.stat().st_size > 10_000}
    dashboards = {"dashboard-auditor.png", "dashboard-drift.png", "dashboard-rl_job.png"}
    views = {f"page-{view}-{scheme}.png" for view in ("runs", "run", "sample") for scheme in ("light", "dark")}
    assert pictures == dashboards | views
    assert "FIRING MismatchedTokens (critical)" in (folder / "alert.txt").read_text()
    assert "stale_weights" in done.stdout
    # The native run is beside the strict one, and every panel has something to show but for what went right.
    assert re.search(r"finding on \S+-native: sides \{'both': \d+\}", done.stdout)
    empty = {
        title for titles in re.findall(r"nothing to show in (.*)", done.stdout) for title in titles.split(", ")
    } - {"no panel"}
    assert empty <= FAULTS_OF_OTHER_KINDS
    rang = re.search(r"([\d.]+) s  from there until the pager rang", done.stdout)
    assert rang is not None
    assert float(rang[1]) < 15


def test_an_interrupted_tour_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from deploy.tour import main

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "_tour", interrupted)
    assert main.main(["--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted; everything that was started has been stopped\n"
