"""The one writer.

    with ledger.transaction() as unit:
        stored = unit.add_record(key, "rollout", payload, unit.held(key))
        unit.judge(key, judgement, unit.judgement(key))

What is written in one transaction is there together, or not at all.
"""

import copy
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from auditor.compare import Logprobs
from auditor.errors import ConflictError, LedgerError
from auditor.judge import Judgement, Verdict
from auditor.records import SampleKey, Side
from auditor.storage.chain import GENESIS, digest, link
from auditor.storage.database import Database, migrate
from auditor.storage.rows import Totals

Counter = tuple[str, tuple[tuple[str, str], ...]]
Counts = Mapping[Counter, float]


class Stored(StrEnum):
    """What became of a record."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class Held:
    """A stored record: the digest of its bytes, and the bytes unless they have been retired."""

    digest: bytes
    payload: bytes | None


class Unit:
    """What may be written inside one transaction. Made by `Ledger.transaction`, invalid after it."""

    def __init__(self, database: Database, tail: tuple[int, bytes], now: float) -> None:
        self._database = database
        self.tail = tail
        self.now = now
        self.counts: dict[Counter, float] = {}
        # Samples that this transaction hands to the reference, and runs whose counters it ends.
        self.asked = 0
        self.left: set[str] = set()
        self.after_commit: list[Callable[[], None]] = []

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a durable counter."""
        key = (name, tuple(sorted(labels.items())))
        self.counts[key] = self.counts.get(key, 0) + value

    def has_counter(self, name: str, **labels: str) -> bool:
        """Whether a counter is there, be it from this transaction."""
        counted = (name, tuple(sorted(labels.items()))) in self.counts
        query = "SELECT 1 FROM counters WHERE name = ? AND labels = ?"
        return counted or bool(self._database.all(query, (name, _text(labels))))

    def end_counters(self, runs: Collection[str]) -> None:
        """Forget the counters of runs that leave the exposition; what is counted of them from here on starts at 0."""
        rows = self._database.all("SELECT name, labels FROM counters")
        ended = [row for row in rows if dict(_labels(row[1])).get("run_id") in runs]
        self._database.many("DELETE FROM counters WHERE name = ? AND labels = ?", ended)
        self.left.update(runs)

    def held(self, key: SampleKey) -> dict[Side, Held]:
        """What is stored of a sample, by side."""
        rows = self._database.all(
            "SELECT side, digest, payload FROM records WHERE run_id = ? AND step = ? AND sample_id = ?", key
        )
        return {side: Held(bytes(found), None if payload is None else bytes(payload)) for side, found, payload in rows}

    def add_record(self, key: SampleKey, side: Side, payload: bytes, held: Mapping[Side, Held]) -> Stored:
        """Store a record. DUPLICATE where the same one is there; ConflictError where another one is.

        held: what is stored of the sample now.
        """
        content = digest(payload)
        if side in held and held[side].digest == content:
            return Stored.DUPLICATE
        if side in held:
            raise ConflictError(
                f"a different {side} record of run {key.run_id!r}, step {key.step}, sample {key.sample_id!r} is stored"
            )
        seq = self._append("record", key, content)
        self._database.run(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (seq, *key, side, content, payload, self.now)
        )
        return Stored.ACCEPTED

    def payload(self, key: SampleKey, side: Side) -> bytes | None:
        """The record of one side, or None where it has not come (or has been retired)."""
        rows = self._database.all(
            "SELECT payload FROM records WHERE run_id = ? AND step = ? AND sample_id = ? AND side = ?", (*key, side)
        )
        return bytes(rows[0][0]) if rows and rows[0][0] is not None else None

    def judgement(self, key: SampleKey) -> Judgement | None:
        """The present judgement of a sample."""
        rows = self._database.all("SELECT body FROM samples WHERE run_id = ? AND step = ? AND sample_id = ?", key)
        return Judgement.from_json(json.loads(rows[0][0])) if rows else None

    def judge(self, key: SampleKey, judgement: Judgement, before: Judgement | None) -> None:
        """Store a judgement, and the verdict in the chain unless it is only `pending`. before: the one it replaces."""
        body = json.dumps(judgement.to_json(), sort_keys=True)
        if judgement.verdict is not Verdict.PENDING:
            seq = self._append("verdict", key, digest(body.encode()))
            self._database.run("INSERT INTO verdicts VALUES (?, ?, ?, ?, ?)", (seq, *key, body))
        state = (judgement.verdict.value, judgement.reference.value, body)
        if before is None:
            self._database.run("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?)", (*key, *state))
        else:
            self._database.run(
                "UPDATE samples SET verdict = ?, reference = ?, body = ?"
                " WHERE run_id = ? AND step = ? AND sample_id = ?",
                (*state, *key),
            )

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
        where = " WHERE run_id = ? AND step = ? AND sample_id = ?"
        return int(self._database.all(f"SELECT begun FROM searches{where}", key)[0][0])

    def search_undone(self, key: SampleKey) -> None:
        """Take back that a search began."""
        where = " WHERE run_id = ? AND step = ? AND sample_id = ?"
        self._database.run(f"UPDATE searches SET begun = begun - 1{where}", key)

    def search_ends(self, key: SampleKey) -> None:
        """Forget how many times a search was begun."""
        self._database.run("DELETE FROM searches WHERE run_id = ? AND step = ? AND sample_id = ?", key)

    def heard_from(self, run_id: str, side: Side, step: int) -> None:
        """Note that a side has reported up to `step`."""
        self._database.run(
            "INSERT INTO sides VALUES (?, ?, ?, ?) ON CONFLICT (run_id, side) DO UPDATE SET last_at = excluded.last_at,"
            " newest_step = CASE WHEN excluded.newest_step > sides.newest_step THEN excluded.newest_step"
            " ELSE sides.newest_step END",
            (run_id, side, step, self.now),
        )

    def last_heard(self, run_id: str) -> float | None:
        """Unix seconds of a run's last record; None where there is none."""
        last: float | None = self._database.all("SELECT max(last_at) FROM sides WHERE run_id = ?", (run_id,))[0][0]
        return last

    def keep_reference(self, key: SampleKey, logprobs: Logprobs) -> None:
        """Keep what the reference computed, float32 [R], once a sample."""
        payload = logprobs.astype("<f4").tobytes()
        self._database.run("INSERT INTO reference_logprobs VALUES (?, ?, ?, ?)", (*key, payload))

    def drop_evidence(self, seqs: Sequence[int], keys: Collection[SampleKey]) -> None:
        """Forget the content of records and the reference's values of their samples."""
        self._database.many("UPDATE records SET payload = NULL WHERE seq = ?", [(seq,) for seq in seqs])
        self._database.many(
            "DELETE FROM reference_logprobs WHERE run_id = ? AND step = ? AND sample_id = ?",
            [tuple(key) for key in keys],
        )

    def add_to_step(self, run_id: str, step: int, gained: Totals) -> Totals:
        """Add to a step's totals and its run's; the step's new totals."""
        rows = self._database.all("SELECT body FROM steps WHERE run_id = ? AND step = ?", (run_id, step))
        totals = (Totals.from_json(json.loads(rows[0][0])) if rows else Totals()) + gained
        numbers = (totals.verdict(Verdict.MISMATCH), totals.verdict(Verdict.PENDING), json.dumps(totals.to_json()))
        if rows:
            self._database.run(
                "UPDATE steps SET mismatches = ?, pending = ?, body = ? WHERE run_id = ? AND step = ?",
                (*numbers, run_id, step),
            )
        else:
            self._database.run("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", (run_id, step, *numbers))
        self._add_to_run(run_id, gained)
        return totals

    def _add_to_run(self, run_id: str, gained: Totals) -> None:
        rows = self._database.all("SELECT body FROM runs WHERE run_id = ?", (run_id,))
        if not rows:
            body = json.dumps(gained.to_json())
            self._database.run("INSERT INTO runs VALUES (?, ?, ?, ?)", (run_id, self.now, self.now, body))
            return
        body = json.dumps((Totals.from_json(json.loads(rows[0][0])) + gained).to_json())
        self._database.run("UPDATE runs SET last_at = ?, body = ? WHERE run_id = ?", (self.now, body, run_id))

    def _append(self, kind: str, key: SampleKey, content: bytes) -> int:
        seq = self.tail[0] + 1
        hashed = link(self.tail[1], seq, kind, key, content)
        self._database.run("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", (seq, kind, *key, content, hashed))
        self.tail = (seq, hashed)
        return seq

    def flush_counts(self) -> None:
        """Write the counters gathered in this unit."""
        self._database.many(
            "INSERT INTO counters VALUES (?, ?, ?) ON CONFLICT (name, labels)"
            " DO UPDATE SET value = counters.value + excluded.value",
            [(name, _text(dict(labels)), value) for (name, labels), value in self.counts.items()],
        )


