"""How much one caller may send in a time: a bucket for each, which fills at a steady rate.

A call is taken while the bucket holds anything, and may leave it in debt. So a batch that is larger than the bucket
goes through too, and the calls after it wait until its debt is paid: the rate is bounded, whatever the batch size.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from auditor.errors import RateError

_CALLERS: Final = 4096


class Rate:
    """At most `per_second` of something from each caller, after a burst of `burst_s` seconds' worth.

    what: for the message. per_second: 0 is no limit.
    """

    def __init__(
        self, what: str, per_second: float, burst_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._per_second, self._clock = what, per_second, clock
        self._full = per_second * burst_s
        self._lock = threading.Lock()
        # caller → what is left, and when that was
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self._per_second > 0

    def take(self, caller: str, amount: float) -> None:
        """Take `amount` for a caller; RateError where there is nothing left, and nothing is taken then."""
        if not self.limited:
            return
        with self._lock:
            now = self._clock()
            left, then = self._left.pop(caller, (self._full, now))
            left = min(self._full, left + (now - then) * self._per_second)
            self._left[caller] = (left - amount if left > 0 else left, now)
            while len(self._left) > _CALLERS:
                self._left.popitem(last=False)
        if left <= 0:
            wait = max(0.05, -left / self._per_second)
            raise RateError(
                f"more than {self._per_second:g} {self._what} a second from {caller}; try again in {wait:.2f} s", wait
            )
