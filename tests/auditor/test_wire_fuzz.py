"""Bytes into the real ports of a real auditor: refused with a code that is counted, or taken whole; nothing grows.

AUDITOR_FUZZ_INPUTS sets the number of inputs of the soak test (100,000).
"""

import http.client
import os
import re
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import grpc
import numpy as np
import pytest

from auditor.codec import to_wire
from auditor.proto import audit_pb2 as pb
from auditor.storage.chain import verify
from auditor.storage.database import open_database
from tests.auditor.processes import REPOSITORY, AuditorProcess, running_auditor
from tests.auditor.samples import one_ulp_off, pair
from tests.auditor.test_fuzz import mutated
from tests.auditor.test_unpaired import send

SERVICE = "/audit.v1.AuditService"
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PROTOCOL = (REPOSITORY / "docs" / "audit-protocol.md").read_text()
PATHS = (
    "/", "/metrics", "/readyz", "/version", "/openapi.json", "/api/v1/runs", "/api/v1/runs/run",
    "/api/v1/runs/run/steps?first=0&last=9&limit=3", "/api/v1/runs/run/steps/0", "/api/v1/runs/run/curve?points=7",
    "/api/v1/runs/run/steps/0/samples?after=0&limit=2&verdict=match", "/api/v1/runs/run/samples/0/0",
    "/api/v1/runs/run/capsules?after=0/0", "/api/v1/runs/run/capsules/0/0", "/api/v1/runs/run/samples/0/0/capsule",
)  # fmt: skip


def messages() -> list[bytes]:
    """Requests that are right, to be bent. A stream's has the same bytes."""
    rollout, trainer = pair("seed")
    batches = ((rollout, trainer), (one_ulp_off(rollout),), (trainer,))
    return [
        pb.SubmitRequest(batch=pb.Batch(records=[to_wire(r) for r in records])).SerializeToString()
        for records in batches
    ]


class Callers:
    """Raw calls to an auditor's gRPC port, and what came of them."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._unary: Callable[..., bytes] = channel.unary_unary(f"{SERVICE}/Submit")
        self._stream: Callable[..., Any] = channel.stream_stream(f"{SERVICE}/SubmitStream")
        self.outcomes: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def unary(self, raw: bytes) -> None:
        try:
            answer = pb.SubmitResponse.FromString(self._unary(raw, timeout=60))
        except grpc.RpcError as error:
            self._count_failure(error)
            return
        self._count(answer.receipts)

    def stream(self, raws: list[bytes]) -> None:
        try:
            for answer in self._stream(iter(raws), timeout=60):
                self._count(pb.SubmitStreamResponse.FromString(answer).receipts)
        except grpc.RpcError as error:
            self._count_failure(error)

    def _count(self, receipts: pb.Receipts) -> None:
        for receipt in receipts.receipts:
            self.outcomes[receipt.outcome] += 1
            if receipt.outcome == pb.OUTCOME_REFUSED:
                self.refused[receipt.code] += 1

    def _count_failure(self, error: Any) -> None:
        code, separator, _ = error.details().partition(": ")
        assert (error.code(), separator) == (grpc.StatusCode.INVALID_ARGUMENT, ": "), error
        self.failed[code] += 1


def fuzz_grpc(auditor: AuditorProcess, inputs: int, random: np.random.Generator) -> Callers:
    seeds = messages()
    with grpc.insecure_channel(auditor.grpc) as channel:
        callers = Callers(channel)
        for i in range(inputs):
            raw = random.bytes(int(random.integers(0, 300))) if i % 7 == 0 else mutated(seeds[i % 3], random)
            if i % 50 == 49:
                _garbage(auditor.grpc, random, HTTP_2 if i % 100 == 99 else b"")
            if i % 10 == 9:
                callers.stream([raw, seeds[i % 3], mutated(seeds[0], random)])
            else:
                callers.unary(raw)
    return callers


def fuzz_http(auditor: AuditorProcess, inputs: int, random: np.random.Generator) -> Counter[int]:
    """Statuses. Paths, queries and methods bent; every twentieth input is no HTTP at all."""
    statuses: Counter[int] = Counter()
    host, _, port = auditor.http.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    for i in range(inputs):
        if i % 20 == 19:
            said = _garbage(auditor.http, random)
            assert b"\r\ncontent-type: application/problem+json\r\n" in said, said
            statuses[int(said.split()[1])] += 1
            continue
        path = "/" + quote_from_bytes(mutated(PATHS[i % len(PATHS)][1:].encode() or b"x", random), safe="/?&=")
        method = "GET" if i % 5 else ("POST", "HEAD", "DELETE", "OPTIONS", "PATCH")[i % 25 // 5]
        connection.request(method, path, body=random.bytes(20) if method == "POST" else None)
        answer = connection.getresponse()
        body = answer.read()
        statuses[answer.status] += 1
        if answer.status >= 400 and method != "HEAD":
            assert answer.headers["content-type"] == "application/problem+json", (method, path, answer.status, body)
    connection.close()
    return statuses


def _garbage(address: str, random: np.random.Generator, first: bytes = b"") -> bytes:
    """What a port says first to bytes that are not its protocol, or are only where they begin."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as raw, suppress(ConnectionError):
        raw.sendall(first + random.bytes(int(random.integers(1, 200))) + b"\r\n\r\n")
        raw.shutdown(socket.SHUT_WR)
        return raw.recv(1 << 16)
    return b""


