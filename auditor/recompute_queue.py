"""What waits for the reference: mismatches first, each sample once, and never more than so many.

The ledger knows what is queued; this is the order of it, and of each sample no more than its name.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from auditor.records import SampleKey


@dataclass(frozen=True, slots=True, order=True)
class Asked:
    """A sample that waits. rank: 0 for a mismatch; order: in which they came. queued_at, first_try: by a steady clock;
    first_try is None until the sample was tried in vain, `tries` times.
    """

    rank: int
    order: int
    queued_at: float
    key: SampleKey
    tries: int = 0
    first_try: float | None = None


class RecomputeQueue:
    """Thread-safe. capacity: mismatches that may wait; chosen samples that agree have half of it, so that a mismatch
    finds room where they do not.
    """

    def __init__(self, capacity: int, steady: Callable[[], float] = time.monotonic) -> None:
        self._capacity, self._steady = capacity, steady
        self._heap: list[Asked] = []
        # Those to be tried again, and when.
        self._later: list[tuple[float, Asked]] = []
        # What waits or is worked on: the ledger may name it again, at a start or after a failed commit.
        self._known: set[SampleKey] = set()
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Samples that wait."""
        return len(self._heap) + len(self._later)

    @property
    def closed(self) -> bool:
        """Whether nothing is handed out any more."""
        return self._closed

    @property
    def lag_seconds(self) -> float:
        """How long the sample that waits longest has waited; 0 where none waits."""
        with self._changed:
            waiting = [*(asked.queued_at for asked in self._heap), *(asked.queued_at for _, asked in self._later)]
            return self._steady() - min(waiting) if waiting else 0.0

    def room(self, urgent: bool, asked: int) -> bool:
        """Whether one more may wait, beside `asked` that will be put here first."""
        return self.waiting + asked < (self._capacity if urgent else (self._capacity + 1) // 2)

    def known(self, run_id: str) -> int:
        """Samples of a run that wait or are worked on."""
        with self._changed:
            return sum(key.run_id == run_id for key in self._known)

    def put(self, key: SampleKey, urgent: bool) -> None:
        """Let a sample wait, unless it does already. urgent: before all that are not."""
        with self._changed:
            if key in self._known:
                return
            self._known.add(key)
            heapq.heappush(self._heap, Asked(0 if urgent else 1, next(self._order), self._steady(), key))
            self._changed.notify()

    def again(self, asked: Asked, pause_s: float) -> None:
        """Let one that was taken wait once more, for so long at least."""
        now = self._steady()
        first = now if asked.first_try is None else asked.first_try
        again = Asked(asked.rank, asked.order, asked.queued_at, asked.key, asked.tries + 1, first)
        with self._changed:
            heapq.heappush(self._later, (now + pause_s, again))
            self._changed.notify()

    def take(self) -> Asked | None:
        """The next one, waited for; None when the queue is closed. Say `done` of it, or `again`."""
        with self._changed:
            while not self._closed:
                now = self._steady()
                while self._later and self._later[0][0] <= now:
                    heapq.heappush(self._heap, heapq.heappop(self._later)[1])
                if self._heap:
                    return heapq.heappop(self._heap)
                self._changed.wait(self._later[0][0] - now if self._later else None)
            return None

    def done(self, asked: Asked) -> None:
        """Forget one that was taken."""
        with self._changed:
            self._known.discard(asked.key)

    def pause(self, seconds: float) -> None:
        """Wait so long, or until the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)

    def close(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
