"""Batches on disk for the time that the auditor is away. One file a batch, whole or not there at all.

Several clients, and clients started again, may share one folder: a file belongs to whoever holds its lock.
"""

import fcntl
import itertools
import os
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SUFFIX = ".batch"


@dataclass(frozen=True, slots=True)
class Claimed:
    """A spooled batch that nobody else can take while it is claimed."""

    path: Path
    payload: bytes
    records: int

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
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, payload: bytes, records: int) -> bool:
        """Store a batch durably; False where the limit would be passed. OSError where the disk says no."""
        if len(payload) + sum(_size(path) for path in self._files()) > self._limit_bytes:
            return False
        name = f"{time.time_ns():020d}-{os.getpid()}-{next(self._serial)}-{records}{_SUFFIX}"
        draft = self.folder / f".{name}.part"
        try:
            with draft.open("wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            draft.rename(self.folder / name)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        return True

    def waiting(self) -> int:
        """Records on disk, by the counts in the file names."""
        return sum(_records_in(path) for path in self._files())

    @contextmanager
    def claim_oldest(self, but: Container[Path] = ()) -> Iterator[Claimed | None]:
        """Hold the oldest batch that no other client holds and that is not in `but`; None where there is none."""
        for path in self._files():
            if path in but:
                continue
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue
            with file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                if os.fstat(file.fileno()).st_nlink == 0:
                    continue
                yield Claimed(path, file.read(), _records_in(path))
                return
        yield None

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.suffix == _SUFFIX and path.name[0] != ".")


def _size(path: Path) -> int:
    """Bytes; none where another client, or another thread, has sent the batch meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _records_in(path: Path) -> int:
    return int(path.stem.rsplit("-", 1)[1])
