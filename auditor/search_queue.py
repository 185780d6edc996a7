"""Which mismatches are searched for causes, and those that wait for it.

A fault that goes on makes every step differ, and one search may take a minute: a few samples of a step say as much as
all of them, and no run has more of them wait than one step may have.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from auditor.recompute_queue import RecomputeQueue
from auditor.records import SampleKey

_STEPS_REMEMBERED: Final = 10_000


class SearchQueue(RecomputeQueue):
    """In the order in which they came. per_step: samples of a step that are looked into, and of a run that wait."""

    def __init__(self, per_step: int, steady: Callable[[], float] = time.monotonic) -> None:
        super().__init__(per_step, steady)
        self._per_step = per_step
        # By step: asked again, after a commit that failed, the answer is the same.
        self._chosen: defaultdict[tuple[str, int], set[str]] = defaultdict(set)

    def wants(self, key: SampleKey) -> bool:
        """Whether the causes of this mismatch are to be searched for; one that is refused once may be wanted later."""
        chosen = self._chosen[key.run_id, key.step]
        if key.sample_id not in chosen:
            if len(chosen) >= self._per_step or self.known(key.run_id) >= self._per_step:
                return False
            chosen.add(key.sample_id)
        while len(self._chosen) > _STEPS_REMEMBERED:
            del self._chosen[next(iter(self._chosen))]
        return True
