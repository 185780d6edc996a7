"""Runs leave the exposition and come back: no series for ever, no false alert, no finding missed."""

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from auditor.codec import encode
from auditor.contracts import known_contracts
from auditor.errors import LedgerError
from auditor.export.board import Board
from auditor.export.leaving import Leaving
from auditor.export.metrics import Live, Metrics
from auditor.periodic import Periodic
from auditor.pipeline import Incoming, Pipeline
from auditor.sampling import Rate
from auditor.storage.database import open_database
from auditor.storage.ledger import Ledger
from auditor.storage.reader import Reader
from auditor.writer import Writer
from tests.auditor.processes import REPOSITORY, running_auditor
from tests.auditor.samples import RESPONSE, one_ulp_off, pair
from tests.auditor.test_unpaired import send

IDLE_S = 7200.0
COMPARED = ("compared_tokens", (("run_id", "run"),))


class World:
    """An auditor's ledger, board and metrics on a clock of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.left: list[tuple[str, int]] = []
        self.path = str(folder / "ledger.db")
        self.ledger = Ledger(open_database(self.path, True), self.clock)
        self.board = Board(self.clock)
        self.writer = Writer(self.ledger, self.board.commit, lambda: None, 8)
        self.flow = Pipeline(known_contracts(), Rate(0.0), self.board, None)
        self.leaving = Leaving(self.board, self.writer, IDLE_S, 100, lambda why, runs: self.left.append((why, runs)))
        self.metrics = Metrics(self.board, Live(*[lambda: 0] * 6, self.clock, lambda: 0.0, dict), "test")
        self._sample = 0

    def clock(self) -> float:
        return self.now

    def report(self, run_id: str = "run", mismatch: bool = False) -> None:
        self._sample += 1
        rollout, trainer = pair(str(self._sample), run_id=run_id)
        batch = [Incoming(r, encode(r)) for r in (rollout, one_ulp_off(trainer) if mismatch else trainer)]
        self.writer.submit(lambda unit: self.flow.receive(unit, batch)).result()

    def shown(self) -> set[str]:
        return {run for run in ("run", "other", "third") if f'run_id="{run}"' in self.metrics.text().decode()}

    def series(self) -> dict[str, float]:
        lines = self.metrics.text().decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if "run_id=" in line}

    def close(self) -> None:
        self.writer.close()
        self.ledger.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def test_a_run_that_is_silent_leaves_and_what_the_ledger_holds_of_it_stays(world: World) -> None:
    world.report("run")
    world.now = IDLE_S - 1
    world.report("other")
    world.leaving.look()
    assert world.shown() == {"run", "other"}
    world.now = IDLE_S + 1
    world.leaving.look()
    assert (world.shown(), world.left) == ({"other"}, [("silent", 1)])
    assert {dict(labels).get("run_id") for _, labels in world.ledger.counters()} == {"other"}
    assert Reader(lambda: open_database(world.path, False)).run("run").totals.compared_tokens == RESPONSE


def test_beyond_a_number_the_run_that_was_silent_longest_leaves(world: World) -> None:
    world.leaving = Leaving(world.board, world.writer, IDLE_S, 2, lambda why, runs: world.left.append((why, runs)))
    for at, run_id in enumerate(("run", "other", "third", "run")):
        world.now = float(at)
        world.report(run_id)
    world.leaving.look()
    assert (world.shown(), world.left) == ({"run", "third"}, [("crowded", 1)])


def test_runs_that_left_are_counted_although_the_next_transaction_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("auditor.export.leaving._AT_ONCE", 2)
    for run_id in ("run", "other", "third"):
        world.report(run_id)
    world.now = IDLE_S + 1
    real = world.writer.submit

    def once(work: Callable[..., object], **kind: bool) -> object:
        if world.left:
            raise LedgerError("the ledger is away")
        return real(work, **kind)

    monkeypatch.setattr(world.writer, "submit", once)
    with pytest.raises(LedgerError):
        world.leaving.look()
    assert (len(world.shown()), world.left) == (1, [("silent", 2)])


def test_a_run_whose_sides_first_report_in_one_transaction_is_new_and_not_back(world: World) -> None:
    rollout, trainer = pair()
    started = threading.Event()
    world.writer.submit(lambda unit: started.wait(5))  # so that the two that follow are one group
    batches = [[Incoming(record, encode(record))] for record in (rollout, one_ulp_off(trainer))]
    waiting = [world.writer.submit(lambda unit, b=batch: world.flow.receive(unit, b)) for batch in batches]
    started.set()
    assert [receipt.outcome for future in waiting for receipt in future.result()] == ["accepted"] * 2
    assert world.series()['auditor_mismatched_tokens_total{run_id="run",side="pair"}'] == 1.0


def test_a_run_that_comes_back_counts_from_zero_and_a_restart_does_not_change_that(world: World) -> None:
    for _ in range(3):
        world.report(mismatch=True)
    world.now = 2 * IDLE_S
    world.leaving.look()
    world.report(mismatch=True)
    pair_of = 'auditor_mismatched_tokens_total{run_id="run",side="pair"}'
    assert world.series()[pair_of] == 0.0, "first as zero, so that what follows is an increase"
    world.now += 80.0
    assert world.series()[pair_of] == 1.0
    kept = world.board.snapshot()
    rebuilt = Board.rebuilt(world.ledger.counters(), Reader(lambda: open_database(world.path, False)), 10).snapshot()
    assert (rebuilt.counters, rebuilt.sides) == (kept.counters, kept.sides)


def test_a_record_that_comes_while_the_run_is_about_to_leave_keeps_it(world: World) -> None:
    world.report()
    world.now = IDLE_S + 1
    assert world.board.silences()["run"] > IDLE_S
    blocked, go = threading.Event(), threading.Event()
    world.writer.submit(lambda unit: (blocked.set(), go.wait(10)))
    assert blocked.wait(10)
    looking = threading.Thread(target=world.leaving.look)
    reporting = [threading.Thread(target=world.report) for _ in range(2)]
    for thread, waiting in ((reporting[0], 1), (looking, 2), (reporting[1], 3)):
        thread.start()
        while world.writer.waiting < waiting:
            time.sleep(0.01)
    go.set()
    for thread in (looking, *reporting):
        thread.join()
    assert world.shown() == {"run"}
    assert world.left == [("silent", 0)]
    assert world.board.snapshot().counters[COMPARED] == 3 * RESPONSE


def test_what_is_reported_in_the_transaction_in_which_a_run_leaves_is_counted_from_zero(world: World) -> None:
    """The other order: it leaves, and comes back, before anything of that is durable."""
    world.report()
    world.now = IDLE_S + 1
    blocked, go = threading.Event(), threading.Event()
    world.writer.submit(lambda unit: (blocked.set(), go.wait(10)))
    assert blocked.wait(10)
    looking, reporting = threading.Thread(target=world.leaving.look), threading.Thread(target=world.report)
    for thread, waiting in ((looking, 1), (reporting, 2)):
        thread.start()
        while world.writer.waiting < waiting:
            time.sleep(0.01)
    go.set()
    for thread in (looking, reporting):
        thread.join()
    assert (world.shown(), world.left) == ({"run"}, [("silent", 1)])
    world.now += 80.0
    assert world.board.snapshot().counters[COMPARED] == RESPONSE
    assert world.ledger.counters()[COMPARED] == RESPONSE


def test_no_setting_of_the_machines_clock_makes_a_run_silent(world: World) -> None:
    """The ledger's clock is a year off at the second start; the run reports before and after."""
    world.report()
    ledger = world.ledger
    for off in (0.0, 3e7, -3e7):
        board = Board.rebuilt(ledger.counters(), Reader(lambda: open_database(world.path, False)), 10)
        assert board.silences()["run"] < 1.0
        board.side_heard("run", "rollout", 1, off)
        assert board.silences()["run"] < 1.0


