"""What the reference and the searches for causes say, made durable; and what becomes of samples that nobody asks about.

A search is begun so many times and no more, over all starts of the auditor: one that takes the whole process along, as
where it fills the memory of its container, would do so at every start for ever.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from auditor.errors import AuditorError, EvidenceError, LedgerError, RecomputeError
from auditor.export.metrics import Metrics
from auditor.judge import ReferenceLogprobs
from auditor.pipeline import Pipeline
from auditor.records import RolloutRecord, SampleKey, TrainerRecord
from auditor.storage.reader import Reader
from auditor.storage.unit import Unit
from auditor.writer import Writer

log = logging.getLogger(__name__)
_LEDGER_PAUSE_S: Final = 0.5
_BEGINNINGS: Final = 3
_BATCH: Final = 500


class Outcomes:
    """stopping: set where nothing more is waited for."""

    def __init__(
        self, reader: Reader, writer: Writer, pipeline: Pipeline, metrics: Metrics, stopping: threading.Event
    ) -> None:
        self._reader, self._writer, self._pipeline = reader, writer, pipeline
        self._metrics, self._stopping = metrics, stopping
        self._searched: SampleKey | None = None
        self._started = time.monotonic()

    def load(self, key: SampleKey) -> tuple[RolloutRecord, TrainerRecord]:
        """A sample's two records; RecomputeError where they are held no more, or cannot be read."""
        try:
            rollout, trainer = self._reader.record(key, "rollout"), self._reader.record(key, "trainer")
        except EvidenceError as error:
            said = (
                f"the ledger's evidence of {key} cannot be read ({error}); `python -m auditor.verify` checks all of it"
            )
            raise RecomputeError(said, error.code) from None
        if not (isinstance(rollout, RolloutRecord) and isinstance(trainer, TrainerRecord)):
            raise RecomputeError(f"the evidence of {key} has been retired", "evidence_retired")
        return rollout, trainer

    def conclude(self, key: SampleKey, outcome: ReferenceLogprobs | RecomputeError, seconds: float) -> None:
        """Record what the reference said."""
        self._metrics.recompute_seconds.observe(seconds)
        self._record(key, lambda unit: self._pipeline.conclude(unit, key, outcome))

    def begin_search(self, key: SampleKey) -> tuple[RolloutRecord, TrainerRecord]:
        """Note durably that a search begins, and load its records; RecomputeError where it has begun often enough."""
        records = self.load(key)
        begun = self._writer.submit(lambda unit: unit.search_begins(key), block=True).result()
        if begun > _BEGINNINGS:
            said = f"its search was begun {_BEGINNINGS} times and ended its worker, or the auditor, each time"
            raise RecomputeError(said, "worker_died")
        self._searched = key
        return records

    def search_answered(self, key: SampleKey) -> None:
        """The search took nothing along, whatever it found."""
        self._searched = None
        self._try(lambda unit: unit.search_ends(key))

    def forgive_search(self) -> None:
        """One that was broken off by the auditor's own end had no chance to do harm."""
        key, self._searched = self._searched, None
        if key is not None:
            self._try(lambda unit: unit.search_undone(key))

    def explain(self, key: SampleKey, outcome: ReferenceLogprobs | RecomputeError, seconds: float) -> None:
        """Record what a search found."""
        self._metrics.search_seconds.observe(seconds)
        causes, why = None, ""
        if isinstance(outcome, RecomputeError):
            log.warning("causes of %s were not searched for: %s: %s", key, outcome.code, outcome)
            why = f"nothing was found: {outcome}"
        elif (causes := outcome.causes) is None:
            self.count_fault("causes")
        self._searched = None

        def work(unit: Unit) -> None:
            unit.search_ends(key)
            self._pipeline.explain(unit, key, causes, why)

        self._record(key, work)

    def give_searches_up(self, retry_s: float) -> None:
        """Where nothing is searched, nobody is to wait for it, and no evidence to be kept for it."""
        waiting = sum(1 for _ in self._reader.queued())
        kept = f"; {waiting} samples in the ledger wait {retry_s:g} s for one that has it" if waiting else ""
        log.warning("no weights_root: nothing is recomputed, so no mismatch gets a side%s", kept)
        left = list(self._reader.searching())

        def work(unit: Unit) -> None:
            for key in left:
                self._pipeline.explain(unit, key, None)

        if left:
            self._writer.submit(work, block=True).result()

    def end_queued(self, after_s: float) -> None:
        """Without a reference, and none in so many seconds: what waits for it ends, and its evidence may be retired."""
        if time.monotonic() - self._started < after_s:
            return
        waiting = [key for key, _ in self._reader.queued()]
        error = RecomputeError(f"the auditor has had no weights_root for {after_s:g} s", "weights_missing")

        def work(unit: Unit, keys: list[SampleKey]) -> None:
            for key in keys:
                self._pipeline.conclude(unit, key, error)

        for first in range(0, len(waiting), _BATCH):
            if self._stopping.is_set():
                return
            self._writer.submit(partial(work, keys=waiting[first : first + _BATCH]), block=True).result()
        if waiting:
            log.warning("%d samples are not recomputed any more: %s", len(waiting), error)

    def count_fault(self, part: str) -> None:
        """Count a failure of the auditor's own."""
        self._metrics.count_error(part, AuditorError.code)

    def _record(self, key: SampleKey, work: Callable[[Unit], None]) -> None:
        while not self._stopping.is_set():
            future = self._writer.submit(work, block=True)
            try:
                return future.result()
            except LedgerError:
                self._stopping.wait(_LEDGER_PAUSE_S)  # said again it changes nothing, where it was written after all
            except Exception:
                log.exception("the reference's word on %s was not recorded; it is asked again at the next start", key)
                return self.count_fault("judge")
        return None

    def _try(self, work: Callable[[Unit], None]) -> None:
        """What may be lost: a search counts as begun once more than it was."""
        try:
            self._writer.submit(work, block=True).result()
        except LedgerError as error:
            log.warning("a search's end was not noted: %s", error)
