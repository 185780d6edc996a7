"""Processes die, disks fill, networks go: nothing acknowledged is lost, nothing is counted twice."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from auditor.client import AuditClient
from auditor.codec import to_wire
from auditor.proto import audit_pb2 as pb
from auditor.proto.audit_pb2_grpc import AuditServiceStub
from auditor.spool import Spool
from auditor.storage.chain import verify
from auditor.storage.sqlite import SqliteDatabase
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import RESPONSE, one_ulp_off, pair

MISMATCHED = 'auditor_mismatched_tokens_total{run_id="run",side="pair"}'
COMPARED = 'auditor_compared_tokens_total{run_id="run"}'


def submit_pairs(client: AuditClient, samples: range) -> None:
    """Every tenth sample has one token off."""
    for i in samples:
        rollout, trainer = pair(str(i), step=i // 8)
        client.submit_rollout(rollout)
        client.submit_trainer(one_ulp_off(trainer) if i % 10 == 0 else trainer)


def check_totals(auditor: AuditorProcess, samples: int) -> None:
    run = auditor.get("/api/v1/runs/run")
    assert run["samples"] == samples
    assert run["by_verdict"] == {"match": samples - samples // 10, "mismatch": samples // 10}
    assert run["compared_tokens"] == samples * RESPONSE
    assert run["mismatched_tokens"] == samples // 10
    metrics = auditor.metrics()
    assert metrics[COMPARED] == samples * RESPONSE
    assert metrics[MISMATCHED] == samples // 10
    for side in ("rollout", "trainer"):
        assert metrics[f'auditor_records_total{{outcome="accepted",run_id="run",side="{side}"}}'] == samples


def test_killed_in_the_middle_and_started_again_it_has_every_record_once(tmp_path: Path) -> None:
    """Killed five times while records come; the client spools, replays, and every total is right in the end."""
    with running_auditor(tmp_path) as auditor, AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "spool") as client:
        producer = threading.Thread(
            target=lambda: [(submit_pairs(client, range(i, i + 10)), time.sleep(0.05)) for i in range(0, 400, 10)]
        )
        producer.start()
        last = 0.0
        for pause in (0.3, 0.05, 0.4, 0.1, 0.2):
            time.sleep(pause)
            auditor.kill()
            time.sleep(0.1)
            auditor.start()
            compared = auditor.metrics().get(COMPARED, 0.0)
            assert compared >= last, "a counter went back over a restart"
            last = compared
        producer.join()
        counts = client.flush(60)
        assert (counts.queued, counts.spooled, counts.dropped, counts.refused) == (0, 0, 0, 0)
        check_totals(auditor, 400)
        assert auditor.stop() == 0
        database = SqliteDatabase(auditor.ledger, writer=False)
        assert verify(database).entries == 400 * 3


def test_what_was_acknowledged_is_there_after_kill_minus_nine(tmp_path: Path) -> None:
    with running_auditor(tmp_path) as auditor:
        channel = grpc.insecure_channel(auditor.grpc)
        stub = AuditServiceStub(channel)
        for i in range(20):
            records = [to_wire(record) for record in pair(str(i))]
            reply = stub.Submit(pb.SubmitRequest(batch=pb.Batch(batch_id=i, records=records)))
            assert [r.outcome for r in reply.receipts.receipts] == [pb.OUTCOME_ACCEPTED] * 2
        auditor.kill()
        channel.close()
        auditor.start()
        assert auditor.get("/api/v1/runs/run")["by_verdict"] == {"match": 20}
        with grpc.insecure_channel(auditor.grpc) as again:
            records = [to_wire(record) for i in range(20) for record in pair(str(i))]
            reply = AuditServiceStub(again).Submit(pb.SubmitRequest(batch=pb.Batch(records=records)))
        assert {r.outcome for r in reply.receipts.receipts} == {pb.OUTCOME_DUPLICATE}
        assert auditor.metrics()[COMPARED] == 20 * RESPONSE


def test_a_client_started_later_sends_what_an_earlier_one_spooled(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    nobody = "127.0.0.1:9"
    early = AuditClient(nobody, "run", spool_dir=spool)
    submit_pairs(early, range(10))
    assert early.close(timeout=2).spooled == 20
    with running_auditor(tmp_path / "auditor") as auditor:
        with AuditClient(auditor.grpc, "run", spool_dir=spool) as late:
            assert late.flush(20).accepted == 20
        check_totals(auditor, 10)


def test_records_that_reach_another_program_than_the_auditor_wait_for_the_auditor(tmp_path: Path) -> None:
    """An ingress that does not route to it yet answers a call as a server does that has no such method."""
    other = grpc.server(ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    early = AuditClient(f"127.0.0.1:{port}", "run", spool_dir=tmp_path / "spool")
    submit_pairs(early, range(10))
    counts = early.close(timeout=1)
    other.stop(None).wait()
    assert (counts.spooled, counts.refused, counts.dropped) == (20, 0, 0)
    with running_auditor(tmp_path / "auditor") as auditor:
        with AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "spool") as late:
            assert late.flush(20).accepted == 20
        check_totals(auditor, 10)


def test_submitting_never_waits_though_nobody_listens(tmp_path: Path) -> None:
    client = AuditClient("127.0.0.1:9", "run", spool_dir=tmp_path, queue_size=100_000)
    rollout, _ = pair()
    started = time.perf_counter()
    for _ in range(1000):
        client.submit_rollout(rollout)
    assert time.perf_counter() - started < 1.0
    counts = client.close(timeout=1)
    assert counts.spooled == 1000
    assert counts.dropped == 0


def test_what_no_room_is_left_for_is_counted(tmp_path: Path) -> None:
    client = AuditClient("127.0.0.1:9", "run", spool_dir=tmp_path, spool_limit_bytes=1000)
    submit_pairs(client, range(20))
    counts = client.close(timeout=1)
    assert counts.spooled + counts.dropped == 40
    assert counts.dropped > 0


def test_a_full_disk_under_the_spool_is_counted_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = AuditClient("127.0.0.1:9", "run", spool_dir=tmp_path)

    def full(self: Spool, payload: bytes, records: int) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Spool, "put", full)
    submit_pairs(client, range(3))
    assert client.close(timeout=1).dropped == 6


def test_a_spooled_file_that_is_no_batch_is_set_aside(tmp_path: Path) -> None:
    assert Spool(tmp_path / "spool", 1 << 20).put(b"\xff" * 50, 7)
    with (
        running_auditor(tmp_path / "a") as auditor,
        AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "spool") as client,
    ):
        submit_pairs(client, range(10))
        counts = client.flush(20)
    assert (counts.accepted, counts.dropped, counts.spooled) == (20, 7, 0)
    assert [p.suffix for p in (tmp_path / "spool").iterdir()] == [".bad"]


def test_a_different_record_under_the_same_name_is_refused_and_the_first_one_stays(tmp_path: Path) -> None:
    rollout, trainer = pair()
    with running_auditor(tmp_path) as auditor, AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client:
        client.submit_rollout(rollout)
        client.submit_trainer(trainer)
        assert client.flush(10).accepted == 2
        client.submit_trainer(one_ulp_off(trainer))
        assert client.flush(10).refused == 1
        assert auditor.get("/api/v1/runs/run")["by_verdict"] == {"match": 1}
        metrics = auditor.metrics()
        assert metrics['auditor_refusals_total{code="conflict"}'] == 1
        assert metrics['auditor_records_total{outcome="refused",run_id="run",side="trainer"}'] == 1


def test_records_may_come_in_any_order_and_many_times(tmp_path: Path) -> None:
    records = [to_wire(record) for i in range(30) for record in pair(str(i))] * 3
    order = np.random.default_rng(3).permutation(len(records))
    with running_auditor(tmp_path) as auditor, grpc.insecure_channel(auditor.grpc) as channel:
        requests = [
            pb.SubmitStreamRequest(batch=pb.Batch(batch_id=n, records=[records[i] for i in order[n : n + 7]]))
            for n in range(0, len(order), 7)
        ]
        replies = list(AuditServiceStub(channel).SubmitStream(iter(requests)))
        assert [r.receipts.batch_id for r in replies] == [r.batch.batch_id for r in requests]
        outcomes = [r.outcome for reply in replies for r in reply.receipts.receipts]
        assert outcomes.count(pb.OUTCOME_ACCEPTED) == 60
        assert outcomes.count(pb.OUTCOME_DUPLICATE) == 120
        assert auditor.get("/api/v1/runs/run")["by_verdict"] == {"match": 30}


def test_one_side_alone_is_pending_and_named(tmp_path: Path) -> None:
    with running_auditor(tmp_path) as auditor, AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client:
        client.submit_rollout(pair()[0])
        client.flush(10)
        run = auditor.get("/api/v1/runs/run")
        assert (run["by_verdict"], run["missing"], run["compared_tokens"]) == ({"pending": 1}, {"trainer": 1}, 0)
        assert run["max_abs"] is None, "nothing compared is not a difference of zero"
        assert run["drift"]["mean_abs_diff"] is None
        metrics = auditor.metrics()
        assert metrics['auditor_missing_pairs{run_id="run",side="trainer"}'] == 1
        assert not any(name.startswith("auditor_step{") for name in metrics)
