"""What is kept in memory of samples that wait for their other side takes what it may, whatever a record holds."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from auditor.codec import decode, encode
from auditor.ingest.limits import Limits, admit_batch
from auditor.judge import pending
from auditor.pipeline import Refused
from auditor.proto import audit_pb2 as pb
from auditor.records import Layout, Positions, Record, SampleKey
from auditor.storage.halves import Halves, Held
from tests.auditor.samples import pair

LIMIT = 4 << 20


def with_positions(record: Record) -> Record:
    ids = np.arange(200_000, dtype=np.uint32)
    trainer = replace(record, token_count=len(ids), tokens=None, prompt_len=len(ids) - record.response_len)
    return replace(trainer, positions=Positions("00" * 32, ids=ids, first_keys=np.zeros_like(ids)))


def with_shards(record: Record) -> Record:
    return replace(record, layout=Layout(1, 1, 5000, 5000, tuple(range(4097))))


def with_digests(record: Record) -> Record:
    return replace(record, layer_digests=tuple(f"{i:064x}" for i in range(1024)))


@pytest.mark.parametrize("make", [with_positions, with_shards, with_digests, lambda record: record])
def test_memory_is_what_the_limit_says_whatever_a_record_holds(make) -> None:  # type: ignore[no-untyped-def]
    payload = encode(make(pair("0")[1]))
    halves = Halves(LIMIT)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(3000):
            if len(halves) < number:
                break
            record = decode(payload)
            halves.keep(
                SampleKey("r", 0, str(number)), "trainer", Held(b"", payload, record), pending("rollout", 1), 0.0
            )
        assert tracemalloc.get_traced_memory()[0] - before <= LIMIT + (1 << 20)
    finally:
        tracemalloc.stop()
    assert 1 <= len(halves) < 3000


def test_what_is_kept_longest_stays_until_it_has_waited_long() -> None:
    record = pair("0")[0]
    held, waits = Held(b"", encode(record), record), pending("trainer", 1)
    halves, keys = Halves(12_000), [SampleKey("r", 0, str(number)) for number in range(4)]
    for now, key in enumerate(keys[:3]):
        halves.keep(key, "rollout", held, waits, float(now))
    assert [halves.held(key) is not None for key in keys[:3]] == [True, True, False]
    halves.keep(keys[3], "rollout", held, waits, 601.0)
    assert [halves.held(key) is not None for key in keys] == [False, True, False, True]


@pytest.mark.parametrize("fill", [
    lambda c, i: setattr(c.environment, "arch", chr(97 + i) * 1_000_000),
    lambda c, i: c.layout.vocab_shards.extend([i] * 1_000_000),
])  # fmt: skip
def test_what_was_refused_leaves_nothing_in_memory(fill) -> None:  # type: ignore[no-untyped-def]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(20):
            message = pb.Record.FromString(encode(pair("0")[0]))
            fill(message.rollout.common, number)
            (item,) = admit_batch(pb.Batch(records=[message]), Limits())
            assert isinstance(item, Refused)
            assert item.code == "too_large"
        del message, item
        assert tracemalloc.get_traced_memory()[0] - before < 2_000_000
    finally:
        tracemalloc.stop()
