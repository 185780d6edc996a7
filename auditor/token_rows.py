"""Token rows: what each active and inactive token of a judged sample was, as a table anybody can read (Parquet).

A row is one response token: run, step, sample, index, token id, whether it counts, the three log-probabilities as bits
and as numbers, and what was said of the sample. `verdict_seq` is the entry of the hash chain that says it.
"""

import io
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from auditor.compare import Logprobs
from auditor.judge import Judgement
from auditor.records import RolloutRecord, SampleKey, TrainerRecord

# Of a sample, the same in each of its rows: kept once in a file and named by number.
_OF_SAMPLE: Final = (
    "run_id", "sample_id", "verdict", "side", "cause", "verdict_digest", "rollout_digest", "trainer_digest",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JudgedSample:
    """A sample with the verdict that is the last word on it.

    seq, digest: of the verdict's entry in the chain, the digest in hex as the other two, which are of the records'
    entries. reference: float32 [R] under the rollout's contract, None where it was not asked.
    """

    seq: int
    digest: str
    key: SampleKey
    judgement: Judgement
    rollout: RolloutRecord
    trainer: TrainerRecord
    rollout_digest: str
    trainer_digest: str
    reference: Logprobs | None

    @property
    def rows(self) -> int:
        """Response tokens."""
        return self.rollout.response_len


def table_of(samples: list[JudgedSample]) -> Any:
    """The rows of these samples, in their order, as a pyarrow table."""
    import pyarrow as arrow  # noqa: PLC0415 - an extra of its own

    counts = [sample.rows for sample in samples]
    columns: dict[str, Any] = {
        name: arrow.DictionaryArray.from_arrays(
            np.repeat(np.arange(len(samples), dtype=np.int32), counts), [_said(s, name) for s in samples]
        ).cast(arrow.string())
        for name in _OF_SAMPLE
    }
    for name, numbers in (("step", [s.key.step for s in samples]), ("verdict_seq", [s.seq for s in samples])):
        columns[name] = np.repeat(np.array(numbers, np.int64), counts)
    columns["index"] = _joined([np.arange(count, dtype=np.int32) for count in counts])
    columns["token_id"] = _joined([s.rollout.tokens[s.rollout.prompt_len :] for s in samples])
    columns["active"] = _joined([s.rollout.mask for s in samples])
    for side in ("rollout", "trainer", "reference"):
        values, missing = _values(samples, side)
        columns[f"{side}_bits"] = arrow.array(values.view(np.uint32), mask=missing)
        columns[f"{side}_logprob"] = arrow.array(values, mask=missing)
    return arrow.table({name: columns[name] for name in COLUMNS})


COLUMNS: Final = (
    "run_id", "step", "sample_id", "index", "token_id", "active",
    "rollout_bits", "trainer_bits", "reference_bits", "rollout_logprob", "trainer_logprob", "reference_logprob",
    "verdict", "side", "cause", "verdict_seq", "verdict_digest", "rollout_digest", "trainer_digest",
)  # fmt: skip


def parquet_of(table: Any) -> bytes:
    """A table as the content of a Parquet file."""
    from pyarrow import parquet  # noqa: PLC0415 - an extra of its own

    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _said(sample: JudgedSample, name: str) -> str:
    match name:
        case "run_id" | "sample_id":
            return str(getattr(sample.key, name))
        case "verdict" | "side" | "cause":
            return str(getattr(sample.judgement, name))
        case "verdict_digest":
            return sample.digest
        case _:
            return str(getattr(sample, name))


def _values(samples: list[JudgedSample], side: str) -> tuple[Logprobs, Any]:
    """The log-probabilities of a side, and which of them are not there."""
    parts, missing = [], []
    for sample in samples:
        said = sample.reference if side == "reference" else getattr(sample, side).logprobs
        parts.append(np.zeros(sample.rows, np.float32) if said is None else said)
        missing.append(np.full(sample.rows, said is None))
    return _joined(parts), _joined(missing)


def _joined(parts: list[Any]) -> Any:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
