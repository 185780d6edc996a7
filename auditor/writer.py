"""One thread writes the ledger; what waits for it is written together, and answered after it is durable."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from auditor.errors import LedgerError
from auditor.storage.ledger import Counts, Ledger, Unit

T = TypeVar("T")
_GROUP = 64


@dataclass(frozen=True, slots=True)
class _Task:
    work: Callable[[Unit], Any]
    future: Future[Any]


class Writer:
    """Runs pieces of work inside transactions of the ledger, several a transaction, each undone alone where it raises.

    on_commit: given the counters that became durable. on_recovery: called at the first commit after a failed one, which
    may have become durable although it failed. capacity: work that may wait before `submit` says no.
    """

    def __init__(
        self, ledger: Ledger, on_commit: Callable[[Counts], None], on_recovery: Callable[[], None], capacity: int
    ) -> None:
        self._ledger = ledger
        self._on_commit = on_commit
        self._on_recovery = on_recovery
        self._uncertain = False
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
                self._write(group)
            if tasks[-1] is None:
                return

    def _write(self, group: list[_Task]) -> None:
        results: list[tuple[_Task, Any, Exception | None]] = []
        try:
            with self._ledger.transaction() as unit:
                for task in group:
                    results.append((task, *self._attempt(unit, task)))
        except LedgerError as error:
            self._uncertain = True
            for task in group:
                task.future.set_exception(error)
            return
        if self._uncertain:
            self._on_recovery()
            self._uncertain = False
        else:
            self._on_commit(unit.counts)
        for call in unit.after_commit:
            call()
        for task, value, failure in results:
            if failure is None:
                task.future.set_result(value)
            else:
                task.future.set_exception(failure)

    def _attempt(self, unit: Unit, task: _Task) -> tuple[Any, Exception | None]:
        try:
            with self._ledger.savepoint(unit):
                return task.work(unit), None
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the future, not to this thread
            return None, error
