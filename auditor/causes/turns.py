"""Searches that take turns, so that the time one diagnosis has is not spent by the first of them.

Each begins with what is common. On a small model it ends in its first turn; on a large one every search comes to its
common hypotheses before any comes to its rare ones.
"""

from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from threading import Semaphore, Thread

from auditor.causes.evidence import Suggestion
from auditor.causes.purse import OutOfBudget, Purse

Search = Callable[[], Iterator[Suggestion]]


def in_turns(
    searches: Sequence[tuple[str, Search, float]],
    purse: Purse,
    found: list[Suggestion],
    enough: Callable[[list[Suggestion]], bool],
) -> list[str]:
    """Run them until what they found is enough, nothing more may be spent, or all are done.

    searches: name, search, and how long its turns are. found: gets what they say, also of one that was not done. The
    names of those that never came to a turn, where nothing more may be spent.
    """
    turns = [_Turns(*search, purse) for search in searches]
    left, spent = turns, False
    try:
        while left and not spent and not enough(found):
            for turn in left:
                spent = turn.go()
                found += turn.said()
                if spent or enough(found):
                    break
            left = [turn for turn in left if not turn.done]
    finally:
        for turn in turns:
            turn.stop()
            found += turn.said()
    return [turn.name for turn in turns if spent and not turn.begun]


class _Turns:
    """One search in a thread that only runs while `go` waits for it: so it can stop wherever it spends something."""

    def __init__(self, name: str, search: Search, long: float, purse: Purse) -> None:
        self.name, self.begun, self.done = name, False, False
        self._search, self._long, self._purse = search, long, purse
        self._found: list[Suggestion] = []
        self._mine, self._others = Semaphore(0), Semaphore(0)
        self._stopped = self._spent = False
        self._error: BaseException | None = None

    def go(self) -> bool:
        """Until its turn is over, or it is done; whether nothing more may be spent."""
        if not self.begun:
            self.begun = True
            # As here: NumPy's errstate is of a context, and a thread has one of its own.
            run = copy_context().run
            Thread(target=run, args=(self._run,), name=f"causes: {self.name}", daemon=True).start()
        with self._purse.turn(self._pause, self._long):
            self._mine.release()
            self._others.acquire()
        if self._error is not None:
            raise self._error
        return self._spent

    def said(self) -> list[Suggestion]:
        """What it found since it was asked."""
        found, self._found = self._found, []
        return found

    def stop(self) -> None:
        """It gives up where it stands; what was nearest until then is said."""
        self._stopped = True
        if self.begun and not self.done:
            self.go()

    def _run(self) -> None:
        self._mine.acquire()
        try:
            for suggestion in self._search():
                self._found.append(suggestion)
        except OutOfBudget:
            self._spent = True
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        self.done = True
        self._others.release()

    def _pause(self) -> None:
        if not self._stopped and self._purse.turn_is_over:
            self._others.release()
            self._mine.acquire()
        if self._stopped:
            raise OutOfBudget
