"""Work in the background that is done again and again; what keeps it from being done is said once and counted."""

import logging
import threading
from collections.abc import Callable

from auditor.errors import AuditorError

log = logging.getLogger(__name__)


class Periodic:
    """A thread that calls `look` at once and then every `period_s` seconds. on_error: told the code of each failure."""

    def __init__(self, name: str, period_s: float, look: Callable[[], None], on_error: Callable[[str], None]) -> None:
        self._name, self._period_s, self._look, self._on_error = name, period_s, look, on_error
        self._stop = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def close(self) -> None:
        """End the thread after the look that it is at."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._try()
            if self._stop.wait(self._period_s):
                return

    def _try(self) -> None:
        try:
            self._look()
        except AuditorError as error:
            self._on_error(error.code)
            if not self._failing:
                log.warning("%s: cannot be done now, to be tried again: %s", self._name, error)
            self._failing = True
            return
        if self._failing:
            log.warning("%s: done again", self._name)
        self._failing = False
