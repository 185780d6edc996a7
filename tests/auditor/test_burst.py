"""A step of many samples arrives at once: more than the queue holds, faster than anything can be sent."""

import socket
import threading
import time
from pathlib import Path

from auditor.client import AuditClient
from auditor.codec import to_wire
from auditor.outbox import Outbox
from tests.auditor.processes import running_auditor
from tests.auditor.samples import pair
from tests.auditor.test_spool import server

DEFAULT_QUEUE = 4096
RECORD = to_wire(pair()[0])
BURST = 3 * DEFAULT_QUEUE


def _submit(client: AuditClient, first: int, count: int) -> None:
    for i in range(first, first + count):
        client.submit_rollout(pair(str(i))[0])


def test_a_burst_of_three_queues_loses_nothing_while_nobody_listens(tmp_path: Path) -> None:
    client = AuditClient("127.0.0.1:9", "run", spool_dir=tmp_path)
    threads = [threading.Thread(target=_submit, args=(client, n * BURST // 4, BURST // 4)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = client.counts
    assert counts.queued <= DEFAULT_QUEUE + len(threads) * 256, "the queue is not bounded"
    counts = client.close(timeout=1)
    assert (counts.spooled, counts.dropped) == (BURST, 0)


def test_what_a_burst_put_on_disk_arrives_once(tmp_path: Path) -> None:
    client = AuditClient("127.0.0.1:9", "run", spool_dir=tmp_path / "spool", queue_size=64)
    _submit(client, 0, 1000)
    assert client.close(timeout=1).dropped == 0
    with running_auditor(tmp_path / "a") as auditor:
        with AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "spool", queue_size=64) as again:
            _submit(again, 1000, 1000)
            counts = again.flush(60)
        assert (counts.accepted, counts.duplicate, counts.dropped, counts.refused) == (2000, 0, 0, 0)
        assert auditor.get("/api/v1/runs/run")["by_verdict"] == {"pending": 2000}


def test_close_takes_no_longer_than_it_was_told_however_much_waits(tmp_path: Path) -> None:
    with server(seconds=0.5) as address:
        client = AuditClient(address, "run", spool_dir=tmp_path)
        _submit(client, 0, 2000)
        started = time.monotonic()
        counts = client.close(timeout=0.1)
        assert time.monotonic() - started < 2, "eight batches would take four seconds"
    assert (counts.accepted + counts.spooled, counts.dropped, counts.queued) == (2000, 0, 0)


def test_what_waits_in_memory_is_bounded_in_bytes_too(tmp_path: Path) -> None:
    """Somebody listens and never answers, so that all of it would wait in the queue, which has room for its number."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        client = AuditClient(address, "run", spool_dir=tmp_path, queue_bytes=20 * RECORD.ByteSize())
        _submit(client, 0, 2000)
        counts = client.counts
        assert counts.queued <= 256 + 20 + 1, "what is being sent, and the bound"
        assert (counts.queued + counts.spooled, counts.dropped) == (2000, 0)
    counts = client.close(timeout=1)
    assert (counts.spooled, counts.dropped) == (2000, 0)


def test_large_records_make_small_batches_and_a_larger_one_still_goes() -> None:
    outbox = Outbox(100, 10 << 20)
    for size in (1 << 20, 1 << 20, 3 << 20, 1):
        outbox.add(RECORD, size)
    assert not outbox.full
    assert outbox.half_full
    assert [len(outbox.take()) for _ in range(4)] == [2, 1, 1, 0]
    assert (len(outbox), outbox.half_full) == (0, False)
    outbox.add(RECORD, 11 << 20)
    assert outbox.full
