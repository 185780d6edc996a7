"""The present numbers, in memory, so that a scrape reads no disk. Rebuilt from the ledger at start.

Counters are the ledger's own: they were written in the transactions of what they count, so after a crash they go on
from where the durable records are, and Prometheus sees no step back and nothing twice.
"""

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from auditor.judge import Verdict
from auditor.storage.ledger import Counter, Counts
from auditor.storage.reader import Reader
from auditor.storage.rows import StepRow, Totals


@dataclass(frozen=True, slots=True)
class Snapshot:
    """counters: by name and labels. last_complete: the last complete step by run. missing: samples by run and side."""

    counters: Mapping[Counter, float]
    last_complete: Mapping[str, StepRow]
    missing: Mapping[tuple[str, str], int]


class Board:
    """Thread-safe; written by the ledger's writer, read by scrapes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[Counter, float] = defaultdict(float)
        self._last_complete: dict[str, StepRow] = {}
        self._missing: dict[tuple[str, str], int] = defaultdict(int)

    @classmethod
    def rebuilt(cls, counters: Counts, reader: Reader, runs: int) -> "Board":
        """The board as the ledger has it. runs: how many of the last active ones get gauges."""
        board = cls()
        board.add(counters)
        for run in reader.runs(runs):
            last = reader.last_complete_step(run.run_id)
            if last is not None:
                board._last_complete[run.run_id] = last
            board._add_missing(run.run_id, run.totals)
        return board

    def add(self, counts: Counts) -> None:
        """Take in counters that became durable."""
        with self._lock:
            for key, value in counts.items():
                self._counters[key] += value

    def step_changed(self, run_id: str, step: int, totals: Totals, gained: Totals) -> None:
        """Take in a step's new totals."""
        with self._lock:
            self._add_missing(run_id, gained)
            last = self._last_complete.get(run_id)
            if totals.verdict(Verdict.PENDING) == 0 and (last is None or step >= last.step):
                self._last_complete[run_id] = StepRow(run_id, step, totals)

    def snapshot(self) -> Snapshot:
        """A copy that no writer changes."""
        with self._lock:
            return Snapshot(dict(self._counters), dict(self._last_complete), dict(self._missing))

    def _add_missing(self, run_id: str, totals: Totals) -> None:
        for side in ("rollout", "trainer"):
            self._missing[run_id, side] += totals.missing.get(side, 0)
