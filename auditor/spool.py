"""Batches on disk for the time that the auditor is away. One file a batch, whole or not there at all.

Several clients, and clients started again, may share one folder: a file belongs to whoever holds its lock. Its name
says how many records it has and what its digest is; what is named in any other way is not the spool's.
"""

import fcntl
import hashlib
import itertools
import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from auditor.forks import follow

log = logging.getLogger(__name__)
_SUFFIX = ".batch"
# time, process, number, records, and the start of the sha256
_NAME = re.compile(r"\d+-\d+-\d+-(\d+)-([0-9a-f]{16})\.batch")
_DRAFT = re.compile(rf"\.{_NAME.pattern}\.part")
_DRAFT_OLD_S = 60.0
_SHARERS = 64
_BELIEVED = 20.0


@dataclass(frozen=True, slots=True)
class Claimed:
    """A spooled batch that nobody else can take while it is claimed. whole: its content is what was stored."""

    path: Path
    payload: bytes
    records: int
    whole: bool

    def remove(self) -> None:
        """Forget the batch: it is durable elsewhere."""
        self.path.unlink(missing_ok=True)

    def set_aside(self) -> None:
        """Keep the file for a person, under a name that is not sent again."""
        self.path.rename(self.path.with_suffix(".bad"))


class _Room:
    """What may be put into a folder. Thread-safe.

    It is not looked at for every batch: a look takes the longer the more lies there, is believed for twenty times as
    long, and is good for a 64th of what it finds free; where it finds too little, for a no. taken: looks; bytes.
    """

    def __init__(self, limit_bytes: int, taken: Callable[[], int]) -> None:
        self._limit_bytes, self._taken = limit_bytes, taken
        self.forked()

    def forked(self) -> None:
        """Nothing is known, nor being written, in a child."""
        self._lock = threading.Lock()
        self._writing = self._free = self._granted = 0
        self._until = -math.inf

    def takes(self, size: int) -> bool:
        """Whether so many bytes find room, which is theirs then until they are `written`."""
        with self._lock:
            if time.monotonic() >= self._until or self._granted < size <= self._free:
                self._look(size)
            if size > self._granted:
                return False
            self._granted -= size
            self._writing += size
            return True

    def written(self, size: int) -> None:
        """They are on disk, where a look finds them, or failed."""
        with self._lock:
            self._writing -= size

    def _look(self, size: int) -> None:
        began = time.monotonic()
        self._free = self._limit_bytes - self._taken() - self._writing
        self._granted = max(size, self._free // _SHARERS) if size <= self._free else 0
        self._until = time.monotonic() + _BELIEVED * (time.monotonic() - began)


class Spool:
    """A bounded folder of batches.

    folder: made when needed. limit_bytes: `put` says no beyond it. One process keeps to it; of several that put at
    once, each may pass it by a batch, or by a 64th of what it found free when it last looked.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self._serial = itertools.count()
        self._open: set[FileIO] = set()  # locked, or about to be
        self._ahead: deque[str] = deque()  # what the last look found and nobody has claimed, the oldest first
        self._room = _Room(limit_bytes, self._bytes)
        follow(self)
        folder.mkdir(parents=True, exist_ok=True)
        self._clear_drafts()

    def put(self, payload: bytes, records: int) -> bool:
        """Store a batch durably; False where the limit would be passed. OSError where the disk says no."""
        if not self._room.takes(len(payload)):
            return False
        try:
            self._write(payload, records)
        finally:
            self._room.written(len(payload))
        return True

    def _write(self, payload: bytes, records: int) -> None:
        name = f"{time.time_ns():020d}-{os.getpid()}-{next(self._serial)}-{records}-{_mark(payload)}{_SUFFIX}"
        draft = self.folder / f".{name}.part"
        self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have tidied it away
        try:
            with self._held(FileIO(draft, "w")) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # its writer lives
                _write(file, payload)
                os.fsync(file.fileno())
                draft.rename(self.folder / name)
            self._sync()
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def waiting(self) -> int:
        """Records on disk, by the counts in the file names."""
        return sum(_records_in(entry.name) for entry in self._batches())

    def waits(self) -> tuple[int, int]:
        """Records on disk, and their bytes."""
        batches = [(_records_in(entry.name), _size(entry)) for entry in self._batches()]
        return sum(records for records, _ in batches), sum(size for _, size in batches)

    @contextmanager
    def claim_oldest(self, but: Container[Path] = ()) -> Iterator[Claimed | None]:
        """Hold the oldest batch that no other client holds and that is not in `but`; None where there is none."""
        for path in self._in_turn():
            if path in but:
                continue
            try:
                file = FileIO(path)
            except OSError:
                continue  # sent meanwhile, or not to be read by this user: it stays, and is counted as waiting
            with self._held(file):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    payload = file.read()
                except OSError:
                    continue
                if os.fstat(file.fileno()).st_nlink == 0:
                    continue
                try:
                    yield Claimed(path, payload, _records_in(path.name), _is_whole(path.name, payload))
                finally:
                    if path.exists():
                        self._ahead.appendleft(path.name)
                return
        yield None

    def forked(self) -> None:
        """In a child: let go of what the parent holds, which would stay locked as long as the child lives."""
        for file in self._open:
            file.close()
        self._open.clear()
        self._ahead.clear()
        self._room.forked()

    @contextmanager
    def _held(self, file: FileIO) -> Iterator[FileIO]:
        """Close it at the end, in a child that is forked off meanwhile too.

        A child of the moment before it is noted here has it open as long as it lives.
        """
        self._open.add(file)
        try:
            yield file
        finally:
            self._open.discard(file)
            if not file.closed:
                _let_go(file)

    def _in_turn(self) -> Iterator[Path]:
        """The batches, the oldest first. All that a look at the folder finds has its turn before the next look."""
        for again in (True, False):
            while self._ahead:
                yield self.folder / self._ahead.popleft()
            if again:
                self._ahead.extend(sorted(entry.name for entry in self._batches()))

    def _batches(self) -> list[os.DirEntry[str]]:
        """In any order; none where the folder is gone."""
        try:
            with os.scandir(self.folder) as entries:
                return [entry for entry in entries if _NAME.fullmatch(entry.name)]
        except FileNotFoundError:
            return []

    def _bytes(self) -> int:
        return sum(map(_size, self._batches()))

    def _sync(self) -> None:
        """Make the names durable too."""
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _clear_drafts(self) -> None:
        """What a process that died was writing is cut short, and was never counted as stored."""
        for path in self.folder.iterdir():
            match = _DRAFT.fullmatch(path.name)
            if match and _is_abandoned(path):
                log.warning("%s was left by a process that died while it stored %s records", path, match[1])
                path.unlink(missing_ok=True)


def _write(file: FileIO, payload: bytes) -> None:
    """All of it. Not through a buffer, which a child that is forked off meanwhile would write once more."""
    rest = memoryview(payload)
    while rest:
        rest = rest[file.write(rest) :]


def _let_go(file: FileIO) -> None:
    """Close it, and unlock it first: closing alone leaves the lock to whoever was forked off meanwhile."""
    try:
        fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        file.close()


def _mark(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()[:16]


def _is_whole(name: str, payload: bytes) -> bool:
    match = _NAME.fullmatch(name)
    assert match, name
    return match[2] == _mark(payload)


def _is_abandoned(draft: Path) -> bool:
    """Old, and nobody holds it; the age is for the moment between making it and taking its lock."""
    try:
        file = FileIO(draft)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return time.time() - os.fstat(file.fileno()).st_mtime > _DRAFT_OLD_S
        finally:
            _let_go(file)
    except OSError:
        return False


def _size(batch: os.DirEntry[str]) -> int:
    """Bytes; none where another client, or another thread, has sent the batch meanwhile."""
    try:
        return batch.stat().st_size
    except OSError:
        return 0


def _records_in(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match, name
    return int(match[1])