class Ledger:
    """Owns the writing connection. Used from one thread at a time.

    clock: Unix seconds, for `received_at`, by which evidence is retired; `auditor.clock` gives one that does not jump.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        migrate(database)
        # None: unknown, for a commit failed and may have happened all the same; it is read again.
        self._tail: tuple[int, bytes] | None = None

    @contextmanager
    def transaction(self) -> Iterator[Unit]:
        """Everything in the block becomes durable at its end, or nothing does."""
        self._database.run("BEGIN")
        try:
            unit = Unit(self._database, self._tail or self._read_tail(), self._clock())
            yield unit
            unit.flush_counts()
            self._database.run("COMMIT")
        except BaseException:
            self._tail = None
            self._rollback()
            raise
        self._tail = unit.tail

    @contextmanager
    def savepoint(self, unit: Unit) -> Iterator[None]:
        """Inside a transaction: undo only the block where it raises. After a LedgerError nothing of it can go on."""
        before = {name: copy.copy(value) for name, value in vars(unit).items() if name != "_database"}
        self._database.run("SAVEPOINT part")
        try:
            yield
        except LedgerError:
            raise
        except Exception:
            self._database.run("ROLLBACK TO part")
            self._database.run("RELEASE part")
            vars(unit).update(before)
            raise
        self._database.run("RELEASE part")

    def counters(self) -> dict[Counter, float]:
        """Every durable counter."""
        rows = self._database.all("SELECT name, labels, value FROM counters")
        return {(name, _labels(labels)): value for name, labels, value in rows}

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()

    def _read_tail(self) -> tuple[int, bytes]:
        rows = self._database.all("SELECT seq, hash FROM entries ORDER BY seq DESC LIMIT 1")
        return (rows[0][0], bytes(rows[0][1])) if rows else (0, GENESIS)

    def _rollback(self) -> None:
        """Undo; a database that cannot even do that is closed by the next error, and nothing was acknowledged."""
        try:
            self._database.run("ROLLBACK")
        except LedgerError:
            return


def _text(labels: Mapping[str, str]) -> str:
    return json.dumps(sorted(labels.items()))


def _labels(text: str) -> tuple[tuple[str, str], ...]:
    pairs: list[list[Any]] = json.loads(text)
    return tuple((name, value) for name, value in pairs)
