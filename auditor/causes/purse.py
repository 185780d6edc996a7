"""What one diagnosis may cost, in forwards and in seconds, and how much of it one search may spend at a time."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_A_TURN: Final = 0.05  # of all that may be spent
_PATIENCE: Final = 10.0  # seconds by the clock that count as one, where this process has no core


class OutOfBudget(Exception):
    """The forwards or the seconds that one diagnosis may cost are spent."""


class Purse:
    """Shared by all that computes for one diagnosis. forwards, seconds: that may be spent.

    Seconds are this process's own, or those of the clock where it runs on several cores: a search has the least
    priority, and beside a job that needs every core nothing would be computed before a clock said that time is over.
    """

    def __init__(self, forwards: float, seconds: float) -> None:
        self._left, self._turn = forwards, (forwards * _A_TURN, seconds * _A_TURN)
        self._began, self._seconds = (time.process_time(), time.monotonic()), seconds
        self._until = (-math.inf, math.inf)  # forwards that are left, and seconds spent, at which the turn is over
        self._pause: Callable[[], None] | None = None
        self._long = 1.0

    def spend(self, forwards: float) -> None:
        """Something costs so many forwards; OutOfBudget where nothing more may be computed."""
        if self._pause is not None:
            self._pause()
        self.check()
        self._left -= forwards

    def check(self) -> None:
        """OutOfBudget where nothing more may be computed."""
        if self._left <= 0 or self._spent() > self._seconds:
            raise OutOfBudget

    def _spent(self) -> float:
        own, clock = time.process_time() - self._began[0], time.monotonic() - self._began[1]
        return max(min(own, clock), clock / _PATIENCE)

    @contextmanager
    def turn(self, pause: Callable[[], None], long: float) -> Iterator[None]:
        """For a turn, so many times as long as the shortest; pause: is called before anything is spent."""
        self._long, self._pause = long, pause
        self.renew()
        try:
            yield
        finally:
            self._pause = None

    def renew(self) -> None:
        """A turn begins anew, for a search that has just paid for what it goes on with."""
        seconds = self._spent() + self._long * self._turn[1]
        endless = math.isinf(self._left)  # a part of it has no end either
        self._until = -math.inf if endless else self._left - self._long * self._turn[0], seconds

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """For what is worth finishing, whether its turn is over or not."""
        pause, self._pause = self._pause, None
        try:
            yield
        finally:
            self._pause = pause

    @property
    def turn_is_over(self) -> bool:
        """Whether a search has had its part for now."""
        return self._left <= self._until[0] or self._spent() > self._until[1]
