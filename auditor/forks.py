"""What a forked child inherits of clients and spools, and what is left alone there.

Neither the thread that sends nor gRPC survives a fork. gRPC promises nothing to the child of a process that has used
it, and does not do it: with grpcio 1.85 and its own handlers of a fork, and a sending parent, 1 of 300 children
that made a channel of their own had calls that ended by their time alone, and another a connection that broke at its
first bytes; without the handlers, which `auditor` turns off, no call of such a channel ends at all. So a client
touches no gRPC in a child: what is handed in there goes to the spool before the call returns, and the client of the
process that made it, which looks there twice a second, sends it, and hears from `Losses` of what found no room.
"""

import os
import threading
from collections import Counter
from io import FileIO
from typing import Final, Protocol
from weakref import WeakSet

from auditor.records import Side


class Inherited(Protocol):
    """What has to know that it is in a child now."""

    def forked(self) -> object:
        """Begin anew in the child, in its only thread; return what must never be torn down there, or None."""


class Losses:
    """What children lost, told to the process that made this: a byte a record through a pipe, which never waits.

    No lock and no shared number: a child that is killed leaves nothing half said.
    """

    def __init__(self) -> None:
        read, write = os.pipe()
        # Both ends stay open in a child: where the others' were closed, writing would kill it where SIGPIPE does that.
        self._read, self._write = FileIO(read, "r"), FileIO(write, "w")
        for end in (read, write):
            os.set_blocking(end, False)
        self._unsaid = bytearray()
        self._listening = threading.Lock()  # taken by the process alone that made this
        follow(self)

    def forked(self) -> None:
        """What a child has not said is not its children's to say."""
        self._unsaid.clear()

    def say(self, side: Side) -> None:
        """In a child: a record of this side is lost. Where the pipe is full, it is said with the next one."""
        if not self._write.closed:
            self._unsaid += _LETTERS[side]
            said: int | None = self._write.write(self._unsaid)  # None: full, of which the type does not know
            del self._unsaid[: said or 0]

    def heard(self) -> dict[Side, int]:
        """Records that were lost since this was asked last."""
        with self._listening:
            told = Counter(b"" if self._read.closed else self._read.read(_PIPE_BYTES) or b"")
        return {side: told[letter[0]] for side, letter in _LETTERS.items() if told[letter[0]]}

    def close(self) -> None:
        """Listen no more."""
        with self._listening:
            self._read.close()
            self._write.close()


_LETTERS: Final[dict[Side, bytes]] = {"rollout": b"r", "trainer": b"t"}
_PIPE_BYTES: Final = 1 << 20
_living: Final[WeakSet[Inherited]] = WeakSet()
# The destructors of a channel and of its calls speak to gRPC.
_left_behind: Final[list[object]] = []


def follow(one: Inherited) -> None:
    """Call its `forked` in every child from now on; it is not kept alive for that."""
    _living.add(one)


def _in_child() -> None:
    for one in list(_living):
        _left_behind.append(one.forked())


os.register_at_fork(after_in_child=_in_child)
