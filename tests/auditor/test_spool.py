"""Whatever lies in a spool's folder: what was stored is sent whole or counted as lost, and the client lives."""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from auditor.client import AuditClient
from auditor.codec import to_wire
from auditor.errors import ConfigError
from auditor.grants import Grants
from auditor.ingest.admission import Admission
from auditor.ingest.limits import Limits
from auditor.ingest.service import AuditService, start_server
from auditor.pipeline import Incoming, Receipt, Refused
from auditor.proto import audit_pb2 as pb
from auditor.rates import Rate
from auditor.spool import Spool
from tests.auditor.samples import pair

NOBODY = "127.0.0.1:9"


@contextmanager
def server(missing_receipts: int = 0, seconds: float = 0.0) -> Iterator[str]:
    """Takes everything; the first call's answer lacks some receipts. seconds: that each call takes."""
    missing = [missing_receipts]

    def accept(batch: Sequence[Incoming | Refused]) -> list[Receipt]:
        receipts = [Receipt("accepted")] * (len(batch) - missing[0])
        missing[0] = 0
        time.sleep(seconds)
        return receipts

    service = AuditService(accept, Limits(), Admission(Grants(), Rate("r", 0, 1), Rate("b", 0, 1)))
    running, port = start_server(service, "127.0.0.1:0", Limits(), None)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        running.stop(grace=None).wait()


@pytest.mark.parametrize(
    "address",
    [
        *("http://127.0.0.1:9", "nonsense", "nobody:port", ":9", "nobody:99999", "", "nobody:0", "::1:9", " nobody:9"),
        *("dns:///nobody", "dns:///", "dns://8.8.8.8/nobody:9", "nobody:" + "9" * 5000),
    ],
)
def test_an_address_that_is_none_is_refused_where_the_client_is_made(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="is no host:port") as refused:
        AuditClient(address, "run", spool_dir=tmp_path)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("host", ["dns:///localhost", "ipv4:127.0.0.1", "localhost"])
def test_an_address_may_be_one_of_grpcs_own_targets(tmp_path: Path, host: str) -> None:
    with server() as address, AuditClient(f"{host}:{address.partition(':')[2]}", "run", spool_dir=tmp_path) as client:
        client.submit_rollout(pair()[0])
        assert client.flush(10).accepted == 1


@pytest.mark.parametrize("bound", [{"queue_size": -1}, {"queue_bytes": -1}])
def test_a_queue_bounded_below_nothing_is_refused(tmp_path: Path, bound: dict[str, int]) -> None:
    """Handing in a record would never end: nothing that is put on disk makes such a queue short enough."""
    with pytest.raises(ConfigError, match="neither may be below 0"):
        AuditClient(NOBODY, "run", spool_dir=tmp_path, **bound)


def payload(samples: int) -> bytes:
    records = [to_wire(record) for i in range(samples) for record in pair(str(i))]
    return pb.SubmitRequest(batch=pb.Batch(records=records)).SerializeToString()


def spooled(folder: Path, samples: int = 3) -> Path:
    assert Spool(folder, 1 << 30).put(payload(samples), 2 * samples)
    (file,) = folder.iterdir()
    return file


@pytest.mark.parametrize("samples_left", [0, 1, 2])
def test_a_file_cut_short_where_it_still_parses_is_set_aside_and_counted(tmp_path: Path, samples_left: int) -> None:
    file = spooled(tmp_path)
    file.write_bytes(payload(samples_left) if samples_left else b"")
    with server() as address, AuditClient(address, "run", spool_dir=tmp_path) as client:
        counts = client.flush(5)
    assert (counts.accepted, counts.dropped, counts.spooled) == (0, 6, 0)
    assert [path.suffix for path in tmp_path.iterdir()] == [".bad"]


def test_a_file_with_other_bytes_and_the_right_count_is_not_sent(tmp_path: Path) -> None:
    file = spooled(tmp_path)
    content = file.read_bytes()
    assert content.count(b"rollout-0") == 3
    file.write_bytes(content.replace(b"rollout-0", b"rollout-1"))
    with server() as address, AuditClient(address, "run", spool_dir=tmp_path) as client:
        assert (client.flush(5).dropped, client.counts.accepted) == (6, 0)


def test_files_of_others_and_files_that_cannot_be_read_hold_up_nothing(tmp_path: Path) -> None:
    """Nobody can read a folder as a file, not even root."""
    for foreign in ("foo.batch", "a-b.batch", ".batch", "1-2-3-x.batch"):
        (tmp_path / foreign).write_bytes(b"theirs")
    (tmp_path / "00000000000000000001-1-0-7-0123456789abcdef.batch").mkdir()
    with server() as address:
        client = AuditClient(address, "run", spool_dir=tmp_path)
        assert Spool(tmp_path, 1 << 30).put(payload(3), 6)
        for record in pair("9"):
            (client.submit_rollout if record.side == "rollout" else client.submit_trainer)(record)  # type: ignore[arg-type]
        counts = client.close(2)
    assert (counts.accepted, counts.dropped, counts.spooled) == (8, 0, 7)
    assert (tmp_path / "foo.batch").read_bytes() == b"theirs"


