"""Records out of files that others wrote: one JSON object a line, or the rows of a Parquet file.

A row names `side` (rollout, trainer), `step`, `sample_id` and the fields of `auditor.records`, nested ones with a dot
(`sampling.temperature`). Log-probabilities come as `logprobs` (numbers) or `logprob_bits` (eight hex digits each).
Fields that every row shares come from defaults. What is unknown is left out or null, but for the temperature and the
filters: a number cannot say that it is unknown. What is no field is refused, and so are a key or column that is there
twice, a null among numbers, a number beyond fp32, and an id that is no whole number.
"""

import json
import re
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
_PARQUET: Final = b"PAR1"
_COMPRESSED: Final = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")  # gzip, zstd, bzip2, xz
_FIELD: Final = re.compile(r"'?(\w+)")
_BITS: Final = re.compile(r"[0-9a-fA-F]{8}")
# What a side does not say is unknown, and the auditor judges the sample not comparable.
_UNKNOWN: Final[Mapping[str, Any]] = {
    "weight_version": -1,
    "weight_digest": "",
    "contract_digest": "",
    "environment": {"arch": "", "mma": "", "digest": ""},
    "layout": {"tp_size": 0, "cp_size": 0, "vocab_size": 0, "padded_vocab_size": 0, "vocab_shards": ()},
    "positions": {"rope_digest": "", "attention": ""},
    "sampling": {"logprobs_mode": ""},
    "engine_id": "dump",
    "trainer_id": "dump",
}


# What would pass for off where it is only not known; with the value that says so.
_STATED: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def read_dump(path: Path, defaults: Mapping[str, Any], defaults_of: str = "the defaults") -> Iterator[Record]:
    """Every record of a file of JSON lines, or of a Parquet file, by its name or its first bytes.

    RecordError names the row, or `defaults_of` where what is wrong comes from there, or says that there is no row.
    """
    number, run = 0, defaults.get("run_id")
    rows = _parquet(path) if _is_parquet(path) else _json_lines(path)
    for number, row in enumerate(rows, 1):
        try:
            if row.get("run_id", run) not in (None, run):
                raise RecordError(f"run_id is {row['run_id']!r}; the records that are sent are of run {run!r}")
            yield record_of({**defaults, **row})
        except (RecordError, TypeError, ValueError, OverflowError) as error:
            where = defaults_of if _of_defaults(error, defaults, row) else f"{path}, row {number}"
            raise RecordError(f"{where}: {error}") from None
    if number == 0:
        raise RecordError(f"{path} holds no row; it needs at least one record")


def _is_parquet(path: Path) -> bool:
    """Whatever else it is called: a line of JSON never begins so. What a pipe gives can be read once only."""
    if path.suffix.lower() == ".parquet":
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_PARQUET)) == _PARQUET


