"""Evidence that is old: written away, dropped, and still in the chain, over SQLite and a real PostgreSQL alike."""

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest

from auditor.capsule import freeze
from auditor.codec import encode
from auditor.errors import ArchiveError, NotFoundError
from auditor.judge import Verdict
from auditor.object_store import StoreAccess
from auditor.periodic import Periodic
from auditor.pipeline import Incoming
from auditor.records import SampleKey
from auditor.retention import Evidence, ParquetArchive, Retirement, archived, drop, evidence_before
from auditor.storage.chain import digest, verify
from auditor.storage.ledger import Ledger
from auditor.storage.reader import Reader
from auditor.writer import Writer
from tests.auditor.postgres_server import Open
from tests.auditor.samples import pair
from tests.auditor.test_ledger import pipeline, receive, wait_until


def test_evidence_is_retired_by_age_written_away_and_still_in_the_chain(connect: Open, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    now = [1000.0]
    ledger = Ledger(connect(True), clock=lambda: now[0])
    queue: list[SampleKey] = []
    receive(ledger, pipeline(), 0, 1)
    receive(ledger, pipeline(queue=queue), 2)
    rollout, _ = pair("lonely")
    with ledger.transaction() as unit:
        pipeline().receive(unit, [Incoming(rollout, encode(rollout))])
    now[0] = 2000.0
    receive(ledger, pipeline(), 3)
    before, archive = verify(connect(False)), ParquetArchive(str(tmp_path / "archive"))
    reader = Reader(lambda: connect(False))
    old = evidence_before(reader, 1500.0)
    archive.write(old)
    with ledger.transaction() as unit:
        assert drop(unit, old) == 4, "not what is young, queued or without its other side"
    assert evidence_before(reader, 1500.0) == []
    assert reader.record(SampleKey("run", 0, "0"), "rollout") is None
    assert reader.sample(SampleKey("run", 0, "0")).judgement.verdict is Verdict.MATCH
    for kept in ("2", "3", "lonely"):
        assert reader.record(SampleKey("run", 0, kept), "rollout") is not None
    after = verify(connect(False))
    assert (after.entries, after.head) == (before.entries, before.head)
    assert after.payloads == before.payloads - 4
    (file,) = (tmp_path / "archive").iterdir()
    rows = parquet.read_table(file).to_pylist()
    assert {row["sample_id"] for row in rows} == {"0", "1"}
    assert all(digest(row["payload"]) == row["digest"] for row in rows)
    gone = SampleKey("run", 0, "0")
    with pytest.raises(NotFoundError):
        freeze(reader, gone)
    frozen = freeze(reader, gone, partial(archived, str(tmp_path / "archive"), StoreAccess()))
    assert [encode(record) for record in pair("0")] == [encode(frozen.rollout), encode(frozen.trainer)]
    seq, named = reader.entry(gone, "rollout") or (0, b"")
    assert archived(str(tmp_path / "archive"), StoreAccess(), seq, bytes(32)) is None, "only what the chain names"
    assert archived(str(tmp_path / "archive"), StoreAccess(), 10**6, named) is None
    with pytest.raises(ArchiveError):
        archived(str(tmp_path / "nowhere"), StoreAccess(), seq, named)
    # The same record again is still known as the same, and another one as another.
    assert receive(ledger, pipeline(), 0) == ["duplicate"] * 2
    ledger.close()


def test_an_archive_that_fails_keeps_the_evidence_and_is_counted_and_so_is_what_has_rotted(connect: Open) -> None:
    """Until it works again: then the same evidence is written away and dropped."""

    class Full:
        full = True
        written: ClassVar[list[Evidence]] = []

        def write(self, evidence: Sequence[Evidence]) -> None:
            if self.full:
                raise ArchiveError("archive: No space left on device")
            self.written += evidence

    database = connect(True)
    ledger, archive, codes = Ledger(database, clock=lambda: 1000.0), Full(), list[str]()
    receive(ledger, pipeline(), 0)
    writer = Writer(ledger, lambda counts: None, lambda: None, 8)
    reader = Reader(lambda: connect(False))
    retirement = Retirement(reader, writer, 1 / 86_400, archive, lambda: 2000.0, threading.Event(), None, codes.append)
    work = Periodic("retirement", 0.01, retirement.look, codes.append)
    wait_until(lambda: len(codes) >= 2)
    assert set(codes) == {"archive_unavailable"}
    assert reader.record(SampleKey("run", 0, "0"), "rollout") is not None
    codes.clear()
    writer.submit(
        lambda unit: database.run("UPDATE records SET payload = ? WHERE side = 'trainer'", (b"rotten",))
    ).result()
    archive.full = False
    wait_until(lambda: reader.record(SampleKey("run", 0, "0"), "rollout") is None)
    work.close()
    writer.close()
    ledger.close()
    assert [evidence.side for evidence in archive.written] == ["rollout", "trainer"]
    assert [code for code in codes if code != "archive_unavailable"] == ["evidence_unreadable"]


def test_an_auditor_that_ends_retires_the_batch_that_it_is_at_and_no_other(
    connect: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("auditor.retention._BATCH", 2)
    ledger, stopping, written = Ledger(connect(True), clock=lambda: 1000.0), threading.Event(), []

    class Ending:
        def write(self, evidence: Sequence[Evidence]) -> None:
            written.extend(evidence)
            stopping.set()

    receive(ledger, pipeline(), 0, 1, 2)
    writer = Writer(ledger, lambda counts: None, lambda: None, 8)
    reader = Reader(lambda: connect(False))
    Retirement(reader, writer, 1 / 86_400, Ending(), lambda: 2000.0, stopping).look()
    writer.close()
    ledger.close()
    assert len(written) == 2
    assert len(evidence_before(reader, 1500.0, limit=9)) == 4
