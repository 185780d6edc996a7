"""One connection to one database, as little of it as the ledger needs. SQL is written with `?` for arguments."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

from auditor.errors import ConfigError
from auditor.storage.schema import MIGRATIONS, VERSION

Row = tuple[Any, ...]
_TOO_NEW: Final = "the ledger has schema version {}, of a newer program; this one knows up to {}"


class Database(Protocol):
    """A connection for one thread. Every error of the driver comes out as LedgerError.

    types: how it spells column types. number_at: how it reads a number inside a JSON text, see `number_at`.
    snapshot: begins a transaction that reads, in which nobody's writing is seen.
    """

    types: ClassVar[Mapping[str, str]]
    number_at: ClassVar[str]
    snapshot: ClassVar[str]

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


def number_at(database: Database, column: str, *path: str) -> str:
    """SQL for the number at `path` inside the JSON text of a column; NULL where there is none."""
    return database.number_at.format(column=column, dots=".".join(path), commas=",".join(path))


def open_database(ledger: str, writer: bool) -> Database:
    """The database of a `postgresql://` URL or of a SQLite file. ConfigError: it can be neither."""
    if ledger.startswith(("postgresql://", "postgres://")):
        from auditor.storage.postgres import PostgresDatabase  # noqa: PLC0415 - psycopg is an extra of its own

        return PostgresDatabase(ledger, writer)
    from auditor.storage.sqlite import SqliteDatabase  # noqa: PLC0415 - beside the other one

    scheme, separator, _ = ledger.partition("://")
    if separator:
        raise ConfigError(f"a ledger cannot be at {scheme}://…; give a file or a postgresql:// URL")
    path = Path(ledger)
    if path.is_dir():
        raise ConfigError(f"ledger {path} is a folder; give a file in it")
    return SqliteDatabase(path, writer)


def migrate(database: Database) -> None:
    """Bring the tables to this program's version; ConfigError where the ledger is from a newer one."""
    database.run("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)")
    rows = database.all("SELECT version FROM schema_version")
    present = rows[0][0] if rows else 0
    if present > VERSION:
        raise ConfigError(_TOO_NEW.format(present, VERSION))
    if present == VERSION:
        return
    database.run("BEGIN")
    for statements in MIGRATIONS[present:]:
        for statement in statements:
            if callable(statement):
                statement(database)
            else:
                database.run(statement.format(**database.types))
    database.run("DELETE FROM schema_version")
    database.run("INSERT INTO schema_version VALUES (?)", (VERSION,))
    database.run("COMMIT")


def require_current(database: Database) -> None:
    """ConfigError where the tables are those of another version of this program, whose totals mean something else."""
    rows = database.all("SELECT version FROM schema_version")
    present = rows[0][0] if rows else 0
    if present > VERSION:
        raise ConfigError(_TOO_NEW.format(present, VERSION))
    if present != VERSION:
        raise ConfigError(
            f"the ledger has schema version {present}, this program {VERSION}; an auditor brings it up to date when it"
            " is started on it"
        )