def _of_defaults(error: Exception, defaults: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether the field that the error begins with is theirs, and not the row's; a run's name is given elsewhere."""
    field = _FIELD.match(str(error))
    heads = {key.partition(".")[0] for key in row}
    given = {key.partition(".")[0] for key in defaults}
    return field is not None and field[1] in given - heads - {"run_id"}


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
    for name in ("logprobs", "logprob_bits", "tokens", "mask"):
        if name in values and not _is_flat(values[name]):
            raise RecordError(f"{name} is no list of single values")
    if "logprob_bits" in values:
        if "logprobs" in values:
            raise RecordError("logprobs and logprob_bits are both there; give one of them")
        values["logprobs"] = _of_bits(values.pop("logprob_bits"))
    elif "logprobs" in values:
        values["logprobs"] = _fp32(values["logprobs"])
    if "tokens" in values:
        values["tokens"] = _ids(values["tokens"])
        if kind is TrainerRecord:
            values.setdefault("token_count", len(values["tokens"]))
    if "mask" in values:
        values["mask"] = _mask(values["mask"])
    elif "logprobs" in values:
        values["mask"] = np.ones(len(values["logprobs"]), np.bool_)


def _is_flat(values: Any) -> bool:
    """Whether it is a list, or an array with one axis, that holds no list."""
    if isinstance(values, np.ndarray):
        return values.ndim == 1
    return isinstance(values, list | tuple) and not any(isinstance(value, list | tuple | dict) for value in values)


def _of_bits(texts: Any) -> np.ndarray:
    for text in texts:
        if not (isinstance(text, str) and _BITS.fullmatch(text)):
            raise RecordError(f"logprob_bits holds {text!r}; each is eight hex digits")
    return np.frombuffer(bytes.fromhex("".join(texts)), ">u4").astype(np.uint32).view(np.float32)


def _fp32(numbers: Any) -> np.ndarray:
    wide = np.asarray(numbers)  # which takes true for 1 among numbers
    if (wide.size and wide.dtype.kind not in "fiu") or bool in map(type, numbers):
        raise RecordError("logprobs holds something that is no number; a value that was not one is NaN")
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    if (np.isinf(narrow) & np.isfinite(wide)).any():
        raise RecordError("logprobs holds a number that is beyond fp32; an infinity is written Infinity")
    return narrow


def _ids(ids: Any) -> np.ndarray:
    if bool in map(type, ids):
        raise RecordError("tokens holds true or false; ids are whole numbers")
    return np.asarray(ids)


def _mask(flags: Any) -> np.ndarray:
    given = np.asarray(flags)
    if given.size and not (given.dtype.kind == "b" or (given.dtype.kind in "iu" and np.isin(given, (0, 1)).all())):
        raise RecordError("mask holds something other than true, false, 1 and 0")
    return given.astype(np.bool_)


def _nested(row: Mapping[str, Any]) -> dict[str, Any]:
    """`{"sampling.seed": 1}` as `{"sampling": {"seed": 1}}`; what is null is left out, there too."""
    result: dict[str, Any] = {}
    for name, value in row.items():
        head, dot, tail = name.partition(".")
        inside = {tail: value} if dot else value
        if isinstance(inside, dict):
            inside = {key: inner for key, inner in inside.items() if inner is not None}
            outer = result.setdefault(head, {})
            if not isinstance(outer, dict):
                raise RecordError(f"{head} is {outer!r}; it must be an object")
            result[head] = {**outer, **inside}
        elif value is not None:
            if head in result:
                raise RecordError(f"{head} is {value!r}; it must be an object")
            result[head] = value
    return result


def _typed(name: str, value: Any) -> Any:
    kind = _NESTED.get(name)
    if kind is None:
        if name != "layer_digests":
            return value
        if not isinstance(value, list):
            raise RecordError(f"layer_digests is {value!r}; it must be a list")
        return tuple(value)
    if not isinstance(value, dict):
        raise RecordError(f"{name} is {value!r}; it must be an object")
    known = {field.name for field in fields(kind)}
    for key in value:
        if key not in known:
            raise RecordError(f"'{name}.{key}' is no field; there are {', '.join(sorted(known))}")
    for key, off in _STATED.items() if kind is Sampling else ():
        if key not in value:
            raise RecordError(f"'sampling.{key}' is missing; {off:g} says that there is none")
    return kind(**{**_UNKNOWN[name], **value})


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if number == 1 and line.startswith(_COMPRESSED):
                raise RecordError(f"{path} is compressed; unpack it first")
            try:
                row = json.loads(line, object_pairs_hook=_once)
            except (ValueError, RecursionError) as error:
                raise RecordError(f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise RecordError(f"{path}, line {number}: an object is expected, not a {type(row).__name__}")
            yield row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} is there twice")
    return row


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow  # noqa: PLC0415 - only for files of this kind
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise RecordError(f"{path}: a .parquet file needs pyarrow; install it or give .jsonl") from None
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        for name in names:
            if names.count(name) > 1:
                raise RecordError(f"{path}: column {name!r} is there twice")
        for batch in file.iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except FileNotFoundError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise RecordError(f"{path}: not a Parquet file that can be read: {' '.join(str(error).split())}") from None
