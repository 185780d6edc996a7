"""Write a safetensors file tensor by tensor, so that a model is never in memory a second time.

Format: u64 length of the header, a JSON header padded with spaces to a multiple of 8 bytes, the tensors' bytes.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_kernel.reference.weights import Array

_BYTES = {"BF16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class Entry:
    """Name, safetensors dtype (`BF16`, `F32`) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def write_tensors(path: Path, entries: Sequence[Entry], arrays: Iterable[Array]) -> None:
    """Write `arrays`, one for each entry and in their order, and make the file durable."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + math.prod(entry.shape) * _BYTES[entry.dtype]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry, array in zip(entries, arrays, strict=True):
            assert array.shape == entry.shape
            file.write(array.reshape(-1).data)
        file.flush()
        os.fsync(file.fileno())
