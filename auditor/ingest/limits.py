"""How large a thing from outside may be, and the names it may have. Beyond that it is refused, never cut."""

import re
from dataclasses import dataclass
from typing import Final

from auditor import codec
from auditor.errors import LimitError, RecordError
from auditor.pipeline import Incoming, Refused
from auditor.proto import audit_pb2 as pb
from auditor.records import Record, RolloutRecord, Side, TrainerRecord

# A URL cannot carry `.` or `..`: nobody could read what has such a name.
_NAME: Final = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:@+=-]+")
_HEX: Final = re.compile(r"[0-9a-f]{64}")
# Below 0 a side counts its pads; above, a position would be no uint32.
_OFFSETS: Final = (-(2**31), 2**32 - 1)
_SIDES: Final[dict[str | None, Side]] = {"rollout": "rollout", "trainer": "trainer"}


@dataclass(frozen=True, slots=True)
class Limits:
    """message_bytes: of one gRPC message. tokens: of one sample. name_chars: of run, sample and source ids."""

    message_bytes: int = 16 << 20
    batch_records: int = 4096
    tokens: int = 1 << 20
    name_chars: int = 128
    layer_digests: int = 1024
    vocab_shards: int = 4097
    versions: int = 64


def admit_batch(batch: pb.Batch, limits: Limits) -> list[Incoming | Refused]:
    """Decode and check every record of a batch; LimitError where the batch itself is too large."""
    if len(batch.records) > limits.batch_records:
        raise LimitError(f"a batch of {len(batch.records)} records; the limit is {limits.batch_records}")
    return [_admit(message, limits) for message in batch.records]


def _admit(message: pb.Record, limits: Limits) -> Incoming | Refused:
    try:
        _check_sizes(message, limits)
        record = codec.from_wire(message)
        _check_values(record, limits)
        return Incoming(record, message.SerializeToString(deterministic=True))
    except RecordError as error:
        return Refused(_SIDES.get(message.WhichOneof("side"), ""), error.code, str(error))


def _check_sizes(message: pb.Record, limits: Limits) -> None:
    """Before anything is decoded."""
    side = message.rollout if message.HasField("rollout") else message.trainer
    positions = side.common.positions
    for name, length, limit in (
        ("tokens", len(side.tokens), limits.tokens),
        ("logprob_bits", len(side.common.logprob_bits), limits.tokens),
        ("layer_digests", len(side.common.layer_digests), limits.layer_digests),
        ("positions.ids", len(positions.ids), limits.tokens),
        ("positions.first_keys", len(positions.first_keys), limits.tokens),
        ("layout.vocab_shards", len(side.common.layout.vocab_shards), limits.vocab_shards),
    ):
        if length > limit:
            raise LimitError(f"{name} has {length} values; the limit is {limit}")


def _check_values(record: Record, limits: Limits) -> None:
    _check_names(record, limits)
    if record.step > 2**53:
        raise RecordError(f"step is {record.step}; it lies in 0..2**53", "bad_step")
    if record.weight_version > 2**53:
        raise RecordError(f"weight_version is {record.weight_version}; it lies in 0..2**53", "bad_version")
    if record.response_len == 0:
        raise RecordError("the response is empty; a sample has at least one response token", "empty_response")
    _check_digests(record)
    _check_rows(record)
    sampling = record.sampling
    if not 0.0 < sampling.temperature < 1e6:
        raise RecordError(f"sampling.temperature is {sampling.temperature}; it must be above 0", "bad_sampling")
    if not (0.0 < sampling.top_p <= 1.0 and 0.0 <= sampling.min_p <= 1.0):
        raise RecordError(
            f"sampling.top_p {sampling.top_p} or min_p {sampling.min_p} lies outside 0..1", "bad_sampling"
        )


def _check_rows(record: Record) -> None:
    """What a record may hold that was stored before, and no new one: so nothing here is asked where one is read."""
    offset, tokens = record.positions.offset, record.prompt_len + record.response_len
    if not _OFFSETS[0] <= offset <= _OFFSETS[1]:
        raise RecordError(f"positions.offset is {offset}; it lies in {_OFFSETS[0]}..{_OFFSETS[1]}")
    if record.routed_experts is not None and len(record.routed_experts) != tokens:
        raise RecordError(f"routed_experts has {len(record.routed_experts)} rows; {tokens} tokens need as many")


def _check_names(record: Record, limits: Limits) -> None:
    source = record.engine_id if isinstance(record, RolloutRecord) else record.trainer_id
    for name, value in (("run_id", record.run_id), ("sample_id", record.sample_id), ("source_id", source)):
        if not value or len(value) > limits.name_chars or not _NAME.fullmatch(value):
            raise RecordError(
                f"{name} is {value[:40]!r}; it needs 1 to {limits.name_chars} characters of A-Z a-z 0-9 . _ : @ + = -"
                " and more than one or two dots",
                "bad_name",
            )
    for name, value in (
        ("sampling.logprobs_mode", record.sampling.logprobs_mode),
        ("environment.arch", record.environment.arch),
        ("environment.mma", record.environment.mma),
        ("positions.attention", record.positions.attention),
        ("finish_reason", record.finish_reason if isinstance(record, RolloutRecord) else ""),
    ):
        if len(value) > limits.name_chars:
            raise LimitError(f"{name} has {len(value)} characters; the limit is {limits.name_chars}")
    versions = record.environment.versions
    if len(versions) > limits.versions:
        raise LimitError(f"environment.versions has {len(versions)} packages; the limit is {limits.versions}")
    if longest := max((version for version in versions if len(version) > limits.name_chars), key=len, default=""):
        raise LimitError(
            f"environment.versions has {longest[:40]!r} of {len(longest)} characters; the limit is {limits.name_chars}"
        )


def _check_digests(record: Record) -> None:
    for name, value in (
        ("weight_digest", record.weight_digest),
        ("contract_digest", record.contract_digest),
        ("environment.digest", record.environment.digest),
        ("tokens_digest", record.tokens_digest if isinstance(record, TrainerRecord) else ""),
        ("positions.rope_digest", record.positions.rope_digest),
        ("positions.ids_digest", record.positions.ids_digest),
        *(("layer_digests", digest) for digest in record.layer_digests),
    ):
        if value and not _HEX.fullmatch(value):
            raise RecordError(f"{name} is {value[:80]!r}; it is 64 lower-case hex digits, or empty", "bad_digest")
