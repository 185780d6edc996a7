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
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from auditor.errors import ArchiveError, ConfigError
from auditor.object_store import AMAZON, StoreAccess, is_url, open_place
from auditor.records import SampleKey
from auditor.storage.ledger import Unit
from auditor.storage.reader import Reader
from auditor.writer import Writer

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
        self._files, self._root = open_place("archive", place, access)
        self._local = not is_url(place)
        try:
            self._files.create_dir(self._root, recursive=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"archive {place}: {_one_line(error)}") from None

    def write(self, evidence: Sequence[Evidence]) -> None:
        """Store a batch, whole or not at all; the name says which entries of the chain it covers.

        And what is in it: another ledger's file of the same entries has another name, so none is ever replaced by
        anything but itself.
        """
        content = _parquet(evidence)
        mark = hashlib.sha256(content).hexdigest()[:16]
        name = f"evidence-{evidence[0].seq:012d}-{evidence[-1].seq:012d}-{mark}.parquet"
        try:
            if self._local:
                _write_whole(Path(self._root) / name, content)
            else:
                # An object appears when its stream is closed, after the store has taken all of it.
                with self._files.open_output_stream(f"{self._root}/{name}") as stream:
                    stream.write(content)
        except (OSError, ValueError) as error:
            raise ArchiveError(f"archive {self._root}: {_one_line(error)}") from None


def archived(place: str, access: StoreAccess, seq: int, digest: bytes) -> bytes | None:
    """The content that an entry's record had, out of an archive; None where no file there holds it.

    seq, digest: as the chain has them, so that nothing else is taken for it.
    ArchiveError where the place cannot be read.
    """
    files, root = open_place("archive", place, access)
    from pyarrow import fs, parquet  # noqa: PLC0415 - an extra of its own

    try:
        for info in files.get_file_info(fs.FileSelector(root)):
            name = _NAME.fullmatch(info.base_name)
            if name is None or not int(name[1]) <= seq <= int(name[2]):
                continue
            with files.open_input_file(info.path) as file:
                rows = parquet.read_table(file, columns=["payload"], filters=[("seq", "=", seq)])
            for payload in rows["payload"].to_pylist():
                if hashlib.sha256(payload).digest() == digest:
                    return bytes(payload)
    except (OSError, ValueError) as error:
        raise ArchiveError(f"archive {root}: {_one_line(error)}") from None
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
    """

    def __init__(
        self,
        reader: Reader,
        writer: Writer,
        days: float,
        archive: Archive | None,
        clock: Callable[[], float],
        stopping: threading.Event,
    ) -> None:
        self._reader, self._writer, self._days, self._archive = reader, writer, days, archive
        self._clock, self._stopping = clock, stopping
        newest = reader.newest()
        self._stood_still_s = 0.0 if newest is None else max(0.0, clock() - newest - _DAY_S)

    def look(self) -> None:
        """Retire all that is old by now; ArchiveError or LedgerError where that cannot be done, and it stays."""
        until = _first_young(self._reader, self._clock() - self._stood_still_s - self._days * _DAY_S)
        while not self._stopping.is_set() and (evidence := _evidence(self._reader, until, _BATCH)):
            if self._archive is not None:
                self._archive.write(evidence)
            self._writer.submit(partial(drop, evidence=evidence), block=True).result()


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


def _write_whole(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.part")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