def test_a_client_outlives_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    client = AuditClient(NOBODY, "run", spool_dir=folder)
    rollout, trainer = pair()
    client.submit_rollout(rollout)
    deadline = time.monotonic() + 10
    while client.counts.spooled == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    shutil.rmtree(folder)
    assert client.counts.spooled == 0
    time.sleep(1.2)  # it looks for what is spooled meanwhile
    client.submit_trainer(trainer)
    counts = client.close(timeout=2)
    assert (counts.spooled, counts.dropped, counts.queued) == (1, 0, 0)


def test_a_receipt_too_few_is_no_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auditor.sender.LONGEST_PAUSE_S", 0.1)
    with server(missing_receipts=1) as address, AuditClient(address, "run", spool_dir=tmp_path) as client:
        client.submit_rollout(pair()[0])
        counts = client.flush(5)
    assert (counts.accepted, counts.spooled, counts.dropped) == (1, 0, 0)


def test_what_a_dead_process_left_half_written_is_cleared_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    old, young = (tmp_path / f".0000000000000000000{i}-1-0-7-{'ab' * 8}.batch.part" for i in range(2))
    for draft in (old, young):
        draft.write_bytes(b"half")
    os.utime(old, (1.0, 1.0))
    Spool(tmp_path, 1 << 30)
    assert [path.name for path in tmp_path.iterdir()] == [young.name]


def test_a_name_is_durable_before_the_batch_counts_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr("os.fsync", fsync)
    spooled(tmp_path)
    assert synced[-1] == str(tmp_path)
    assert synced[0].endswith(".part")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with each look at a folder."""
    seen: list[object] = []
    real = os.scandir

    def scandir(folder: Path) -> object:
        seen.append(folder)
        return real(folder)

    monkeypatch.setattr("os.scandir", scandir)
    return seen


def test_a_batch_costs_no_look_at_all_that_lies_there(tmp_path: Path, looks: list[object]) -> None:
    """A worker that is forked off puts one for each record, and its parent sends them one by one."""
    for number in range(3000):
        (tmp_path / f"{number:020d}-1-{number}-1-{'ab' * 8}.batch").write_bytes(b"one")
    spool = Spool(tmp_path, 1 << 30)
    looks.clear()
    assert all(spool.put(b"more", 1) for _ in range(100))
    assert len(looks) < 50
    looks.clear()
    names = []
    for _ in range(3100):
        with spool.claim_oldest() as claimed:
            assert claimed is not None
            names.append(claimed.path.name)
            claimed.remove()
    assert (names, len(looks)) == (sorted(names), 1)
    with spool.claim_oldest() as claimed:
        assert claimed is None


def test_a_batch_that_could_not_be_sent_stays_the_first(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1 << 30)
    assert all(spool.put(b"%d" % number, 1) for number in range(3))
    seen = []
    for take in (False, True, False, True, True):
        with spool.claim_oldest() as claimed:
            assert claimed is not None
            seen.append(claimed.payload)
            if take:
                claimed.remove()
    assert seen == [b"0", b"0", b"1", b"1", b"2"]


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def fill(spool: Spool, size: int) -> int:
    """Put until there is no room; how many were taken."""
    return sum(1 for _ in iter(lambda: spool.put(b"x" * size, 1), False))


def test_the_threads_of_a_process_fill_a_spool_to_its_limit_and_not_beyond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: time.sleep(0.001))  # long enough for the others to put meanwhile
    spool, limit = Spool(tmp_path, 20_000), 20_000
    with ThreadPoolExecutor(8) as pool:
        puts = list(pool.map(lambda _: spool.put(b"x" * 99, 1), range(300)))
    assert limit // 99 - 8 <= sum(puts) <= limit // 99, "what is being written may count twice"
    assert held(tmp_path) <= limit
    with spool.claim_oldest() as claimed:
        assert claimed is not None
        claimed.remove()
    deadline = time.monotonic() + 10
    while not spool.put(b"x" * 99, 1):
        assert time.monotonic() < deadline, "a no is for a while"


def test_several_that_put_pass_the_limit_by_a_64th_of_it_each_at_the_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looks when all is free, and puts what it may when the first has filled the folder."""
    monkeypatch.setattr("auditor.spool._BELIEVED", 1e9)
    limit, size = 64_000, 100
    spools = [Spool(tmp_path, limit) for _ in range(5)]
    assert all(spool.put(b"x" * size, 1) for spool in spools)
    assert fill(spools[0], size) == limit // size - 5
    assert [fill(spool, size) for spool in spools] == [0, 8, 8, 8, 8], "each had put one of nine"
    assert held(tmp_path) <= limit + 4 * limit // 64


def test_a_token_that_cannot_be_had_loses_no_record(tmp_path: Path) -> None:
    def broken() -> str:
        raise KeyError("no token")

    with server() as address:
        client = AuditClient(address, "run", spool_dir=tmp_path, token=broken)
        client.submit_rollout(pair()[0])
        counts = client.close(timeout=1.5)
    assert (counts.spooled, counts.queued, counts.dropped) == (1, 0, 0)
