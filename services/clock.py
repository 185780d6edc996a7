"""Seconds by phase: `with clock("train"): …`. The same phase twice adds up."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """A stopwatch with named phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the block's wall-clock time to `phase`, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
