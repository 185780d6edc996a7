"""A Submit whose message never comes takes no other caller's turn, and not for long its own."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from auditor.codec import to_wire
from auditor.errors import RateError
from auditor.grants import Grants
from auditor.ingest import doorstep
from auditor.ingest.admission import Admission
from auditor.ingest.doorstep import Doorstep
from auditor.ingest.limits import Limits
from auditor.ingest.service import AuditService, start_server
from auditor.pipeline import Receipt
from auditor.proto import audit_pb2 as pb
from auditor.proto.audit_pb2_grpc import AuditServiceStub
from auditor.rates import Rate
from tests.auditor.samples import pair

SUBMIT = "/audit.v1.AuditService/Submit"
REQUEST = pb.SubmitRequest(batch=pb.Batch(records=[to_wire(record) for record in pair()]))
THREADS = 48


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@contextmanager
def server(folder: Path, codes: list[str], message_s: float = 60.0, patience_s: float = 1.0) -> Iterator[str]:
    tokens = [{"name": name, "token": f"t-{name}", "runs": ["*"]} for name in ("loud", "calm")]
    (folder / "tokens").write_text(yaml.safe_dump(tokens))
    admission = Admission(Grants(None, folder / "tokens"), Rate("records", 0, 1), Rate("bytes", 0, 1))
    service = AuditService(
        lambda batch: [Receipt("accepted")] * len(batch),
        Limits(),
        admission,
        codes.append,
        message_s=message_s,
        patience_s=patience_s,
    )
    running, port = start_server(service, "127.0.0.1:0", Limits(), None)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        running.stop(grace=None).wait()


def silent(parts: ExitStack, address: str, token: str, count: int) -> list[Any]:
    """Calls of Submit, by a client that sends the headers and never the message."""
    ended = threading.Event()
    parts.callback(ended.set)
    channel = parts.enter_context(grpc.insecure_channel(address))

    def nothing() -> Iterator[bytes]:
        ended.wait()
        yield from ()

    return [channel.stream_stream(SUBMIT)(nothing(), metadata=metadata(token)) for _ in range(count)]


def submit(parts: ExitStack, address: str, token: str) -> float:
    """Seconds until the receipts are there."""
    channel = parts.enter_context(grpc.insecure_channel(address))
    started = time.monotonic()
    reply = AuditServiceStub(channel).Submit(REQUEST, metadata=metadata(token), timeout=5)
    assert len(reply.receipts.receipts) == 2
    return time.monotonic() - started


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_three_times_as_many_silent_calls_as_threads_starve_nobody(tmp_path: Path) -> None:
    codes: list[str] = []
    with server(tmp_path, codes, patience_s=4.0) as address, ExitStack() as parts:
        calls = silent(parts, address, "t-loud", 3 * THREADS)
        wait_for(lambda: sum(call.done() for call in calls) == 3 * THREADS - 8)
        assert {call.code() for call in calls if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert {name for call in calls if call.done() for name, _ in call.trailing_metadata()} == {"retry-after"}
        assert submit(parts, address, "t-calm") < 3.0, "another caller does not wait"
        time.sleep(4.1)  # as long as a busy machine may take for all of the above
        assert submit(parts, address, "t-loud") < 3.0, "the caller itself takes the place of its oldest silent call"
        wait_for(lambda: codes.count("silent") == 1)
        assert sum(call.done() for call in calls) == 3 * THREADS - 7
    assert codes.count("rate_limited") == 3 * THREADS - 8


def test_a_message_that_does_not_come_in_time_ends_the_call_and_is_counted(tmp_path: Path) -> None:
    codes: list[str] = []
    with server(tmp_path, codes, message_s=0.5) as address, ExitStack() as parts:
        calls = silent(parts, address, "t-loud", 3)
        wait_for(lambda: all(call.done() for call in calls))
        assert {call.code() for call in calls} == {grpc.StatusCode.CANCELLED}
        wait_for(lambda: codes.count("silent") == 3)
        assert submit(parts, address, "t-loud") < 1.0


def test_a_call_without_a_message_is_refused_with_its_code(tmp_path: Path) -> None:
    codes: list[str] = []
    with server(tmp_path, codes) as address, grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(SUBMIT)(iter(()), metadata=metadata("t-calm"))
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert call.details() == "incomplete: the call ended without a message"
        unknown = channel.unary_unary("/audit.v1.AuditService/Erase")
        with pytest.raises(grpc.RpcError, match="no_method: there is no method"):
            unknown(b"", metadata=metadata("t-calm"))
    assert codes == ["incomplete", "no_method"]


def test_a_message_that_is_cut_off_or_too_large_is_counted(tmp_path: Path) -> None:
    codes: list[str] = []
    with server(tmp_path, codes) as address, grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as large:
            channel.unary_unary(SUBMIT)(bytes(Limits().message_bytes + 1), metadata=metadata("t-calm"))
        assert large.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        wait_for(lambda: codes == ["incomplete"])
        with ExitStack() as parts:
            (call,) = silent(parts, address, "t-calm", 1)
            time.sleep(0.3)
            call.cancel()
            wait_for(lambda: codes == ["incomplete"] * 2)


class Call:
    ended = False

    def cancel(self) -> None:
        self.ended = True


def test_places_are_shared_between_callers() -> None:
    step = Doorstep(4, 0.0, 60.0, lambda: None)
    first, second, third = Call(), Call(), Call()
    with ExitStack() as parts:
        for call in (first, second):
            parts.enter_context(step.place("a", call))
        parts.enter_context(step.place("b", third))
        parts.enter_context(step.place("a", Call()))
        assert [call.ended for call in (first, second, third)] == [True, False, False], "of its own, the oldest"


def test_a_caller_without_a_place_gets_one_before_those_who_share_all_of_them_lose_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doorstep, "_FAIR_S", 0.0)
    step = Doorstep(4, 60.0, 600.0, lambda: None)
    calls = {(caller, i): Call() for caller in ("a", "b") for i in range(2)}
    with ExitStack() as parts:
        for (caller, _), call in calls.items():
            parts.enter_context(step.place(caller, call))
        with pytest.raises(RateError):
            parts.enter_context(step.place("a", Call()))
        parts.enter_context(step.place("c", Call()))
        assert [call.ended for call in calls.values()] == [True, False, False, False]


def test_a_call_is_not_ended_before_it_had_time_for_its_message() -> None:
    step = Doorstep(2, 60.0, 600.0, lambda: None)
    with step.place("a", Call()), pytest.raises(RateError, match="whose message has not come"), step.place("a", Call()):
        raise AssertionError
