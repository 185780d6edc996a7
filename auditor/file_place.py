"""A folder or an object store that takes whole files, durably, and gives them back."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from auditor.errors import ArchiveError, ConfigError
from auditor.object_store import StoreAccess, is_url, open_place


class FilePlace:
    """setting: its name, for messages. place: a folder, made where it is missing, or a URL (s3://bucket/prefix).

    ConfigError: it cannot be had.
    """

    def __init__(self, setting: str, place: str, access: StoreAccess) -> None:
        self._setting = setting
        self._files, self._root = open_place(setting, place, access)
        self._local = not is_url(place)
        try:
            self._files.create_dir(self._root, recursive=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting} {place}: {one_line(error)}") from None

    def put(self, name: str, content: bytes) -> None:
        """Store a file, whole or not at all; ArchiveError where that failed."""
        try:
            if self._local:
                _write_whole(Path(self._root) / name, content)
            else:
                # An object appears when its stream is closed, after the store has taken all of it.
                with self._files.open_output_stream(f"{self._root}/{name}") as stream:
                    stream.write(content)
        except (OSError, ValueError) as error:
            raise ArchiveError(f"{self._setting} {self._root}: {one_line(error)}") from None


def tables_in(
    setting: str,
    place: str,
    access: StoreAccess,
    wanted: Callable[[str], bool],
    columns: list[str] | None = None,
    filters: list[tuple[str, str, Any]] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Name and pyarrow table of every Parquet file at a place whose name is wanted, in the order of their names.

    columns, filters: as pyarrow takes them; None: everything. ArchiveError where the place or a file cannot be read.
    """
    files, root = open_place(setting, place, access)
    from pyarrow import fs, parquet  # noqa: PLC0415 - an extra of its own

    at = root
    try:
        for info in sorted(files.get_file_info(fs.FileSelector(root)), key=lambda info: str(info.base_name)):
            if info.is_file and wanted(info.base_name):
                at = info.path
                with files.open_input_file(info.path) as stream:
                    table = parquet.read_table(stream, columns=columns, filters=filters)
                yield info.base_name, table
    except (OSError, ValueError) as error:
        raise ArchiveError(f"{setting} {at}: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    """What an error of a store says, which may be of many lines."""
    return " ".join(str(error).split())


def _write_whole(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.part")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
