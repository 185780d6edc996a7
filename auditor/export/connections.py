"""HTTP connections that anybody may open: few enough, and none that keeps a request to itself.

h11 and no other parser, whichever is installed: it bounds what a request's head may take.
"""

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_BYTES: Final = 64 << 10


class BoundedProtocol(H11Protocol):
    """most: connections that may be open; one more is closed. head_s: until a request's head must have come whole."""

    most: ClassVar[int] = 512
    head_s: ClassVar[float] = 10.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._wait()
        super().on_response_complete()

    def _wait(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = self.loop.call_later(self.head_s, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
