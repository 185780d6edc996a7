"""What the ledger holds, read from any thread; every thread gets a connection of its own."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from auditor.compare import Logprobs
from auditor.errors import LedgerError, NotFoundError
from auditor.judge import SEARCHING, Judgement, Reference, Verdict
from auditor.records import SIDES, Record, SampleKey, Side
from auditor.storage.database import Database, Row, number_at
from auditor.storage.halves import Held
from auditor.storage.rows import RunRow, SampleRow, StepRow, Totals

_RUNS = (
    "SELECT r.run_id, r.first_at, r.last_at, r.body, count(s.step), min(s.step), max(s.step)"
    " FROM runs r LEFT JOIN steps s ON s.run_id = r.run_id"
)
_LOOKED_AT = 2000
# As `Unit.judge` writes it; what others have written stands in that text with its quotes escaped.
_IS_SEARCHING = f'%"cause": "{SEARCHING}"%'
# SQLite takes the few that wait first, and not all records, where the verdict is written out as in the index, and CROSS
# leaves it no choice.
PENDING_SINCE = (
    "SELECT s.run_id, s.step, s.sample_id FROM samples s CROSS JOIN records r"
    " WHERE r.run_id = s.run_id AND r.step = s.step AND r.sample_id = s.sample_id"
    " AND s.verdict = 'pending' AND r.received_at < ? ORDER BY r.seq LIMIT ?"
)
_RUNS_GROUP = " GROUP BY r.run_id, r.first_at, r.last_at, r.body"


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """A verdict of the chain. digest: of its body, in hex, as the chain has it; body: the judgement as JSON."""

    seq: int
    key: SampleKey
    body: str
    digest: str


class Reader:
    """Reads the ledger. connect: opens a connection for the calling thread."""

    def __init__(self, connect: Callable[[], Database]) -> None:
        self._connect = connect
        self._local = threading.local()

    @property
    def database(self) -> Database:
        """The connection of the calling thread."""
        if not hasattr(self._local, "database"):
            self._local.database = self._connect()
        database: Database = self._local.database
        return database

    def runs(self, limit: int) -> list[RunRow]:
        """The runs, the last active first."""
        rows = self.database.all(f"{_RUNS}{_RUNS_GROUP} ORDER BY r.last_at DESC, r.run_id LIMIT ?", (limit,))
        return [_run(row) for row in rows]

    def run(self, run_id: str) -> RunRow:
        """One run; NotFoundError."""
        rows = self.database.all(f"{_RUNS} WHERE r.run_id = ?{_RUNS_GROUP}", (run_id,))
        if not rows:
            raise NotFoundError(f"no run {run_id!r}")
        return _run(rows[0])

    def steps(self, run_id: str, first: int, last: int, only_mismatching: bool, limit: int) -> list[StepRow]:
        """Steps first..last of a run, ascending."""
        self.run(run_id)
        only = " AND mismatches > 0" if only_mismatching else ""
        rows = self.database.all(
            f"SELECT run_id, step, body FROM steps WHERE run_id = ? AND step >= ? AND step <= ?{only}"
            " ORDER BY step LIMIT ?",
            (run_id, first, last, limit),
        )
        return [_step(row) for row in rows]

    def step(self, run_id: str, step: int) -> StepRow:
        """One step; NotFoundError."""
        rows = self.database.all("SELECT run_id, step, body FROM steps WHERE run_id = ? AND step = ?", (run_id, step))
        if not rows:
            raise NotFoundError(f"no step {step} in run {run_id!r}")
        return _step(rows[0])

    def sides(self) -> list[tuple[str, str, int, float]]:
        """run, side, newest step and Unix seconds of the last record, of every side that ever reported."""
        rows = self.database.all("SELECT run_id, side, newest_step, last_at FROM sides")
        return [(run_id, side, step, at) for run_id, side, step, at in rows]

    def last_complete_step(self, run_id: str) -> StepRow | None:
        """The highest step in which no sample waits for a side."""
        rows = self.database.all(
            "SELECT run_id, step, body FROM steps WHERE run_id = ? AND pending = 0 ORDER BY step DESC LIMIT 1",
            (run_id,),
        )
        return _step(rows[0]) if rows else None

    def missing(self, run_id: str) -> list[tuple[int, Mapping[str, int]]]:
        """The samples that wait for each side, by step, of all steps in which one does."""
        counts = ", ".join(number_at(self.database, "body", "missing", side) for side in SIDES)
        rows = self.database.all(f"SELECT step, {counts} FROM steps WHERE run_id = ? AND pending > 0", (run_id,))
        return [(step, {side: int(n or 0) for side, n in zip(SIDES, found, strict=True)}) for step, *found in rows]

    def samples(self, run_id: str, step: int, after: str, limit: int, verdict: Verdict | None) -> list[SampleRow]:
        """Samples of a step in ascending order of their id, from the one after `after`."""
        self.step(run_id, step)
        only = " AND verdict = ?" if verdict else ""
        rows = self.database.all(
            f"SELECT run_id, step, sample_id, body FROM samples WHERE run_id = ? AND step = ? AND sample_id > ?{only}"
            " ORDER BY sample_id LIMIT ?",
            (run_id, step, after, *([verdict.value] if verdict else []), limit),
        )
        return [_sample(row) for row in rows]

    def sample(self, key: SampleKey) -> SampleRow:
        """One sample; NotFoundError."""
        rows = self.database.all(
            "SELECT run_id, step, sample_id, body FROM samples WHERE run_id = ? AND step = ? AND sample_id = ?", key
        )
        if not rows:
            raise NotFoundError(f"no sample {key.sample_id!r} in step {key.step} of run {key.run_id!r}")
        return _sample(rows[0])

    def record(self, key: SampleKey, side: Side) -> Record | None:
        """What a side reported, or None where it has not or the evidence has been retired.

        EvidenceError where the stored bytes are not those that were stored.
        """
        rows = self.database.all(
            "SELECT digest, payload FROM records WHERE run_id = ? AND step = ? AND sample_id = ? AND side = ?",
            (*key, side),
        )
        return Held(bytes(rows[0][0]), bytes(rows[0][1])).decoded() if rows and rows[0][1] is not None else None

    def entry(self, key: SampleKey, side: Side) -> tuple[int, bytes] | None:
        """Where in the chain a side's record is, and its digest, also where the content has been retired."""
        rows = self.database.all(
            "SELECT seq, digest FROM records WHERE run_id = ? AND step = ? AND sample_id = ? AND side = ?", (*key, side)
        )
        return (int(rows[0][0]), bytes(rows[0][1])) if rows else None

    def reference(self, key: SampleKey) -> Logprobs | None:
        """The reference's log-probabilities, float32 [R], under the rollout's contract; None where it was not asked."""
        rows = self.database.all(
            "SELECT payload FROM reference_logprobs WHERE run_id = ? AND step = ? AND sample_id = ?", key
        )
        return np.frombuffer(bytes(rows[0][0]), "<f4").astype(np.float32) if rows else None

    def verdicts_after(self, seq: int, limit: int) -> list[VerdictRow]:
        """Verdicts behind an entry of the chain, in its order."""
        rows = self.database.all(
            "SELECT v.seq, v.run_id, v.step, v.sample_id, v.body, e.digest FROM verdicts v JOIN entries e"
            " ON e.seq = v.seq WHERE v.seq > ? ORDER BY v.seq LIMIT ?",
            (seq, limit),
        )
        return [VerdictRow(at, SampleKey(*key), body, bytes(digest).hex()) for at, *key, body, digest in rows]

    def verdict_at(self, seq: int) -> VerdictRow | None:
        """The verdict of one entry; None where that entry is none."""
        found = self.verdicts_after(seq - 1, 1)
        return found[0] if found and found[0].seq == seq else None

    def exported(self, name: str) -> int:
        """The last entry of the chain of which an export has what it wants; 0 where it has not begun."""
        rows = self.database.all("SELECT seq FROM exports WHERE name = ?", (name,))
        return int(rows[0][0]) if rows else 0

    def exports(self) -> list[tuple[str, int]]:
        """Every export and the last entry of the chain of which it has what it wants."""
        return [(str(name), int(seq)) for name, seq in self.database.all("SELECT name, seq FROM exports ORDER BY name")]

    def queued(self) -> Iterator[tuple[SampleKey, bool]]:
        """Samples that wait for the reference, and whether they are mismatches."""
        rows = self.database.all(
            "SELECT run_id, step, sample_id, verdict FROM samples WHERE reference = ? ORDER BY run_id, step, sample_id",
            (Reference.QUEUED.value,),
        )
        for *key, verdict in rows:
            yield SampleKey(*key), verdict == Verdict.MISMATCH.value

    def searching(self) -> Iterator[SampleKey]:
        """Samples whose causes are being searched for. Totals lead to them, so nothing that is settled is looked at."""
        searched = number_at(self.database, "body", "causes", SEARCHING) + " > 0"
        for (run_id,) in self.database.all(f"SELECT run_id FROM runs WHERE {searched} ORDER BY run_id"):
            steps = self.database.all(
                f"SELECT step FROM steps WHERE run_id = ? AND mismatches > 0 AND {searched} ORDER BY step", (run_id,)
            )
            for (step,) in steps:
                rows = self.database.all(
                    "SELECT run_id, step, sample_id FROM samples WHERE run_id = ? AND step = ? AND verdict = ?"
                    " AND body LIKE ? ORDER BY sample_id",
                    (run_id, step, Verdict.MISMATCH.value, _IS_SEARCHING),
                )
                yield from (SampleKey(*row) for row in rows)

    def pending_since(self, before: float, limit: int) -> list[SampleKey]:
        """Samples that have waited for their other side since before that time (Unix seconds), in the chain's order."""
        rows = self.database.all(
            PENDING_SINCE,
            (before, limit),
        )
        return [SampleKey(*row) for row in rows]

    def newest(self) -> float | None:
        """Unix seconds of the last record of all runs, by the clock that stamped it; None where there is none."""
        newest: float | None = self.database.all("SELECT max(last_at) FROM sides")[0][0]
        return newest

    def first_held_since(self, since: float) -> int | None:
        """The first entry of the chain whose record is still held and came at `since` or later."""
        rows = self.database.all(
            "SELECT seq FROM records WHERE payload IS NOT NULL AND received_at >= ? ORDER BY seq LIMIT 1", (since,)
        )
        return int(rows[0][0]) if rows else None

    def evidence_until(self, until: int, limit: int) -> list[Row]:
        """seq, run, step, sample, side, digest, payload, received_at of settled samples' records before entry `until`.

        In the order of the chain.
        """
        return self.database.all(
            "SELECT r.seq, r.run_id, r.step, r.sample_id, r.side, r.digest, r.payload, r.received_at FROM records r"
            " JOIN samples s ON s.run_id = r.run_id AND s.step = r.step AND s.sample_id = r.sample_id"
            " WHERE r.seq < ? AND r.payload IS NOT NULL AND s.verdict <> 'pending' AND s.reference <> 'queued'"
            " AND s.body NOT LIKE ? ORDER BY r.seq LIMIT ?",
            (until, _IS_SEARCHING, limit),
        )

    def capsules(
        self, run_id: str, after: tuple[int, str], limit: int
    ) -> tuple[list[SampleRow], tuple[int, str] | None]:
        """Mismatching samples whose two records are still held, ascending from the one after (step, sample).

        With them where to go on; None at the end. Only so many mismatches are looked at in one call, so there may be
        few or none before that, as where all is retired.
        """
        self.run(run_id)
        rows = self.database.all(
            "SELECT s.run_id, s.step, s.sample_id, s.body, (SELECT count(*) FROM records r WHERE r.run_id = s.run_id"
            " AND r.step = s.step AND r.sample_id = s.sample_id AND r.payload IS NOT NULL) FROM samples s"
            " WHERE s.run_id = ? AND s.verdict = ? AND s.step >= ? AND (s.step > ? OR s.sample_id > ?)"
            " ORDER BY s.step, s.sample_id LIMIT ?",
            (run_id, Verdict.MISMATCH.value, after[0], *after, _LOOKED_AT),
        )
        found: list[SampleRow] = []
        for row in rows:
            if row[4] == len(SIDES):
                found.append(_sample(row[:4]))
            if len(found) == limit:
                return found, (row[1], row[2])
        return found, (rows[-1][1], rows[-1][2]) if len(rows) == _LOOKED_AT else None

    def size_bytes(self) -> int:
        """Bytes on disk."""
        return self.database.size_bytes()

    def ready(self) -> bool:
        """Whether the ledger answers."""
        try:
            self.database.all("SELECT 1")
        except LedgerError:
            return False
        return True


def _run(row: Row) -> RunRow:
    run_id, first_at, last_at, body, steps, first, last = row
    return RunRow(run_id, first_at, last_at, steps, first, last, Totals.from_json(json.loads(body)))


def _step(row: Row) -> StepRow:
    return StepRow(row[0], row[1], Totals.from_json(json.loads(row[2])))


def _sample(row: Row) -> SampleRow:
    return SampleRow(SampleKey(*row[:3]), Judgement.from_json(json.loads(row[3])))
