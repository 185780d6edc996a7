"""Between records and the wire. Arrays go as packed little-endian bits, in one copy, no Python number a token."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from auditor.errors import RecordError
from auditor.proto import audit_pb2 as pb
from auditor.records import Environment, Layout, Positions, Record, RolloutRecord, Sampling, TrainerRecord

_LOGPROB_BITS = pb.Common.LOGPROB_BITS_FIELD_NUMBER
_ROLLOUT_TOKENS = pb.RolloutRecord.TOKENS_FIELD_NUMBER
_TRAINER_TOKENS = pb.TrainerRecord.TOKENS_FIELD_NUMBER
_POSITION_IDS = pb.Positions.IDS_FIELD_NUMBER
_KEPT_BYTES: Final = 1024
T = TypeVar("T")
_FIRST_KEYS = pb.Positions.FIRST_KEYS_FIELD_NUMBER


def to_wire(record: Record) -> pb.Record:
    """The record as a message; the arrays keep their bits."""
    if isinstance(record, RolloutRecord):
        rollout = pb.RolloutRecord(common=_common(record, record.engine_id), finish_reason=record.finish_reason)
        rollout.MergeFromString(_packed(_ROLLOUT_TOKENS, record.tokens))
        return pb.Record(rollout=rollout)
    trainer = pb.TrainerRecord(
        common=_common(record, record.trainer_id),
        token_count=record.token_count,
        tokens_digest=record.tokens_digest,
    )
    if record.tokens is not None:
        trainer.MergeFromString(_packed(_TRAINER_TOKENS, record.tokens))
    return pb.Record(trainer=trainer)


def from_wire(message: pb.Record) -> Record:
    """The message as a record; RecordError where it does not hold together."""
    match message.WhichOneof("side"):
        case "rollout":
            rollout = message.rollout
            return RolloutRecord(
                tokens=np.asarray(rollout.tokens, dtype=np.uint32),
                engine_id=rollout.common.source_id,
                finish_reason=rollout.finish_reason,
                **_fields(rollout.common),
            )
        case "trainer":
            trainer = message.trainer
            return TrainerRecord(
                token_count=trainer.token_count,
                tokens_digest=trainer.tokens_digest,
                tokens=np.asarray(trainer.tokens, dtype=np.uint32) if len(trainer.tokens) else None,
                trainer_id=trainer.common.source_id,
                **_fields(trainer.common),
            )
        case _:
            raise RecordError("a record has neither rollout nor trainer; exactly one must be set")


def encode(record: Record) -> bytes:
    """Canonical bytes of a record: what the ledger stores and what its digest is over."""
    return to_wire(record).SerializeToString(deterministic=True)


def decode(payload: bytes) -> Record:
    """The record stored as `payload`; RecordError where it is none any more, as after a fault of the disk."""
    try:
        return from_wire(pb.Record.FromString(payload))
    except DecodeError as error:
        raise RecordError(f"the stored content is no record: {error}") from None


def _common(record: Record, source_id: str) -> pb.Common:
    sampling, layout = record.sampling, record.layout
    common = pb.Common(
        run_id=record.run_id,
        step=record.step,
        sample_id=record.sample_id,
        source_id=source_id,
        prompt_len=record.prompt_len,
        loss_mask=np.packbits(record.mask, bitorder="little").tobytes(),
        sampling=pb.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            logprobs_mode=sampling.logprobs_mode,
        ),
        weight_version=record.weight_version if record.weight_version >= 0 else None,
        weight_digest=record.weight_digest,
        contract_digest=record.contract_digest,
        environment=pb.Environment(
            arch=record.environment.arch,
            mma=record.environment.mma,
            digest=record.environment.digest,
            versions=record.environment.versions,
        ),
        layout=pb.Layout(
            tp_size=layout.tp_size,
            cp_size=layout.cp_size,
            vocab_size=layout.vocab_size,
            padded_vocab_size=layout.padded_vocab_size,
            vocab_shards=layout.vocab_shards,
        ),
        positions=_from_positions(record.positions),
        layer_digests=record.layer_digests,
    )
    experts = record.routed_experts
    if experts is not None:
        common.routed_experts.CopyFrom(
            pb.RoutedExperts(columns=experts.shape[1], experts=experts.astype("<u2").tobytes())
        )
    common.MergeFromString(_packed(_LOGPROB_BITS, record.logprobs.view(np.uint32)))
    return common


def _fields(common: pb.Common) -> dict[str, Any]:
    bits = np.asarray(common.logprob_bits, dtype=np.uint32)
    return {
        "run_id": common.run_id,
        "step": common.step,
        "sample_id": common.sample_id,
        "prompt_len": common.prompt_len,
        "logprobs": bits.view(np.float32),
        "mask": _mask(common.loss_mask, len(bits)),
        "sampling": _sampling(common.sampling),
        "weight_version": common.weight_version if common.HasField("weight_version") else -1,
        "weight_digest": common.weight_digest,
        "contract_digest": common.contract_digest,
        "environment": _one_of_few(_environment, _known_environment, common.environment),
        "layout": _one_of_few(_layout, _known_layout, common.layout),
        "positions": _positions(common.positions),
        "layer_digests": tuple(common.layer_digests),
        "routed_experts": _experts(common),
    }


def _sampling(message: pb.Sampling) -> Sampling:
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else None,
        logprobs_mode=message.logprobs_mode,
    )


def _environment(encoded: bytes) -> Environment:
    message = pb.Environment.FromString(encoded)
    found = Environment(message.arch, message.mma, message.digest, tuple(message.versions))
    if found.versions != tuple(message.versions):  # the same record in another order would be another one's bytes
        raise RecordError("environment.versions are not in the order of their names")
    return found


def _layout(encoded: bytes) -> Layout:
    message = pb.Layout.FromString(encoded)
    return Layout(
        tp_size=message.tp_size,
        cp_size=message.cp_size,
        vocab_size=message.vocab_size,
        padded_vocab_size=message.padded_vocab_size,
        vocab_shards=tuple(message.vocab_shards),
    )


# Of few kinds, each in every record of a run, and never changed once made.
_known_environment = lru_cache(64)(_environment)
_known_layout = lru_cache(64)(_layout)


def _one_of_few(make: Callable[[bytes], T], known: Callable[[bytes], T], message: Message) -> T:
    """One that was made before, where it is small; a large one may be anything, and is not kept."""
    encoded = message.SerializeToString()
    return known(encoded) if len(encoded) <= _KEPT_BYTES else make(encoded)


def _from_positions(positions: Positions) -> pb.Positions:
    message = pb.Positions(
        rope_digest=positions.rope_digest,
        offset=positions.offset,
        attention=positions.attention,
        ids_digest=positions.ids_digest,
        window=positions.window,
        left_padding=positions.left_padding,
        padding_seen=positions.padding_seen,
    )
    for number, array in ((_POSITION_IDS, positions.ids), (_FIRST_KEYS, positions.first_keys)):
        if array is not None:
            message.MergeFromString(_packed(number, array))
    return message


def _positions(message: pb.Positions) -> Positions:
    said = message.ListFields()
    if not said or said[-1][0].number <= pb.Positions.ATTENTION_FIELD_NUMBER:
        return Positions(message.rope_digest, message.offset, message.attention)
    return Positions(
        message.rope_digest,
        message.offset,
        message.attention,
        ids=np.asarray(message.ids, dtype=np.uint32) if len(message.ids) else None,
        ids_digest=message.ids_digest,
        window=message.window,
        first_keys=np.asarray(message.first_keys, dtype=np.uint32) if len(message.first_keys) else None,
        left_padding=message.left_padding,
        padding_seen=message.padding_seen,
    )


def _mask(packed: bytes, length: int) -> npt.NDArray[np.bool_]:
    if len(packed) != (length + 7) // 8:
        raise RecordError(f"loss_mask has {len(packed)} bytes; {length} response tokens need {(length + 7) // 8}")
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=length, bitorder="little").astype(np.bool_)


def _experts(common: pb.Common) -> npt.NDArray[np.uint16] | None:
    if not common.HasField("routed_experts"):
        return None
    columns, raw = common.routed_experts.columns, common.routed_experts.experts
    if columns == 0 or len(raw) % (2 * columns):
        raise RecordError(f"routed_experts has {len(raw)} bytes, which is no whole number of rows of {columns} uint16")
    return np.frombuffer(raw, "<u2").astype(np.uint16).reshape(-1, columns)


def _packed(number: int, values: npt.NDArray[np.uint32]) -> bytes:
    """A packed fixed32 field as protobuf writes it: tag, length, little-endian words."""
    if values.size == 0:
        return b""
    body = values.astype("<u4", copy=False).tobytes()
    return bytes([number << 3 | 2]) + varint(len(body)) + body


def varint(value: int) -> bytes:
    """A length as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
