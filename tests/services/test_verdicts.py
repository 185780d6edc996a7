"""An auditor that answers by halves, or somebody else in its place: silence for the job, never an error."""

import json
import socket
import threading
import time
from dataclasses import asdict

import pytest

from services import verdicts
from services.auditor_access import AuditorAccess
from services.errors import AuditorError
from services.verdicts import AuditorApi, Verdicts

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture
def answering():
    """Start a server that gives each caller the same bytes and hangs up; returns its address."""
    servers = []

    def start(answer):
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def serve():
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:
                    return
                with caller:
                    caller.recv(65536)
                    caller.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        HEAD % 500 + b'{"samples": 4, "comp',
        HEAD % 13 + b"<html></html>",
        HEAD % 2 + b"{}",
        HEAD % 4 + b"null",
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ],
    ids=["nothing", "cut off", "a page", "no counts", "null", "another protocol"],
)
def test_an_answer_that_is_none_is_silence(answering, answer):
    api = AuditorApi(AuditorAccess("", f"http://{answering(answer)}"), "run")
    assert api.run() is None
    assert api.step(0, samples=4, seconds=0.3) is None
    assert api.metrics() in ("", "{}", "null", "<html></html>")


@pytest.mark.parametrize(
    ("causes", "waits"),
    [
        ({"searching": 1, "undiagnosed": 3}, True),
        ({"searching": 1, "stale_weights": 1}, False),
        ({"unknown": 1}, False),
        ({"undiagnosed": 1}, False),
        ({}, False),
    ],
)
def test_the_end_of_a_run_waits_for_one_search_for_causes_and_not_for_long(answering, monkeypatch, causes, waits):
    monkeypatch.setattr(verdicts, "_CAUSES_SECONDS", 1.0)
    body = json.dumps({**asdict(Verdicts(samples=4)), "by_cause": causes}).encode()
    api = AuditorApi(AuditorAccess("", f"http://{answering(HEAD % len(body) + body)}"), "run")
    began = time.monotonic()
    found = api.settle(samples=4, seconds=60.0)
    assert found is not None
    assert (found.settled, found.by_cause) == ("searching" not in causes, causes)
    assert waits == (time.monotonic() - began > 0.9)
    assert time.monotonic() - began < 10


def test_an_address_where_nothing_speaks_grpc_is_named(answering):
    access = AuditorAccess(answering(HEAD % 2 + b"{}"), "")
    with pytest.raises(AuditorError, match=r"nothing speaks gRPC at auditor\.grpc = 127\.0\.0\.1:\d+"):
        access.require_grpc(1.0)
