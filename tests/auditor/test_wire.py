"""Records survive the wire bit by bit, and the committed stubs are what audit.proto gives."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from auditor import codec
from auditor.errors import RecordError
from auditor.ingest.limits import Limits, admit_batch
from auditor.pipeline import Incoming, Refused
from auditor.proto import audit_pb2 as pb
from auditor.proto.generate import stale
from auditor.records import Sampling
from tests.auditor.samples import pair


def test_committed_stubs_are_fresh() -> None:
    assert stale() == []


@given(st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32))
def test_every_bit_pattern_of_a_logprob_survives(bits: list[int]) -> None:
    rollout, trainer = pair()
    values = np.array(bits, np.uint32).view(np.float32)
    for record in (replace(rollout, logprobs=values), replace(trainer, logprobs=values)):
        back = codec.decode(codec.encode(record))
        assert back.logprobs.view(np.uint32).tolist() == bits


def test_every_field_survives() -> None:
    experts = np.arange(80, dtype=np.uint16).reshape(40, 2)
    for plain in pair():
        record = replace(plain, layer_digests=("ab" * 32,), routed_experts=experts)
        back = codec.decode(codec.encode(record))
        for name in record.__dataclass_fields__:
            ours, theirs = getattr(record, name), getattr(back, name)
            assert np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else ours == theirs, name


def test_what_is_unknown_stays_unknown() -> None:
    rollout, _ = pair()
    back = codec.decode(codec.encode(replace(rollout, weight_version=-1, sampling=Sampling(seed=None))))
    assert back.weight_version == -1
    assert back.sampling.seed is None


def test_the_packed_field_is_what_protobuf_itself_writes() -> None:
    rollout, _ = pair()
    written = codec.to_wire(rollout).rollout
    by_protobuf = pb.RolloutRecord()
    by_protobuf.CopyFrom(written)
    del by_protobuf.tokens[:]
    by_protobuf.tokens.extend(rollout.tokens.tolist())
    assert by_protobuf.SerializeToString(deterministic=True) == written.SerializeToString(deterministic=True)


def test_a_buffer_that_the_caller_reuses_changes_no_record() -> None:
    rollout, _ = pair()
    buffer = rollout.logprobs.copy()
    record = replace(rollout, logprobs=buffer)
    buffer[:] = 0
    assert np.array_equal(record.logprobs, rollout.logprobs)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"logprobs": np.zeros(3, np.float32)}, "logprobs has 3 values"),
        ({"logprobs": np.zeros(32)}, "logprobs is float64"),
        ({"mask": np.ones(31, np.bool_)}, "mask has 31 values"),
        ({"tokens": np.array([-1] * 40)}, "tokens holds -1"),
        ({"tokens": np.zeros((2, 20), np.uint32)}, "tokens has shape"),
        ({"prompt_len": 41}, "prompt_len is 41"),
        ({"step": -1}, "step is -1"),
        ({"tokens": None}, "tokens has shape"),
        ({"logprobs": [[1.0], [2.0, 3.0]]}, "logprobs is no array"),
        ({"sampling": None}, "sampling is a NoneType; it must be a Sampling"),
        ({"layout": {"tp_size": 1}}, "layout is a dict; it must be a Layout"),
    ],
)
def test_a_record_that_does_not_hold_together_names_the_field(change: dict[str, object], named: str) -> None:
    rollout, _ = pair()
    with pytest.raises(RecordError, match=named):
        replace(rollout, **change)


def test_a_trainers_digest_must_be_that_of_its_tokens() -> None:
    _, trainer = pair()
    with pytest.raises(RecordError, match="is not that of the tokens"):
        replace(trainer, tokens_digest="00" * 32)


def _admit_one(message: pb.Record, limits: Limits | None = None) -> Incoming | Refused:
    (item,) = admit_batch(pb.Batch(records=[message]), limits or Limits())
    return item


def _with_tokens_digest(digest: str) -> pb.Record:
    message = codec.to_wire(replace(pair()[1], tokens=None))
    message.trainer.tokens_digest = digest
    return message


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda m: m.rollout.common.ClearField("loss_mask"), "malformed"),
        (lambda m: setattr(m.rollout.common.positions, "offset", 2**63 - 1), "malformed"),
        (
            lambda m: m.rollout.common.routed_experts.MergeFrom(pb.RoutedExperts(columns=1, experts=b"12" * 3)),
            "malformed",
        ),
        (lambda m: setattr(m.rollout.common, "run_id", "a b"), "bad_name"),
        (lambda m: setattr(m.rollout.common, "run_id", ""), "bad_name"),
        (lambda m: setattr(m.rollout.common, "run_id", ".."), "bad_name"),
        (lambda m: setattr(m.rollout.common, "sample_id", "."), "bad_name"),
        (lambda m: setattr(m.rollout.common, "sample_id", "x" * 129), "bad_name"),
        (lambda m: setattr(m.rollout.common, "weight_digest", "zz"), "bad_digest"),
        (lambda m: m.CopyFrom(_with_tokens_digest("no digest " * 9)), "bad_digest"),
        (lambda m: setattr(m.rollout.common.sampling, "temperature", 0.0), "bad_sampling"),
        (lambda m: setattr(m.rollout.common.sampling, "temperature", float("nan")), "bad_sampling"),
        (lambda m: setattr(m.rollout.common.sampling, "top_p", 0.0), "bad_sampling"),
        (lambda m: setattr(m.rollout.common, "step", 2**60), "bad_step"),
        (lambda m: setattr(m.rollout.common, "weight_version", 2**63), "bad_version"),
        (lambda m: setattr(m.rollout.common, "prompt_len", 4_000_000_000), "malformed"),
        (lambda m: m.ClearField("rollout"), "malformed"),
        (lambda m: setattr(m.rollout.common.positions, "attention", "x" * 1000), "too_large"),
        (lambda m: m.rollout.common.environment.versions.extend(f"p{n:02} 1" for n in range(65)), "too_large"),
        (lambda m: m.rollout.common.environment.versions.append("x" * 127 + " 1"), "too_large"),
        (lambda m: m.rollout.common.environment.versions.extend(["b 1", "a 1"]), "malformed"),
        (lambda m: m.rollout.common.environment.versions.append("torch"), "malformed"),
    ],
)
def test_a_bad_message_is_refused_with_its_code(change: object, code: str) -> None:
    message = codec.to_wire(pair()[0])
    assert isinstance(_admit_one(message), Incoming)
    change(message)  # type: ignore[operator]
    item = _admit_one(message)
    assert isinstance(item, Refused)
    assert item.code == code


def test_versions_arrive_in_one_order_and_records_of_old_have_none() -> None:
    rollout, _ = pair()
    engine = replace(rollout.environment, versions=("vllm 0.32.0", "torch 2.13.0"))
    item = _admit_one(codec.to_wire(replace(rollout, environment=engine)))
    assert isinstance(item, Incoming)
    assert item.record.environment.versions == ("torch 2.13.0", "vllm 0.32.0")
    old = _admit_one(codec.to_wire(rollout))
    assert isinstance(old, Incoming)
    assert old.record.environment.versions == ()


def test_an_empty_response_is_refused() -> None:
    rollout, _ = pair()
    empty = replace(rollout, prompt_len=40, logprobs=np.zeros(0, np.float32), mask=np.zeros(0, np.bool_))
    item = _admit_one(codec.to_wire(empty))
    assert isinstance(item, Refused)
    assert item.code == "empty_response"


def test_a_sample_beyond_the_limit_is_refused_before_it_is_decoded() -> None:
    item = _admit_one(codec.to_wire(pair()[0]), Limits(tokens=39))
    assert isinstance(item, Refused)
    assert (item.code, item.detail) == ("too_large", "tokens has 40 values; the limit is 39")


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused_or_no_message_at_all(raw: bytes) -> None:
    try:
        batch = pb.Batch.FromString(raw)
    except DecodeError:
        return
    for item in admit_batch(batch, Limits()):
        assert isinstance(item, Refused | Incoming)


def test_the_auditor_imports_nothing_that_it_audits() -> None:
    code = (
        "import sys, auditor.main, auditor.recompute_worker;"
        "bad = [m for m in ('torch', 'vllm', 'ray', 'megatron', 'triton', 'rl_kernel.ops', 'rl_kernel.integrations',"
        " 'services') if m in sys.modules];"
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_client_imports_grpc_protobuf_and_numpy_only() -> None:
    """Where grpc_tools is installed, grpc itself imports it; nothing here does."""
    code = (
        "import sys; before = set(sys.modules); import auditor.client;"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names);"
        "extra = new - {'auditor', 'grpc', 'google', 'numpy', 'typing_extensions', 'cython_runtime', 'grpc_tools'};"
        "extra = {m for m in extra if not m.startswith('_')}; sys.exit(repr(extra) if extra else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
