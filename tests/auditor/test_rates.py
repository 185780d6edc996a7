"""More than the rate is refused with the time to come back; a client waits, spools, and loses nothing."""

import math
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from auditor.client import AuditClient
from auditor.codec import to_wire
from auditor.errors import RateError
from auditor.grants import EVERYTHING, Grant, Grants
from auditor.ingest.admission import Admission
from auditor.proto import audit_pb2 as pb
from auditor.proto.audit_pb2_grpc import AuditServiceStub
from auditor.rates import Rate
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import pair


def test_a_burst_goes_through_and_then_the_rate_holds() -> None:
    now = [0.0]
    rate = Rate("records", 10.0, 2.0, lambda: now[0])
    for _ in range(20):
        rate.take("a", 1)
    with pytest.raises(RateError, match="more than 10 records a second from a"):
        rate.take("a", 1)
    rate.take("b", 1)
    taken = 0
    for _ in range(1000):
        now[0] += 0.01
        try:
            rate.take("a", 1)
            taken += 1
        except RateError:
            continue
    assert 99 <= taken <= 101


def test_a_batch_larger_than_the_bucket_goes_through_and_its_debt_is_paid_first() -> None:
    now = [0.0]
    rate = Rate("bytes", 100.0, 1.0, lambda: now[0])
    rate.take("a", 600)
    with pytest.raises(RateError) as refused:
        rate.take("a", 1)
    assert math.isclose(refused.value.retry_after_s, 5.0)
    now[0] += 4.9
    with pytest.raises(RateError):
        rate.take("a", 1)
    now[0] += 0.2
    rate.take("a", 1)


def test_no_rate_is_no_limit_and_remembers_nobody() -> None:
    rate = Rate("records", 0.0, 1.0)
    for i in range(10_000):
        rate.take(f"{i}", 10**9)
    assert not rate.limited
    assert not rate._left


def test_callers_that_are_forgotten_are_the_ones_that_called_longest_ago() -> None:
    rate = Rate("records", 1.0, 1.0, lambda: 0.0)
    for i in range(5000):
        rate.take(f"{i}", 1)
    assert len(rate._left) == 4096
    with pytest.raises(RateError):
        rate.take("4999", 1)


def submit(auditor: AuditorProcess, sample: str, run_id: str = "run") -> pb.SubmitResponse:
    records = [to_wire(record) for record in pair(sample, run_id=run_id)]
    with grpc.insecure_channel(auditor.grpc) as channel:
        return AuditServiceStub(channel).Submit(pb.SubmitRequest(batch=pb.Batch(records=records)))


@pytest.mark.parametrize("flags", [("--rate-records", "1"), ("--rate-bytes", "500")])
def test_a_call_too_many_is_resource_exhausted_with_retry_after_and_counted(
    tmp_path: Path, flags: tuple[str, str]
) -> None:
    with running_auditor(tmp_path, *flags, "--rate-burst-s", "1") as auditor:
        submit(auditor, "0")
        with pytest.raises(grpc.RpcError) as refused:
            submit(auditor, "1")
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.details().startswith("rate_limited: more than ")
        (after,) = [value for name, value in refused.value.trailing_metadata() if name == "retry-after"]
        assert 0.0 < float(after) < 5.0
        with pytest.raises(grpc.RpcError, match="rate_limited"):
            submit(auditor, "0", run_id="another")  # a fresh run on a fresh connection is the same caller
        assert auditor.metrics()['auditor_errors_total{code="rate_limited",part="grpc"}'] == 2


def test_each_token_has_a_rate_of_its_own_and_callers_without_one_have_that_of_their_address() -> None:
    admission = Admission(Grants(), Rate("records", 1.0, 1.0, lambda: 0.0), Rate("bytes", 0.0, 1.0))
    batch = pb.Batch(records=[to_wire(record) for record in pair()])
    everything = Grant("admin", ("*",))
    for grant, peer in ((Grant("a", ("run",)), "ipv4:10.0.0.7:1"), (everything, "ipv4:10.0.0.7:2"),
                        (EVERYTHING, "ipv4:10.0.0.7:3"), (EVERYTHING, "ipv6:%5B::1%5D:3")):  # fmt: skip
        admission.admit(batch, grant, peer)
        with pytest.raises(RateError):
            admission.admit(batch, grant, peer.rpartition(":")[0] + ":9")


def test_a_client_that_is_too_fast_waits_spools_and_loses_nothing(tmp_path: Path) -> None:
    flags = ("--rate-records", "200", "--rate-burst-s", "0.2")
    with running_auditor(tmp_path / "a", *flags) as auditor:
        with AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client:
            for i in range(200):
                for record in pair(f"{i}"):
                    (client.submit_rollout if record.side == "rollout" else client.submit_trainer)(record)  # type: ignore[arg-type]
            counts = client.flush(30)
        assert (counts.accepted, counts.dropped, counts.refused, counts.spooled) == (400, 0, 0, 0)
        assert auditor.get("/api/v1/runs/run")["by_verdict"] == {"match": 200}
        assert auditor.metrics()['auditor_errors_total{code="rate_limited",part="grpc"}'] >= 1


def test_a_reader_that_asks_too_often_is_told_when_to_come_back(tmp_path: Path) -> None:
    with running_auditor(tmp_path, "--rate-reads", "2", "--rate-burst-s", "1") as auditor:
        answers = []
        for _ in range(5):
            try:
                auditor.get("/api/v1/runs")
                answers.append(200)
            except urllib.error.HTTPError as refused:
                answers.append(refused.code)
                headers, body = refused.headers, refused.read()
        assert answers[:2] == [200, 200]
        assert 429 in answers
        assert int(headers["Retry-After"]) >= 1
        assert b'"code":"rate_limited"' in body
        with urllib.request.urlopen(f"http://{auditor.http}/healthz", timeout=5) as answer:
            assert answer.status == 200, "who asks whether it lives is always told"


def test_a_batch_larger_than_the_auditor_takes_goes_in_parts_and_a_record_of_that_size_is_refused(
    tmp_path: Path,
) -> None:
    large, _ = pair("large")
    tokens = np.zeros(20_000, np.uint32)
    logprobs, mask = np.zeros(19_992, np.float32), np.ones(19_992, np.bool_)
    with (
        running_auditor(tmp_path / "a", "--message-bytes", "65536") as auditor,
        AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client,
    ):
        for i in range(150):
            for record in pair(f"{i}"):
                (client.submit_rollout if record.side == "rollout" else client.submit_trainer)(record)  # type: ignore[arg-type]
        client.submit_rollout(replace(large, tokens=tokens, logprobs=logprobs, mask=mask))
        counts = client.flush(20)
        assert (counts.accepted, counts.refused, counts.spooled, counts.dropped) == (300, 1, 0, 0)
        assert auditor.get("/api/v1/runs/run")["by_verdict"] == {"match": 150}
