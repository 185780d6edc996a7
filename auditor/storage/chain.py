"""The hash chain: each entry's hash covers the one before, so that no entry can be changed, removed or slipped in."""

import hashlib
from dataclasses import dataclass
from typing import Final

from auditor.errors import ChainError
from auditor.records import SampleKey
from auditor.storage.database import Database

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
    """Walk the whole chain and the content it is about; ChainError names the first entry that does not fit."""
    previous, seq, payloads = GENESIS, 0, 0
    while True:
        rows = database.all(
            "SELECT e.seq, e.kind, e.run_id, e.step, e.sample_id, e.digest, e.hash, r.payload, v.body, r.seq, r.digest"
            " FROM entries e LEFT JOIN records r ON r.seq = e.seq LEFT JOIN verdicts v ON v.seq = e.seq"
            " WHERE e.seq > ? ORDER BY e.seq LIMIT ?",
            (seq, _PAGE),
        )
        if not rows:
            _check_state(database)
            return Verified(seq, payloads, previous.hex())
        for row in rows:
            at, kind, run_id, step, sample_id, content, found, payload, body, record, record_digest = row
            key = SampleKey(run_id, step, sample_id)
            if at != seq + 1:
                raise ChainError(f"entry {seq + 1} is missing; the next one is {at}")
            if link(previous, at, kind, key, bytes(content)) != bytes(found):
                raise ChainError(f"entry {at} ({kind} of {key}) does not follow from the one before")
            if kind == "record" and (record is None or bytes(record_digest) != bytes(content)):
                raise ChainError(f"entry {at}: the record of {key} is missing or under another digest")
            if kind == "verdict" and body is None:
                raise ChainError(f"entry {at}: the verdict of {key} is missing")
            held = bytes(payload) if payload is not None else body.encode() if body is not None else None
            if held is not None:
                payloads += 1
                if digest(held) != bytes(content):
                    raise ChainError(f"entry {at}: the {kind} of {key} is not the one that was written")
            previous, seq = bytes(found), at


def _check_state(database: Database) -> None:
    """The present state of each judged sample must be its last verdict."""
    rows = database.all(
        "SELECT s.run_id, s.step, s.sample_id FROM samples s LEFT JOIN verdicts v"
        " ON v.run_id = s.run_id AND v.step = s.step AND v.sample_id = s.sample_id AND v.seq ="
        " (SELECT max(w.seq) FROM verdicts w WHERE w.run_id = s.run_id AND w.step = s.step"
        " AND w.sample_id = s.sample_id)"
        " WHERE s.verdict <> 'pending' AND (v.body IS NULL OR v.body <> s.body) LIMIT 1"
    )
    if rows:
        raise ChainError(f"the state of {SampleKey(*rows[0])} is not its last verdict")
