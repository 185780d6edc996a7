"""The hash chain: each entry's hash covers the one before, so that no entry can be changed, removed or slipped in."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError

from auditor.errors import ChainError
from auditor.proto import audit_pb2 as pb
from auditor.records import SampleKey
from auditor.storage.database import Database, require_current
from auditor.storage.state import check_state

GENESIS: Final = bytes(32)
_PAGE = 2000


def digest(content: bytes) -> bytes:
    """sha256 of a record's payload or a verdict's body."""
    return hashlib.sha256(content).digest()


def link(previous: bytes, seq: int, kind: str, key: SampleKey, content: bytes) -> bytes:
    """The hash of entry `seq`. content: the digest of what the entry is about."""
    head = f"{seq}\0{kind}\0{key.run_id}\0{key.step}\0{key.sample_id}\0".encode()
    return hashlib.sha256(previous + head + content).digest()


@dataclass(frozen=True, slots=True)
class Verified:
    """entries: how many follow from each other. head: hash of the last, in hex; write it down elsewhere to pin history.

    payloads: records whose content was there to check; the rest has been retired.
    """

    entries: int
    payloads: int
    head: str


def verify(database: Database) -> Verified:
    """Walk the whole chain, the content it is about and the state that follows; ChainError names what does not fit.
    ConfigError: the ledger is one of an older program, and has not been brought up to date.

    All of it as it is at one moment, for others may go on writing. A tail that was cut off cannot be told from here:
    compare the head with one that was written down elsewhere.
    """
    database.run(database.snapshot)
    try:
        require_current(database)
        found = _walk(database)
        check_state(database)
    finally:
        database.run("ROLLBACK")
    return found


def _walk(database: Database) -> Verified:
    previous, seq, payloads = GENESIS, 0, 0
    while True:
        rows = database.all(
            "SELECT e.seq, e.kind, e.run_id, e.step, e.sample_id, e.digest, e.hash,"
            " r.payload, r.digest, r.side, r.run_id, r.step, r.sample_id, v.body, v.run_id, v.step, v.sample_id"
            " FROM entries e LEFT JOIN records r ON r.seq = e.seq LEFT JOIN verdicts v ON v.seq = e.seq"
            " WHERE e.seq > ? ORDER BY e.seq LIMIT ?",
            (seq, _PAGE),
        )
        if not rows:
            return Verified(seq, payloads, previous.hex())
        for at, kind, run_id, step, sample_id, content, found, *held in rows:
            key = SampleKey(run_id, step, sample_id)
            if at != seq + 1:
                raise ChainError(f"entry {seq + 1} is missing; the next one is {at}")
            if link(previous, at, kind, key, bytes(content)) != bytes(found):
                raise ChainError(f"entry {at} ({kind} of {key}) does not follow from the one before")
            check = _check_record if kind == "record" else _check_verdict
            payloads += check(f"entry {at}", key, bytes(content), held)
            previous, seq = bytes(found), at


def _check_record(entry: str, key: SampleKey, content: bytes, held: Sequence[Any]) -> bool:
    """Whether there was content to check."""
    payload, found, side, *found_key = held[:6]
    if found is None or bytes(found) != content:
        raise ChainError(f"{entry}: the record of {key} is missing or under another digest")
    if payload is not None and digest(bytes(payload)) != content:
        raise ChainError(f"{entry}: the record of {key} is not the one that was written")
    if SampleKey(*found_key) != key or (payload is not None and _side(bytes(payload)) not in ("", side)):
        raise ChainError(f"{entry}: the record of {key} is listed under another sample or side")
    return payload is not None


def _check_verdict(entry: str, key: SampleKey, content: bytes, held: Sequence[Any]) -> bool:
    """Whether there was content to check."""
    body, *found_key = held[6:]
    if body is None:
        raise ChainError(f"{entry}: the verdict of {key} is missing")
    if digest(body.encode()) != content:
        raise ChainError(f"{entry}: the verdict of {key} is not the one that was written")
    if SampleKey(*found_key) != key:
        raise ChainError(f"{entry}: the verdict of {key} is listed under another sample")
    return True


def _side(payload: bytes) -> str:
    """The side that a record says it is of; empty where it says none."""
    try:
        return pb.Record.FromString(payload).WhichOneof("side") or ""
    except DecodeError:
        return ""
