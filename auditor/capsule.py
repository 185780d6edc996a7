"""A frozen sample: both sides' records, the reference's word and the judgement, in one small file.

    python -m auditor.capsule LEDGER RUN STEP SAMPLE --out FILE [--archive PLACE]

Records that have been retired are read from the archive, a folder or s3:// URL, and must be what the chain says.
A zip with `capsule.json` (format, names, judgement, sha256 of the rest), `rollout.pb`, `trainer.pb` (records as they
were reported) and, where the reference was asked, `reference.f32` (little-endian fp32 under the rollout's contract).
Weights are named by version and digest and are not inside.
"""

import argparse
import hashlib
import io
import json
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from auditor.codec import decode, encode
from auditor.command import end
from auditor.compare import Logprobs
from auditor.errors import AuditorError, NotFoundError, RecordError
from auditor.judge import Judgement
from auditor.object_store import StoreAccess
from auditor.records import SIDES, Record, RolloutRecord, SampleKey, Side, TrainerRecord
from auditor.retention import archived
from auditor.storage.database import open_database
from auditor.storage.reader import Reader

_FORMAT: Final = 1
# What zipfile, zlib, json and the codec raise on a file that somebody changed.
_BROKEN: Final = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    DecodeError,
    AttributeError,
    EOFError,
    KeyError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
_LIMIT: Final = 1 << 30  # bytes of one part, so that no crafted file fills the memory


Retired = Callable[[int, bytes], bytes | None]


def _nowhere(seq: int, digest: bytes) -> None:
    """Nothing that has been retired can be had."""


@dataclass(frozen=True, slots=True)
class Capsule:
    """One sample with its evidence. reference: float32 [R], None where it was not asked."""

    rollout: RolloutRecord
    trainer: TrainerRecord
    judgement: Judgement
    reference: Logprobs | None

    @property
    def key(self) -> SampleKey:
        """Which sample it is."""
        return self.rollout.key


def freeze(reader: Reader, key: SampleKey, retired: Retired = _nowhere) -> Capsule:
    """Take a sample out of the ledger; NotFoundError where one of its records is not there.

    retired: gives the content of an entry's record that the ledger holds no more, by its digest, or None.
    """
    rollout, trainer = (_record(reader, key, side, retired) for side in SIDES)
    row = reader.sample(key)
    if not (isinstance(rollout, RolloutRecord) and isinstance(trainer, TrainerRecord)):
        said = f"the ledger does not hold both records of sample {key.sample_id!r}, step {key.step}"
        raise NotFoundError(f"{said}; what was retired is in the archive, if there is one")
    return Capsule(rollout, trainer, row.judgement, reader.reference(key))


def _record(reader: Reader, key: SampleKey, side: Side, retired: Retired) -> Record | None:
    held, entry = reader.record(key, side), reader.entry(key, side)
    content = retired(*entry) if held is None and entry is not None else None
    return held if content is None else decode(content)


def to_bytes(capsule: Capsule) -> bytes:
    """The file's content; the same capsule gives the same bytes."""
    parts = {"rollout.pb": encode(capsule.rollout), "trainer.pb": encode(capsule.trainer)}
    if capsule.reference is not None:
        parts["reference.f32"] = capsule.reference.astype("<f4").tobytes()
    head = {
        "format": _FORMAT,
        **capsule.key._asdict(),
        "judgement": capsule.judgement.to_json(),
        "sha256": {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()},
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in {"capsule.json": json.dumps(head, indent=1, sort_keys=True).encode(), **parts}.items():
            archive.writestr(zipfile.ZipInfo(name), part, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def from_bytes(content: bytes) -> Capsule:
    """The capsule in a file's content; RecordError where it is none or was changed."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            head = json.loads(_part(archive, "capsule.json"))
            if head["format"] != _FORMAT:
                raise RecordError(f"capsule format {head['format']}; this program reads {_FORMAT}")
            parts = {name: _part(archive, name) for name in head["sha256"]}
        for name, part in parts.items():
            if hashlib.sha256(part).hexdigest() != head["sha256"][name]:
                raise RecordError(f"{name} of the capsule is not the one that was frozen")
        rollout, trainer = decode(parts["rollout.pb"]), decode(parts["trainer.pb"])
        judgement = Judgement.from_json(head["judgement"])
    except _BROKEN as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"this is no capsule: {' '.join(str(error).split())}") from None
    if not (isinstance(rollout, RolloutRecord) and isinstance(trainer, TrainerRecord)):
        raise RecordError("the capsule's records are not one of each side")
    raw = parts.get("reference.f32")
    if raw is not None and len(raw) != 4 * rollout.response_len:
        raise RecordError(f"reference.f32 of the capsule has {len(raw)} bytes, not 4 for each response token")
    return Capsule(rollout, trainer, judgement, None if raw is None else np.frombuffer(raw, "<f4").astype(np.float32))


def read_capsule(path: Path) -> Capsule:
    """The capsule in a file; RecordError names the file."""
    try:
        return from_bytes(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def _part(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _LIMIT:
        raise RecordError(f"{name} of the capsule is larger than {_LIMIT} bytes")
    return archive.read(name)


def main(arguments: list[str]) -> int:
    """Freeze one sample; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m auditor.capsule", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ledger", help="file of the ledger, or a postgresql:// URL")
    parser.add_argument("run", help="its run_id")
    parser.add_argument("step", type=int, help="its step, from 0")
    parser.add_argument("sample", help="its sample_id, as the page, the API and the alert name it")
    parser.add_argument("--archive", default="", metavar="PLACE", help="where evidence is that has been retired")
    parser.add_argument("--store-endpoint", default="", help="URL of an S3 service that is not Amazon's")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the capsule goes")
    given: Any = parser.parse_args(arguments)
    try:
        if not 0 <= given.step <= 2**53:
            raise NotFoundError(f"step {given.step}: steps lie in 0..2**53")
        reader = Reader(lambda: open_database(given.ledger, writer=False))
        retired = partial(archived, given.archive, StoreAccess(given.store_endpoint)) if given.archive else _nowhere
        content = to_bytes(freeze(reader, SampleKey(given.run, given.step, given.sample), retired))
        given.out.write_bytes(content)
    except (AuditorError, OSError) as error:
        print(f"capsule: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: {len(content)} bytes")
    return 0


if __name__ == "__main__":
    end("capsule", main)
