"""The reference, asked elsewhere: mismatches first, then the sampled ones in the order in which they came."""

import heapq
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from auditor.codec import encode
from auditor.errors import LedgerError, RecomputeError
from auditor.judge import ReferenceLogprobs
from auditor.records import RolloutRecord, SampleKey, TrainerRecord
from auditor.weights_place import WeightsPlace
from auditor.workers import Hire, Worker

log = logging.getLogger(__name__)
_ATTEMPTS = 3
_STEPS_REMEMBERED = 10_000
_LEDGER_PAUSE_S = 0.5

Load = Callable[[SampleKey], tuple[RolloutRecord, TrainerRecord]]
Conclude = Callable[[SampleKey, ReferenceLogprobs | RecomputeError, float], None]


class _Closing(Exception):
    """The pool is closed while a sample is worked on."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the search for causes may cost, so that a run in which everything differs does not delay every verdict.

    samples_per_step: mismatching samples of a step that are looked into. seconds: for each of them and side.
    """

    samples_per_step: int
    seconds: float


class RecomputePool:
    """Workers and the queue before them.

    hire: makes a worker; workers: how many.
    diagnosis: how much may be spent on causes.
    load: fetches a sample's two records from the ledger, so that what waits costs a key and no arrays.
    conclude: is told the outcome and the seconds that it took; called from the pool's threads, which wait for it.
    """

    def __init__(
        self, weights: WeightsPlace, hire: Hire, workers: int, diagnosis: Diagnosis, load: Load, conclude: Conclude
    ) -> None:
        self._hire = hire
        self._diagnosis = diagnosis
        self._diagnosed: Counter[tuple[str, int]] = Counter()
        self._weights = weights
        self._load = load
        self._conclude = conclude
        self._heap: list[tuple[int, int, float, SampleKey]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closing = False
        # Hired here, so that a pool that cannot be had fails the start and not the first mismatch.
        self._spare: Worker | None = hire(weights)
        self._workers: set[Worker] = {self._spare}
        self._threads = [threading.Thread(target=self._work, name=f"recompute-{i}") for i in range(workers)]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Samples in the queue."""
        return len(self._heap)

    @property
    def lag_seconds(self) -> float:
        """How long the sample that waits longest has waited; 0 where none waits."""
        with self._changed:
            return time.monotonic() - min(queued for _, _, queued, _ in self._heap) if self._heap else 0.0

    def put(self, key: SampleKey, urgent: bool) -> None:
        """Queue a sample. urgent: before all that are not."""
        with self._changed:
            heapq.heappush(self._heap, (0 if urgent else 1, next(self._order), time.monotonic(), key))
            self._changed.notify()

    def close(self) -> None:
        """Stop at once; what waits is queued in the ledger and is taken up at the next start."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for worker in list(self._workers):
            worker.kill()
        for thread in self._threads:
            thread.join()
        for worker in list(self._workers):
            self._stop(worker)

    def _work(self) -> None:
        worker: Worker | None = None
        while (key := self._next()) is not None:
            outcome: ReferenceLogprobs | RecomputeError | None = None
            started = time.monotonic()
            for _ in range(_ATTEMPTS):
                worker = worker or self._start()
                try:
                    outcome = self._ask(worker, key, self._loaded(key))
                    break
                except _Closing:
                    return
                except RecomputeError as error:
                    outcome = error
                    break
                except (EOFError, OSError) as error:
                    self._stop(worker)
                    worker = None
                    if self._closing:
                        return
                    log.warning("recompute worker ended on %s: %s", key, error)
            outcome = outcome or RecomputeError(f"{_ATTEMPTS} workers ended on it", "worker_died")
            self._conclude(key, outcome, time.monotonic() - started)
        if worker is not None:
            self._stop(worker)

    def _next(self) -> SampleKey | None:
        with self._changed:
            while not self._heap and not self._closing:
                self._changed.wait()
            return None if self._closing else heapq.heappop(self._heap)[3]

    def _loaded(self, key: SampleKey) -> tuple[bytes, bytes]:
        """The sample's records; a ledger that is away is waited for."""
        said = False
        while not self._closing:
            try:
                rollout, trainer = self._load(key)
                return encode(rollout), encode(trainer)
            except LedgerError as error:
                if not said:
                    log.warning("the reference waits for the ledger: %s", error)
                said = True
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, _LEDGER_PAUSE_S)
        raise _Closing

    def _ask(self, worker: Worker, key: SampleKey, records: tuple[bytes, bytes]) -> ReferenceLogprobs:
        rollout, trainer = records
        name = (key.run_id, key.step)
        diagnose = self._diagnosed[name] < self._diagnosis.samples_per_step
        job = {"rollout_bytes": len(rollout), "diagnose": self._diagnosis.seconds if diagnose else 0.0}
        reference = _reference(*worker.ask(job, rollout + trainer))
        if reference.causes:
            with self._changed:
                self._diagnosed[name] += 1
                while len(self._diagnosed) > _STEPS_REMEMBERED:
                    del self._diagnosed[next(iter(self._diagnosed))]
        return reference

    def _start(self) -> Worker:
        with self._changed:
            worker, self._spare = self._spare, None
        worker = worker or self._hire(self._weights)
        self._workers.add(worker)
        return worker

    def _stop(self, worker: Worker) -> None:
        self._workers.discard(worker)
        worker.stop()


def _reference(header: dict[str, Any], raw: bytes) -> ReferenceLogprobs:
    if "error" in header:
        raise RecomputeError(header["error"], header["code"])
    values = np.frombuffer(raw, "<f4").astype(np.float32)
    # Two arrays of one length where the sides hold two contracts.
    rollout, trainer = np.split(values, 2) if "," in header["mma"] else (values, values)
    causes = header["causes"]
    return ReferenceLogprobs(rollout, trainer, header["mma"], None if causes is None else tuple(causes))
