"""One thread writes the ledger; what waits for it is written together, and answered after it is durable."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from auditor.errors import LedgerError
from auditor.storage.ledger import Ledger
from auditor.storage.unit import Unit

log = logging.getLogger(__name__)
T = TypeVar("T")
_GROUP = 64


@dataclass(frozen=True, slots=True)
class _Task:
    work: Callable[[Unit], Any]
    future: Future[Any]


class Writer:
    """Runs pieces of work inside transactions of the ledger, several a transaction, each undone alone where it raises.

    on_commit: given the transaction that became durable. on_recovery: called at the first commit after a failed one,
    which may have become durable although it failed. capacity: work that may wait before `submit` says no.

    Where the ledger itself fails inside a piece of work, everything of that transaction is undone, and each piece is
    tried once more alone: what the ledger cannot take must not hold up the rest.
    """

    def __init__(
        self, ledger: Ledger, on_commit: Callable[[Unit], None], on_recovery: Callable[[], None], capacity: int
    ) -> None:
        self._ledger = ledger
        self._on_commit = on_commit
        self._on_recovery = on_recovery
        self._uncertain = False
        self._trouble = ""
        self._queue: queue.Queue[_Task | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._run, name="ledger-writer")
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Pieces of work that wait."""
        return self._queue.qsize()

    def submit(self, work: Callable[[Unit], T], block: bool = False) -> "Future[T]":
        """Queue a piece of work; its result comes after the commit. LedgerError where the queue is full.

        block: wait for room instead, for work that nobody would send again.
        """
        future: Future[Any] = Future()
        try:
            self._queue.put(_Task(work, future), block=block)
        except queue.Full:
            raise LedgerError(f"{self._queue.maxsize} batches wait to be written; try again", "busy") from None
        return cast("Future[T]", future)

    def trouble(self, wait_s: float = 1.0) -> str:
        """Why the ledger cannot be written; empty where it can. After a failure a small write finds out anew."""
        if self._trouble:
            try:
                self.submit(lambda unit: unit.count("write_probes")).result(wait_s)
            except (LedgerError, TimeoutError):
                return self._trouble
        return self._trouble

    def close(self) -> None:
        """Write what waits, then stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            tasks = [self._queue.get()]
            while len(tasks) < _GROUP and tasks[-1] is not None:
                try:
                    tasks.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            group = [task for task in tasks if task is not None]
            if group:
                self._write_or_fail(group)
            if tasks[-1] is None:
                return

    def _write_or_fail(self, group: list[_Task]) -> None:
        """Whatever happens, everybody who waits is answered and the thread lives: without it nothing is written again.

        What became durable all the same is found at the next commit, as after any other failure.
        """
        try:
            self._write(group)
        except Exception as error:
            log.exception("the ledger's writer failed on a group of %d", len(group))
            self._uncertain = True
            self._trouble = f"the ledger's writer failed: {error!r}"
            _fail([task for task in group if not task.future.done()], LedgerError(self._trouble))

    def _write(self, group: list[_Task]) -> bool:
        """Write a group; whether a transaction could be begun at all."""
        results: list[tuple[_Task, Any, Exception | None]] = []
        begun = False
        try:
            with self._ledger.transaction() as unit:
                begun = True
                for task in group:
                    results.append((task, *self._attempt(unit, task)))
        except LedgerError as error:
            self._uncertain = True
            if not self._trouble:
                log.warning("the ledger cannot be written: %s", error)
            self._trouble = str(error)
            if begun and len(group) > 1:
                self._write_each(group)
            else:
                _fail(group, error)
            return begun
        self._durable(unit)
        for task, value, failure in results:
            if failure is None:
                task.future.set_result(value)
            else:
                task.future.set_exception(failure)
        return True

    def _durable(self, unit: Unit) -> None:
        """Tell everybody of what is durable now."""
        if self._trouble:
            log.warning("the ledger is written again")
        self._trouble = ""
        if not self._uncertain:
            self._on_commit(unit)
        for call in unit.after_commit:
            call()
        if self._uncertain:  # after the calls, for what is read again holds what they would add
            self._uncertain = not self._recovered()

    def _recovered(self) -> bool:
        """Whether what is durable could be read again; tried after each commit until it can."""
        try:
            self._on_recovery()
        except LedgerError:
            return False
        return True

    def _write_each(self, group: list[_Task]) -> None:
        """One transaction a piece of work, until none can be begun: then the ledger is away, and not one piece odd."""
        for at, task in enumerate(group):
            if not self._write([task]):
                _fail(group[at + 1 :], LedgerError(self._trouble))
                return

    def _attempt(self, unit: Unit, task: _Task) -> tuple[Any, Exception | None]:
        try:
            with self._ledger.savepoint(unit):
                return task.work(unit), None
        except LedgerError:
            raise  # the database may have undone the whole transaction already, so nothing of it may go on
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the future, not to this thread
            return None, error


def _fail(group: list[_Task], error: LedgerError) -> None:
    for task in group:
        task.future.set_exception(error)
