"""Contracts as data: what an op computes, bit for bit, and a digest that changes when that changes.

Nothing here computes a number. The values of version 1 are in `rl_kernel.contracts`; the code that obeys
them is in `rl_kernel.reference` (the law) and `rl_kernel.ops` (the backends). Standard library only.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final

from rl_kernel.errors import ContractError


@dataclass(frozen=True, slots=True)
class MmaModel:
    """The arithmetic of one matrix instruction: `acc' = mma(acc, a[group], b[group])`.

    group: products that one step adds at once; a chain is padded with +0 * +0 to a multiple of it.
    fraction_bits: where aligned products are cut; None where each step is an IEEE fma.
    lowest_exponent: the smallest exponent that terms are aligned to; None for an IEEE fma.
    source: where the rule is known from, and whether it was checked on the hardware.
    """

    name: str
    group: int
    fraction_bits: int | None
    lowest_exponent: int | None
    rule: str
    source: str


@dataclass(frozen=True, slots=True)
class Exp2Model:
    """One way to compute 2^x for x ≤ 0.

    table_sha256: digest of the table that the rule needs, or None.
    """

    name: str
    rule: str
    table_sha256: str | None
    source: str


@dataclass(frozen=True, slots=True)
class Profile:
    """An MMA model and an exp2 model: the two choices that depend on the hardware."""

    name: str
    mma: str
    exp2: str


_TRUNCATED: Final = (
    "align the products and acc to the largest exponent among those that are not zero, at least lowest_exponent"
    " (a product has the sum of its operands' exponents; a subnormal has the smallest normal one);"
    " cut each toward zero at fraction_bits; add; cut the sum toward zero to fp32, subnormals kept, nothing is +0;"
    " past the fp32 range +-inf; NaN, inf*0 and inf-inf give one NaN"
)
_CDNA3: Final = (
    "a product past the fp32 range is +-inf; align the products to their largest exponent, cut each toward zero at"
    " fraction_bits, add; align that sum and acc to the larger exponent, at least lowest_exponent; round the sum down"
    " at 32 fractional bits, acc down at fraction_bits; add; round the normalised sum down at 31 fractional bits, then"
    " to nearest even to fp32; a sum of zero is +0; NaN, inf*0 and inf-inf give one NaN"
)
_MMA_SIM: Final = "arXiv 2511.10909 and its simulator mmasim 2.1.1"

MMA_MODELS: Final[Mapping[str, MmaModel]] = MappingProxyType(
    {
        model.name: model
        for model in (
            MmaModel("fma32", 1, None, None, "acc' = fma(a, b, acc) in fp32, round to nearest even", "IEEE 754-2019"),
            MmaModel("sm80", 8, 24, -132, _TRUNCATED, f"{_MMA_SIM}; not checked by us on the hardware"),
            MmaModel("sm90", 16, 25, -133, _TRUNCATED, f"arXiv 2512.07004, {_MMA_SIM}; checked by us on an H200"),
            MmaModel("sm100", 16, 25, -133, _TRUNCATED, f"{_MMA_SIM}; not checked by us on the hardware"),
            MmaModel("cdna3", 8, 24, -126, _CDNA3, f"{_MMA_SIM}; not checked by us on the hardware"),
        )
    }
)

EXP2_MODELS: Final[Mapping[str, Exp2Model]] = MappingProxyType(
    {
        model.name: model
        for model in (
            Exp2Model(
                "poly",
                "below -126: +0; n = (x + 12582912) - 12582912; f = x - n; p = Horner by fma of 0x1.41fbbcp-13,"
                " 0x1.5f3e54p-10, 0x1.3b2d4cp-7, 0x1.c6aee8p-5, 0x1.ebfbdcp-3, 0x1.62e430p-1, 1 in f; p * 2^n",
                None,
                "this project",
            ),
            Exp2Model(
                "sm90_ex2",
                "q = x * 2^23 cut toward zero; n = q >> 23, f = q & (2^23 - 1); T[f] * 2^(n+1), below 2^-126: +0;"
                " T[f] = 2^(f/2^23 - 1) to nearest even, moved by the table's 2 bits for f, minus 2, units in the"
                " last place",
                "a3b7d7409d992f950a154aaeb0ba11701fb24900aab889237d00506b38550c18",
                "ex2.approx.ftz.f32 of an H200, every f checked by us on the hardware",
            ),
        )
    }
)

PROFILES: Final[Mapping[str, Profile]] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile("portable", "fma32", "poly"),
            Profile("sm90", "sm90", "sm90_ex2"),
            Profile("sm90_poly", "sm90", "poly"),
            Profile("sm80", "sm80", "poly"),
            Profile("sm100", "sm100", "poly"),
            Profile("cdna3", "cdna3", "poly"),
        )
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
        """sha256 (hex) of the canonical JSON, in which the rules of the MMA and exp2 models stand for their names."""
        models = {"mma": _rule(MMA_MODELS, self.mma), "exp2": _rule(EXP2_MODELS, self.exp2)}
        return digest_of(asdict(self) | models)


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


def _rule(models: Mapping[str, MmaModel] | Mapping[str, Exp2Model], name: str | None) -> dict[str, Any] | None:
    """What a digest says of a model: everything but where it is known from."""
    if name is None:
        return None
    if name not in models:
        raise ContractError(f"there is no model {name!r}; choose one of {', '.join(models)}")
    return {key: value for key, value in asdict(models[name]).items() if key != "source"}


def digest_of(value: object) -> str:
    """sha256 (hex) of `value` as canonical JSON: sorted keys, no spaces, ASCII only."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
