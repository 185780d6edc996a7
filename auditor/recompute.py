"""The reference, asked elsewhere: mismatches first, then the sampled ones in the order in which they came.

A search for causes is a job of the same workers and never of the same worker: a pool of its own with one worker, so
that no verdict waits for a guess, and none is broken off, with what it had read, where a verdict is asked for.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from auditor.codec import encode
from auditor.errors import ConfigError, LedgerError, RecomputeError
from auditor.judge import ReferenceLogprobs
from auditor.recompute_queue import Asked, RecomputeQueue
from auditor.records import RolloutRecord, SampleKey, TrainerRecord
from auditor.weights_place import WeightsPlace
from auditor.workers import Hire, Worker

log = logging.getLogger(__name__)
_ATTEMPTS = 3
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_PLACE_S = 10.0
# What passes: the sample is tried again.
_PASSING: Final = ("weights_unreachable", "no_worker")

Load = Callable[[SampleKey], tuple[RolloutRecord, TrainerRecord]]
Conclude = Callable[[SampleKey, ReferenceLogprobs | RecomputeError, float], None]
WorkerEnd = Literal["died", "timed_out"]


class _Closing(Exception):
    """The pool is closed while a sample is worked on."""


class _TimedOut(Exception):
    """A worker was killed, for it was too long at a sample."""


@dataclass(frozen=True, slots=True)
class Patience:
    """sample_s: after which a worker that is at one sample is killed. retry_s: for which a sample is tried anew while
    its weights' store does not answer, or nobody can be had who runs the reference.
    """

    sample_s: float
    retry_s: float


class RecomputePool:
    """Workers before a queue.

    hire: makes a worker; workers: how many.
    load: fetches a sample's two records from the ledger, so that what waits costs a key and no arrays.
    conclude: is told the outcome and the seconds that it took; called from the pool's threads, which wait for it.
    on_end: told of each worker that did not end by itself, or that was killed.
    diagnose_s: spent on the causes of a sample and side at most; 0: they are not searched for. A pool that searches
    hires when something waits, and keeps no worker when nothing does. answered: told of each sample that a worker
    gave an answer to, before `conclude` is, which may wait for what is to be tried again.
    """

    def __init__(
        self,
        weights: WeightsPlace,
        hire: Hire,
        workers: int,
        queue: RecomputeQueue,
        patience: Patience,
        load: Load,
        conclude: Conclude,
        on_end: Callable[[WorkerEnd], None],
        diagnose_s: float = 0.0,
        answered: Callable[[SampleKey], None] = lambda key: None,
    ) -> None:
        self._hire, self._weights = hire, weights
        self._queue, self._patience, self._diagnose_s = queue, patience, diagnose_s
        self._load, self._conclude, self._on_end, self._answered = load, conclude, on_end, answered
        self._changed = threading.Lock()
        # Hired here, so that a pool that cannot be had fails the start and not the first mismatch.
        self._spare = None if diagnose_s else hire(weights)
        self._workers: set[Worker] = {self._spare} if self._spare else set()
        name = "search" if diagnose_s else "recompute"
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}") for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop at once; what waits is queued in the ledger and is taken up at the next start."""
        self._queue.close()
        for worker in list(self._workers):
            worker.kill()
        for thread in self._threads:
            thread.join()
        for worker in list(self._workers):
            self._stop(worker)

    def _work(self) -> None:
        worker: Worker | None = None
        while (asked := self._queue.take()) is not None:
            started = time.monotonic()
            try:
                worker, outcome = self._serve(worker, asked.key)
            except _Closing:
                break
            if isinstance(outcome, RecomputeError) and outcome.code in _PASSING and self._try_again(asked, outcome):
                continue
            self._conclude(asked.key, outcome, time.monotonic() - started)
            self._queue.done(asked)
            if self._diagnose_s and worker is not None and not self._queue.waiting:
                self._stop(worker)
                worker = None
        if worker is not None:
            self._stop(worker)

    def _serve(self, worker: Worker | None, key: SampleKey) -> tuple[Worker | None, ReferenceLogprobs | RecomputeError]:
        """Ask a worker, or the next one where it ends on the sample; the one that is left, and the outcome."""
        outcome = RecomputeError(f"{_ATTEMPTS} workers ended on it", "worker_died")
        for _ in range(_ATTEMPTS):
            there = False
            try:
                worker = worker or self._start()
                if not worker.wait(_PLACE_S):
                    said = f"no worker was there within {_PLACE_S:g} s: it has not started, or no core is free for it"
                    return worker, RecomputeError(said, "no_worker")
                there = True
                return worker, self._ask(worker, key, self._loaded(key))
            except _TimedOut:
                self._replace(worker, key, "timed_out", f"not done after {self._patience.sample_s:g} s")
                said = f"the worker was not done after {self._patience.sample_s:g} s and was ended"
                return None, RecomputeError(said, "timed_out")
            except RecomputeError as error:
                return worker, error
            except (EOFError, OSError, ConfigError) as error:
                if not there:  # no fault of the sample's, which is tried again later
                    outcome = RecomputeError(f"nobody to run the reference: {error}", "no_worker")
                    self._queue.pause(_PAUSE_S)
                if worker is not None:
                    self._replace(worker, key, "died", str(error))
                    worker = None
            if self._queue.closed:
                raise _Closing
        return worker, outcome

    def _try_again(self, asked: Asked, error: RecomputeError) -> bool:
        """Whether the sample is put back, for what is in its way may pass."""
        if asked.first_try is not None and time.monotonic() - asked.first_try > self._patience.retry_s:
            return False
        if asked.tries == 0:
            log.warning("%s is tried again later: %s", asked.key, error)
        self._queue.again(asked, min(_LONGEST_PAUSE_S, self._patience.retry_s, _PAUSE_S * 2**asked.tries))
        return True

    def _loaded(self, key: SampleKey) -> tuple[bytes, bytes]:
        """The sample's records; a ledger that is away is waited for."""
        said = False
        while not self._queue.closed:
            try:
                rollout, trainer = self._load(key)
                return encode(rollout), encode(trainer)
            except LedgerError as error:
                if not said:
                    log.warning("the reference waits for the ledger: %s", error)
                said = True
                self._queue.pause(_PAUSE_S)
        raise _Closing

    def _ask(self, worker: Worker, key: SampleKey, records: tuple[bytes, bytes]) -> ReferenceLogprobs:
        rollout, trainer = records
        job = {"rollout_bytes": len(rollout), "diagnose": self._diagnose_s}
        with _ended_after(worker, self._patience.sample_s):
            answer = worker.ask(job, rollout + trainer)
        self._answered(key)
        return _reference(*answer)

    def _start(self) -> Worker:
        with self._changed:
            worker, self._spare = self._spare, None
        worker = worker or self._hire(self._weights)
        self._workers.add(worker)
        return worker

    def _replace(self, worker: Worker | None, key: SampleKey, why: WorkerEnd, said: str) -> None:
        """Let go of a worker that is no use any more; the next sample gets another one."""
        assert worker is not None
        self._stop(worker)
        if not self._queue.closed:
            log.warning("recompute worker ended on %s: %s", key, said)
            self._on_end(why)

    def _stop(self, worker: Worker) -> None:
        self._workers.discard(worker)
        worker.stop()


@contextmanager
def _ended_after(worker: Worker, seconds: float) -> Iterator[None]:
    """The worker is killed where the block takes longer; _TimedOut then."""
    late = threading.Event()

    def end() -> None:
        late.set()
        worker.kill()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (EOFError, OSError):
        if late.is_set():
            raise _TimedOut from None
        raise
    finally:
        timer.cancel()
    if late.is_set():
        raise _TimedOut  # it answered while it was being killed


def _reference(header: dict[str, Any], raw: bytes) -> ReferenceLogprobs:
    if "error" in header:
        raise RecomputeError(header["error"], header["code"])
    values = np.frombuffer(raw, "<f4").astype(np.float32)
    # Two arrays of one length where the sides hold two contracts.
    rollout, trainer = np.split(values, 2) if "," in header["mma"] else (values, values)
    causes, (of_rollout, of_trainer) = header["causes"], header.get("first_layers", (None, None))
    return ReferenceLogprobs(
        rollout, trainer, header["mma"], None if causes is None else tuple(causes), (of_rollout, of_trainer)
    )
