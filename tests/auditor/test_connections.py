"""Connections that anybody may open take neither the memory nor the files of the auditor, and hold up no record."""

import asyncio
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest
import uvicorn

from auditor.codec import varint
from auditor.export.connections import BoundedProtocol
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import pair
from tests.auditor.test_unpaired import send

HEAD = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


class Quick(BoundedProtocol):
    most = 3
    head_s = 0.5
    told: ClassVar[list[str]] = []

    def on_error(self, code: str) -> None:
        self.told.append(code)


async def _app(scope: object, receive: object, answer: object) -> None:
    await answer({"type": "http.response.start", "status": 204, "headers": []})  # type: ignore[operator]
    await answer({"type": "http.response.body", "body": b""})  # type: ignore[operator]


@contextmanager
def served(app: object = _app) -> Iterator[int]:
    """A real server of connections that are given up quickly; its port."""
    Quick.told = []
    server = uvicorn.Server(uvicorn.Config(app, http=Quick, log_level="warning", timeout_keep_alive=30))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


def _closed(connection: socket.socket) -> bool:
    """Whether the other end has gone, waited for."""
    connection.settimeout(5)
    with suppress(ConnectionResetError):
        return connection.recv(100) == b""
    return True


@pytest.mark.parametrize(("said", "told"), [(b"", []), (HEAD, ["head_timeout"])])
def test_a_request_that_does_not_come_is_not_waited_for(said: bytes, told: list[str]) -> None:
    with served() as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(said)
        started = time.monotonic()
        assert _closed(connection)
        assert 0.3 < time.monotonic() - started < 4
        assert Quick.told == told


def test_nor_is_the_next_one_after_an_answer_though_its_bytes_drip() -> None:
    with served() as port, socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(2):
            connection.sendall(HEAD + b"\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 204")
        started = time.monotonic()
        with suppress(OSError):
            for byte in HEAD * 9:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
        assert 0.3 < time.monotonic() - started < 4
        assert Quick.told == ["head_timeout"]


def test_one_more_than_may_be_open_is_closed_and_the_others_are_served() -> None:
    with served() as port, ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)]
        time.sleep(0.1)
        assert _closed(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
        assert Quick.told == ["too_many_connections"]
        held[0].sendall(HEAD + b"\r\n")
        assert held[0].recv(1000).startswith(b"HTTP/1.1 204")


def test_a_body_that_is_none_behind_the_beginning_of_an_answer_ends_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def early(scope: object, receive: object, answer: object) -> None:
        await answer({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        await answer({"type": "http.response.body", "body": b"x", "more_body": True})  # type: ignore[operator]
        await receive()  # type: ignore[operator]
        await receive()  # type: ignore[operator]

    with served(early) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.sendall(b"no size of a chunk\r\n")
        connection.settimeout(5)
        with suppress(ConnectionResetError):
            while connection.recv(1000):
                pass
        assert Quick.told == []
    assert "LocalProtocolError" not in caplog.text


def _resident(auditor: AuditorProcess, name: str = "VmRSS") -> int:
    """KiB; VmHWM is the most that there ever was."""
    assert auditor.process is not None
    status = Path(f"/proc/{auditor.process.pid}/status").read_text()
    (size,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith(name)]
    return size


@pytest.fixture
def hard() -> Iterator[int]:
    """This process may open many files, and says how many another one may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 8192:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_head_without_end_is_cut_off_and_a_thousand_silent_callers_hold_up_no_record(
    tmp_path: Path, hard: int
) -> None:
    # The usual soft limit, which the auditor raises.
    shell = ["bash", "-c", 'ulimit -Sn 1024; exec "$@"', "-", sys.executable]
    with running_auditor(tmp_path, python=shell) as auditor, ExitStack() as stack:
        before = _resident(auditor)
        for address in (auditor.http, auditor.grpc):
            host, _, port = address.rpartition(":")
            endless = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            with suppress(OSError):
                endless.sendall(HEAD)
                for i in range(64):
                    endless.sendall(b"X%d: " % i + b"y" * (1 << 20) + b"\r\n")
            for _ in range(600):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
        started = time.monotonic()
        send(auditor, *pair("0"))
        assert time.monotonic() - started < 5
        assert _resident(auditor) - before < 40 << 10
        stack.close()
        auditor.wait_for("/api/v1/runs/run", lambda run: run["by_verdict"] == {"match": 1})


def test_messages_that_swell_when_they_are_decoded_are_decoded_one_at_a_time(tmp_path: Path) -> None:
    """Of nothing but empty records, each two bytes that become fifty."""
    batch = b"\x12\x00" * 8_000_000
    swollen = b"\x0a" + varint(len(batch)) + batch
    with running_auditor(tmp_path) as auditor, grpc.insecure_channel(auditor.grpc) as channel:
        call: Any = channel.unary_unary("/audit.v1.AuditService/Submit")
        for answer in [call.future(swollen, timeout=60) for _ in range(12)]:
            with pytest.raises(grpc.RpcError, match=r"too_large: a batch of 8000000 records|try again"):
                answer.result()
        assert _resident(auditor, "VmHWM") < 1000 << 10


@pytest.mark.soak
def test_who_does_not_speak_http_2_on_the_other_port_is_not_waited_for(tmp_path: Path) -> None:
    with running_auditor(tmp_path) as auditor:
        host, _, port = auditor.grpc.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            started = time.monotonic()
            with suppress(ConnectionResetError):
                while connection.recv(100):
                    pass
            assert 5 < time.monotonic() - started < 20
