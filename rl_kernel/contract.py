"""Contracts as data: what an op computes, bit for bit, and a digest that changes when that changes.

Nothing here computes a number. The values of version 1 are in `rl_kernel.contracts`; the code that obeys
them is in `rl_kernel.reference` (the law) and `rl_kernel.ops` (the backends). Standard library only.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Final

from rl_kernel.errors import ContractError


@dataclass(frozen=True, slots=True)
class MmaModel:
    """The arithmetic of one matrix instruction: `acc' = mma(acc, a[group], b[group])`.

    group: products that one step adds at once; K is padded with zeros to a multiple of it.
    fraction_bits: where aligned terms are cut off; None where each step is an IEEE fma.
    source: where the rule is known from.
    """

    name: str
    group: int
    fraction_bits: int | None
    rule: str
    source: str


@dataclass(frozen=True, slots=True)
class Profile:
    """An MMA model and an exp2 model: the two choices that depend on the hardware."""

    name: str
    mma: str
    exp2: str


MMA_MODELS: Final[Mapping[str, MmaModel]] = MappingProxyType(
    {
        "fma32": MmaModel("fma32", 1, None, "acc' = fma(a, b, acc) in fp32, round to nearest even", "IEEE 754-2019"),
    }
)

PROFILES: Final[Mapping[str, Profile]] = MappingProxyType(
    {
        "portable": Profile("portable", "fma32", "poly"),
    }
)


@dataclass(frozen=True, slots=True)
class OpContract:
    """What one op computes.

    semantics: the rule, one step a line, in order.
    parameters: numbers that the rule names (tile widths, lane counts), sorted by name.
    """

    op: str
    version: int
    mma: str | None
    exp2: str | None
    semantics: tuple[str, ...]
    parameters: tuple[tuple[str, int], ...] = ()

    def parameter(self, name: str) -> int:
        """Return the parameter `name`; KeyError names the op."""
        for key, value in self.parameters:
            if key == name:
                return value
        raise KeyError(f"contract of {self.op} has no parameter {name!r}")

    def digest(self) -> str:
        """sha256 of the canonical JSON, in hex."""
        return digest_of(asdict(self))


@dataclass(frozen=True, slots=True)
class ModelContract:
    """The contracts of every op on the path to a logprob, and the topology they are invariant over.

    segments: parts that every row-parallel sum is cut into; a TP degree that divides it changes no bit.
    """

    profile: Profile
    segments: int
    ops: tuple[OpContract, ...]

    def __getitem__(self, op: str) -> OpContract:
        for contract in self.ops:
            if contract.op == op:
                return contract
        raise ContractError(f"no contract for op {op!r}; there is one for {', '.join(c.op for c in self.ops)}")

    def digest(self) -> str:
        """sha256 over profile, segments and each op's digest, in hex."""
        return digest_of(
            {
                "profile": asdict(self.profile),
                "segments": self.segments,
                "ops": {c.op: c.digest() for c in self.ops},
            }
        )


def profile(name: str) -> Profile:
    """Return the profile called `name`; ContractError lists the ones there are."""
    try:
        return PROFILES[name]
    except KeyError:
        raise ContractError(f"unknown numerics profile {name!r}; choose one of {', '.join(PROFILES)}") from None


def digest_of(value: object) -> str:
    """sha256 (hex) of `value` as canonical JSON: sorted keys, no spaces, ASCII only."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
