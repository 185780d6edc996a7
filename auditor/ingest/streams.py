"""Streams hold a thread while they are open: only callers with a token, only so many, none that says nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from auditor.errors import AuditorError, AuthError, NoMethodError, RateError
from auditor.ingest.admission import Admission
from auditor.ingest.status import translated

_COME_BACK_S = 1.0


class Streams:
    """The open ones. most: beyond it RateError. idle_s: one without a message for that long is cancelled.

    on_end: called for each that is.
    """

    def __init__(self, most: int, idle_s: float, on_end: Callable[[], None]) -> None:
        self._seats, self._most, self._idle_s = threading.BoundedSemaphore(most), most, idle_s
        self._on_end = on_end

    @contextmanager
    def opened(self, context: grpc.ServicerContext) -> Iterator[Callable[[], None]]:
        """A seat for the block; call what it gives at each message."""
        if not self._seats.acquire(blocking=False):
            raise RateError(f"{self._most} streams are open; use Submit, or try again later", _COME_BACK_S)
        ended, last = threading.Event(), [time.monotonic()]

        def heard() -> None:
            last[0] = time.monotonic()

        def watch() -> None:
            while not ended.wait(max(0.0, last[0] + self._idle_s - time.monotonic())):
                if time.monotonic() >= last[0] + self._idle_s:
                    context.cancel()
                    self._on_end()
                    return

        threading.Thread(target=watch, name="stream-idle", daemon=True).start()
        try:
            yield heard
        finally:
            ended.set()
            self._seats.release()


class AtTheDoor(grpc.ServerInterceptor):
    """Turns away a call without a valid token by its metadata alone: waiting for its first message costs a thread."""

    def __init__(self, admission: Admission, on_error: Callable[[str], None]) -> None:
        self._admission, self._on_error = admission, on_error

    def intercept_service(self, continuation: Callable[[Any], Any], call: Any) -> Any:
        """The method's own handler, or one that ends the call without reading a message."""
        try:
            self._admission.authenticate(dict(call.invocation_metadata or ()).get("authorization", ""))
        except AuthError as error:
            return self._refusal(error)
        return continuation(call) or self._refusal(NoMethodError(f"there is no method {call.method[:200]!r}"))

    def _refusal(self, error: AuditorError) -> Any:
        def refuse(_: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with translated(context, self._on_error):
                raise error
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)
