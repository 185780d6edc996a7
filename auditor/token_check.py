"""Token rows that were written away, held against the ledger that they are of."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, cast

import numpy as np

from auditor.errors import ChainError
from auditor.file_place import tables_in
from auditor.judge import Judgement
from auditor.object_store import StoreAccess
from auditor.storage.reader import Reader, VerdictRow
from auditor.token_evidence import Wanted, is_last_word, is_wanted, judged_sample
from auditor.token_rows import COLUMNS, parquet_of, table_of

_SAID: Final = ("verdict", "side", "cause")
_PAGE: Final = 500


@dataclass(slots=True)
class Checked:
    """files, samples: looked at. twice: samples that two files hold. compared: with records that are held still.

    marked: whether the ledger notes an export to this place, so that what is missing there can be known. retired:
    samples without rows whose records are held no more: retired, it may be, before rows were asked for.
    """

    files: int = 0
    samples: int = 0
    twice: int = 0
    compared: int = 0
    marked: bool = False
    retired: int = 0
    seen: set[int] = field(default_factory=set)


def check_rows(reader: Reader, place: str, access: StoreAccess) -> Checked:
    """Every file of token rows at a place, which is named as the auditor has it in `evidence_place`.

    ChainError: names the first sample whose rows are not the ledger's, or are missing. ArchiveError: the place or a
    file in it cannot be read.
    """
    found = Checked()
    # First: an auditor that runs moves its mark when a file is there, and the files are looked through after that.
    marks = [(export.partition(" "), reached) for export, reached in reader.exports()]
    for name, table in tables_in("evidence", place, access, lambda name: name.startswith("tokens-")):
        found.files += 1
        if tuple(table.column_names) != COLUMNS:
            raise ChainError(f"{name}: its columns are not those of token rows")
        if table.num_rows == 0:
            raise ChainError(f"{name} has no rows; a file is written for those of a sample at least")
        seqs = table["verdict_seq"].to_numpy()
        edges = [0, *(np.flatnonzero(seqs[1:] != seqs[:-1]) + 1).tolist(), len(seqs)]
        for start, end in pairwise(edges):
            _check_sample(reader, name, int(seqs[start]), table.slice(start, end - start), found)
    for (wanted, _, where), reached in marks:
        if where == place:
            found.marked = True
            _check_missing(reader, cast(Wanted, wanted), reached, found)
    return found


def _check_missing(reader: Reader, wanted: Wanted, reached: int, found: Checked) -> None:
    """The rows of every verdict up to the mark that were asked for must have been seen."""
    at = 0
    while verdicts := [verdict for verdict in reader.verdicts_after(at, _PAGE) if verdict.seq <= reached]:
        at = verdicts[-1].seq
        for verdict in verdicts:
            judgement = Judgement.from_json(json.loads(verdict.body))
            if verdict.seq in found.seen or not is_last_word(judgement) or not is_wanted(wanted, judgement):
                continue
            if judged_sample(reader, verdict, judgement) is not None:
                key = verdict.key
                raise ChainError(
                    f"the rows of sample {key.sample_id!r}, step {key.step} of run {key.run_id!r} (entry {verdict.seq})"
                    " are in no file, and the ledger says that they were written"
                )
            found.retired += 1


def _check_sample(reader: Reader, name: str, seq: int, rows: Any, found: Checked) -> None:
    verdict = reader.verdict_at(seq)
    first = rows.slice(0, 1).to_pylist()[0]
    at = f"{name}: the rows of sample {first['sample_id']!r}, step {first['step']} of run {first['run_id']!r}"
    if verdict is None:
        raise ChainError(f"{at} are of entry {seq}, which is no verdict of this ledger")
    judgement = Judgement.from_json(json.loads(verdict.body))
    expected = {**_of_ledger(reader, verdict), **{said: str(getattr(judgement, said)) for said in _SAID}}
    for column, value in expected.items():
        if first[column] != value or len(rows[column].unique()) != 1:
            raise ChainError(f"{at} say {column} {first[column]!r} where the ledger has {value!r}")
    sample = judged_sample(reader, verdict, judgement)
    if sample is not None:
        if _content(table_of([sample])) != _content(rows):
            raise ChainError(f"{at} are not those of its records")
        found.compared += 1
    found.twice += seq in found.seen
    found.samples += seq not in found.seen
    found.seen.add(seq)


def _of_ledger(reader: Reader, verdict: VerdictRow) -> dict[str, Any]:
    digests = {}
    for side in ("rollout", "trainer"):
        entry = reader.entry(verdict.key, side)
        digests[f"{side}_digest"] = entry[1].hex() if entry is not None else ""
    return {**verdict.key._asdict(), "verdict_digest": verdict.digest, **digests}


def _content(rows: Any) -> bytes:
    """By bits: a NaN is equal to itself."""
    return parquet_of(rows.combine_chunks())
