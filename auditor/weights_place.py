"""Where the reference finds weights by version: a folder, or an object store of which each version is fetched once.

Both hold `v000001`, `v000002`, …, each with safetensors, `config.json` and `manifest.json`; a folder may hold those of
several jobs, each in a subfolder of its own. What is fetched lies in a
cache folder that all workers of a machine share, under its version and digest, and is mapped from there.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from auditor.errors import ConfigError, RecomputeError
from auditor.object_store import AMAZON, StoreAccess, is_url, open_place

_WANTED: Final = (".safetensors", ".json")
_CHUNK: Final = 8 << 20
_JUST_USED_S: Final = 60.0


class WeightsStore(Protocol):
    """Weights by version and digest."""

    def folder(self, version: int, digest: str) -> Path:
        """The folder of these weights on this machine; RecomputeError where they are not to be had.

        That its bytes have the digest is for the caller to check, who reads them anyway.
        """

    def of_version(self, version: int, near: Path | None = None) -> Path:
        """The folder of a version, whatever its digest. near: a folder of the same job."""

    def versions(self, near: Path | None = None) -> list[int]:
        """Every version there is, ascending. near: a folder of the job that is meant."""

    def reject(self, folder: Path) -> None:
        """The folder's files are not what they are said to be, or not whole: a copy is not kept."""


@dataclass(frozen=True, slots=True)
class WeightsPlace:
    """What a worker is told. root: folder or URL. cache, keep: for a URL, where copies lie and how many versions."""

    root: str
    cache: str = ""
    keep: int = 8
    access: StoreAccess = AMAZON

    def open(self) -> WeightsStore:
        """The store; ConfigError where it cannot be had."""
        return RemoteWeights(self) if is_url(self.root) else LocalWeights(Path(self.root))

    def to_json(self) -> str:
        """As text, for a worker's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "WeightsPlace":
        """The inverse of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "access": StoreAccess(**values["access"])})


class LocalWeights:
    """A folder of versions on this machine, or one that every machine sees."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, version: int, digest: str) -> Path:
        """The folder of that version whose manifest has the digest, or any other that has; else that version's."""
        named = self._root / _name(version)
        places = (f"{named.name}/", f"*/{named.name}/", "*/", "*/v*/")
        for manifest in (found for place in places for found in sorted(self._root.glob(place + "manifest.json"))):
            if _announced(manifest) == digest:
                return manifest.parent
        if (named / "config.json").is_file():
            return named
        raise RecomputeError(
            f"{named} does not exist, and no manifest under {self._root} names {digest}", "weights_missing"
        )

    def of_version(self, version: int, near: Path | None = None) -> Path:
        """The folder of a version."""
        return (near.parent if near else self._root) / _name(version)

    def versions(self, near: Path | None = None) -> list[int]:
        """Versions that have a folder."""
        folders = (near.parent if near else self._root).glob("v*")
        return sorted(int(folder.name[1:]) for folder in folders if folder.name[1:].isdigit())

    def reject(self, folder: Path) -> None:
        """It is not ours; it stays."""


class RemoteWeights:
    """Versions in an object store, each fetched into the cache by the first worker that needs it."""

    def __init__(self, place: WeightsPlace) -> None:
        if not place.cache:
            raise ConfigError(f"weights_root {place.root} is a URL and needs weights_cache, a folder for copies")
        self._files, self._root = open_place("weights_root", place.root, place.access)
        self._keep = place.keep
        self._cache = Path(place.cache)
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"weights_cache {self._cache}: {error.strerror}") from None

    def folder(self, version: int, digest: str) -> Path:
        """The cached copy, fetched where there is none."""
        return self._fetched(version, digest)

    def of_version(self, version: int, near: Path | None = None) -> Path:
        """The copy of a version under the digest that its manifest names."""
        return self._fetched(version, self._digest(version))

    def versions(self, near: Path | None = None) -> list[int]:
        """Versions under the root."""
        from pyarrow import fs  # noqa: PLC0415 - an extra of its own

        with _translated(self._root):
            found = self._files.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        names = [info.base_name for info in found]
        return sorted(int(name[1:]) for name in names if name[:1] == "v" and name[1:].isdigit())

    def reject(self, folder: Path) -> None:
        """Forget a copy, so that the next one to ask fetches it again."""
        shutil.rmtree(folder, ignore_errors=True)

    def _fetched(self, version: int, digest: str) -> Path:
        copy = self._cache / f"{_name(version)}-{digest[:16]}"
        # Somebody may have tidied the cache away, or filled its disk.
        with _translated(f"weights_cache {self._cache}"), _locked(self._cache / f".{copy.name}.lock"):
            if copy.is_dir():
                os.utime(copy)
                return copy
            announced = self._digest(version)
            if announced != digest:
                raise RecomputeError(
                    f"{self._root}/{_name(version)} holds weights {announced}, the record names {digest}",
                    "weights_digest",
                )
            draft = self._cache / f".{copy.name}.part"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            with _translated(f"{self._root}/{_name(version)}"):
                self._fetch(f"{self._root}/{_name(version)}", draft)
            draft.rename(copy)
        self._forget_oldest(copy)
        return copy

    def _digest(self, version: int) -> str:
        """By the manifest, which is published last: without one a version is not there yet."""
        path = f"{self._root}/{_name(version)}/manifest.json"
        try:
            with self._files.open_input_stream(path) as stream:
                return str(json.loads(stream.read())["weight_digest"])
        except FileNotFoundError:
            raise RecomputeError(f"{path} does not exist", "weights_missing") from None
        except OSError as error:
            raise RecomputeError(f"{path}: {' '.join(str(error).split())}", "weights_unreachable") from None
        except (ValueError, KeyError, TypeError) as error:
            raise RecomputeError(f"{path}: {' '.join(str(error).split())}", "weights_unreadable") from None

    def _fetch(self, source: str, draft: Path) -> None:
        from pyarrow import fs  # noqa: PLC0415 - an extra of its own

        for info in self._files.get_file_info(fs.FileSelector(source)):
            if not info.is_file or not info.base_name.endswith(_WANTED):
                continue
            with self._files.open_input_stream(info.path) as stream, (draft / info.base_name).open("wb") as file:
                while chunk := stream.read(_CHUNK):
                    file.write(chunk)

    def _forget_oldest(self, used: Path) -> None:
        """Keep the copies that were used last. One that a worker has mapped lives on for it after it is gone here."""
        copies = [folder for folder in self._cache.glob("v*-*") if folder.is_dir() and folder != used]
        for folder in sorted(copies, key=_last_used, reverse=True)[self._keep - 1 :]:
            # One that was asked for a moment ago may not be mapped yet.
            if time.time() - _last_used(folder) > _JUST_USED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _name(version: int) -> str:
    return f"v{version:06d}"


def _announced(manifest: Path) -> str | None:
    """The digest in a manifest; None where it cannot be read, as while it is pruned."""
    try:
        digest: str | None = json.loads(manifest.read_text("utf-8")).get("weight_digest")
    except (OSError, ValueError, AttributeError):
        return None
    return digest


def _last_used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One worker of this machine at a time; the lock goes with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _translated(place: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecomputeError(f"{place}: {' '.join(str(error).split())}", "weights_unreachable") from None
