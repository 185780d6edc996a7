"""Runs leave the exposition: those that are silent, and beyond a number the ones that were silent longest.

What the ledger holds of them stays, and so do its totals, which the API shows. Only their counters end, in one
transaction: a run that reports again starts at 0, as after a reset. Prometheus, which may have forgotten it meanwhile,
then counts what is new and nothing old; and a restart of the auditor changes nothing about it.
"""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final, Literal

from auditor.export.board import Board
from auditor.storage.unit import Unit
from auditor.writer import Writer

log = logging.getLogger(__name__)
# Runs a transaction: records wait for it.
_AT_ONCE: Final = 200
Reason = Literal["silent", "crowded"]


class Leaving:
    """idle_s: of silence after which a run leaves; 0: it never does for that. most: runs that are shown at once.

    on_left: told after each transaction how many left, and why.
    """

    def __init__(
        self, board: Board, writer: Writer, idle_s: float, most: int, on_left: Callable[[Reason, int], None]
    ) -> None:
        self._board, self._writer = board, writer
        self._idle_s, self._most, self._on_left = idle_s or math.inf, most, on_left

    def look(self) -> None:
        """Let those leave that are to leave now."""
        silences = self._board.silences()
        self._end("silent", [run_id for run_id, silent_s in silences.items() if silent_s > self._idle_s])
        rest = sorted((silent_s, run_id) for run_id, silent_s in silences.items() if silent_s <= self._idle_s)
        self._end("crowded", [run_id for _, run_id in rest[self._most :]])

    def _end(self, reason: Reason, runs: Sequence[str]) -> None:
        if not runs:
            return
        least_s = self._idle_s if reason == "silent" else 0.0
        for first in range(0, len(runs), _AT_ONCE):
            work = partial(self._end_counters, runs=runs[first : first + _AT_ONCE], least_s=least_s)
            ended = self._writer.submit(work, block=True).result()
            # At once: the next transaction may fail, and this one is durable.
            self._on_left(reason, ended)
            log.info("%d runs leave /metrics (%s)", ended, reason)

    def _end_counters(self, unit: Unit, runs: Collection[str], least_s: float) -> int:
        """Of those that are silent still; how many. The board has heard of every transaction but this one."""
        silences = self._board.silences()
        ended = [run for run in runs if silences.get(run, math.inf) >= least_s and unit.last_heard(run) != unit.now]
        if ended:
            unit.end_counters(self._board.counters_of(ended))
        return len(ended)
