"""What a forked child inherits of clients and spools, and what is left alone there.

Neither the thread that sends nor gRPC survives a fork. gRPC promises nothing to the child of a process that has used
it, and does not do it: with grpcio 1.85, and a parent that was sending, 1 of 300 children that made a channel of their
own had calls that ended by their time alone, and another a connection that broke at its first bytes. So a client
touches no gRPC in a child: what is handed in there goes to the spool before the call returns, and the client of the
process that made it, which looks there twice a second, sends it.
"""

import os
from typing import Final, Protocol
from weakref import WeakSet


class Inherited(Protocol):
    """What has to know that it is in a child now."""

    def forked(self) -> object:
        """Begin anew in the child, in its only thread; return what must never be torn down there, or None."""


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
