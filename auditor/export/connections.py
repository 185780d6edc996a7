"""HTTP connections that anybody may open: few enough, and none that keeps a request to itself.

h11 and no other parser, whichever is installed: it bounds what a request's head may take.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from auditor.errors import RecordError
from auditor.export.problems import MEDIA_TYPE
from auditor.export.views import Problem

HEAD_BYTES: Final = 64 << 10
_NO_HTTP: Final = f"what came is no HTTP request, or its head is larger than {HEAD_BYTES} bytes"


class BoundedProtocol(H11Protocol):
    """most: connections that may be open; one more is closed. head_s: until a request's head must have come whole."""

    most: ClassVar[int] = 512
    head_s: ClassVar[float] = 10.0
    _late: asyncio.TimerHandle | None = None
    _begun = False  # whether something of a request has come; a caller that only holds a connection makes no error

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self.on_error("too_many_connections")
            transport.abort()
        else:
            self._wait()

    def data_received(self, data: bytes) -> None:
        """Note that a request has begun."""
        self._begun = True
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._wait()
        super().on_response_complete()

    def on_error(self, code: str) -> None:
        """Told the code of what is answered, or cut off, before there is a request."""

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the form of every other error."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer is under way, behind which nothing can be said
            return
        status, code = HTTPStatus.BAD_REQUEST, RecordError.code
        self.on_error(code)
        problem = Problem(type="about:blank", title=status.phrase, status=status, detail=_NO_HTTP, code=code)
        body = problem.model_dump_json().encode()
        headers = [("content-type", MEDIA_TYPE), ("content-length", str(len(body))), ("connection", "close")]
        for event in (
            h11.Response(status_code=status.value, headers=headers, reason=status.phrase),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _wait(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._begun = False
        self._late = self.loop.call_later(self.head_s, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            if self._begun:
                self.on_error("head_timeout")
            self.transport.close()


def bounded(on_error: Callable[[str], None]) -> type[BoundedProtocol]:
    """The protocol of a server that counts what it answers. on_error: told the code."""

    class Counted(BoundedProtocol):
        def on_error(self, code: str) -> None:
            on_error(code)

    return Counted
