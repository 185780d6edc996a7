"""The one writer.

    with ledger.transaction() as unit:
        stored = unit.add_record(key, "rollout", Held(digest(payload), payload), unit.held(key))
        unit.judge(key, judgement)

What is written in one transaction is there together, or not at all.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from auditor.errors import LedgerError
from auditor.storage.chain import GENESIS
from auditor.storage.database import Database, migrate
from auditor.storage.halves import Halves
from auditor.storage.unit import Counter, Unit, labels_of


class Ledger:
    """Owns the writing connection. Used from one thread at a time.

    clock: Unix seconds, for `received_at`, by which evidence is retired; `auditor.clock` gives one that does not jump.
    halves: where samples that wait for their other side are kept at hand.
    """

    def __init__(
        self, database: Database, clock: Callable[[], float] = time.time, halves: Halves | None = None
    ) -> None:
        self._database, self._clock = database, clock
        self._halves = Halves() if halves is None else halves
        migrate(database)
        # None: unknown, for a commit failed and may have happened all the same; it is read again.
        self._tail: tuple[int, bytes] | None = None

    @contextmanager
    def transaction(self) -> Iterator[Unit]:
        """Everything in the block becomes durable at its end, or nothing does."""
        self._database.run("BEGIN")
        try:
            unit = Unit(self._database, self._halves, self._tail or self._read_tail(), self._clock())
            yield unit
            unit.flush()
            self._database.run("COMMIT")
        except BaseException:
            self._tail = None
            self._halves.clear()
            self._rollback()
            raise
        self._tail = unit.tail
        unit.after()

    @contextmanager
    def savepoint(self, unit: Unit) -> Iterator[None]:
        """Inside a transaction: undo only the block where it raises. After a LedgerError nothing of it can go on."""
        before = {name: copy.copy(value) for name, value in vars(unit).items() if name not in ("_database", "_halves")}
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
        return {(name, labels_of(labels)): value for name, labels, value in rows}

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
