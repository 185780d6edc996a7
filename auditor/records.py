"""What each side reports about one sample: frozen records over NumPy arrays.

Legend: N tokens of the whole sample (prompt and response), P of them prompt, R = N - P of them response.
Unknown is said as such (an empty string, a negative version, None) and is never compared: such a sample is stored
and judged `not_comparable`.

    >>> sampling = Sampling(temperature=1.0, seed=7)
    >>> layout = Layout(tp_size=1, cp_size=1, vocab_size=128, padded_vocab_size=128, vocab_shards=(0, 128))
    >>> engine = Environment(arch="cpu-x86_64", mma="fma32", digest="ab" * 32)
    >>> record = RolloutRecord(
    ...     run_id="demo", step=0, sample_id="0-0", engine_id="rollout-0",
    ...     tokens=np.array([5, 6, 7, 8]), prompt_len=2, logprobs=np.array([-1.5, -0.25], np.float32),
    ...     mask=np.array([True, True]), sampling=sampling, weight_version=1, weight_digest="cd" * 32,
    ...     contract_digest="ef" * 32, environment=engine, layout=layout,
    ...     positions=Positions(rope_digest="01" * 32), finish_reason="stop")
    >>> record.response_len
    2
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from auditor.errors import RecordError
from auditor.fields import INT64, UINT32, as_array, one_text, real, text, texts, whole, wholes
from auditor.positions import Positions

__all__ = [
    "SIDES", "Environment", "Layout", "Positions", "Record", "RolloutRecord", "SampleKey", "Sampling", "Side",
    "TrainerRecord", "tokens_digest",
]  # fmt: skip

Side = Literal["rollout", "trainer"]
SIDES: tuple[Side, Side] = ("rollout", "trainer")


class SampleKey(NamedTuple):
    """What the two sides of a sample are joined by."""

    run_id: str
    step: int
    sample_id: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the response was drawn, and what the log-probabilities are of.

    top_k: 0 is off. seed: None is unknown. logprobs_mode: vLLM's names (`processed_logprobs`, `raw_logprobs`).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logprobs_mode: str = "processed_logprobs"

    def __post_init__(self) -> None:
        real(self, "sampling.", ("temperature", "top_p", "min_p"))
        whole(self, "sampling.", ("top_k",), UINT32)
        if self.seed is not None:
            whole(self, "sampling.", ("seed",), INT64)
        text(self, "sampling.", ("logprobs_mode",))


@dataclass(frozen=True, slots=True)
class Layout:
    """How the model is cut over ranks.

    vocab_size: the true vocabulary; ids from there to padded_vocab_size are padding and never count.
    vocab_shards: token ids where the vocabulary is cut, from 0 to padded_vocab_size, so tp_size + 1 values
        (or two values where the vocabulary is not cut).
    """

    tp_size: int
    cp_size: int
    vocab_size: int
    padded_vocab_size: int
    vocab_shards: tuple[int, ...]

    def __post_init__(self) -> None:
        whole(self, "layout.", ("tp_size", "cp_size", "vocab_size", "padded_vocab_size"), UINT32)
        wholes(self, "layout.", "vocab_shards")


@dataclass(frozen=True, slots=True)
class Environment:
    """What the side runs on. `digest` is that of `rl_kernel.environment.Environment`.

    versions: `torch 2.13.0` of each package that numbers may depend on, kept in the order of the names; empty where
    they are not said. Of two sides whose digests differ they say in which package.
    """

    arch: str
    mma: str
    digest: str
    versions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        text(self, "environment.", ("arch", "mma", "digest"))
        if self.versions:
            object.__setattr__(self, "versions", _versions(self.versions))


def _versions(given: object) -> tuple[str, ...]:
    """In the order of the names. A mapping of names to versions, as a dump may have it, is taken too."""
    said = [f"{package} {version}" for package, version in given.items()] if isinstance(given, Mapping) else given
    found = tuple(sorted(texts("environment.versions", said)))
    packages = [each.partition(" ")[0] for each in found if all(each.partition(" "))]
    if len(packages) != len(found) or len(set(packages)) != len(found):
        raise RecordError("environment.versions says each package once, with its version: `torch 2.13.0`")
    return found


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RolloutRecord:
    """One sample as the engine that drew it reports it.

    tokens: uint32 [N]. logprobs: float32 [R], NaN and infinities as they were computed. mask: bool [R], the tokens
    that the loss counts. layer_digests: of each layer's output (`auditor.facts.layer_digests`), where the
    engine offers them.
    routed_experts: uint16 [N, layers * top_k], for mixtures of experts.
    """

    side: ClassVar[Side] = "rollout"

    run_id: str
    step: int
    sample_id: str
    engine_id: str
    tokens: npt.NDArray[np.uint32]
    prompt_len: int
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_]
    sampling: Sampling
    weight_version: int
    weight_digest: str
    contract_digest: str
    environment: Environment
    layout: Layout
    positions: Positions
    finish_reason: str = ""
    layer_digests: tuple[str, ...] = ()
    routed_experts: npt.NDArray[np.uint16] | None = None

    def __post_init__(self) -> None:
        text(self, "", ("engine_id", "finish_reason"))
        _freeze(self, "tokens", np.uint32, 1)
        _freeze_optional(self, "routed_experts", np.uint16, 2)
        _check(self, len(self.tokens))

    @property
    def key(self) -> SampleKey:
        """What this record is joined by."""
        return SampleKey(self.run_id, self.step, self.sample_id)

    @property
    def response_len(self) -> int:
        """R."""
        return len(self.logprobs)

    @property
    def tokens_digest(self) -> str:
        """Digest of the tokens, comparable with a trainer's."""
        return tokens_digest(self.tokens)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainerRecord:
    """The same sample as the trainer's first forward scored it.

    tokens_digest: of the tokens that it was given, see `tokens_digest`; taken from `tokens` where those are sent.
    tokens: uint32 [N], optional: with them a difference can be shown and not only detected.
    sampling: what the trainer assumed; its log-probabilities are of that distribution.
    The rest is as in `RolloutRecord`.
    """

    side: ClassVar[Side] = "trainer"

    run_id: str
    step: int
    sample_id: str
    trainer_id: str
    token_count: int
    prompt_len: int
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_]
    sampling: Sampling
    weight_version: int
    weight_digest: str
    contract_digest: str
    environment: Environment
    layout: Layout
    positions: Positions
    tokens_digest: str = ""
    tokens: npt.NDArray[np.uint32] | None = None
    layer_digests: tuple[str, ...] = ()
    routed_experts: npt.NDArray[np.uint16] | None = None

    def __post_init__(self) -> None:
        _freeze_optional(self, "tokens", np.uint32, 1)
        _freeze_optional(self, "routed_experts", np.uint16, 2)
        text(self, "", ("trainer_id", "tokens_digest"))
        whole(self, "", ("token_count",), UINT32)
        if self.tokens is not None:
            if len(self.tokens) != self.token_count:
                raise RecordError(f"token_count is {self.token_count}, but {len(self.tokens)} tokens are given")
            digest = tokens_digest(self.tokens)
            if self.tokens_digest not in ("", digest):
                raise RecordError(
                    f"tokens_digest {self.tokens_digest[:80]!r} is not that of the tokens given, {digest}"
                )
            object.__setattr__(self, "tokens_digest", digest)
        _check(self, self.token_count)

    @property
    def key(self) -> SampleKey:
        """What this record is joined by."""
        return SampleKey(self.run_id, self.step, self.sample_id)

    @property
    def response_len(self) -> int:
        """R."""
        return len(self.logprobs)


