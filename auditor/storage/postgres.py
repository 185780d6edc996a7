"""A ledger in a PostgreSQL database, by URL. One writer, by an advisory lock that dies with its connection."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final

from auditor.errors import ConfigError, LedgerError
from auditor.storage.database import Row

try:
    import psycopg
    from psycopg.pq import TransactionStatus
except ImportError as error:
    raise ConfigError("a postgresql:// ledger needs psycopg: install the extra `postgres`") from error

_WRITER_LOCK: Final = 0x61756469746F72  # "auditor"
# Both ends notice a dead peer within half a minute: a thread waits here, and there a lost session holds the lock.
_KEEPALIVE: Final[Mapping[str, Any]] = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
# What the driver's message says → what is told.
_REASONS: Final = (
    ("password authentication failed", "the password or the user is wrong"),
    ("no password supplied", "the server asks for a password"),
    ("no pg_hba.conf entry", "the server lets this user in from nowhere near here (pg_hba.conf)"),
    ("does not exist", "the database or the role does not exist"),
    ("too many", "the server has no connection left"),
    ("starting up", "the server is starting"),
    ("shutting down", "the server is shutting down"),
    ("Connection refused", "connection refused"),
    ("timeout", "no answer in time"),
    ("resolve host", "the host's name is not known"),
    ("translate host name", "the host's name is not known"),
    ("SSL", "TLS cannot be agreed on"),
)
# A server that takes bytes and answers nothing, stopped or behind a network that drops, is given up after so long;
# whoever reads for a page waits for less than who writes.
_WRITER_ANSWER_S: Final = 30.0
_READER_ANSWER_S: Final = 10.0
# Tables are made and changed once, and that may take as long as it takes.
_UNHURRIED: Final = ("CREATE ", "DROP ")
_SESSION: Final = (
    "SET tcp_keepalives_idle = 10",
    "SET tcp_keepalives_interval = 5",
    "SET tcp_keepalives_count = 3",
    # A commit is acknowledged, so it must be on disk, whatever the server's or the role's default is.
    "SET synchronous_commit = on",
)


class _Bounded(psycopg.Connection[Row]):
    """A connection that is closed where the server does not answer in time. answer_s: None is no bound.

    gave_up: whether it was.
    """

    answer_s: float | None = None
    gave_up = False

    def wait(self, gen: Any, *arguments: Any, **named: Any) -> Any:
        """Wait for the server; OperationalError where it takes longer."""
        return super().wait(self._watched(gen), *arguments, **named)

    def _watched(self, gen: Any) -> Any:
        """The driver's generator, which is asked again and again while nothing comes."""
        started, ready = time.monotonic(), None
        while True:
            try:
                wanted = gen.send(ready)
            except StopIteration as done:
                return done.value
            if self.answer_s is not None and time.monotonic() - started > self.answer_s:
                self.close()
                self.gave_up = True
                raise psycopg.OperationalError(f"no answer in {self.answer_s:g} s; the connection is given up")
            ready = yield wanted


class PostgresDatabase:
    """A connection. writer: takes the lock and may write.

    A connection that was lost is made again at the next BEGIN, or at once for a statement of a reader that is no
    transaction's; what else was in flight fails. The URL may hold a password and is in no message.
    """

    types: ClassVar[Mapping[str, str]] = {
        "blob": "BYTEA",
        "real": "DOUBLE PRECISION",
        "integer": "BIGINT",
        "name": 'TEXT COLLATE "C"',
    }
    number_at: ClassVar[str] = "CAST(CAST({column} AS json) #>> '{{{commas}}}' AS DOUBLE PRECISION)"
    snapshot: ClassVar[str] = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

    def __init__(self, url: str, writer: bool) -> None:
        self._url = url
        self._writer = writer
        self._answer_s = _WRITER_ANSWER_S if writer else _READER_ANSWER_S
        self._connection = self._connect()

    def all(self, sql: str, arguments: Sequence[Any] = ()) -> list[Row]:
        """Run one statement and return its rows."""
        with self._translated():
            return self._execute(sql, arguments).fetchall()

    def run(self, sql: str, arguments: Sequence[Any] = ()) -> int:
        """Run one statement; the number of rows that it changed."""
        with self._translated():
            return self._execute(sql, arguments).rowcount

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for each of `rows`."""
        with self._translated(), self._connection.cursor() as cursor:
            cursor.executemany(_marks(sql), rows)

    def size_bytes(self) -> int:
        """Bytes of the whole database."""
        return int(self.all("SELECT pg_database_size(current_database())")[0][0])

    def close(self) -> None:
        """Let go of the connection, and with it of the lock."""
        self._connection.close()

    def _execute(self, sql: str, arguments: Sequence[Any]) -> psycopg.Cursor[Row]:
        connection = self._ready(sql)
        alone = not self._writer and connection.info.transaction_status is TransactionStatus.IDLE
        try:
            return connection.execute(_marks(sql), arguments)
        except psycopg.OperationalError:
            # Only by asking is it seen that a server went away meanwhile; it may be back. One that answers nothing is
            # not asked twice, and what belongs to a transaction ends with it.
            if not (alone and connection.closed) or connection.gave_up:
                raise
            return self._ready(sql).execute(_marks(sql), arguments)

    def _ready(self, sql: str) -> _Bounded:
        """The connection, made again where it was lost and nothing is in flight on it."""
        if self._connection.closed and (sql == "BEGIN" or not self._writer):
            try:
                self._connection = self._connect()
            except ConfigError as error:
                # At a start it is somebody's mistake; here it may be this auditor's own lost session, which passes.
                raise LedgerError(str(error)) from None
        self._connection.answer_s = None if sql.startswith(_UNHURRIED) else self._answer_s
        return self._connection

    def _connect(self) -> _Bounded:
        try:
            connection = _Bounded.connect(self._url, autocommit=True, connect_timeout=5, **_KEEPALIVE)
        except psycopg.ProgrammingError:
            raise ConfigError(
                "the PostgreSQL ledger's URL cannot be parsed; it is postgresql://USER:PASSWORD@HOST:PORT/DATABASE,"
                " with %25 for a percent sign in the password, %40 for an at sign and %2F for a slash"
            ) from None
        except psycopg.Error as error:
            raise LedgerError(f"PostgreSQL ledger: no connection: {_why(error)}") from None
        try:
            with self._translated():
                self._set_up(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_up(self, connection: _Bounded) -> None:
        connection.answer_s = self._answer_s
        for setting in _SESSION:
            connection.execute(setting)
        if not self._writer:
            return
        row = connection.execute("SELECT pg_try_advisory_lock(%s)", (_WRITER_LOCK,)).fetchone()
        if row is None or not row[0]:
            raise ConfigError("the PostgreSQL ledger is in use by another auditor; stop it or use another database")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise LedgerError(f"PostgreSQL ledger: {' '.join(str(error).split())}") from error


def _why(error: psycopg.Error) -> str:
    """In words of our own: the driver quotes the URL's parts, and an @ in a password makes the rest of it a host."""
    said = str(error)
    return next((ours for theirs, ours in _REASONS if theirs in said), "the server cannot be reached by this URL")


def _marks(sql: str) -> Any:
    """Psycopg writes arguments as %s; no statement of the ledger holds a question mark or a percent sign otherwise."""
    return sql.replace("?", "%s")
