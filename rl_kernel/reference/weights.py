"""Weights on disk: safetensors mapped into memory, and the digest that names them everywhere.

The digest is sha256 over the tensors in ascending order of their Hugging Face names; for each, the line
`name dtype dim,dim\\n` in UTF-8 and then the bytes. With tied embeddings `lm_head.weight` does not count: whether a
file repeats it changes nothing.
"""

import hashlib
import json
import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_kernel.errors import ModelError, WeightDigestError

_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
_MAX_HEADER: Final = 100_000_000  # the limit of the safetensors format

Array = npt.NDArray[Any]


def map_weights(folder: Path) -> dict[str, tuple[str, Array]]:
    """Map every tensor of `folder`/*.safetensors: name → (safetensors dtype, array). BF16 comes as uint16 bits."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors file; expected a Hugging Face model folder")
    tensors: dict[str, tuple[str, Array]] = {}
    for file in files:
        for name, tensor in _map_file(file).items():
            if name in tensors:
                raise ModelError(f"{file}: tensor {name!r} is in another file of {folder} too")
            tensors[name] = tensor
    return tensors


def digest_tensors(tensors: Iterable[tuple[str, str, Array]], *, tied: bool) -> str:
    """Digest (name, safetensors dtype, array) triples in any order, from a file or from an engine's own memory."""
    digest = hashlib.sha256()
    for name, dtype, array in sorted(tensors, key=lambda item: item[0]):
        if tied and name == "lm_head.weight":
            continue
        digest.update(f"{name} {dtype} {','.join(map(str, array.shape))}\n".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def weight_digest(folder: Path) -> str:
    """Digest of a Hugging Face model folder."""
    config = read_json(folder / "config.json")
    tensors = map_weights(folder)
    triples = ((name, dtype, array) for name, (dtype, array) in tensors.items())
    return digest_tensors(triples, tied=bool(config.get("tie_word_embeddings", False)))


def check_weight_digest(folder: Path, announced: str) -> None:
    """Raise WeightDigestError unless the folder's bytes are the ones that were announced."""
    found = weight_digest(folder)
    if found != announced:
        raise WeightDigestError(f"{folder}: weight digest is {found}, announced was {announced}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; ModelError names the file when it is missing or is not one."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; expected a Hugging Face model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def _map_file(path: Path) -> Mapping[str, tuple[str, Array]]:
    mapped = _map_bytes(path)
    if len(mapped) < 8:
        raise ModelError(f"{path} is cut off: {len(mapped)} bytes")
    length = int.from_bytes(mapped[:8], "little")
    if length > min(_MAX_HEADER, len(mapped) - 8):
        raise ModelError(f"{path} is not a safetensors file, or it is cut off: its header claims {length} bytes")
    try:
        header = json.loads(mapped[8 : 8 + length], object_pairs_hook=_each_name_once)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _tensor(path, mapped, 8 + length, name, entry) for name, entry in entries.items()}
        _refuse_overlaps_and_holes(path, entries, len(mapped) - 8 - length)
        return tensors
    except ModelError:
        raise
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} has a malformed safetensors header: {error}") from None


def _map_bytes(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelError(f"{path} is empty") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def _each_name_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _tensor(path: Path, mapped: mmap.mmap, start: int, name: str, entry: Mapping[str, Any]) -> tuple[str, Array]:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ModelError(f"{path}: tensor {name!r} is {entry['dtype']}; there is a contract for {', '.join(_DTYPES)}")
    (first, last), shape = entry["data_offsets"], tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (first, last, *shape)):
        raise ModelError(f"{path} is malformed at tensor {name!r}: its shape and offsets must be whole numbers from 0")
    count = math.prod(shape)
    if last - first != count * dtype.itemsize or start + last > len(mapped):
        raise ModelError(f"{path} is cut off or malformed at tensor {name!r}")
    return entry["dtype"], np.frombuffer(mapped, dtype, count, start + first).reshape(shape)


def _refuse_overlaps_and_holes(path: Path, entries: Mapping[str, Mapping[str, Any]], size: int) -> None:
    """The format wants each byte behind the header to be of one tensor."""
    end, before = 0, ""
    for (first, last), name in sorted((tuple(entry["data_offsets"]), name) for name, entry in entries.items()):
        if first < end:
            raise ModelError(f"{path}: tensor {name!r} begins at byte {first}, inside tensor {before!r}")
        if first > end:
            raise ModelError(f"{path}: bytes {end} to {first}, before tensor {name!r}, are of no tensor")
        end, before = last, name
    if end < size:
        raise ModelError(f"{path}: {size - end} bytes after the last tensor are of no tensor")
