"""A clock that does not jump: read from the machine once, then carried on by its monotonic clock.

Evidence is retired by its age. A machine whose clock is set while the auditor runs must neither make young evidence old
nor order what comes next before what came earlier.
"""

import time
from collections.abc import Callable


class SteadyClock:
    """Call it for Unix seconds. wall: the machine's clock; steady: one that never jumps."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._offset = wall() - steady()

    def __call__(self) -> float:
        """Unix seconds, as the machine's clock would show them had nobody set it since the start."""
        return self._steady() + self._offset

    @property
    def jumped_seconds(self) -> float:
        """How far the machine's clock has been set since the start; positive is forwards."""
        return self._wall() - self()
