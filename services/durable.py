"""On the disk, so that no power cut takes it back: bytes before the name, and both before what relies on them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Put the file's name into an OSError that has none: a full disk is told to a `write`, which knows no names."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """`sync` for every file in a folder, then for the folder; not for folders in it."""
    for file in folder.iterdir():
        if not file.is_dir():
            sync(file)
    sync(folder)


def replace_text(file: Path, text: str) -> None:
    """Give `file` another content: the old or the new is there at any time, and the new when this returns."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with naming(file):
            draft.write_text(text, encoding="utf-8")
            sync(draft)
        draft.rename(file)
    finally:
        draft.unlink(missing_ok=True)
    sync(file.parent)
