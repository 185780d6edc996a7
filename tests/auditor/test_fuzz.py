"""Bytes that nobody meant: no crash, no hang, no memory that grows, and nothing half-stored."""

import resource
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from auditor.capsule import Capsule, from_bytes, to_bytes
from auditor.codec import to_wire
from auditor.errors import RecordError
from auditor.export.board import Board
from auditor.ingest.limits import Limits, admit_batch
from auditor.judge import judge_pair
from auditor.pipeline import Incoming, Pipeline, Refused
from auditor.proto import audit_pb2 as pb
from auditor.sampling import Rate
from auditor.storage.chain import verify
from auditor.storage.database import open_database
from auditor.storage.ledger import Ledger
from tests.auditor.samples import CONTRACTS, one_ulp_off, pair


def mutated(content: bytes, random: np.random.Generator) -> bytes:
    """A few bytes flipped, cut out, doubled or put in."""
    data = bytearray(content)
    if random.random() < 0.6:  # lengths stay right, so that most of these get past the protobuf parser
        for at in random.integers(0, len(data), int(random.integers(1, 4))):
            data[at] ^= 1 << int(random.integers(0, 8))
        return bytes(data)
    for _ in range(int(random.integers(1, 6))):
        at = int(random.integers(0, max(1, len(data))))
        match int(random.integers(0, 5)):
            case 0 if data:
                data[at] ^= 1 << int(random.integers(0, 8))
            case 1:
                del data[at : at + int(random.integers(1, 40))]
            case 2:
                data[at:at] = data[at : at + int(random.integers(1, 40))]
            case 3:
                data[at:at] = random.bytes(int(random.integers(1, 12)))
            case _:
                del data[at:]
    return bytes(data)


def fuzz(rounds: int, folder: Path) -> tuple[int, int, int]:
    """How many inputs were no message, were refused, were taken."""
    random = np.random.default_rng(rounds)
    rollout, trainer = pair()
    seeds = [
        pb.Batch(records=[to_wire(record) for record in records]).SerializeToString()
        for records in ((rollout, trainer), (one_ulp_off(rollout),), (trainer,))
    ]
    ledger = Ledger(open_database(str(folder / "ledger.db"), writer=True))
    flow = Pipeline(CONTRACTS, Rate(0), Board(), None)
    garbage = refused = taken = 0
    for i in range(rounds):
        raw = mutated(seeds[i % len(seeds)], random)
        try:
            items = admit_batch(pb.Batch.FromString(raw), Limits())
        except DecodeError:
            garbage += 1
            continue
        refused += sum(isinstance(item, Refused) for item in items)
        # Most of what still holds together is the seed under another name; a few go all the way.
        if i % 50 == 0:
            with ledger.transaction() as unit:
                receipts = flow.receive(unit, items)
            assert len(receipts) == len(items)
        taken += sum(isinstance(item, Incoming) for item in items)
    ledger.close()
    verify(open_database(str(folder / "ledger.db"), writer=False))
    return garbage, refused, taken


def test_five_thousand_mutated_messages_are_refused_or_taken_whole(tmp_path: Path) -> None:
    garbage, refused, taken = fuzz(5000, tmp_path)
    assert min(garbage, refused, taken) > 100


@pytest.mark.slow
def test_a_hundred_thousand_mutated_messages_leave_the_memory_as_it_was(tmp_path: Path) -> None:
    fuzz(5000, tmp_path)
    (tmp_path / "ledger.db").unlink()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fuzz(100_000, tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_mutated_capsules_are_refused_or_whole() -> None:
    random = np.random.default_rng(5)
    rollout, trainer = pair()
    content = to_bytes(Capsule(rollout, trainer, judge_pair(rollout, trainer, CONTRACTS).judgement, rollout.logprobs))
    refused = 0
    for _ in range(2000):
        try:
            back = from_bytes(mutated(content, random))
        except RecordError:
            refused += 1
            continue
        assert back.rollout.logprobs.tobytes() == rollout.logprobs.tobytes()
    assert refused > 1000
