"""What may be written inside one transaction of the ledger.

Rows wait here until the transaction's end and are written statement by statement, many at a time; what is asked of a
sample in between is answered from them. So a sample whose two sides come together is written once.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from auditor.compare import Logprobs
from auditor.errors import ConflictError
from auditor.judge import Judgement, Verdict
from auditor.records import SampleKey, Side
from auditor.storage.chain import digest, link
from auditor.storage.database import Database
from auditor.storage.halves import Halves, Held
from auditor.storage.rows import Totals

Counter = tuple[str, tuple[tuple[str, str], ...]]
Counts = Mapping[Counter, float]
_OF_SAMPLE: Final = "WHERE run_id = ? AND step = ? AND sample_id = ?"
_ENTRY: Final = "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)"
_RECORD: Final = "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_VERDICT: Final = "INSERT INTO verdicts VALUES (?, ?, ?, ?, ?)"
_SAMPLE: Final = (
    "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (run_id, step, sample_id)"
    " DO UPDATE SET verdict = excluded.verdict, reference = excluded.reference, body = excluded.body"
)
_STEP: Final = (
    "INSERT INTO steps VALUES (?, ?, ?, ?, ?) ON CONFLICT (run_id, step)"
    " DO UPDATE SET mismatches = excluded.mismatches, pending = excluded.pending, body = excluded.body"
)
_RUN: Final = (
    "INSERT INTO runs VALUES (?, ?, ?, ?) ON CONFLICT (run_id)"
    " DO UPDATE SET last_at = excluded.last_at, body = excluded.body"
)
_SIDE: Final = (
    "INSERT INTO sides VALUES (?, ?, ?, ?) ON CONFLICT (run_id, side) DO UPDATE SET last_at = excluded.last_at,"
    " newest_step = CASE WHEN excluded.newest_step > sides.newest_step THEN excluded.newest_step"
    " ELSE sides.newest_step END"
)
_COUNTER: Final = (
    "INSERT INTO counters VALUES (?, ?, ?) ON CONFLICT (name, labels)"
    " DO UPDATE SET value = counters.value + excluded.value"
)


class Stored(StrEnum):
    """What became of a record."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"


