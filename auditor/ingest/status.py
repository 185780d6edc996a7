"""One table from error to gRPC status. What is not in it is a bug of ours and is told so."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import grpc

from auditor.errors import AuditorError, AuthError, LedgerError, LimitError, RecordError

log = logging.getLogger(__name__)

# The most derived class that fits decides. UNAVAILABLE and RESOURCE_EXHAUSTED invite another try, the others do not.
STATUS: Final[dict[type[AuditorError], grpc.StatusCode]] = {
    LimitError: grpc.StatusCode.INVALID_ARGUMENT,
    RecordError: grpc.StatusCode.INVALID_ARGUMENT,
    AuthError: grpc.StatusCode.UNAUTHENTICATED,
    LedgerError: grpc.StatusCode.UNAVAILABLE,
}


def status_of(error: AuditorError) -> grpc.StatusCode:
    """The gRPC status for an error."""
    if isinstance(error, LedgerError) and error.code == "busy":
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return grpc.StatusCode.INTERNAL


@contextmanager
def translated(context: grpc.ServicerContext) -> Iterator[None]:
    """End the call with the status of whatever error the block raises; details are `code: message`."""
    try:
        yield
    except AuditorError as error:
        context.abort(status_of(error), f"{error.code}: {error}")
    except Exception:
        if not context.is_active():
            raise
        log.exception("a call failed")
        context.abort(grpc.StatusCode.INTERNAL, "internal: the auditor failed on this call; its log says how")