Record = RolloutRecord | TrainerRecord
_PARTS: Final = (
    ("sampling", Sampling),
    ("environment", Environment),
    ("layout", Layout),
    ("positions", Positions),
)


def tokens_digest(tokens: npt.ArrayLike) -> str:
    """sha256 (hex) over the ids as little-endian uint32."""
    return hashlib.sha256(as_array("tokens", tokens, np.uint32, 1).astype("<u4").tobytes()).hexdigest()


def _check(record: Record, token_count: int) -> None:
    _freeze(record, "logprobs", np.float32, 1)
    _freeze(record, "mask", np.bool_, 1)
    text(record, "", ("run_id", "sample_id", "weight_digest", "contract_digest"))
    for name, kind in _PARTS:
        if not isinstance(getattr(record, name), kind):
            raise RecordError(f"{name} is a {type(getattr(record, name)).__name__}; it must be a {kind.__name__}")
    for digest in record.layer_digests:
        one_text("layer_digests", digest)
    record.positions.check(token_count)
    whole(record, "", ("weight_version",), (INT64[0], 2**64 - 1))
    whole(record, "", ("prompt_len",), INT64)
    whole(record, "", ("step",), (INT64[0], 2**64 - 1))
    if record.step < 0:
        raise RecordError(f"step is {record.step}; it counts from 0")
    if not 0 <= record.prompt_len <= token_count:
        raise RecordError(f"prompt_len is {record.prompt_len}, outside 0..{token_count}")
    expected = token_count - record.prompt_len
    for name, length in (("logprobs", len(record.logprobs)), ("mask", len(record.mask))):
        if length != expected:
            raise RecordError(
                f"{name} has {length} values; {token_count} tokens, {record.prompt_len} of them prompt, need {expected}"
            )


def _freeze(record: Record, name: str, dtype: type[np.generic], ndim: int) -> None:
    """Replace an array field by a read-only copy, so that a buffer reused by the caller changes nothing here."""
    array = as_array(name, getattr(record, name), dtype, ndim).copy()
    array.flags.writeable = False
    object.__setattr__(record, name, array)


def _freeze_optional(record: Record, name: str, dtype: type[np.generic], ndim: int) -> None:
    if getattr(record, name) is not None:
        _freeze(record, name, dtype, ndim)
