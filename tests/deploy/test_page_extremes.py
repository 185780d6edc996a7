"""The auditor's page with nothing to show, with nothing compared, with the longest names, and with 100,000 steps."""

import json
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest

from auditor.client import AuditClient
from auditor.drift import DriftSums
from auditor.storage.ledger import Ledger
from auditor.storage.rows import Totals
from auditor.storage.sqlite import SqliteDatabase
from tests.auditor.processes import running_auditor
from tests.auditor.samples import pair
from tests.deploy.browser import browser, needs_chromium
from tests.deploy.test_page import shoot
from tests.deploy.watched import other_rope

pytestmark = [pytest.mark.slow, needs_chromium]


def test_an_empty_ledger_says_so(tmp_path: Path) -> None:
    with running_auditor(tmp_path) as process, browser() as page:
        page.goto(f"http://{process.http}/")
        page.get_by_text("The ledger is empty").wait_for()
        shoot(page, "empty")


def test_what_was_never_compared_is_said_in_the_curves_and_is_no_zero(tmp_path: Path) -> None:
    with running_auditor(tmp_path) as process, browser() as page:
        for run_id, steps in (("deaf", [7]), ("half-deaf", [0, 1, 2, 3])):
            with AuditClient(process.grpc, run_id, spool_dir=tmp_path / run_id, queue_size=32) as client:
                for step in steps:
                    rollout, trainer = pair("0", step=step, run_id=run_id)
                    client.submit_rollout(rollout)
                    client.submit_trainer(trainer if step in (0, 3) else other_rope(trainer))
        page.goto(f"http://{process.http}/#/run/deaf")
        chart = page.locator("svg.chart").first
        chart.wait_for()
        shoot(page, "deaf")
        # One step is named once.
        assert chart.locator("text").all_text_contents()[2:] == ["step 7", "Nothing was compared."]
        page.goto(f"http://{process.http}/#/run/half-deaf")
        page.get_by_role("heading", name="Run half-deaf").wait_for()
        shoot(page, "half-deaf")
        holes = page.locator("svg.chart").first.locator(".hole")
        widths = holes.evaluate_all("all => all.map(one => one.getBoundingClientRect().width)")
        assert len(widths) == 2
        assert min(widths) > 200
        assert page.locator("svg.chart").first.get_by_text("Nothing was compared").count() == 0
        assert page.get_by_text("nothing was compared there").count() == 1


@pytest.mark.parametrize("width", [390, 1280])
def test_long_names_and_digests_leave_room_for_the_rest(width: int, tmp_path: Path) -> None:
    run_id = "r" * 128
    with running_auditor(tmp_path) as process, browser() as page:
        page.set_viewport_size({"width": width, "height": 900})
        with AuditClient(process.grpc, run_id, spool_dir=tmp_path / "spool", queue_size=8) as client:
            rollout, trainer = pair("s" * 128, run_id=run_id)
            client.submit_rollout(rollout)
            client.submit_trainer(other_rope(trainer))
        run, sample = f"#/run/{run_id}", "s" * 128
        for address, heading in (
            ("", "Runs"),
            (run, "Run r"),
            (f"{run}/step/0", "Step 0"),
            (f"{run}/sample/0/{sample}", "Sample s"),
        ):
            page.goto(f"http://{process.http}/{address}")
            page.get_by_role("heading", level=1, name=heading).wait_for()
            page.wait_for_load_state("networkidle")
            shoot(page, f"long-{width}-{address.count('/')}")
            assert page.evaluate("document.documentElement.scrollWidth") == width
        page.goto(f"http://{process.http}/#/")
        page.get_by_role("heading", name="Runs").wait_for()
        # On a wide screen nothing has to be scrolled for.
        assert width < 1280 or page.evaluate(
            "[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)"
        )


def test_a_run_of_100000_steps_is_drawn_in_few_points_and_a_peak_is_not_averaged_away(tmp_path: Path) -> None:
    peak = 54_321
    fill_ledger(tmp_path / "ledger.db", 100_000, peak)
    with running_auditor(tmp_path) as process, browser() as page:
        started = time.monotonic()
        page.goto(f"http://{process.http}/#/run/long")
        page.locator("svg.chart").first.wait_for(timeout=60_000)
        seconds = time.monotonic() - started
        print(f"100,000 steps shown after {seconds:.1f} s")
        shoot(page, "long")
        points = process.get("/api/v1/runs/long/curve?points=400")["points"]
        assert len(points) == 400
        worst = max(points, key=lambda point: point["most_mismatched"])
        assert worst["first_step"] <= peak <= worst["last_step"]
        assert (worst["mismatched_tokens"], worst["max_abs"]) == (3, 0.5)
        assert sum(point["compared_tokens"] for point in points) == 100_000 * 800
        assert page.evaluate("document.querySelectorAll('*').length") < 8000
        page.locator("svg.chart").first.focus()
        page.keyboard.press("Home")
        for _ in range(points.index(worst)):
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        page.get_by_role("link", name=str(peak), exact=True).wait_for()


def fill_ledger(path: Path, steps: int, peak: int) -> None:
    """A ledger whose steps came from somewhere else: their totals, as the auditor writes them."""
    Ledger(SqliteDatabase(path, writer=True)).close()
    clean = Totals(
        samples=8,
        verdicts={"match": 8},
        compared_tokens=800,
        drift=DriftSums(tokens=800, sequences=8, ratio=800.0, ratio_squared=800.0),
    )
    wrong = replace(
        clean,
        verdicts={"match": 7, "mismatch": 1},
        sides={"unknown": 1},
        causes={"unknown": 1},
        mismatched_tokens=3,
        drift=replace(clean.drift, max_abs=0.5),
    )
    usual, other = json.dumps(clean.to_json()), json.dumps(wrong.to_json())
    with sqlite3.connect(path) as database:
        rows = (("long", s, int(s == peak), 0, other if s == peak else usual) for s in range(steps))
        database.executemany("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", rows)
        database.execute("INSERT INTO runs VALUES ('long', 1e9, 1.1e9, ?)", (other,))
