"""The present numbers, in memory, so that a scrape reads no disk. Rebuilt from the ledger at start.

Counters are the ledger's own: they were written in the transactions of what they count, so after a crash they go on
from where the durable records are, and Prometheus sees no step back and nothing twice. Those of a run that leaves the
exposition end, in the ledger and here at once (`auditor.export.leaving`); when it reports again they start at 0.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from auditor.judge import Verdict
from auditor.records import SIDES
from auditor.storage.reader import Reader
from auditor.storage.rows import StepRow, Totals
from auditor.storage.unit import Counter, Counts, Unit

_MANY: Final = 1 << 62
# A counter that first appears at 5 has never increased, and Prometheus may still know its old value: one that comes
# back is shown as 0 for longer than the usual minute between two scrapes.
_SHOWN_AS_ZERO_S: Final = 75.0


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
    """Thread-safe; written by the ledger's writer, read by scrapes.

    shown_runs: a scrape has so many runs at most, those that were heard of last: until the others have left
    (`auditor.export.leaving`) they wait out of sight. steady: seconds by a clock that never jumps.
    """

    def __init__(self, steady: Callable[[], float] = time.monotonic, shown_runs: int = _MANY) -> None:
        self._lock = threading.Lock()
        self._steady, self._shown_runs = steady, shown_runs
        # run (empty: of no run) → its counters
        self._counters: dict[str, dict[Counter, float]] = {}
        self._returned: dict[str, float] = {}
        self._last_complete: dict[str, StepRow] = {}
        self._sides: dict[tuple[str, str], tuple[int, float]] = {}
        # run → when it was last heard of, by the steady clock: no setting of the machine's makes it silent
        self._heard: dict[str, float] = {}
        # run, side → step → samples that wait for the side there
        self._waiting: dict[tuple[str, str], dict[int, int]] = {}

    @classmethod
    def rebuilt(cls, counters: Counts, reader: Reader, runs: int) -> "Board":
        """The board as the ledger has it. runs: how many of the last active ones get gauges."""
        board = cls(shown_runs=runs)
        board._add(counters)
        shown = {run.run_id for run in reader.runs(runs)} & set(board._counters)
        for run_id in shown:
            last = reader.last_complete_step(run_id)
            if last is not None:
                board._last_complete[run_id] = last
            for step, missing in reader.missing(run_id):
                board._add_waiting(run_id, step, missing)
        sides = reader.sides()
        board._sides = {(run_id, side): (step, at) for run_id, side, step, at in sides if run_id in shown}
        now, newest = board._steady(), max((at for *_, at in sides), default=0.0)
        for run_id, _, _, at in sides:
            board._heard[run_id] = max(board._heard.get(run_id, -math.inf), now - (newest - at))
        return board

    def commit(self, unit: Unit) -> None:
        """Take in the counters of a transaction that became durable, after those that it ended."""
        with self._lock:
            for run_id in unit.left:
                self._drop(run_id)
            self._add(unit.counts)

    def rebuild(self, counters: Counts, reader: Reader) -> None:
        """Take everything as the ledger has it, where it is not known what became durable."""
        fresh = Board.rebuilt(counters, reader, self._shown_runs)
        with self._lock:
            self._counters, self._last_complete = fresh._counters, fresh._last_complete
            self._sides, self._waiting = fresh._sides, fresh._waiting
            self._heard = {run: max(at, self._heard.get(run, -math.inf)) for run, at in fresh._heard.items()}

    def counters_of(self, runs: Collection[str]) -> dict[str, list[Counter]]:
        """The names of all counters of these runs."""
        with self._lock:
            return {run_id: list(self._counters.get(run_id, ())) for run_id in runs}

    def run_returned(self, run_id: str) -> None:
        """Take in that a run which had left reports again."""
        with self._lock:
            self._returned[run_id] = self._steady()

    def step_changed(self, run_id: str, step: int, totals: Totals, gained: Totals) -> None:
        """Take in a step's new totals."""
        with self._lock:
            self._add_waiting(run_id, step, gained.missing)
            last = self._last_complete.get(run_id)
            if totals.verdict(Verdict.PENDING) == 0 and (last is None or step >= last.step):
                self._last_complete[run_id] = StepRow(run_id, step, totals)

    def side_heard(self, run_id: str, side: str, step: int, at: float) -> None:
        """Take in that a side has reported."""
        with self._lock:
            newest, _ = self._sides.get((run_id, side), (0, 0.0))
            self._sides[run_id, side] = (max(newest, step), at)
            self._heard[run_id] = self._steady()

    def silences(self) -> dict[str, float]:
        """Seconds for which each run that is shown has been silent; those in which no auditor ran are left out."""
        with self._lock:
            now = self._steady()
            shown = {*self._counters, *self._last_complete, *(run_id for run_id, _ in self._waiting)} - {""}
            return {run_id: now - self._heard.get(run_id, -math.inf) for run_id in shown}

    def snapshot(self) -> Snapshot:
        """A copy that no writer changes."""
        with self._lock:
            now = self._steady()
            self._returned = {run: at for run, at in self._returned.items() if now - at < _SHOWN_AS_ZERO_S}
            counters: dict[Counter, float] = {}
            shown = self._shown()
            for run_id, counted in self._counters.items():
                if run_id in shown:
                    counters.update(dict.fromkeys(counted, 0.0) if run_id in self._returned else counted)
            waiting = {name: steps for name, steps in self._waiting.items() if name[0] in shown}
            sides = {name: heard for name, heard in self._sides.items() if name[0] in shown}
            overdue = {
                name: sum(count for step, count in steps.items() if step < sides.get(name, (0, 0.0))[0])
                for name, steps in waiting.items()
            }
            missing = {name: sum(steps.values()) for name, steps in waiting.items()}
            last = {run_id: row for run_id, row in self._last_complete.items() if run_id in shown}
            return Snapshot(counters, last, sides, missing, overdue)

    def _shown(self) -> set[str]:
        """The runs that a scrape has, and the empty name, under which stands what is of no run."""
        names = {*self._counters, *self._last_complete, *(run_id for run_id, _ in self._waiting)} - {""}
        if len(names) > self._shown_runs:
            names = set(nlargest(self._shown_runs, names, lambda run: (self._heard.get(run, -math.inf), run)))
        return {*names, ""}

    def _add(self, counts: Counts) -> None:
        for key, value in counts.items():
            counted = self._counters.setdefault(dict(key[1]).get("run_id", ""), defaultdict(float))
            counted[key] += value

    def _drop(self, run_id: str) -> None:
        self._counters.pop(run_id, None)
        self._returned.pop(run_id, None)
        self._last_complete.pop(run_id, None)
        self._heard.pop(run_id, None)
        for side in SIDES:
            self._sides.pop((run_id, side), None)
            self._waiting.pop((run_id, side), None)

    def _add_waiting(self, run_id: str, step: int, missing: Mapping[str, int]) -> None:
        for side in SIDES:
            steps = self._waiting.setdefault((run_id, side), {})
            count = steps.get(step, 0) + missing.get(side, 0)
            if count:
                steps[step] = count
            else:
                steps.pop(step, None)
