"""What waits for the reference is bounded, mismatches first; a recompute ends; and what was left out is said."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from auditor.errors import ConfigError, RecomputeError
from auditor.judge import ReferenceLogprobs
from auditor.recompute import Patience, RecomputePool
from auditor.recompute_queue import RecomputeQueue
from auditor.records import SampleKey
from auditor.weights_place import WeightsPlace
from auditor.workers import ProcessWorker
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import RESPONSE, one_ulp_off
from tests.auditor.test_reference import true_pair, weights_root
from tests.auditor.test_rounds import workers_of
from tests.auditor.test_unpaired import send

__all__ = ["weights_root"]
STUCK = "33" * 32


def key(i: int) -> SampleKey:
    return SampleKey("run", 0, f"{i}")


def test_mismatches_come_first_and_the_rest_in_the_order_in_which_they_came() -> None:
    queue = RecomputeQueue(10)
    for i, urgent in enumerate((False, True, False, True)):
        queue.put(key(i), urgent)
    assert [asked.key for asked in (queue.take() for _ in range(4)) if asked] == [key(i) for i in (1, 3, 0, 2)]


def test_a_sample_that_waits_or_is_worked_on_does_not_wait_twice() -> None:
    queue = RecomputeQueue(10)
    for _ in range(3):
        queue.put(key(0), False)
    taken = queue.take()
    assert taken is not None
    queue.put(key(0), True)
    assert queue.waiting == 0
    queue.done(taken)
    queue.put(key(0), True)
    assert queue.waiting == 1


def test_agreeing_samples_have_half_of_the_room() -> None:
    queue = RecomputeQueue(4)
    assert [queue.room(False, asked) for asked in range(4)] == [True, True, False, False]
    assert [queue.room(True, asked) for asked in range(5)] == [True, True, True, True, False]
    for i in range(2):
        queue.put(key(i), False)
    assert (queue.room(False, 0), queue.room(True, 1), queue.room(True, 2)) == (False, True, False)


def test_one_that_is_tried_again_waits_its_time_and_holds_nobody_up() -> None:
    now = [100.0]
    queue = RecomputeQueue(10, lambda: now[0])
    queue.put(key(0), True)
    first = queue.take()
    assert first is not None
    queue.again(first, 5.0)
    queue.put(key(1), False)
    second = queue.take()
    assert second is not None
    assert (second.key, queue.waiting) == (key(1), 1)
    now[0] = 106.0
    assert queue.lag_seconds == 6.0
    again = queue.take()
    assert again is not None
    assert (again.key, again.tries, again.first_try) == (key(0), 1, 100.0)


class Reference:
    """A worker that answers what it is told, one word a call; `stillborn`: it ends before it is there."""

    def __init__(self, words: Iterator[str]) -> None:
        self._words, self._next = words, ""

    def wait(self, seconds: float) -> bool:
        self._next = next(self._words)
        if self._next == "stillborn":
            raise EOFError
        return True

    def ask(self, job: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        word = self._next
        if word == "gone":
            raise EOFError
        return ({"mma": "fma32", "causes": None}, b"") if word == "ok" else ({"error": word, "code": word}, b"")

    def kill(self) -> None: ...

    def stop(self) -> None: ...


def outcomes(words: list[str], retry_s: float, root: Path, away: int = 0) -> list[str]:
    """What is concluded of one sample by workers that say these words. away: hirings that fail after the first."""
    said, concluded, hired = iter(words), threading.Event(), iter([True] + [False] * away + [True] * 9)
    found: list[str] = []

    def hire(weights: WeightsPlace) -> Reference:
        if not next(hired):
            raise ConfigError("no cluster to join")
        return Reference(said)

    def conclude(_: SampleKey, outcome: ReferenceLogprobs | RecomputeError, seconds: float) -> None:
        found.append(outcome.code if isinstance(outcome, RecomputeError) else "ok")
        concluded.set()

    queue = RecomputeQueue(10)
    pool = RecomputePool(
        WeightsPlace(str(root)), hire, 1, queue, Patience(60.0, retry_s),
        lambda _: true_pair(root, "a"), conclude, lambda why: None,
    )  # fmt: skip
    queue.put(key(0), False)
    try:
        assert concluded.wait(20)
    finally:
        pool.close()
    return found


def test_a_store_that_does_not_answer_is_asked_again_until_it_does_or_time_is_up(weights_root: Path) -> None:
    assert outcomes(["weights_unreachable", "weights_unreachable", "ok"], 60.0, weights_root) == ["ok"]
    assert outcomes(["weights_unreachable"] * 9, 0.5, weights_root) == ["weights_unreachable"]
    assert outcomes(["weights_missing", "ok"], 60.0, weights_root) == ["weights_missing"]


def test_while_nobody_can_be_hired_a_sample_waits(weights_root: Path) -> None:
    """The one that was there ends on the sample, as when its cluster goes."""
    assert outcomes(["gone", "ok"], 60.0, weights_root, away=4) == ["ok"]
    assert outcomes(["gone", "gone", "gone"], 60.0, weights_root) == ["worker_died"]


def test_a_worker_that_ends_before_it_is_there_is_no_fault_of_the_sample(weights_root: Path) -> None:
    assert outcomes(["stillborn"] * 5 + ["ok"], 60.0, weights_root) == ["ok"]
    assert outcomes(["gone", "stillborn", "gone", "ok"], 60.0, weights_root) == ["ok"]
    assert outcomes(["stillborn"] * 9, 0.5, weights_root) == ["no_worker"]


def test_a_process_is_there_when_it_has_said_so(weights_root: Path) -> None:
    worker = ProcessWorker(WeightsPlace(str(weights_root)))
    try:
        assert not worker.wait(0.0), "it has to import NumPy first"
        assert worker.wait(60.0)
        assert worker.wait(0.0)
    finally:
        worker.stop()
    ended = ProcessWorker(WeightsPlace(str(weights_root)))
    ended.kill()
    with pytest.raises(EOFError):
        ended.wait(60.0)
    ended.stop()


@pytest.fixture
def root(weights_root: Path, tmp_path: Path) -> Path:
    """With a version 3 whose file is never there to read: a pipe that nobody writes, as a file system that hangs."""
    root = tmp_path / "weights"
    shutil.copytree(weights_root, root)
    shutil.copytree(root / "v000001", root / "v000003")
    (root / "v000003/model.safetensors").unlink()
    os.mkfifo(root / "v000003/model.safetensors")
    (root / "v000003/manifest.json").write_text(json.dumps({"weight_version": 3, "weight_digest": STUCK}))
    return root


def stuck(root: Path, name: str) -> tuple[Any, Any]:
    rollout, trainer = true_pair(root, name)
    changed: dict[str, Any] = {"weight_version": 3, "weight_digest": STUCK}
    return replace(rollout, **changed), replace(one_ulp_off(trainer), **changed)


def counted(auditor: AuditorProcess, name: str, **labels: str) -> float:
    inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return auditor.metrics().get(f"auditor_{name}_total{{{inside}}}", 0.0)


def test_a_recompute_that_does_not_end_is_ended_and_the_queue_goes_on(root: Path, tmp_path: Path) -> None:
    flags = ("--weights-root", str(root), "--recompute-rate", "1", "--recompute-timeout-s", "5")
    flags += ("--diagnose-per-step", "0")
    with running_auditor(tmp_path / "a", *flags) as auditor:
        (first,) = workers_of(auditor)
        send(auditor, *stuck(root, "stuck"))
        for i in range(4):
            send(auditor, *true_pair(root, f"{i}"))
        run = auditor.wait_for("/api/v1/runs/run", lambda r: r["queued"] == 0)
        assert run["by_reference"] == {"failed": 1, "done": 4}
        judged = auditor.get("/api/v1/runs/run/samples/0/stuck")["judgement"]
        assert (judged["verdict"], judged["side"], judged["reference"]) == ("mismatch", "unknown", "failed")
        assert judged["reference_error"].startswith("timed_out: ")
        assert counted(auditor, "recompute_errors", run_id="run", code="timed_out") == 1
        assert counted(auditor, "recompute_worker_ends", reason="timed_out") == 1
        (second,) = workers_of(auditor)
        assert second != first
        assert not Path(f"/proc/{first}").exists(), "the process is gone, not only forgotten"
        assert "recompute worker ended on" in auditor.log
        assert auditor.stop() == 0


def test_what_finds_no_room_is_skipped_counted_and_shown_and_never_as_recomputed(root: Path, tmp_path: Path) -> None:
    flags = ("--weights-root", str(root), "--recompute-rate", "1")
    flags += ("--recompute-queue", "2", "--diagnose-per-step", "0")
    with running_auditor(tmp_path / "a", *flags) as auditor:
        send(auditor, *stuck(root, "stuck"))
        auditor.wait_for_metrics(lambda series: series["auditor_recompute_queue_samples"] == 0)
        for i in range(10):
            send(auditor, *true_pair(root, f"agree{i}"))
        for i in range(3):
            rollout, trainer = true_pair(root, f"differ{i}")
            send(auditor, rollout, one_ulp_off(trainer))
        run = auditor.get("/api/v1/runs/run")
        assert run["by_reference"] == {"queued": 3, "skipped": 11}
        assert auditor.metrics()["auditor_recompute_queue_samples"] == 2
        assert counted(auditor, "recompute_skipped_samples", run_id="run", chosen="sampled") == 9
        assert counted(auditor, "recompute_skipped_samples", run_id="run", chosen="mismatch") == 2
        left_out = auditor.get("/api/v1/runs/run/samples/0/differ2")["judgement"]
        assert (left_out["reference"], left_out["side"], left_out["verdict"]) == ("skipped", "unknown", "mismatch")
        with (root / "v000003/model.safetensors").open("wb"):
            pass  # whoever waits for it finds it empty
        run = auditor.wait_for("/api/v1/runs/run", lambda r: r["queued"] == 0)
        assert run["by_reference"] == {"failed": 1, "done": 2, "skipped": 11}
        assert run["recomputed_tokens"] == 2 * RESPONSE
        assert run["detection"]["recomputed_share"] == 1 / 10, "of those that agree: one; the other one was a mismatch"
        assert run["detection"]["missed"]["0.1"] == 0.9, "one of ten would have it, and one in ten was looked at"
        assert run["by_verdict"] == {"match": 10, "mismatch": 4}
        assert auditor.stop() == 0
