"""The verdict first, the causes afterwards: no verdict waits for a search, and no search is lost or counted twice."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from auditor.export.board import Board
from auditor.judge import SEARCHING, Reference, ReferenceLogprobs, Verdict
from auditor.pipeline import Pipeline
from auditor.records import SampleKey
from auditor.retention import evidence_before
from auditor.sampling import Rate
from auditor.search_queue import SearchQueue
from auditor.storage.chain import verify
from auditor.storage.database import open_database
from auditor.storage.ledger import Ledger
from auditor.storage.reader import Reader
from auditor.weights_place import WeightsPlace
from auditor.workers import ProcessWorker
from tests.auditor.postgres_server import Open
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import CONTRACTS, one_ulp_off, pair
from tests.auditor.test_ledger import receive, wait_until
from tests.auditor.test_recompute_queue import counted, root
from tests.auditor.test_reference import settled, true_pair, weights_root
from tests.auditor.test_rounds import workers_of
from tests.auditor.test_unpaired import send

__all__ = ["root", "weights_root"]
RUN = "/api/v1/runs/run"


def differ(auditor: AuditorProcess, root: Path, name: str) -> None:
    """Send a sample whose trainer is off by a bit."""
    rollout, trainer = true_pair(root, name)
    send(auditor, rollout, one_ulp_off(trainer))


def counted_samples(auditor: AuditorProcess) -> dict[str, float]:
    """Mismatched samples by their cause."""
    name = "auditor_mismatched_samples_total{"
    return {series.split('"')[1]: n for series, n in auditor.metrics().items() if series.startswith(name)}


def searching_workers(auditor: AuditorProcess) -> list[int]:
    """Those that are at a search, and give way to everybody."""
    return [pid for pid in workers_of(auditor) if os.getpriority(os.PRIO_PROCESS, pid) == 19]


def entries(auditor: AuditorProcess) -> int:
    return verify(open_database(str(auditor.ledger), writer=False)).entries


@contextmanager
def searching(root: Path, folder: Path, *flags: str) -> Iterator[AuditorProcess]:
    """An auditor with one verdict, whose search hangs: it reads every version, and version 3 is not there to read."""
    with running_auditor(folder, "--weights-root", str(root), "--diagnose-per-step", "1", *flags) as auditor:
        differ(auditor, root, "first")
        auditor.wait_for(RUN, lambda r: r["by_cause"] == {SEARCHING: 1})
        yield auditor


def left_queued(root: Path, folder: Path) -> AuditorProcess:
    """An auditor that was killed while a sample waited for its reference."""
    with running_auditor(folder, "--weights-root", str(root)) as auditor:
        os.kill(workers_of(auditor)[0], signal.SIGSTOP)
        differ(auditor, root, "first")
        assert auditor.get(RUN)["queued"] == 1
        auditor.kill()
    return auditor


def go_on(root: Path) -> None:
    """Whoever waits for version 3 finds it empty; a search that has not come to it yet is waited for."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.close(os.open(root / "v000003/model.safetensors", os.O_WRONLY | os.O_NONBLOCK))
            return
        except OSError:
            time.sleep(0.05)
    pytest.fail("no search reads version 3")


def test_no_verdict_waits_for_a_search_and_a_sample_is_counted_when_its_search_is_over(
    root: Path, tmp_path: Path
) -> None:
    with searching(root, tmp_path / "a", "--recompute-rate", "1") as auditor:
        judged = auditor.get("/api/v1/runs/run/samples/0/first")["judgement"]
        assert (judged["reference"], judged["side"], judged["causes"]) == ("done", "trainer", [])
        assert counted(auditor, "mismatched_tokens", run_id="run", side="trainer") == 1, "what an alert looks at"
        differ(auditor, root, "second")
        send(auditor, *true_pair(root, "sound"))
        run = auditor.wait_for(RUN, lambda r: r["by_reference"] == {"done": 3})
        assert (run["by_side"], run["by_cause"]) == ({"trainer": 2}, {SEARCHING: 1, "undiagnosed": 1})
        assert counted_samples(auditor) == {"undiagnosed": 1}
        wait_until(lambda: bool(searching_workers(auditor)))
        assert len(workers_of(auditor)) == 2
        go_on(root)
        run = auditor.wait_for(RUN, settled)
        assert run["by_cause"] == {"reduction_order": 1, "undiagnosed": 1}
        assert counted_samples(auditor) == {"reduction_order": 1, "undiagnosed": 1}
        wait_until(lambda: len(workers_of(auditor)) == 1)  # nobody is kept for searches that nobody asks for
        assert auditor.stop() == 0
        # Two records, and verdicts of the pair, of the reference and, for one, of the search.
        assert entries(auditor) == 4 * 3 + 1


