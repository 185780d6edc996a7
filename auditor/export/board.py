"""The present numbers, in memory, so that a scrape reads no disk. Rebuilt from the ledger at start.

Counters are the ledger's own: they were written in the transactions of what they count, so after a crash they go on
from where the durable records are, and Prometheus sees no step back and nothing twice.
"""

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from auditor.judge import Verdict
from auditor.records import SIDES
from auditor.storage.ledger import Counter, Counts
from auditor.storage.reader import Reader
from auditor.storage.rows import StepRow, Totals

_INCOMPLETE_STEPS = 1000

_INCOMPLETE_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """counters: by name and labels. last_complete: the last complete step by run. sides: newest step and Unix seconds.

    missing: samples that wait, by run and side; overdue: those of them whose side has reported a later step.
    """

    counters: Mapping[Counter, float]
    last_complete: Mapping[str, StepRow]
    sides: Mapping[tuple[str, str], tuple[int, float]]
    missing: Mapping[tuple[str, str], int]
    overdue: Mapping[tuple[str, str], int]


class Board:
    """Thread-safe; written by the ledger's writer, read by scrapes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[Counter, float] = defaultdict(float)
        self._last_complete: dict[str, StepRow] = {}
        self._sides: dict[tuple[str, str], tuple[int, float]] = {}
        # run, side → step → samples that wait for the side there
        self._waiting: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)

    @classmethod
    def rebuilt(cls, counters: Counts, reader: Reader, runs: int) -> "Board":
        """The board as the ledger has it. runs: how many of the last active ones get gauges."""
        board = cls()
        board.add(counters)
        shown = {run.run_id for run in reader.runs(runs)}
        for run_id in shown:
            last = reader.last_complete_step(run_id)
            if last is not None:
                board._last_complete[run_id] = last
            for row in reader.incomplete_steps(run_id, _INCOMPLETE_STEPS):
                board._add_waiting(row.run_id, row.step, row.totals)
        board._sides = {(run_id, side): (step, at) for run_id, side, step, at in reader.sides() if run_id in shown}
        return board

    def add(self, counts: Counts) -> None:
        """Take in counters that became durable."""
        with self._lock:
            for key, value in counts.items():
                self._counters[key] += value

    def replace_counters(self, counts: Counts) -> None:
        """Take every counter as the ledger has it, where it is not known what became durable."""
        with self._lock:
            self._counters = defaultdict(float, counts)

    def step_changed(self, run_id: str, step: int, totals: Totals, gained: Totals) -> None:
        """Take in a step's new totals."""
        with self._lock:
            self._add_waiting(run_id, step, gained)
            last = self._last_complete.get(run_id)
            if totals.verdict(Verdict.PENDING) == 0 and (last is None or step >= last.step):
                self._last_complete[run_id] = StepRow(run_id, step, totals)

    def side_heard(self, run_id: str, side: str, step: int, at: float) -> None:
        """Take in that a side has reported."""
        with self._lock:
            newest, _ = self._sides.get((run_id, side), (0, 0.0))
            self._sides[run_id, side] = (max(newest, step), at)

    def snapshot(self) -> Snapshot:
        """A copy that no writer changes."""
        with self._lock:
            overdue = {
                (run_id, side): sum(
                    count for step, count in steps.items() if step < self._sides.get((run_id, side), (0, 0.0))[0]
                )
                for (run_id, side), steps in self._waiting.items()
            }
            missing = {name: sum(steps.values()) for name, steps in self._waiting.items()}
            return Snapshot(dict(self._counters), dict(self._last_complete), dict(self._sides), missing, overdue)

    def _add_waiting(self, run_id: str, step: int, totals: Totals) -> None:
        for side in SIDES:
            steps = self._waiting[run_id, side]
            count = steps.get(step, 0) + totals.missing.get(side, 0)
            if count:
                steps[step] = count
            else:
                steps.pop(step, None)
