"""Samples of which only one side ever reports: they wait so long and no longer.

A sample that was given up is `not_comparable` with the condition `missing_side`: neither a match nor a mismatch. Its
record may then be retired as any other. Where the other side comes after all, the pair is judged as if it had come in
time. Time for which the auditor itself stood still counts for no sample: nobody could report to it.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from auditor.pipeline import Pipeline
from auditor.storage.reader import Reader
from auditor.writer import Writer

log = logging.getLogger(__name__)
_BATCH: Final = 500


class Unpaired:
    """wait_s: how long a sample waits for its other side. clock: that of the ledger.

    stopping: set where no further batch is begun.
    """

    def __init__(
        self,
        reader: Reader,
        writer: Writer,
        pipeline: Pipeline,
        clock: Callable[[], float],
        wait_s: float,
        stopping: threading.Event,
    ) -> None:
        self._reader, self._writer, self._pipeline = reader, writer, pipeline
        self._clock, self._wait_s, self._stopping = clock, wait_s, stopping
        self._started = clock()
        newest = reader.newest()
        self._stood_still_s = 0.0 if newest is None else max(0.0, self._started - newest)

    def look(self) -> None:
        """Give up every sample that has waited for so long."""
        before = self._clock() - self._wait_s
        if before < self._started:
            before -= self._stood_still_s
        given_up = 0
        while not self._stopping.is_set() and (keys := self._reader.pending_since(before, _BATCH)):
            self._writer.submit(partial(self._pipeline.give_up, keys=keys), block=True).result()
            given_up += len(keys)
        if given_up:
            log.warning("%d samples are given up: their other side did not come in %g s", given_up, self._wait_s)