def test_a_search_that_is_lost_is_taken_up_again_and_recorded_once(root: Path, tmp_path: Path) -> None:
    with searching(root, tmp_path / "a") as auditor:
        began = time.monotonic()
        assert auditor.stop() == 0
        assert time.monotonic() - began < 5, "nobody waits for a search"
        auditor.start()
        wait_until(lambda: bool(searching_workers(auditor)))
        workers = workers_of(auditor)
        auditor.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        auditor.start()
        assert auditor.get(RUN)["by_cause"] == {SEARCHING: 1}
        go_on(root)
        assert auditor.wait_for(RUN, settled)["by_cause"] == {"reduction_order": 1}
        assert counted_samples(auditor) == {"reduction_order": 1}
        assert auditor.stop() == 0
        assert entries(auditor) == 5


def test_where_nothing_is_searched_any_more_nobody_waits_for_it(root: Path, tmp_path: Path) -> None:
    with searching(root, tmp_path / "a") as auditor:
        auditor.kill()
    for _ in range(2):
        with running_auditor(tmp_path / "b", "--ledger", str(auditor.ledger)) as other:
            assert other.wait_for(RUN, settled)["by_cause"] == {"undiagnosed": 1}
            assert counted_samples(other) == {"undiagnosed": 1}
            assert other.stop() == 0
    assert entries(auditor) == 5


def test_an_auditor_that_recomputes_nothing_says_so_and_how_many_samples_wait_for_one_that_does(
    root: Path, tmp_path: Path
) -> None:
    auditor = left_queued(root, tmp_path / "a")
    assert "no weights_root" not in auditor.log
    for name, ledger, said in (
        ("b", auditor.ledger, "a side; 1 samples in the ledger wait 3600 s for one that has it"),
        ("c", None, "a side\n"),
    ):
        with running_auditor(tmp_path / name, *(("--ledger", str(ledger)) if ledger else ())) as other:
            assert other.stop() == 0
            assert f"no weights_root: nothing is recomputed, so no mismatch gets {said}" in other.log


def test_a_sample_that_waits_for_a_reference_is_given_up_where_no_auditor_with_weights_comes(
    root: Path, tmp_path: Path
) -> None:
    auditor = left_queued(root, tmp_path / "a")
    patience = ("--ledger", str(auditor.ledger), "--recompute-retry-s")
    with running_auditor(tmp_path / "b", *patience, "3600") as other:
        time.sleep(1)
        assert other.get(RUN)["queued"] == 1, "one with weights may come"
        assert other.stop() == 0
    with running_auditor(tmp_path / "c", *patience, "1") as other:
        run = other.wait_for(RUN, lambda r: r["queued"] == 0)
        assert (run["by_reference"], run["by_side"], run["by_verdict"]) == (
            {"failed": 1}, {"unknown": 1}, {"mismatch": 1},
        )  # fmt: skip
        judged = other.get("/api/v1/runs/run/samples/0/first")["judgement"]
        assert judged["reference_error"] == "weights_missing: the auditor has had no weights_root for 1 s"
        assert counted(other, "recompute_errors", run_id="run", code="weights_missing") == 1
        assert other.stop() == 0
    reader = Reader(lambda: open_database(str(auditor.ledger), writer=False))
    assert len(evidence_before(reader, time.time() + 60)) == 2, "and may be retired"


