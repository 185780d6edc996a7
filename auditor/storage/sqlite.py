"""A ledger in one SQLite file, in WAL mode, with a lock beside it so that there is one writer."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from auditor.errors import ConfigError, LedgerError
from auditor.storage.database import Row


class SqliteDatabase:
    """A connection. writer: takes the lock and may write; otherwise the file must be there and is only read."""

    types: ClassVar[Mapping[str, str]] = {"blob": "BLOB", "real": "REAL", "integer": "INTEGER", "name": "TEXT"}
    number_at: ClassVar[str] = "json_extract({column}, '$.{dots}')"
    snapshot: ClassVar[str] = "BEGIN"

    def __init__(self, path: Path, writer: bool) -> None:
        self._path = path
        self._lock = _lock(path) if writer else None
        self._connect("rwc" if writer else _reading(path))
        if writer:
            with self._translated():
                self._refuse_foreign()
                self._connection.execute("PRAGMA journal_mode = WAL")
                # A commit must survive a power cut, for it is acknowledged; NORMAL would not sync the WAL.
                self._connection.execute("PRAGMA synchronous = FULL")
                self._connection.execute("PRAGMA wal_autocheckpoint = 4000")
            self._opened = _identity(path)

    def _connect(self, mode: str) -> None:
        opened = _identity(self._path)
        with self._translated():
            self._connection = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?mode={mode}",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
                timeout=10,
            )
        self._opened = opened

    def _stay_in_place(self) -> None:
        """A reader follows to the file that now has the name. A writer does not: what it writes to a file that was
        removed is durable for nobody, and another file is not its ledger.
        """
        if self._opened is not None and _identity(self._path) == self._opened:
            return
        if self._lock is not None:
            raise LedgerError(f"ledger {self._path} is no longer the file that was opened; put it back, or start again")
        if not self._connection.in_transaction:
            left = self._connection
            self._connect(_reading(self._path))
            left.close()

    def _refuse_foreign(self) -> None:
        """ConfigError, before anything is written, where the file is the database of another program."""
        tables = {name for (name,) in self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and "schema_version" not in tables:
            self.close()
            raise ConfigError(f"ledger {self._path} is the database of another program; give a path of its own")

    def all(self, sql: str, arguments: Sequence[Any] = ()) -> list[Row]:
        """Run one statement and return its rows."""
        if self._lock is None:
            self._stay_in_place()
        with self._translated():
            return self._connection.execute(sql, arguments).fetchall()

    def run(self, sql: str, arguments: Sequence[Any] = ()) -> int:
        """Run one statement; the number of rows that it changed."""
        if sql in ("BEGIN", "COMMIT"):
            self._stay_in_place()
        with self._translated():
            return self._connection.execute(sql, arguments).rowcount

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for each of `rows`."""
        with self._translated():
            self._connection.executemany(sql, rows)

    def size_bytes(self) -> int:
        """Bytes of the file and its write-ahead log."""
        files = (self._path, self._path.with_name(self._path.name + "-wal"))
        return sum(_size(file) for file in files)

    def close(self) -> None:
        """Let go of the file and the lock. A writer leaves all in the one file, for whoever copies that one."""
        if self._lock is not None:
            # Not where the disk is full or somebody reads on: what the log beside the file holds is as durable.
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA busy_timeout = 500")
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()
        if self._lock is not None:
            os.close(self._lock)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise LedgerError(f"ledger {self._path}: {error}") from error


def _reading(file: Path) -> str:
    """How a reader opens it. In a folder that it may not write, such as a backup's, SQLite can make no file for shared
    memory; where no log lies beside the ledger nobody has it open, and nothing is to be shared.
    """
    written = file.with_name(file.name + "-wal").exists() or os.access(file.parent, os.W_OK)
    return "ro" if written else "ro&immutable=1"


def _identity(file: Path) -> tuple[int, int] | None:
    """Device and inode; None where it cannot be found."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _size(file: Path) -> int:
    """Bytes; 0 where there is no such file, or none that can be looked at."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


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