def test_without_a_time_no_run_leaves(world: World) -> None:
    world.report()
    world.now = 1e9
    Leaving(world.board, world.writer, 0.0, 100, lambda why, runs: None).look()
    assert world.shown() == {"run"}


def check_alerts(
    folder: Path, world: World, minutes: int, act: Callable[[int], None], expected: Mapping[int, int]
) -> None:
    """Scrape every minute, give what was scraped to the shipped rules, and see in which minutes they page: 1, or 0."""
    scraped: list[dict[str, float]] = []
    for minute in range(minutes):
        world.now = 60.0 * minute
        act(minute)
        world.leaving.look()
        scraped.append(world.series())
    inputs = []
    for name in sorted({name for series in scraped for name in series if "bucket" not in name}):
        values, there = [], False
        for series in scraped:
            values.append(f"{series[name]:g}" if name in series else "stale" if there else "_")
            there = name in series
        inputs.append({"series": name, "values": " ".join(values)})
    firing = 'count(ALERTS{alertname="MismatchedTokens",alertstate="firing"}) or vector(0)'
    asked = [
        {"expr": firing, "eval_time": f"{minute}m", "exp_samples": [{"value": on}]} for minute, on in expected.items()
    ]
    test = {"interval": "1m", "input_series": inputs, "promql_expr_test": asked}
    shutil.copy(REPOSITORY / "deploy/prometheus/rules.yml", folder)
    content = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]}
    (folder / "t.yml").write_text(json.dumps(content))
    command = ["promtool", "test", "rules", str(folder / "t.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is missing: make ops-tools")
@pytest.mark.parametrize("back", [140, 300], ids=["Prometheus still knows it", "Prometheus has forgotten it"])
def test_old_findings_do_not_page_when_a_run_comes_back_and_new_ones_do(
    world: World, tmp_path: Path, back: int
) -> None:
    """One mismatch at minute 5; gone at 126; back and clean; then as many mismatches as before it left."""

    def act(minute: int) -> None:
        if minute == 5:
            world.report(mismatch=True)
        if minute == back or back + 20 < minute < back + 24:
            world.report()
        if minute == back + 40:
            world.report(mismatch=True)

    silent = dict.fromkeys((4, back + 1, back + 3, back + 8, back + 25, back + 39), 0)
    paging = dict.fromkeys((7, back + 42, back + 50), 1)
    check_alerts(tmp_path, world, back + 60, act, silent | paging)


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is missing: make ops-tools")
@pytest.mark.parametrize("back", [140, 300], ids=["Prometheus still knows it", "Prometheus has forgotten it"])
def test_a_run_whose_first_word_after_a_silence_is_a_mismatch_pages(world: World, tmp_path: Path, back: int) -> None:
    """As many as before it left: the number is the same, and the finding is new."""

    def act(minute: int) -> None:
        if minute in (5, back):
            world.report(mismatch=True)

    check_alerts(tmp_path, world, back + 10, act, {back - 3: 0, back + 4: 1})


def test_work_in_the_background_that_fails_is_tried_again_said_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done, codes = threading.Event(), []
    failures = iter([True] * 3)

    def look() -> None:
        if next(failures, False):
            raise LedgerError("the ledger is away")
        done.set()

    with caplog.at_level("WARNING"):
        work = Periodic("a look", 0.01, look, codes.append)
        assert done.wait(10)
        work.close()
    assert codes == ["ledger_unavailable"] * 3
    assert [record.message for record in caplog.records] == [
        "a look: cannot be done now, to be tried again: the ledger is away",
        "a look: done again",
    ]


def test_a_real_auditor_lets_a_run_go_and_takes_it_back(tmp_path: Path) -> None:
    with running_auditor(tmp_path, "--shown-idle-s", "1") as auditor:
        send(auditor, *pair("0"))
        auditor.wait_for_metrics(lambda series: not any('run_id="run"' in name for name in series))
        assert auditor.metrics()['auditor_left_runs_total{reason="silent"}'] == 1
        assert auditor.get("/api/v1/runs/run")["samples"] == 1
        send(auditor, *pair("1"))
        assert auditor.metrics()['auditor_records_total{outcome="accepted",run_id="run",side="trainer"}'] == 0.0
        assert auditor.get("/api/v1/runs/run")["samples"] == 2
        assert auditor.stop() == 0
