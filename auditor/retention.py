"""Evidence that has done its work: written away as Parquet where a place is given, then dropped from the ledger.

What is retired is the content of records and reference values of samples that are judged and wait for nothing.
Digests, verdicts and counts stay, and so does the hash chain: a written-away record still has the digest in it.
What is old is decided by the chain and the clock together: nothing is older than what stands before it, and days for
which the auditor stood still count as one. So a clock that is wrong at some start makes nothing old before its time.
Writing away happens beside the ledger's writer, so that a slow store delays no receipt; evidence that was written
twice, because the auditor died in between, is dropped once.
"""

import hashlib
import io
import logging
import re
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from auditor.errors import EvidenceError
from auditor.file_place import FilePlace, tables_in
from auditor.object_store import AMAZON, StoreAccess
from auditor.records import SampleKey
from auditor.storage.reader import Reader
from auditor.storage.unit import Unit
from auditor.writer import Writer

log = logging.getLogger(__name__)
_BATCH: Final = 500
_DAY_S: Final = 86_400.0
_LAST_SEQ: Final = 2**62
# As `ParquetArchive.write` names its files: the first and the last entry, and a mark of the content.
_NAME: Final = re.compile(r"evidence-(\d+)-(\d+)-[0-9a-f]{16}\.parquet")


@dataclass(frozen=True, slots=True)
class Evidence:
    """The content of one record. seq: its entry in the chain; digest: sha256 of the payload, as the chain has it."""

    seq: int
    key: SampleKey
    side: str
    digest: bytes
    payload: bytes
    received_at: float


class Archive(Protocol):
    """A place for evidence."""

    def write(self, evidence: Sequence[Evidence]) -> None:
        """Store it durably; ArchiveError where that failed, and nothing is dropped."""


class ParquetArchive:
    """One Parquet file a batch under `place`: a folder, or the URL of an object store (s3://bucket/prefix)."""

    def __init__(self, place: str, access: StoreAccess = AMAZON) -> None:
        self._place = FilePlace("archive", place, access)

    def write(self, evidence: Sequence[Evidence]) -> None:
        """Store a batch, whole or not at all; the name says which entries of the chain it covers.

        And what is in it: another ledger's file of the same entries has another name, so none is ever replaced by
        anything but itself.
        """
        content = _parquet(evidence)
        mark = hashlib.sha256(content).hexdigest()[:16]
        name = f"evidence-{evidence[0].seq:012d}-{evidence[-1].seq:012d}-{mark}.parquet"
        self._place.put(name, content)


def archived(place: str, access: StoreAccess, seq: int, digest: bytes) -> bytes | None:
    """The content that an entry's record had, out of an archive; None where no file there holds it.

    seq, digest: as the chain has them, so that nothing else is taken for it.
    ArchiveError where the place cannot be read.
    """

    def covers(name: str) -> bool:
        found = _NAME.fullmatch(name)
        return found is not None and int(found[1]) <= seq <= int(found[2])

    for _, rows in tables_in("archive", place, access, covers, ["payload"], [("seq", "=", seq)]):
        for payload in rows["payload"].to_pylist():
            if hashlib.sha256(payload).digest() == digest:
                return bytes(payload)
    return None


def evidence_before(reader: Reader, before: float, limit: int = _BATCH) -> list[Evidence]:
    """What may be retired: of the records before the first one that came at `before` (Unix seconds) or later."""
    return _evidence(reader, _first_young(reader, before), limit)


def _first_young(reader: Reader, before: float) -> int:
    """The first entry of the chain that is to stay, or one beyond its end."""
    found = reader.first_held_since(before)
    return _LAST_SEQ if found is None else found


def _evidence(reader: Reader, until: int, limit: int) -> list[Evidence]:
    return [
        Evidence(seq, SampleKey(run_id, step, sample_id), side, bytes(digest), bytes(payload), received_at)
        for seq, run_id, step, sample_id, side, digest, payload, received_at in reader.evidence_until(until, limit)
    ]


def drop(unit: Unit, evidence: Sequence[Evidence]) -> int:
    """Forget the content of these records; how many it were."""
    unit.drop_evidence([e.seq for e in evidence], {e.key for e in evidence})
    unit.count("retired_records", len(evidence))
    return len(evidence)


class Retirement:
    """Retires what is older than `days`, a batch at a time between the records that come in.

    clock: that of the ledger, for ages are differences of its times. stopping: set where no further batch is begun.
    unexported: settled samples whose token rows are to be written first; None: too many, and nothing is retired.
    on_error: told the code of each record that is not what was stored: once it is retired, the chain shows it no more.
    """

    def __init__(
        self,
        reader: Reader,
        writer: Writer,
        days: float,
        archive: Archive | None,
        clock: Callable[[], float],
        stopping: threading.Event,
        unexported: Callable[[], Collection[SampleKey] | None] | None = None,
        on_error: Callable[[str], None] = lambda code: None,
    ) -> None:
        self._unexported, self._on_error = unexported, on_error
        self._reader, self._writer, self._days, self._archive = reader, writer, days, archive
        self._clock, self._stopping = clock, stopping
        newest = reader.newest()
        self._stood_still_s = 0.0 if newest is None else max(0.0, clock() - newest - _DAY_S)

    def look(self) -> None:
        """Retire all that is old by now; ArchiveError or LedgerError where that cannot be done, and it stays."""
        until = _first_young(self._reader, self._clock() - self._stood_still_s - self._days * _DAY_S)
        while not self._stopping.is_set() and (evidence := self._next(until)):
            if self._archive is not None:
                self._archive.write(evidence)
            self._writer.submit(partial(drop, evidence=evidence), block=True).result()
            self._tell_rotten(evidence)

    def _tell_rotten(self, evidence: Sequence[Evidence]) -> None:
        for one in evidence:
            if hashlib.sha256(one.payload).digest() != one.digest:
                log.error("the %s record of %s was retired and is not what was stored", one.side, one.key)
                self._on_error(EvidenceError.code)

    def _next(self, until: int) -> list[Evidence]:
        """The next batch; asked after what is settled is known, for what settles later is exported later too."""
        evidence = _evidence(self._reader, until, _BATCH)
        waiting: Collection[SampleKey] | None = () if self._unexported is None else self._unexported()
        return [] if waiting is None else [one for one in evidence if one.key not in waiting]


def _parquet(evidence: Sequence[Evidence]) -> bytes:
    import pyarrow  # noqa: PLC0415 - an extra of its own
    from pyarrow import parquet  # noqa: PLC0415 - the same

    table = pyarrow.table(
        {
            "seq": [e.seq for e in evidence],
            "run_id": [e.key.run_id for e in evidence],
            "step": [e.key.step for e in evidence],
            "sample_id": [e.key.sample_id for e in evidence],
            "side": [e.side for e in evidence],
            "digest": [e.digest for e in evidence],
            "payload": [e.payload for e in evidence],
            "received_at": [e.received_at for e in evidence],
        }
    )
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()