class Unit:
    """What may be written inside one transaction. Made by `Ledger.transaction`, invalid after it."""

    def __init__(self, database: Database, halves: Halves, tail: tuple[int, bytes], now: float) -> None:
        self._database, self._halves = database, halves
        self.tail = tail
        self.now = now
        self.counts: dict[Counter, float] = {}
        # Samples that this transaction hands to the reference, and runs whose counters it ends.
        self.asked = 0
        self.left: set[str] = set()
        self.after_commit: list[Callable[[], None]] = []
        # Rows that wait, as statement and values, and the present state of what this transaction has touched.
        self._waiting: list[tuple[str, tuple[Any, ...]]] = []
        self._held: dict[SampleKey, Mapping[Side, Held]] = {}
        self._judged: dict[SampleKey, tuple[Judgement, str]] = {}
        self._steps: dict[tuple[str, int], Totals] = {}
        self._runs: dict[str, Totals] = {}

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a durable counter."""
        key = (name, tuple(sorted(labels.items())))
        self.counts[key] = self.counts.get(key, 0) + value

    def has_counter(self, name: str, **labels: str) -> bool:
        """Whether a counter is there, be it from this transaction."""
        counted = (name, tuple(sorted(labels.items()))) in self.counts
        query = "SELECT 1 FROM counters WHERE name = ? AND labels = ?"
        return counted or bool(self._database.all(query, (name, _text(labels))))

    def end_counters(self, counters: Mapping[str, Collection[Counter]]) -> None:
        """Forget the counters of runs that leave the exposition; what is counted of them from here on starts at 0.

        counters: by run, all that there are.
        """
        ended = [(name, _text(dict(labels))) for of_run in counters.values() for name, labels in of_run]
        self._database.many("DELETE FROM counters WHERE name = ? AND labels = ?", ended)
        self.left.update(counters)

    def held(self, key: SampleKey) -> Mapping[Side, Held]:
        """What is stored of a sample, by side; where this transaction completed it, without its content."""
        if key in self._held:
            return self._held[key]
        if (half := self._halves.held(key)) is not None:
            return half
        rows = self._database.all(f"SELECT side, digest, payload FROM records {_OF_SAMPLE}", key)
        return {side: Held(bytes(found), None if payload is None else bytes(payload)) for side, found, payload in rows}

    def add_record(self, key: SampleKey, side: Side, new: Held, held: Mapping[Side, Held]) -> Stored:
        """Store a record. DUPLICATE where the same one is there; ConflictError where another one is.

        held: what is stored of the sample now.
        """
        if side in held and held[side].digest == new.digest:
            return Stored.DUPLICATE
        if side in held:
            raise ConflictError(
                f"a different {side} record of run {key.run_id!r}, step {key.step}, sample {key.sample_id!r} is stored"
            )
        seq = self._append("record", key, new.digest)
        self._waiting.append((_RECORD, (seq, *key, side, new.digest, new.payload, self.now)))
        # A table of its own each time: a savepoint may go back to the one before. Where both sides are there, nobody
        # asks for their content again, and it need not stay in memory.
        both = {at: Held(one.digest, None) for at, one in (*held.items(), (side, new))}
        self._held[key] = both if held else {side: new}
        return Stored.ACCEPTED

    def with_content(self, key: SampleKey, side: Side) -> Held | None:
        """The record of one side as the ledger has it, or None where it has not come (or has been retired)."""
        self._write_waiting()
        rows = self._database.all(f"SELECT digest, payload FROM records {_OF_SAMPLE} AND side = ?", (*key, side))
        return Held(bytes(rows[0][0]), bytes(rows[0][1])) if rows and rows[0][1] is not None else None

    def judgement(self, key: SampleKey) -> Judgement | None:
        """The present judgement of a sample."""
        if key in self._judged:
            return self._judged[key][0]
        if (waiting := self._halves.judgement(key)) is not None:
            return waiting
        rows = self._database.all(f"SELECT body FROM samples {_OF_SAMPLE}", key)
        return Judgement.from_json(json.loads(rows[0][0])) if rows else None

    def judge(self, key: SampleKey, judgement: Judgement) -> None:
        """Store a judgement in place of the present one, and in the chain unless it is only `pending`."""
        body = ""
        if judgement.verdict is not Verdict.PENDING:
            body = _body(judgement)
            seq = self._append("verdict", key, digest(body.encode()))
            self._waiting.append((_VERDICT, (seq, *key, body)))
        self._judged[key] = judgement, body

    def export_reaches(self, name: str, seq: int) -> None:
        """Note that an export has what it wants of the chain up to an entry."""
        self._database.run(
            "INSERT INTO exports VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET seq = excluded.seq", (name, seq)
        )

    def search_begins(self, key: SampleKey) -> int:
        """Note that a search for a sample's causes begins; how many times it has begun without an end."""
        self._database.run(
            "INSERT INTO searches VALUES (?, ?, ?, 1) ON CONFLICT (run_id, step, sample_id)"
            " DO UPDATE SET begun = searches.begun + 1",
            key,
        )
        return int(self._database.all(f"SELECT begun FROM searches {_OF_SAMPLE}", key)[0][0])

    def search_undone(self, key: SampleKey) -> None:
        """Take back that a search began."""
        self._database.run(f"UPDATE searches SET begun = begun - 1 {_OF_SAMPLE}", key)

    def search_ends(self, key: SampleKey) -> None:
        """Forget how many times a search was begun."""
        self._database.run(f"DELETE FROM searches {_OF_SAMPLE}", key)

    def heard_from(self, run_id: str, side: Side, step: int) -> None:
        """Note that a side has reported up to `step`."""
        self._waiting.append((_SIDE, (run_id, side, step, self.now)))

    def last_heard(self, run_id: str) -> float | None:
        """Unix seconds of a run's last record; None where there is none."""
        self._write_waiting()
        last: float | None = self._database.all("SELECT max(last_at) FROM sides WHERE run_id = ?", (run_id,))[0][0]
        return last

    def keep_reference(self, key: SampleKey, logprobs: Logprobs) -> None:
        """Keep what the reference computed, float32 [R], once a sample."""
        payload = logprobs.astype("<f4").tobytes()
        self._database.run("INSERT INTO reference_logprobs VALUES (?, ?, ?, ?)", (*key, payload))

    def drop_evidence(self, seqs: Sequence[int], keys: Collection[SampleKey]) -> None:
        """Forget the content of records and the reference's values of their samples."""
        self._write_waiting()
        self._held.clear()
        self._halves.clear()
        self._database.many("UPDATE records SET payload = NULL WHERE seq = ?", [(seq,) for seq in seqs])
        self._database.many(f"DELETE FROM reference_logprobs {_OF_SAMPLE}", [tuple(key) for key in keys])

    def add_to_step(self, run_id: str, step: int, gained: Totals) -> Totals:
        """Add to a step's totals and its run's; the step's new totals."""
        totals = self._steps[run_id, step] = self._step(run_id, step) + gained
        self._runs[run_id] = self._run(run_id) + gained
        return totals

    def flush(self) -> None:
        """Write all that waits, once, at the transaction's end."""
        for key, (judgement, body) in self._judged.items():
            state = (judgement.verdict.value, judgement.reference.value, body or _body(judgement))
            self._waiting.append((_SAMPLE, (*key, *state)))
        for (run_id, step), totals in self._steps.items():
            numbers = (totals.verdict(Verdict.MISMATCH), totals.verdict(Verdict.PENDING))
            self._waiting.append((_STEP, (run_id, step, *numbers, json.dumps(totals.to_json()))))
        for run_id, totals in self._runs.items():
            self._waiting.append((_RUN, (run_id, self.now, self.now, json.dumps(totals.to_json()))))
        for (name, labels), value in self.counts.items():
            self._waiting.append((_COUNTER, (name, _text(dict(labels)), value)))
        self._write_waiting()

    def after(self) -> None:
        """The transaction is durable: what waits by it for its other side stays at hand, the rest of it does not."""
        for key, (judgement, _) in self._judged.items():
            held = self._held.get(key, {})
            if judgement.verdict is Verdict.PENDING and len(held) == 1:
                ((side, one),) = held.items()
                self._halves.keep(key, side, one, judgement, self.now)
            else:
                self._halves.forget(key)

    def _write_waiting(self) -> None:
        rows: dict[str, list[tuple[Any, ...]]] = {}
        for statement, values in self._waiting:
            rows.setdefault(statement, []).append(values)
        for statement, several in rows.items():
            self._database.many(statement, several)
        self._waiting = []

    def _step(self, run_id: str, step: int) -> Totals:
        if (run_id, step) in self._steps:
            return self._steps[run_id, step]
        return _totals(self._database.all("SELECT body FROM steps WHERE run_id = ? AND step = ?", (run_id, step)))

    def _run(self, run_id: str) -> Totals:
        if run_id in self._runs:
            return self._runs[run_id]
        return _totals(self._database.all("SELECT body FROM runs WHERE run_id = ?", (run_id,)))

    def _append(self, kind: str, key: SampleKey, content: bytes) -> int:
        seq = self.tail[0] + 1
        hashed = link(self.tail[1], seq, kind, key, content)
        self._waiting.append((_ENTRY, (seq, kind, *key, content, hashed)))
        self.tail = (seq, hashed)
        return seq


def _body(judgement: Judgement) -> str:
    return json.dumps(judgement.to_json(), sort_keys=True)


def _totals(rows: Sequence[tuple[Any, ...]]) -> Totals:
    return Totals.from_json(json.loads(rows[0][0])) if rows else Totals()


def _text(labels: Mapping[str, str]) -> str:
    return json.dumps(sorted(labels.items()))


def labels_of(text: str) -> tuple[tuple[str, str], ...]:
    """The labels of a stored counter."""
    pairs: list[list[Any]] = json.loads(text)
    return tuple((name, value) for name, value in pairs)
