"""On the disk, so that no power cut takes it back: bytes before the name, and both before what relies on them."""

import os
from pathlib import Path


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
        draft.write_text(text, encoding="utf-8")
        sync(draft)
        draft.rename(file)
    finally:
        draft.unlink(missing_ok=True)
    sync(file.parent)