class Deadly(ProcessWorker):
    """A search that takes the auditor along, as one does that fills the memory of its container."""

    def ask(self, job: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if job["diagnose"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().ask(job, body)


def deadly(weights: WeightsPlace) -> Deadly:
    return Deadly(weights)


def test_a_search_that_ends_the_auditor_is_begun_three_times_and_no_more(weights_root: Path, tmp_path: Path) -> None:
    flags = ("--weights-root", str(weights_root), "--recompute-pool", "tests.auditor.test_searches:deadly")
    with running_auditor(tmp_path, *flags) as auditor:
        differ(auditor, weights_root, "a")
        assert auditor.process is not None
        for _ in range(2):
            assert auditor.process.wait(20) == -signal.SIGKILL
            auditor.start()
        assert auditor.process.wait(20) == -signal.SIGKILL
        auditor.start()
        run = auditor.wait_for(RUN, settled)
        assert (run["by_side"], run["by_cause"]) == ({"trainer": 1}, {"undiagnosed": 1})
        judged = auditor.get("/api/v1/runs/run/samples/0/a")["judgement"]
        said = "nothing was found: its search was begun 3 times and ended its worker, or the auditor, each time"
        assert judged["causes"] == [{"cause": "undiagnosed", "score": 0.0, "evidence": said}]
        assert auditor.stop() == 0


def test_a_search_that_the_auditor_breaks_off_or_puts_off_counts_for_none(connect: Open) -> None:
    ledger, at = Ledger(connect(True)), key("run", 0, "x")
    begun = []
    for ends in (None, "search_undone", None, "search_ends", None):
        with ledger.transaction() as unit:
            begun.append(unit.search_begins(at))
            if ends is not None:
                getattr(unit, ends)(at)
    assert begun == [1, 2, 2, 3, 1]
    ledger.close()


def test_a_search_that_waits_is_seen_and_stopping_in_the_middle_of_one_is_no_beginning(
    root: Path, tmp_path: Path
) -> None:
    with searching(root, tmp_path / "a", "--diagnose-per-step", "2") as auditor:
        differ(auditor, root, "second")
        auditor.wait_for_metrics(lambda m: m["auditor_search_lag_seconds"] > 0.5)
        assert auditor.metrics()["auditor_search_queue_samples"] == 1
        wait_until(lambda: bool(searching_workers(auditor)))
        assert auditor.stop() == 0
    assert open_database(str(auditor.ledger), writer=False).all("SELECT sample_id, begun FROM searches") == [
        ("first", 0)
    ]


def test_a_search_that_does_not_end_is_ended_and_the_next_sample_is_searched(root: Path, tmp_path: Path) -> None:
    limits = ("--recompute-timeout-s", "2", "--diagnose-seconds", "2")
    with searching(root, tmp_path / "a", *limits) as auditor:
        run = auditor.wait_for(RUN, settled)
        assert (run["by_side"], run["by_cause"]) == ({"trainer": 1}, {"undiagnosed": 1})
        assert counted(auditor, "recompute_worker_ends", reason="timed_out") == 1
        assert counted_samples(auditor) == {"undiagnosed": 1}
        rollout, trainer = (replace(record, step=1) for record in true_pair(root, "next"))
        send(auditor, rollout, one_ulp_off(trainer))
        auditor.wait_for(RUN, lambda r: r["by_cause"] == {SEARCHING: 1, "undiagnosed": 1})
        go_on(root)
        assert auditor.wait_for(RUN, settled)["by_cause"] == {"reduction_order": 1, "undiagnosed": 1}
        assert auditor.stop() == 0


class Failing(ProcessWorker):
    """A worker whose searches fail, as one does that meets what no hypothesis was meant for."""

    def ask(self, job: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        header, answer = super().ask({**job, "diagnose": 0.0}, body)
        assert header["causes"] is None
        return header, answer


def failing(weights: WeightsPlace) -> Failing:
    return Failing(weights)


def test_a_search_that_fails_is_a_fault_of_the_auditors_and_costs_no_verdict(
    weights_root: Path, tmp_path: Path
) -> None:
    flags = ("--weights-root", str(weights_root), "--recompute-pool", "tests.auditor.test_searches:failing")
    with running_auditor(tmp_path, *flags) as auditor:
        differ(auditor, weights_root, "a")
        run = auditor.wait_for(RUN, lambda r: r["by_cause"] == {"undiagnosed": 1})
        assert run["by_side"] == {"trainer": 1}
        assert counted(auditor, "errors", part="causes", code="internal") == 1
        assert auditor.stop() == 0


def key(run: str, step: int, sample: str) -> SampleKey:
    return SampleKey(run, step, sample)


def test_a_few_of_a_step_are_searched_and_no_run_has_more_of_them_wait() -> None:
    queue = SearchQueue(2)
    assert [queue.wants(key("a", 0, name)) for name in "xyzxy"] == [True, True, False, True, True], "asked again: same"
    for name in "xy":
        queue.put(key("a", 0, name), urgent=False)
    assert not queue.wants(key("a", 1, "x")), "two of the run wait"
    assert queue.wants(key("b", 1, "x")), "and none of another"
    taken = queue.take()
    assert taken is not None
    assert not queue.wants(key("a", 1, "x")), "one is worked on and one waits"
    queue.done(taken)
    assert queue.wants(key("a", 1, "x"))
    assert not queue.wants(key("a", 0, "z")), "two of that step were looked into"


def flow(searches: SearchQueue | None, queue: list[SampleKey]) -> Pipeline:
    return Pipeline(CONTRACTS, Rate(1.0), Board(), lambda key, urgent: queue.append(key), searches=searches)


def concluded(ledger: Ledger, searches: SearchQueue | None) -> tuple[Pipeline, SampleKey]:
    """A mismatch on which the reference has spoken, in a ledger with a sound sample beside it."""
    queue: list[SampleKey] = []
    pipeline = flow(searches, queue)
    receive(ledger, pipeline, 2, 3)
    for key in queue:
        truth = pair(key.sample_id)[0].logprobs
        with ledger.transaction() as unit:
            pipeline.conclude(unit, key, ReferenceLogprobs(truth, truth, "fma32"))
        for call in unit.after_commit:
            call()
    return pipeline, SampleKey("run", 0, "3")


def test_what_is_searched_is_found_in_the_ledger_and_keeps_its_evidence_until_the_search_is_over(connect: Open) -> None:
    ledger, searches = Ledger(connect(True)), SearchQueue(2)
    pipeline, key = concluded(ledger, searches)
    reader, mismatch = Reader(lambda: connect(False)), Reader(lambda: connect(False)).sample(key).judgement
    assert (mismatch.verdict, mismatch.reference, mismatch.cause) == (Verdict.MISMATCH, Reference.DONE, SEARCHING)
    assert (list(reader.searching()), searches.waiting) == ([key], 1)
    later = time.time() + 60
    assert {e.key.sample_id for e in evidence_before(reader, later)} == {"2"}
    causes = ({"cause": "temperature", "score": 1.0, "evidence": 'T "cause": "searching"'},)
    for _ in range(3):
        with ledger.transaction() as unit:
            pipeline.explain(unit, key, causes)
    assert list(reader.searching()) == []
    assert {e.key.sample_id for e in evidence_before(reader, later)} == {"2", "3"}
    assert reader.sample(key).judgement.causes == causes
    assert reader.run("run").totals.causes == {"temperature": 1}
    samples = [n for (name, _), n in ledger.counters().items() if name == "mismatched_samples"]
    ledger.close()
    assert samples == [1]
    assert verify(connect(False)).entries == 9


@pytest.mark.parametrize("searches", [None, SearchQueue(0)], ids=["nobody searches", "none of a step"])
def test_without_a_search_a_mismatch_is_counted_at_its_verdict(tmp_path: Path, searches: SearchQueue | None) -> None:
    ledger = Ledger(open_database(str(tmp_path / "ledger.db"), writer=True))
    concluded(ledger, searches)
    counted = {name: n for name, n in ledger.counters().items() if name[0] == "mismatched_samples"}
    assert counted == {("mismatched_samples", (("cause", "undiagnosed"), ("run_id", "run"), ("side", "trainer"))): 1}
    assert list(Reader(lambda: open_database(str(tmp_path / "ledger.db"), writer=False)).searching()) == []
    ledger.close()
