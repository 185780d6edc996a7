"""The present numbers, in memory, so that a scrape reads no disk. Rebuilt from the ledger at start.

Counters are the ledger's own: they were written in the transactions of what they count, so after a crash they go on
from where the durable records are, and Prometheus sees no step back and nothing twice.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from auditor.judge import Verdict
from auditor.records import SIDES
from auditor.storage.ledger import Counter, Counts
from auditor.storage.reader import Reader
from auditor.storage.rows import StepRow, Totals

_INCOMPLETE_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The board at one moment; all but the first two by run and side.

    counters: by name and labels. last_complete: the last complete step by run. missing: samples that lack this side;
    overdue: those of them in steps before the last complete one. newest_step: highest that the side reported for.
    last_record: Unix seconds of the side's last accepted record, since this process started.
    """

    counters: Mapping[Counter, float]
    last_complete: Mapping[str, StepRow]
    missing: Mapping[tuple[str, str], int]
    overdue: Mapping[tuple[str, str], int]
    newest_step: Mapping[tuple[str, str], int]
    last_record: Mapping[tuple[str, str], float]


class Board:
    """Thread-safe; written by the ledger's writer, read by scrapes. clock: Unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counters: dict[Counter, float] = defaultdict(float)
        self._last_complete: dict[str, StepRow] = {}
        self._missing: dict[tuple[str, str], int] = defaultdict(int)
        self._incomplete: dict[str, dict[int, Mapping[str, int]]] = defaultdict(dict)
        self._newest_step: dict[tuple[str, str], int] = {}
        self._last_record: dict[tuple[str, str], float] = {}

    @classmethod
    def rebuilt(cls, counters: Counts, reader: Reader, runs: int) -> "Board":
        """The board as the ledger has it. runs: how many of the last active ones get gauges."""
        board = cls()
        board._counters.update(counters)
        for run in reader.runs(runs):
            last = reader.last_complete_step(run.run_id)
            if last is not None:
                board._last_complete[run.run_id] = last
                board._newest_step.update({(run.run_id, side): last.step for side in SIDES})
            board._add_missing(run.run_id, run.totals)
            for row in reader.incomplete_steps(run.run_id, _INCOMPLETE_STEPS):
                board._incomplete[run.run_id][row.step] = row.totals.missing
        return board

    def add(self, counts: Counts) -> None:
        """Take in counters that became durable."""
        with self._lock:
            for key, value in counts.items():
                self._counters[key] += value
                name, labels = key[0], dict(key[1])
                if name == "records" and labels["outcome"] == "accepted":
                    self._last_record[labels["run_id"], labels["side"]] = self._clock()

    def step_changed(self, run_id: str, step: int, totals: Totals, gained: Totals) -> None:
        """Take in a step's new totals."""
        with self._lock:
            self._add_missing(run_id, gained)
            self._note_sides(run_id, step, totals)
            last = self._last_complete.get(run_id)
            if totals.verdict(Verdict.PENDING) == 0 and (last is None or step >= last.step):
                self._last_complete[run_id] = StepRow(run_id, step, totals)

    def snapshot(self) -> Snapshot:
        """A copy that no writer changes."""
        with self._lock:
            return Snapshot(
                dict(self._counters),
                dict(self._last_complete),
                dict(self._missing),
                self._overdue(),
                dict(self._newest_step),
                dict(self._last_record),
            )

    def _note_sides(self, run_id: str, step: int, totals: Totals) -> None:
        for side in SIDES:
            if totals.samples > totals.missing.get(side, 0):
                self._newest_step[run_id, side] = max(step, self._newest_step.get((run_id, side), 0))
        if totals.missing:
            self._incomplete[run_id][step] = totals.missing
        else:
            self._incomplete[run_id].pop(step, None)

    def _overdue(self) -> dict[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = {(run_id, side): 0 for run_id in self._last_complete for side in SIDES}
        for run_id, row in self._last_complete.items():
            for step, missing in self._incomplete[run_id].items():
                if step < row.step:
                    for side, samples in missing.items():
                        found[run_id, side] += samples
        return found

    def _add_missing(self, run_id: str, totals: Totals) -> None:
        for side in SIDES:
            self._missing[run_id, side] += totals.missing.get(side, 0)