def memory_kib(auditor: AuditorProcess) -> int:
    assert auditor.process is not None
    status = Path(f"/proc/{auditor.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found is not None
    return int(found[1])


def counted(auditor: AuditorProcess, name: str) -> dict[str, float]:
    """A counter without a run, by its labels' values: code, or code and part."""
    return {
        " ".join(re.findall(r'"(\w+)"', key)): value
        for key, value in auditor.metrics().items()
        if key.startswith(f"auditor_{name}_total{{")
    }


def gained(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in now.items() if value != before.get(name, 0)}


def fuzz(folder: Path, inputs: int, growth_kib: int) -> None:
    random = np.random.default_rng(inputs)
    with running_auditor(folder, "--shown-runs", "20", "--shown-idle-s", "2") as auditor:
        fuzz_grpc(auditor, 200, random)  # what is loaded once is loaded then
        fuzz_http(auditor, 100, random)
        errors, refusals, before = counted(auditor, "errors"), counted(auditor, "refusals"), memory_kib(auditor)
        callers = fuzz_grpc(auditor, inputs, random)
        statuses = fuzz_http(auditor, inputs // 10, random)
        assert memory_kib(auditor) - before < growth_kib
        assert min(callers.outcomes[pb.OUTCOME_ACCEPTED], callers.outcomes[pb.OUTCOME_DUPLICATE]) > 0
        assert gained(counted(auditor, "refusals"), refusals) == callers.refused
        failures = gained(counted(auditor, "errors"), errors)
        assert {name: n for name, n in failures.items() if name.endswith(" grpc")} == {
            f"{code} grpc": n for code, n in callers.failed.items()
        }
        assert set(statuses) <= {200, 307, 400, 404, 405, 422}, statuses
        assert sum(n for name, n in failures.items() if name.endswith(" http")) == sum(
            n for status, n in statuses.items() if status >= 400
        )
        codes = {*callers.refused, *(name.partition(" ")[0] for name in failures)}
        assert all(f"`{code}`" in PROTOCOL for code in codes), codes
        assert "internal" not in codes
        answer = send(auditor, *pair("after"))
        assert [receipt.outcome for receipt in answer.receipts.receipts] == [pb.OUTCOME_ACCEPTED] * 2
        assert auditor.get("/api/v1/runs/run/samples/0/after")["judgement"]["verdict"] == "match"
        assert auditor.stop() == 0
        assert "Traceback" not in auditor.log
    verify(open_database(str(auditor.ledger), writer=False))


def test_a_thousand_inputs_into_both_ports_are_refused_with_counted_codes_or_taken_whole(tmp_path: Path) -> None:
    fuzz(tmp_path, 1000, 64 << 10)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_inputs_into_both_ports_leave_the_memory_bounded(tmp_path: Path) -> None:
    fuzz(tmp_path, int(os.environ.get("AUDITOR_FUZZ_INPUTS", "100000")), 128 << 10)
