"""Messages between the auditor and its recompute workers: a JSON header and raw bytes over a pipe, never a pickle."""

import json
import struct
from typing import Any, BinaryIO

_HEAD = struct.Struct("<II")


def write_frame(stream: BinaryIO, header: dict[str, Any], body: bytes = b"") -> None:
    """Write one message and push it out."""
    text = json.dumps(header).encode()
    stream.write(_HEAD.pack(len(text), len(body)) + text + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """Read one message; EOFError where the other end is gone."""
    header, body = _HEAD.unpack(_exactly(stream, _HEAD.size))
    value = json.loads(_exactly(stream, header))
    assert isinstance(value, dict)
    return value, _exactly(stream, body)


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError(f"the pipe ended after {len(data)} of {size} bytes")
    return data
