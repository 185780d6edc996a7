"""The gRPC service: one call, one durable batch, one receipt a record."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc

from auditor.errors import ConfigError
from auditor.grants import Grant
from auditor.ingest.admission import Admission
from auditor.ingest.limits import Limits, admit_batch
from auditor.ingest.status import translated
from auditor.ingest.streams import AtTheDoor, Streams
from auditor.pipeline import Incoming, Receipt, Refused
from auditor.proto import audit_pb2 as pb
from auditor.proto.audit_pb2_grpc import AuditServiceServicer, add_AuditServiceServicer_to_server

_OUTCOMES: Final = {
    "accepted": pb.OUTCOME_ACCEPTED,
    "duplicate": pb.OUTCOME_DUPLICATE,
    "refused": pb.OUTCOME_REFUSED,
}
_THREADS = 16
# Threads that are left are for Submit, which holds one for a batch only.
_STREAMS = 8
_STREAM_IDLE_S = 300.0

Accept = Callable[[Sequence[Incoming | Refused]], list[Receipt]]


class AuditService(AuditServiceServicer):
    """accept: makes a batch durable and returns its receipts. on_error: told the code of each call that fails.

    stream_idle_s: a stream without a message for that long is cancelled.
    """

    def __init__(
        self,
        accept: Accept,
        limits: Limits,
        admission: Admission,
        on_error: Callable[[str], None] = lambda code: None,
        stream_idle_s: float = _STREAM_IDLE_S,
    ) -> None:
        self._accept = accept
        self._limits = limits
        self._admission = admission
        self._on_error = on_error
        self._streams = Streams(_STREAMS, stream_idle_s)

    def Submit(self, request: pb.SubmitRequest, context: grpc.ServicerContext) -> pb.SubmitResponse:
        """Take one batch."""
        with translated(context, self._on_error):
            return pb.SubmitResponse(receipts=self._take(request.batch, context))
        raise AssertionError("abort does not return")

    def SubmitStream(
        self, request_iterator: Iterator[pb.SubmitStreamRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.SubmitStreamResponse]:
        """Take batches for as long as they come."""
        with translated(context, self._on_error), self._streams.opened(context) as heard:
            for request in request_iterator:
                heard()
                # Asked anew for each batch: a token that was withdrawn ends the stream too.
                yield pb.SubmitStreamResponse(receipts=self._take(request.batch, context))

    def door(self) -> AtTheDoor:
        """For the server: who has no token waits for nothing."""
        return AtTheDoor(self._admission, self._on_error)

    def _take(self, batch: pb.Batch, context: grpc.ServicerContext) -> pb.Receipts:
        self._admission.admit(batch, self._grant(context), context.peer())
        receipts = self._accept(admit_batch(batch, self._limits))
        return pb.Receipts(
            batch_id=batch.batch_id,
            receipts=[pb.Receipt(outcome=_OUTCOMES[r.outcome], code=r.code, detail=r.detail) for r in receipts],
        )

    def _grant(self, context: grpc.ServicerContext) -> Grant:
        return self._admission.authenticate(dict(context.invocation_metadata()).get("authorization", ""))


def start_server(
    service: AuditService, address: str, limits: Limits, credentials: grpc.ServerCredentials | None
) -> tuple[grpc.Server, int]:
    """Serve on host:port; the server and the port that was bound. ConfigError where it cannot be had."""
    server = grpc.server(
        ThreadPoolExecutor(_THREADS, thread_name_prefix="grpc"),
        interceptors=[service.door()],
        options=(
            ("grpc.max_receive_message_length", limits.message_bytes),
            # Without this a second server on the same port starts too, and takes every other connection.
            ("grpc.so_reuseport", 0),
        ),
    )
    add_AuditServiceServicer_to_server(service, server)
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:
        raise ConfigError(
            f"cannot listen on {address} for gRPC; is the port in use or the host not this one?"
        ) from None
    server.start()
    return server, port
