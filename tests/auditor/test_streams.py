"""Streams that say nothing take no other caller's turn."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from auditor.codec import to_wire
from auditor.grants import Grants
from auditor.ingest.admission import Admission
from auditor.ingest.limits import Limits
from auditor.ingest.service import AuditService, start_server
from auditor.pipeline import Receipt
from auditor.proto import audit_pb2 as pb
from auditor.proto.audit_pb2_grpc import AuditServiceStub
from auditor.rates import Rate
from tests.auditor.samples import pair

TOKEN = (("authorization", "Bearer s3cret"),)


@contextmanager
def server(folder: Path, codes: list[str], idle_s: float = 60.0) -> Iterator[str]:
    (folder / "token").write_text("s3cret")
    admission = Admission(Grants(folder / "token"), Rate("records", 0, 1), Rate("bytes", 0, 1))
    service = AuditService(lambda batch: [Receipt("accepted")] * len(batch), Limits(), admission, codes.append, idle_s)
    running, port = start_server(service, "127.0.0.1:0", Limits(), None)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        running.stop(grace=None).wait()


def silence(ended: threading.Event) -> Iterator[pb.SubmitStreamRequest]:
    ended.wait()
    yield from ()


def batch() -> pb.Batch:
    return pb.Batch(records=[to_wire(record) for record in pair()])


def test_a_submit_is_served_while_forty_silent_streams_and_calls_are_open(tmp_path: Path) -> None:
    codes: list[str] = []
    ended = threading.Event()
    with server(tmp_path, codes) as address, ExitStack() as parts:
        parts.callback(ended.set)
        stub = AuditServiceStub(parts.enter_context(grpc.insecure_channel(address)))
        calls: dict[Any, list[Any]] = {}
        for metadata in ((), TOKEN):
            calls[metadata] = [stub.SubmitStream(silence(ended), metadata=metadata) for _ in range(20)]
        # The method that takes one message, called without it: the metadata alone must decide.
        channel = parts.enter_context(grpc.insecure_channel(address))
        never = channel.stream_stream("/audit.v1.AuditService/Submit")
        calls[()] += [never(silence(ended)) for _ in range(20)]
        reply = stub.Submit(pb.SubmitRequest(batch=batch()), metadata=TOKEN, timeout=5)
        assert len(reply.receipts.receipts) == 2
        for call in calls[()]:
            with pytest.raises(grpc.RpcError):
                next(call)
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        wait_for(lambda: sum(call.done() for call in calls[TOKEN]) == 12)
        refused = [call for call in calls[TOKEN] if call.done()]
        assert {call.code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert {name for call in refused for name, _ in call.trailing_metadata()} == {"retry-after"}
    assert (codes.count("unauthenticated"), codes.count("rate_limited")) == (40, 12)


def test_a_stream_that_says_nothing_is_ended_and_its_seat_is_free_again(tmp_path: Path) -> None:
    ended = threading.Event()
    with server(tmp_path, [], idle_s=0.5) as address, grpc.insecure_channel(address) as channel:
        stub = AuditServiceStub(channel)
        silent = [stub.SubmitStream(silence(ended), metadata=TOKEN) for _ in range(8)]
        wait_for(lambda: all(call.done() for call in silent))
        assert {call.code() for call in silent} == {grpc.StatusCode.CANCELLED}

        def slow() -> Iterator[pb.SubmitStreamRequest]:
            for _ in range(4):
                yield pb.SubmitStreamRequest(batch=batch())
                time.sleep(0.3)

        assert len(list(stub.SubmitStream(slow(), metadata=TOKEN))) == 4, "longer than that, and never silent"
        ended.set()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
