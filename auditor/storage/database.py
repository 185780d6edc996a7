"""One connection to one database, as little of it as the ledger needs. SQL is written with `?` for arguments."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from auditor.errors import ConfigError, LedgerError
from auditor.storage.schema import MIGRATIONS, VERSION

Row = tuple[Any, ...]


class Database(Protocol):
    """A connection for one thread. Every error of the driver comes out as LedgerError."""

    types: dict[str, str]

    def all(self, sql: str, arguments: Sequence[Any] = ()) -> list[Row]:
        """Run one statement and return its rows."""

    def run(self, sql: str, arguments: Sequence[Any] = ()) -> int:
        """Run one statement; the number of rows that it changed."""

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for each of `rows`."""

    def size_bytes(self) -> int:
        """Bytes on disk."""

    def close(self) -> None:
        """Let go of the connection."""


class SqliteDatabase:
    """A SQLite file in WAL mode; `writer` takes a lock so that there is only one."""

    types = {"blob": "BLOB", "real": "REAL", "integer": "INTEGER"}  # noqa: RUF012 - a constant of the protocol

    def __init__(self, path: Path, writer: bool) -> None:
        self._path = path
        self._lock = _lock(path) if writer else None
        with _translated(f"ledger {path}"):
            mode = "rwc" if writer else "ro"
            self._connection = sqlite3.connect(
                f"file:{path}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False, timeout=10
            )
            if writer:
                self._connection.execute("PRAGMA journal_mode = WAL")
                # A commit must survive a power cut, for it is acknowledged; NORMAL would not sync the WAL.
                self._connection.execute("PRAGMA synchronous = FULL")
                self._connection.execute("PRAGMA wal_autocheckpoint = 4000")

    def all(self, sql: str, arguments: Sequence[Any] = ()) -> list[Row]:
        """Run one statement and return its rows."""
        with _translated(f"ledger {self._path}"):
            return self._connection.execute(sql, arguments).fetchall()

    def run(self, sql: str, arguments: Sequence[Any] = ()) -> int:
        """Run one statement; the number of rows that it changed."""
        with _translated(f"ledger {self._path}"):
            return self._connection.execute(sql, arguments).rowcount

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for each of `rows`."""
        with _translated(f"ledger {self._path}"):
            self._connection.executemany(sql, rows)

    def size_bytes(self) -> int:
        """Bytes of the file and its write-ahead log."""
        files = (self._path, self._path.with_name(self._path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """Let go of the file and the lock."""
        self._connection.close()
        if self._lock is not None:
            os.close(self._lock)


def migrate(database: Database) -> None:
    """Bring the tables to this program's version; ConfigError where the ledger is from a newer one."""
    database.run("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)")
    rows = database.all("SELECT version FROM schema_version")
    present = rows[0][0] if rows else 0
    if present > VERSION:
        raise ConfigError(f"the ledger has schema version {present}; this program knows up to {VERSION}")
    if present == VERSION:
        return
    database.run("BEGIN")
    for statements in MIGRATIONS[present:]:
        for statement in statements:
            database.run(statement.format(**database.types))
    database.run("DELETE FROM schema_version")
    database.run("INSERT INTO schema_version VALUES (?)", (VERSION,))
    database.run("COMMIT")


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise LedgerError(f"{what}: {error}") from error


def _lock(path: Path) -> int:
    try:
        descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"ledger {path}: {error.strerror}; give a path in a folder that can be written") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"ledger {path} is in use by another auditor; stop it or choose another path") from None
    return descriptor
