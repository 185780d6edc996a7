"""Evidence that has done its work: written away as Parquet where a place is given, then dropped from the ledger.

What is retired is the content of records and reference values of samples that are judged and wait for nothing.
Digests, verdicts and counts stay, and so does the hash chain: a written-away record still has the digest in it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from auditor.errors import AuditorError, ConfigError, LedgerError
from auditor.records import SampleKey
from auditor.storage.ledger import Unit
from auditor.writer import Writer

log = logging.getLogger(__name__)
_BATCH: Final = 500
_DAY_S: Final = 86_400.0


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
        """Store it durably; AuditorError where that failed, and nothing is dropped."""


class ParquetArchive:
    """One Parquet file a batch under `place`: a folder, or a URL that pyarrow knows (s3://bucket/prefix)."""

    def __init__(self, place: str) -> None:
        try:
            from pyarrow import fs  # noqa: PLC0415 - an extra of its own
        except ImportError:
            raise ConfigError("archive needs pyarrow: install the extra `archive`") from None
        try:
            if "://" in place:
                self._files, self._root = fs.FileSystem.from_uri(place)
            else:
                self._files, self._root = fs.LocalFileSystem(), place
            self._files.create_dir(self._root, recursive=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"archive {place}: {' '.join(str(error).split())}") from None

    def write(self, evidence: Sequence[Evidence]) -> None:
        """Store a batch; the name says which entries of the chain it covers."""
        import pyarrow  # noqa: PLC0415 - see above
        from pyarrow import parquet  # noqa: PLC0415 - see above

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
        name = f"{self._root}/evidence-{evidence[0].seq:012d}-{evidence[-1].seq:012d}.parquet"
        try:
            parquet.write_table(table, name, filesystem=self._files, compression="zstd")
        except OSError as error:
            raise LedgerError(f"archive: {' '.join(str(error).split())}") from None


def retire(unit: Unit, before: float, archive: Archive | None) -> int:
    """Retire one batch of evidence received before `before` (Unix seconds); how many records it was."""
    evidence = [
        Evidence(seq, SampleKey(run_id, step, sample_id), side, bytes(digest), bytes(payload), received_at)
        for seq, run_id, step, sample_id, side, digest, payload, received_at in unit.evidence_before(before, _BATCH)
    ]
    if not evidence:
        return 0
    if archive is not None:
        archive.write(evidence)
    unit.drop_evidence([e.seq for e in evidence], {e.key for e in evidence})
    unit.count("retired_records", len(evidence))
    return len(evidence)


class Retirement:
    """A thread that retires what is older than `days`, a batch at a time between the records that come in."""

    def __init__(
        self, writer: Writer, days: float, archive: Archive | None, clock: Callable[[], float], look_s: float = 60.0
    ) -> None:
        self._writer, self._days, self._archive = writer, days, archive
        self._clock, self._look_s = clock, look_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="retirement")
        self._thread.start()

    def close(self) -> None:
        """End the thread after the batch that it is at."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._look_s):
            try:
                while not self._stop.is_set() and self._one_batch():
                    continue
            except AuditorError as error:
                log.warning("evidence stays where it is, to be tried again: %s", error)

    def _one_batch(self) -> int:
        before = self._clock() - self._days * _DAY_S
        return self._writer.submit(lambda unit: retire(unit, before, self._archive), block=True).result()
