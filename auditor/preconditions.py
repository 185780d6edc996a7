"""What must hold before two log-probabilities may be compared at all: six conditions, in order.

The first that fails makes the sample `not_comparable`, with the condition, the field and both values. A value that
a side does not know fails too: equal ignorance is no agreement.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from auditor.positions import differences
from auditor.records import Layout, RolloutRecord, Sampling, TrainerRecord
from rl_kernel.contract import ModelContract

UNKNOWN: Final = "unknown"
Contracts = Mapping[str, ModelContract]


class Condition(StrEnum):
    """The six, in the order in which they are checked."""

    WEIGHTS = "weights"
    INPUTS = "inputs"
    POSITIONS = "positions"
    LOGICAL_STATE = "logical_state"
    RANDOM_STATE = "random_state"
    CONTRACT = "contract"


@dataclass(frozen=True, slots=True)
class NotComparable:
    """The first condition that fails. rollout, trainer: the values, `unknown` where a side does not say."""

    condition: Condition
    field: str
    rollout: str
    trainer: str


Pair = tuple[str, object, object]


def first_failure(rollout: RolloutRecord, trainer: TrainerRecord, contracts: Contracts) -> NotComparable | None:
    """The first of the six conditions that fails, or None where the two may be compared."""
    for condition, check in CHECKS:
        for field, left, right in check(rollout, trainer, contracts):
            return NotComparable(condition, field, _shown(left), _shown(right))
    return None


def _weights(rollout: RolloutRecord, trainer: TrainerRecord, _: Contracts) -> Iterator[Pair]:
    yield from _differ("weight_version", _known(rollout.weight_version), _known(trainer.weight_version))
    yield from _differ("weight_digest", rollout.weight_digest, trainer.weight_digest)


def _inputs(rollout: RolloutRecord, trainer: TrainerRecord, _: Contracts) -> Iterator[Pair]:
    yield from _differ("token_count", len(rollout.tokens), trainer.token_count)
    if trainer.tokens is not None and len(trainer.tokens) == len(rollout.tokens):
        differing = np.flatnonzero(trainer.tokens != rollout.tokens)
        if differing.size:
            at = int(differing[0])
            yield f"tokens[{at}]", int(rollout.tokens[at]), int(trainer.tokens[at])
    yield from _differ("tokens_digest", rollout.tokens_digest, trainer.tokens_digest)
    yield from _differ("prompt_len", rollout.prompt_len, trainer.prompt_len)
    differing = np.flatnonzero(rollout.mask != trainer.mask)
    if differing.size:
        at = int(differing[0])
        yield f"mask[{at}]", bool(rollout.mask[at]), bool(trainer.mask[at])
    if not rollout.mask.any():
        yield "mask", "no active token", "no active token"


def _positions(rollout: RolloutRecord, trainer: TrainerRecord, _: Contracts) -> Iterator[Pair]:
    return differences(rollout.positions, trainer.positions, len(rollout.tokens))


def _logical_state(rollout: RolloutRecord, trainer: TrainerRecord, contracts: Contracts) -> Iterator[Pair]:
    yield from _differ("layout.vocab_size", rollout.layout.vocab_size or "", trainer.layout.vocab_size or "")
    for name in ("tp_size", "cp_size", "padded_vocab_size", "vocab_shards"):
        left = _layout_fault(name, rollout.layout, contracts.get(rollout.contract_digest))
        right = _layout_fault(name, trainer.layout, contracts.get(trainer.contract_digest))
        if left or right:
            yield (
                f"layout.{name}",
                left or getattr(rollout.layout, name),
                right or getattr(trainer.layout, name),
            )
    highest = int(rollout.tokens.max()) if rollout.tokens.size else 0
    if highest >= rollout.layout.vocab_size:
        yield "tokens", f"id {highest}", f"a vocabulary of {trainer.layout.vocab_size}"


def _random_state(rollout: RolloutRecord, trainer: TrainerRecord, _: Contracts) -> Iterator[Pair]:
    left, right = rollout.sampling, trainer.sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "logprobs_mode"):
        yield from _differ(f"sampling.{name}", getattr(left, name), getattr(right, name))
    yield from _differ("sampling.seed", _seed(left), _seed(right))


def _contract(rollout: RolloutRecord, trainer: TrainerRecord, contracts: Contracts) -> Iterator[Pair]:
    left, right = contracts.get(rollout.contract_digest), contracts.get(trainer.contract_digest)
    if left is None or right is None or _but_for_arithmetic(left) != _but_for_arithmetic(right):
        yield (
            "contract_digest",
            rollout.contract_digest if left else _not_known_here(rollout.contract_digest),
            trainer.contract_digest if right else _not_known_here(trainer.contract_digest),
        )
        return
    ours, theirs = rollout.environment, trainer.environment
    if (ours.mma, theirs.mma) != (left.profile.mma, right.profile.mma):
        yield "environment.mma", ours.mma or UNKNOWN, theirs.mma or UNKNOWN
    if left is right:
        yield from _differ("environment.arch", ours.arch, theirs.arch)
        if ours.versions != theirs.versions and ours.versions and theirs.versions:
            yield from _packages(ours.versions, theirs.versions)
        yield from _differ("environment.digest", ours.digest, theirs.digest)
        return
    for name in ("arch", "digest"):
        if not (getattr(ours, name) and getattr(theirs, name)):
            yield f"environment.{name}", getattr(ours, name), getattr(theirs, name)


def _packages(left: tuple[str, ...], right: tuple[str, ...]) -> Iterator[Pair]:
    """Each package of which the two sides have another version, or one of them none."""
    ours, theirs = (dict(said.partition(" ")[::2] for said in side) for side in (left, right))
    for package in sorted(ours.keys() | theirs.keys()):
        name = f"environment.versions.{package}"
        yield from _differ(name, *(side.get(package, "not installed") for side in (ours, theirs)))


Check = Callable[[RolloutRecord, TrainerRecord, Contracts], Iterator[Pair]]
CHECKS: Final[tuple[tuple[Condition, Check], ...]] = (
    (Condition.WEIGHTS, _weights),
    (Condition.INPUTS, _inputs),
    (Condition.POSITIONS, _positions),
    (Condition.LOGICAL_STATE, _logical_state),
    (Condition.RANDOM_STATE, _random_state),
    (Condition.CONTRACT, _contract),
)


def _differ(field: str, left: object, right: object) -> Iterator[Pair]:
    """The pair where the two differ or one of them is unknown (an empty string)."""
    if left != right or left == "":
        yield field, left, right


def _known(version: int) -> int | str:
    """Versions below zero are unknown, which is written as the empty string."""
    return "" if version < 0 else version


def _seed(sampling: Sampling) -> int | str:
    """A seed may be any number, those below zero too; None is unknown."""
    return "" if sampling.seed is None else sampling.seed


def _not_known_here(digest: str) -> str:
    return f"{digest} (no contract of this auditor)" if digest else UNKNOWN


def _but_for_arithmetic(contract: ModelContract) -> tuple[object, ...]:
    """What two contracts must share for their difference to be one of arithmetic only, as between two GPU makers."""
    ops = tuple((op.op, op.version, op.semantics, op.parameters) for op in contract.ops)
    return contract.segments, ops


def _layout_fault(name: str, layout: Layout, contract: ModelContract | None) -> str:
    """What makes one side's layout one for which its contract promises nothing; empty where it is sound."""
    value = getattr(layout, name)
    if name in ("tp_size", "cp_size"):
        if value == 0:
            return UNKNOWN
        if name == "tp_size" and contract is not None and contract.segments % value:
            return f"{value}, which does not divide the contract's {contract.segments} segments"
        return ""
    if name == "padded_vocab_size":
        return "" if value >= layout.vocab_size else f"{value}, below the vocabulary of {layout.vocab_size}"
    return _shards_fault(layout, contract)


def _shards_fault(layout: Layout, contract: ModelContract | None) -> str:
    value = layout.vocab_shards
    if not value:
        return UNKNOWN
    sound = value[0] == 0 and value[-1] == layout.padded_vocab_size and list(value) == sorted(set(value))
    if sound and layout.tp_size and len(value) - 1 not in (1, layout.tp_size):
        return f"{list(value)}, which are {len(value) - 1} shards for {layout.tp_size} ranks"
    tile = contract["linear_logp"].parameter("vocab_tile") if contract is not None else 1
    whole = all(start % tile == 0 for start in value[:-1])
    return (
        "" if sound and whole else f"{list(value)}, which does not cut the padded vocabulary at whole tiles of {tile}"
    )


def _shown(value: object) -> str:
    text = UNKNOWN if value == "" else str(value)
    return text if len(text) <= 200 else text[:200] + "…"
