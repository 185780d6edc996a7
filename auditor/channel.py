"""The client's connection to an auditor: batches out, and what a failed call says of when to try again."""

import ipaddress
import logging
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from auditor.bearer import bearer
from auditor.errors import ConfigError
from auditor.proto import audit_pb2 as pb

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 20
TOO_LARGE = "message larger than max"  # gRPC's own words, before any code of the auditor's sees the message
# Not UNIMPLEMENTED: so answers another program on the port, or an ingress that does not route to the auditor yet.
REFUSED_FOR_GOOD = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)
_SUBMIT = "/audit.v1.AuditService/Submit"
_RETRY_AFTER = "retry-after"
_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class Channel:
    """address: host:port of the auditor's gRPC, or dns:///host:port. token: a bearer token or a function that gives it.

    credentials: for TLS; None speaks plain text. ConfigError: an address that is none, a token that no call carries.
    """

    def __init__(
        self,
        address: str,
        token: str | Callable[[], str | None] | None,
        credentials: grpc.ChannelCredentials | None,
    ) -> None:
        require_host_port("address", address)
        if isinstance(token, str) and token:
            bearer(token)
        self._token = token if callable(token) else lambda: token
        self._channel = (
            grpc.secure_channel(address, credentials, _OPTIONS)
            if credentials
            else grpc.insecure_channel(address, _OPTIONS)
        )
        # Not by the generated stub, which asks for the very newest grpcio.
        self._submit = self._channel.unary_unary(
            _SUBMIT, pb.SubmitRequest.SerializeToString, pb.SubmitResponse.FromString
        )

    def submit(self, request: pb.SubmitRequest, timeout: float) -> Any:
        """Begin a call; gRPC's future of it. timeout: seconds."""
        return self._submit.future(request, timeout=timeout, metadata=self._metadata())

    def close(self) -> None:
        """Let go of the connection."""
        self._channel.close()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        try:
            token = self._token()
            return (("authorization", bearer(token)),) if token else ()
        except (OSError, ValueError) as error:  # ValueError: a file that is no UTF-8, and what no header can carry
            log.warning("the auditor's token cannot be read now: %s", error)
            return ()


def require_host_port(name: str, address: str) -> None:
    """ConfigError where it is no host:port, nor that behind `dns:///`: gRPC would look for it for ever."""
    host, _, port = address.removeprefix("dns:///").rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= 65535
    if not (host and is_port) or "/" in host or any(map(str.isspace, host)) or _is_ipv6(host):
        raise ConfigError(f"{name} {address[:100]!r} is no host:port, such as 127.0.0.1:50051 or [::1]:50051")


def _is_ipv6(host: str) -> bool:
    """Without its brackets, so that the port would be taken for a part of it."""
    try:
        return isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address)
    except ValueError:
        return False


def pause_of(call: Any, least_s: float, most_s: float) -> float:
    """Seconds until the next try: as long as the auditor asks for, within reason."""
    asked = [value for name, value in call.trailing_metadata() or () if name == _RETRY_AFTER]
    try:
        return min(max(float(asked[0]), least_s), most_s) if asked else least_s
    except ValueError:
        return least_s


def batch_in(payload: bytes) -> pb.SubmitRequest | None:
    """A batch that was stored; None where that is none."""
    try:
        return pb.SubmitRequest.FromString(payload)
    except DecodeError:
        return None
