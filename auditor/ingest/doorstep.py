"""Calls whose message has not come yet: each holds a thread, so they are few, shared fairly, and ended in the end.

A message usually comes with its call, and the call is through here in no time. Who says nothing keeps its place only
while nobody else needs it.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from auditor.errors import RateError

_FAIR_S: Final = 1.0


class Call(Protocol):
    """What can be ended from another thread."""

    def cancel(self) -> object:
        """End it."""


@dataclass(eq=False, slots=True)
class _Waiting:
    caller: str
    call: Call
    since: float
    ended: bool = field(default=False)


class Doorstep:
    """most: places, of which one caller has half at most. longest_s: after which a call is ended in any case.

    Where there is no place, the oldest call of the caller's own, or of the caller who has most, makes room if it has
    had patience_s for its message, which may be large and its network slow; else RateError. For a caller who has none,
    _FAIR_S are enough. on_end: called for each call that is ended.
    """

    def __init__(self, most: int, patience_s: float, longest_s: float, on_end: Callable[[], None]) -> None:
        self._most, self._patience_s, self._longest_s, self._on_end = most, patience_s, longest_s, on_end
        self._changed = threading.Condition()
        # In the order in which they came.
        self._waiting: list[_Waiting] = []
        self._watched = False

    @contextmanager
    def place(self, caller: str, call: Call) -> Iterator[None]:
        """A place for the block, in which the message is read. caller: whose share of the places it takes."""
        mine = _Waiting(caller, call, time.monotonic())
        with self._changed:
            self._make_room(mine)
            self._waiting.append(mine)
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="doorstep", daemon=True).start()
        try:
            yield
        finally:
            with self._changed:
                if not mine.ended:
                    self._waiting.remove(mine)

    def _make_room(self, new: _Waiting) -> None:
        places = Counter(waiting.caller for waiting in self._waiting)
        if places[new.caller] >= max(1, self._most // 2):
            most_of = new.caller
        elif len(self._waiting) >= self._most:
            most_of = places.most_common(1)[0][0]
        else:
            return
        oldest = next(waiting for waiting in self._waiting if waiting.caller == most_of)
        if new.since - oldest.since < (self._patience_s if places[new.caller] else min(_FAIR_S, self._patience_s)):
            raise RateError(
                f"{len(self._waiting)} calls are open whose message has not come; try again in {_FAIR_S:g} s", _FAIR_S
            )
        self._end(oldest)

    def _end(self, waiting: _Waiting) -> None:
        waiting.ended = True
        self._waiting.remove(waiting)
        waiting.call.cancel()
        self._on_end()

    def _watch(self) -> None:
        with self._changed:
            while self._waiting:
                left = self._waiting[0].since + self._longest_s - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                else:
                    self._end(self._waiting[0])
            self._watched = False
