"""One process at a time: a lock that names its holder, and that a process lets go of however it ends."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.errors import CheckpointError


@contextmanager
def held(file: Path, what: str, place: Path, advice: str = "") -> Iterator[None]:
    """Hold `file` for this process, which works on the run in the folder `place`.

    Where another one holds it, CheckpointError: `what` is in use, by whom, and `advice`.
    """
    with file.open("a+", encoding="utf-8") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            opened.seek(0)
            holder = opened.read().strip() or "another process"
            raise CheckpointError(f"{what} is in use by {holder}{advice}") from None
        opened.truncate(0)
        opened.write(f"pid {os.getpid()} on {socket.gethostname()} for {place}\n")
        opened.flush()
        yield
