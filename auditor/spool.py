"""Batches on disk for the time that the auditor is away. One file a batch, whole or not there at all.

Several clients, and clients started again, may share one folder: a file belongs to whoever holds its lock. Its name
says how many records it has and what its digest is; what is named in any other way is not the spool's.
"""

import fcntl
import hashlib
import itertools
import logging
import os
import re
import time
from collections.abc import Container, Iterator
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


class Spool:
    """A bounded folder of batches.

    folder: made when needed. limit_bytes: `put` says no beyond it.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._serial = itertools.count()
        self._open: set[FileIO] = set()  # locked, or about to be
        follow(self)
        folder.mkdir(parents=True, exist_ok=True)
        self._clear_drafts()

    def put(self, payload: bytes, records: int) -> bool:
        """Store a batch durably; False where the limit would be passed. OSError where the disk says no."""
        if len(payload) + sum(_size(path) for path in self._files()) > self._limit_bytes:
            return False
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
        return True

    def waiting(self) -> int:
        """Records on disk, by the counts in the file names."""
        return sum(_records_in(path) for path in self._files())

    def waits(self) -> tuple[int, int]:
        """Records on disk, and their bytes."""
        files = self._files()
        return sum(map(_records_in, files)), sum(map(_size, files))

    @contextmanager
    def claim_oldest(self, but: Container[Path] = ()) -> Iterator[Claimed | None]:
        """Hold the oldest batch that no other client holds and that is not in `but`; None where there is none."""
        for path in self._files():
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
                yield Claimed(path, payload, _records_in(path), _is_whole(path, payload))
                return
        yield None

    def forked(self) -> None:
        """In a child: let go of what the parent holds, which would stay locked as long as the child lives."""
        for file in self._open:
            file.close()
        self._open.clear()

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

    def _files(self) -> list[Path]:
        """The batches, the oldest first; none where the folder is gone."""
        try:
            return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))
        except FileNotFoundError:
            return []

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


def _is_whole(path: Path, payload: bytes) -> bool:
    match = _NAME.fullmatch(path.name)
    assert match, path
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


def _size(path: Path) -> int:
    """Bytes; none where another client, or another thread, has sent the batch meanwhile."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _records_in(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])
