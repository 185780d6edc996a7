"""One table from error to gRPC status. What is not in it is a bug of ours and is told so."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import grpc

from auditor.errors import (
    AuditorError,
    AuthError,
    ForbiddenError,
    LedgerError,
    LimitError,
    NoMethodError,
    RateError,
    RecordError,
)

log = logging.getLogger(__name__)
# Trailing metadata of a call that came too soon: seconds to wait.
RETRY_AFTER: Final = "retry-after"

# The most derived class that fits decides. UNAVAILABLE and RESOURCE_EXHAUSTED invite another try, the others do not.
STATUS: Final[dict[type[AuditorError], grpc.StatusCode]] = {
    LimitError: grpc.StatusCode.INVALID_ARGUMENT,
    RecordError: grpc.StatusCode.INVALID_ARGUMENT,
    ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    AuthError: grpc.StatusCode.UNAUTHENTICATED,
    NoMethodError: grpc.StatusCode.UNIMPLEMENTED,
    RateError: grpc.StatusCode.RESOURCE_EXHAUSTED,
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
def translated(context: grpc.ServicerContext, on_error: Callable[[str], None]) -> Iterator[None]:
    """End the call with the status of whatever error the block raises; details are `code: message`.

    on_error: told the code.
    """
    try:
        yield
    except AuditorError as error:
        on_error(error.code)
        if isinstance(error, RateError):
            context.set_trailing_metadata(((RETRY_AFTER, f"{error.retry_after_s:.3f}"),))
        context.abort(status_of(error), f"{error.code}: {error}")
    except Exception:
        if not context.is_active():
            raise
        on_error(AuditorError.code)
        log.exception("a call failed")
        context.abort(grpc.StatusCode.INTERNAL, "internal: the auditor failed on this call; its log says how")
