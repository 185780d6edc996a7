"""Token rows of judged samples, written away as Parquet files while the job runs (`evidence`, `evidence_place`).

The verdicts of the chain are gone through in their order, beside the ledger's writer; where one is the last word on a
sample that was asked for, its rows go into a file, and a mark in the ledger says how far that has come. It moves after
the file is durable, so that the rows of every sample are there once at least, whatever is killed when. A file's name
says which entries of the chain it covers: two of them that overlap hold some samples twice, each with the same
`verdict_seq`, and the same rows.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Final, Literal

from auditor.errors import EvidenceError
from auditor.file_place import FilePlace
from auditor.judge import SEARCHING, Judgement, Reference, Verdict
from auditor.records import RolloutRecord, SampleKey, TrainerRecord
from auditor.storage.reader import Reader, VerdictRow
from auditor.storage.unit import Unit
from auditor.token_rows import JudgedSample, parquet_of, table_of
from auditor.writer import Writer

log = logging.getLogger(__name__)
Wanted = Literal["mismatches", "recomputed", "all"]
_PAGE: Final = 500
_ROWS: Final = 200_000
_TOO_MANY: Final = 5000


class TokenEvidence:
    """wanted: which samples. place: what it is called in the ledger, where several may be; files: what lies there.

    stopping: set where no further file is begun. on_error: told the code of each sample that cannot be read.
    """

    def __init__(
        self,
        reader: Reader,
        writer: Writer,
        wanted: Wanted,
        place: str,
        files: FilePlace,
        stopping: threading.Event,
        on_error: Callable[[str], None] = lambda code: None,
    ) -> None:
        self._on_error = on_error
        self._reader, self._writer, self._files, self._stopping = reader, writer, files, stopping
        self._wanted, self._name = wanted, f"{wanted} {place}"
        self._reached = reader.exported(self._name)

    def look(self) -> None:
        """Write what has been judged since; ArchiveError or LedgerError where that cannot be done, and it stays."""
        while not self._stopping.is_set():
            verdicts = self._reader.verdicts_after(self._reached, _PAGE)
            if not verdicts:
                return
            samples: list[JudgedSample] = []
            last, rows = self._reached, 0
            for verdict in verdicts:
                sample = self._sample(verdict)
                if sample is not None and samples and rows + sample.rows > _ROWS:
                    break
                last = verdict.seq
                if sample is not None:
                    samples.append(sample)
                    rows += sample.rows
            self._write(samples, last, rows)

    def unexported(self) -> Collection[SampleKey] | None:
        """Samples that were judged and not looked at yet; None: too many to name."""
        found = self._reader.verdicts_after(self._reached, _TOO_MANY)
        return None if len(found) == _TOO_MANY else {verdict.key for verdict in found}

    def _sample(self, verdict: VerdictRow) -> JudgedSample | None:
        """The sample, where this is the last word on it and it was asked for; None also where it is held no more."""
        judgement = Judgement.from_json(json.loads(verdict.body))
        if not is_last_word(judgement) or not is_wanted(self._wanted, judgement):
            return None
        try:
            return judged_sample(self._reader, verdict, judgement)
        except EvidenceError as error:
            self._on_error(error.code)
            log.error("%s has no token rows: %s; `python -m auditor.verify` checks all of it", verdict.key, error)
            return None

    def _write(self, samples: list[JudgedSample], last: int, rows: int) -> None:
        if samples:
            content = parquet_of(table_of(samples))
            mark = hashlib.sha256(content).hexdigest()[:16]
            self._files.put(f"tokens-{self._reached + 1:012d}-{last:012d}-{mark}.parquet", content)
        self._writer.submit(partial(self._mark, last=last, samples=len(samples), rows=rows), block=True).result()
        self._reached = last

    def _mark(self, unit: Unit, last: int, samples: int, rows: int) -> None:
        unit.export_reaches(self._name, last)
        if samples:
            unit.count("evidence_samples", samples)
            unit.count("evidence_rows", rows)


def is_last_word(judgement: Judgement) -> bool:
    """Whether values were compared, and neither the reference nor a search has still to speak."""
    settled = judgement.reference is not Reference.QUEUED and judgement.cause != SEARCHING
    return settled and judgement.verdict in (Verdict.MATCH, Verdict.MISMATCH)


def is_wanted(wanted: Wanted, judgement: Judgement) -> bool:
    """mismatches; recomputed: these, and whatever the reference spoke on; all: whatever was compared."""
    rules: dict[Wanted, Callable[[], bool]] = {
        "mismatches": lambda: judgement.verdict is Verdict.MISMATCH,
        "recomputed": lambda: judgement.verdict is Verdict.MISMATCH or judgement.reference is Reference.DONE,
        "all": lambda: True,
    }
    return rules[wanted]()


def judged_sample(reader: Reader, verdict: VerdictRow, judgement: Judgement) -> JudgedSample | None:
    """A verdict's sample with its evidence; None where that is held no more."""
    key = verdict.key
    rollout, trainer = reader.record(key, "rollout"), reader.record(key, "trainer")
    entries = reader.entry(key, "rollout"), reader.entry(key, "trainer")
    if not (isinstance(rollout, RolloutRecord) and isinstance(trainer, TrainerRecord)):
        return None
    of_rollout, of_trainer = (entry[1].hex() if entry is not None else "" for entry in entries)
    reference = reader.reference(key)
    return JudgedSample(
        verdict.seq, verdict.digest, key, judgement, rollout, trainer, of_rollout, of_trainer, reference
    )
