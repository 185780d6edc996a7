"""The gRPC service: one call, one durable batch, one receipt a record.

Messages are read as bytes and parsed here, so that what is no message is refused with a code and counted, as anything
else that is refused, and so that a call whose message does not come is ended before it costs another call its thread.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from auditor.errors import AuditorError, ConfigError, RecordError
from auditor.grants import Grant
from auditor.ingest.admission import Admission, caller_of
from auditor.ingest.doorstep import Doorstep
from auditor.ingest.limits import Limits, admit_batch
from auditor.ingest.status import translated
from auditor.ingest.streams import AtTheDoor, Streams
from auditor.pipeline import Incoming, Receipt, Refused
from auditor.proto import audit_pb2 as pb

_OUTCOMES: Final = {
    "accepted": pb.OUTCOME_ACCEPTED,
    "duplicate": pb.OUTCOME_DUPLICATE,
    "refused": pb.OUTCOME_REFUSED,
}
_NAME: Final = "audit.v1.AuditService"
# Each has threads of its own: what waits for a message, what streams, and what is worked on.
_STREAMS = 8
_DOORSTEP = 16
_WORKING = 24
_STREAM_IDLE_S = 300.0
_MESSAGE_S = 30.0
# As long as the client of this project waits for an answer.
_PATIENCE_S = 10.0
# Codes of calls that nobody gets an answer to.
_SILENT: Final = "silent"
_INCOMPLETE: Final = "incomplete"
# What a client says of itself and cannot be so; its records are taken all the same.
_BAD_CLIENT: Final = "bad_client"

Accept = Callable[[Sequence[Incoming | Refused]], list[Receipt]]
Request = pb.SubmitRequest | pb.SubmitStreamRequest
M = TypeVar("M", bound=Message)


class AuditService:
    """accept: makes a batch durable and returns its receipts. on_error: told the code of each call that fails.

    hear: told what clients say of themselves, be their records taken or not; False where it cannot be so.
    stream_idle_s: a stream without a message for that long is cancelled; message_s: a Submit before its message;
    patience_s: where another call needs its place.
    """

    def __init__(
        self,
        accept: Accept,
        limits: Limits,
        admission: Admission,
        on_error: Callable[[str], None] = lambda code: None,
        stream_idle_s: float = _STREAM_IDLE_S,
        message_s: float = _MESSAGE_S,
        patience_s: float = _PATIENCE_S,
        hear: Callable[[pb.ClientState], bool] = lambda state: True,
    ) -> None:
        self._accept = accept
        self._limits = limits
        self._admission = admission
        self._on_error, self._hear = on_error, hear
        self._streams = Streams(_STREAMS, stream_idle_s, lambda: on_error(_SILENT))
        self._decoding = threading.Lock()
        self._doorstep = Doorstep(_DOORSTEP, patience_s, message_s, lambda: on_error(_SILENT))

    def submit(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Take one batch: a SubmitRequest, answered by a SubmitResponse."""
        with translated(context, self._on_error):
            with self._doorstep.place(caller_of(self._grant(context), context.peer()), context):
                raw = self._only(requests)
            yield pb.SubmitResponse(receipts=self._take(pb.SubmitRequest, raw, context)).SerializeToString()

    def submit_stream(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Take batches for as long as they come: a SubmitStreamRequest each, answered by a SubmitStreamResponse."""
        with translated(context, self._on_error), self._streams.opened(context) as heard:
            for raw in requests:
                heard()
                # Asked anew for each batch: a token that was withdrawn ends the stream too.
                receipts = self._take(pb.SubmitStreamRequest, raw, context)
                yield pb.SubmitStreamResponse(receipts=receipts).SerializeToString()

    def door(self) -> AtTheDoor:
        """For the server: who has no token waits for nothing."""
        return AtTheDoor(self._admission, self._on_error)

    def handlers(self) -> grpc.GenericRpcHandler:
        """For the server. Submit is unary for whoever calls it; only as a stream can its message be waited for here."""
        methods = {"Submit": self.submit, "SubmitStream": self.submit_stream}
        return grpc.method_handlers_generic_handler(
            _NAME, {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
        )

    def _only(self, requests: Iterator[bytes]) -> bytes:
        try:
            return next(requests)
        except StopIteration:
            raise RecordError("the call ended without a message", _INCOMPLETE) from None
        except grpc.RpcError:
            # Cut off, ended from here, or larger than gRPC takes; the caller has its status from gRPC.
            self._on_error(_INCOMPLETE)
            raise

    def _take(self, kind: Callable[[], Request], raw: bytes, context: grpc.ServicerContext) -> pb.Receipts:
        grant = self._grant(context)
        # A message of nothing but empty parts takes thirty times its size, decoded: never two of them at once.
        with self._decoding:
            try:
                batch_id, items = self._decoded(kind(), raw, grant, context.peer())
            except AuditorError as error:
                raise error.with_traceback(None) from None  # which would hold the message until the call has ended
        receipts = self._accept(items)
        return pb.Receipts(
            batch_id=batch_id,
            receipts=[pb.Receipt(outcome=_OUTCOMES[r.outcome], code=r.code, detail=r.detail) for r in receipts],
        )

    def _decoded(self, message: Request, raw: bytes, grant: Grant, peer: str) -> tuple[int, list[Incoming | Refused]]:
        """Its id and what is in it; nothing of the message itself is held any more."""
        batch = _parsed(message, raw).batch
        if batch.HasField("client") and grant.covers(batch.client.run_id) and not self._hear(batch.client):
            self._on_error(_BAD_CLIENT)
        self._admission.admit(batch, grant, peer)
        return batch.batch_id, admit_batch(batch, self._limits)

    def _grant(self, context: grpc.ServicerContext) -> Grant:
        return self._admission.authenticate(dict(context.invocation_metadata()).get("authorization", ""))


def _parsed(message: M, raw: bytes) -> M:
    try:
        message.ParseFromString(raw)
    except DecodeError:
        raise RecordError(f"{len(raw)} bytes that are no {message.DESCRIPTOR.full_name}") from None
    return message


def start_server(
    service: AuditService, address: str, limits: Limits, credentials: grpc.ServerCredentials | None
) -> tuple[grpc.Server, int]:
    """Serve on host:port; the server and the port that was bound. ConfigError where it cannot be had."""
    server = grpc.server(
        ThreadPoolExecutor(_STREAMS + _DOORSTEP + _WORKING, thread_name_prefix="grpc"),
        handlers=[service.handlers()],
        interceptors=[service.door()],
        options=(
            ("grpc.max_receive_message_length", limits.message_bytes),
            # Without this a second server on the same port starts too, and takes every other connection.
            ("grpc.so_reuseport", 0),
            # Connections on which nobody speaks HTTP/2, or calls anything; a client makes its own anew.
            ("grpc.server_handshake_timeout_ms", 10_000),
            ("grpc.max_connection_idle_ms", 300_000),
        ),
    )
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:
        raise ConfigError(
            f"cannot listen on {address} for gRPC; is the port in use or the host not this one?"
        ) from None
    server.start()
    return server, port
