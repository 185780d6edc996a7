"""Records out of files that others wrote: one JSON object a line, or the rows of a Parquet file.

A row names `side` (rollout, trainer), `step`, `sample_id` and the fields of `auditor.records`, nested ones with a dot
(`sampling.temperature`). Log-probabilities come as `logprobs` (numbers) or `logprob_bits` (eight hex digits each).
Fields that every row shares come from defaults. What is unknown is left out; what is not a field is refused.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from auditor.errors import RecordError
from auditor.records import Environment, Layout, Positions, Record, RolloutRecord, Sampling, TrainerRecord

_NESTED: Final[Mapping[str, type]] = {
    "sampling": Sampling,
    "environment": Environment,
    "layout": Layout,
    "positions": Positions,
}
# What a side does not say is unknown, and the auditor judges the sample not comparable.
_UNKNOWN: Final[Mapping[str, Any]] = {
    "weight_version": -1,
    "weight_digest": "",
    "contract_digest": "",
    "environment": {"arch": "", "mma": "", "digest": ""},
    "layout": {"tp_size": 0, "cp_size": 0, "vocab_size": 0, "padded_vocab_size": 0, "vocab_shards": ()},
    "positions": {"rope_digest": ""},
    "sampling": {},
    "engine_id": "dump",
    "trainer_id": "dump",
}


def read_dump(path: Path, defaults: Mapping[str, Any]) -> Iterator[Record]:
    """Every record of a .jsonl, .json or .parquet file; RecordError names the row."""
    rows = _parquet(path) if path.suffix == ".parquet" else _json_lines(path)
    for number, row in enumerate(rows, 1):
        try:
            yield record_of({**defaults, **row})
        except (RecordError, TypeError, ValueError) as error:
            raise RecordError(f"{path}, row {number}: {error}") from None


def record_of(row: Mapping[str, Any]) -> Record:
    """One record. RecordError: a field that is missing, or is none."""
    values = {name: value for name, value in _nested(row).items() if value is not None}
    side = values.pop("side", None)
    kind = {"rollout": RolloutRecord, "trainer": TrainerRecord}.get(str(side))
    if kind is None:
        raise RecordError(f"side is {side!r}; it must be rollout or trainer")
    names = {field.name for field in fields(kind)}
    values = {**{name: value for name, value in _UNKNOWN.items() if name in names}, **values}
    _decode_arrays(values, kind)
    unknown = sorted(set(values) - names)
    if unknown:
        raise RecordError(f"{unknown[0]!r} is no field of a {side} record; there are {', '.join(sorted(names))}")
    needed = [field.name for field in fields(kind) if field.default is MISSING and field.name not in values]
    if needed:
        raise RecordError(f"{needed[0]!r} is missing")
    record: Record = kind(**{name: _typed(name, value) for name, value in values.items()})
    return record


def _decode_arrays(values: dict[str, Any], kind: type) -> None:
    if "logprob_bits" in values:
        bits = [int(text, 16) for text in values.pop("logprob_bits")]
        values["logprobs"] = np.array(bits, np.uint32).view(np.float32)
    elif "logprobs" in values:
        values["logprobs"] = np.asarray(values["logprobs"], np.float32)
    if "tokens" in values:
        values["tokens"] = np.asarray(values["tokens"], np.int64)
        if kind is TrainerRecord:
            values.setdefault("token_count", len(values["tokens"]))
    if "mask" in values:
        values["mask"] = np.asarray(values["mask"], np.bool_)
    elif "logprobs" in values:
        values["mask"] = np.ones(len(values["logprobs"]), np.bool_)


def _nested(row: Mapping[str, Any]) -> dict[str, Any]:
    """`{"sampling.seed": 1}` as `{"sampling": {"seed": 1}}`."""
    result: dict[str, Any] = {}
    for name, value in row.items():
        head, dot, tail = name.partition(".")
        if dot:
            inner = result.get(head)
            result[head] = {**(inner if isinstance(inner, dict) else {}), tail: value}
        elif isinstance(value, dict):
            result[head] = {**result.get(head, {}), **value}
        else:
            result[head] = value
    return result


def _typed(name: str, value: Any) -> Any:
    kind = _NESTED.get(name)
    if kind is None:
        return tuple(value) if name == "layer_digests" else value
    if not isinstance(value, dict):
        raise RecordError(f"{name} is {value!r}; it must be an object")
    known = {field.name for field in fields(kind)}
    for key in value:
        if key not in known:
            raise RecordError(f"'{name}.{key}' is no field; there are {', '.join(sorted(known))}")
    return kind(**{**value, **({"vocab_shards": tuple(value["vocab_shards"])} if "vocab_shards" in value else {})})


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise RecordError(f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise RecordError(f"{path}, line {number}: an object is expected, not a {type(row).__name__}")
            yield row


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet  # noqa: PLC0415 - only for files of this kind
    except ImportError:
        raise RecordError(f"{path}: a .parquet file needs pyarrow; install it or give .jsonl") from None
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
        yield from batch.to_pylist()
