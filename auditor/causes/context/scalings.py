"""The ways in which models scale their rotations: frequencies, and what cosine and sine are multiplied by."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from auditor.causes.oracle import F64, Oracle

Angles = tuple[F64, float]  # frequencies [head_dim / 2], and a factor of cosine and sine

THETAS: Final = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0, 5_000_000.0)
FACTORS: Final = (2.0, 4.0, 8.0, 3.0, 1.5, 6.0, 16.0, 32.0, 0.5, 2.5, 5.0, 10.0)
_USUAL: Final = 4  # of the factors, the rest of which are rarer than another base
_GROWN: Final = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0)
_LENGTHS: Final = tuple(2.0**power for power in range(4, 16))
_BETAS: Final = ((32.0, 1.0), (16.0, 2.0), (16.0, 1.0), (32.0, 2.0), (64.0, 1.0), (8.0, 1.0))
YARN, YARN_PLAIN, LLAMA3 = "YaRN scaling", "YaRN scaling with lengths left as they are", "Llama 3 scaling"


@dataclass(frozen=True, slots=True)
class Scaling:
    """of: angles of a row, which may depend on how many tokens stand in front of it."""

    name: str
    of: Callable[[int], Angles]


def usual(oracle: Oracle) -> Iterator[tuple[str, F64, float]]:
    """Name, frequencies and factor of what configs say most often: each family with its usual numbers.

    What was stretched is the length that the config names, or what that was before.
    """
    own, longest = oracle.frequencies, float(oracle.decoder.config.max_position)
    stretches = (
        (YARN, 4.0, longest), (LLAMA3, 8.0, 8192.0), (YARN, 4.0, longest / 4.0), (YARN, 2.0, longest),
        (YARN, 8.0, longest), (LLAMA3, 32.0, 8192.0), (YARN, 32.0, 4096.0), (YARN, 40.0, 4096.0),
        (YARN_PLAIN, 4.0, longest), (LLAMA3, 4.0, longest), (LLAMA3, 8.0, longest), (YARN, 16.0, longest),
    )  # fmt: skip
    plain, rest = list(constant(oracle)), []
    for kind, factor, original in stretches:
        angles = stretched(oracle, kind, factor, original, _BETAS[0])
        if not np.array_equal(angles[0], own) or angles[1] != 1.0:
            rest.append((f"{kind} by {factor:g} of {original:g} positions", *angles))
    bases = [angles for angles in plain if angles[0].startswith("RoPE base")]
    yield from (plain[1], *rest[:1], plain[0], *rest[1:3], *plain[2:_USUAL], *rest[3:5], *bases, *rest[5:])


def constant(oracle: Oracle) -> Iterator[tuple[str, F64, float]]:
    """Name, frequencies and factor of the scalings that hold for all rows alike; the common ones first."""
    own, stated = oracle.frequencies, oracle.decoder.config.rope_theta
    for factor in FACTORS[:_USUAL]:
        yield f"linear RoPE scaling by {factor:g}", own / factor, 1.0
    for theta in THETAS:
        if theta != stated:
            yield f"RoPE base {theta:g} (config: {stated:g})", base(own, stated, theta), 1.0
    for factor in FACTORS[_USUAL:]:
        yield f"linear RoPE scaling by {factor:g}", own / factor, 1.0
    for factor in _GROWN:
        yield f"NTK scaling by {factor:g}", base(own, stated, stated * factor ** (len(own) / (len(own) - 1))), 1.0


def by_frequency(oracle: Oracle) -> Iterator[tuple[str, F64, float]]:
    """A factor for each frequency, as LongRoPE has it, growing evenly; or so many frequencies that turn at all."""
    own = oracle.frequencies
    yield "a rotation the other way round", -own, 1.0
    for factor in FACTORS:
        if factor > 1.0:
            yield f"RoPE factors from 1 to {factor:g}", own / np.linspace(1.0, factor, len(own)), 1.0
            yield f"RoPE factors from 1 to {factor:g} by powers", own / np.geomspace(1.0, factor, len(own)), 1.0
    for share in (0.25, 0.5, 0.75):
        count = round(share * len(own))
        if 0 < count < len(own):
            first = np.arange(len(own)) < count
            yield f"a rotation by the first {count} of {len(own)} frequencies", np.where(first, own, 0.0), 1.0
            yield f"a rotation by the last {len(own) - count} of {len(own)} frequencies", np.where(first, 0.0, own), 1.0


def stretched(oracle: Oracle, kind: str, factor: float, original: float, betas: tuple[float, float]) -> Angles:
    """YaRN's or Llama 3's frequencies of a model whose original length was another one."""
    own = oracle.frequencies
    if kind == LLAMA3:
        return llama3(own, factor, original), 1.0
    scaled = yarn(own, oracle.decoder.config.rope_theta, factor, original, betas)
    return scaled, 0.1 * np.log(factor) + 1.0 if kind == YARN else 1.0


def scalings(oracle: Oracle, longest: int, every: bool = True) -> Iterator[Scaling]:
    """All that is known, also those that begin where a sequence gets longer than `longest`; or the common ones."""
    for name, frequencies, length in (*constant(oracle), *by_frequency(oracle)):
        yield Scaling(name, _always((frequencies, length)))
    if not every:
        return
    for kind in (YARN, YARN_PLAIN, LLAMA3):
        for factor in _GROWN:
            for original in _LENGTHS:
                angles = stretched(oracle, kind, factor, original, _BETAS[0])
                yield Scaling(f"{kind} by {factor:g} of {original:g} positions", _always(angles))
    for factor in (1.0, *_GROWN):
        for original in (longest, longest + 1):
            name = f"dynamic NTK scaling by {factor:g} of {original} positions"
            yield Scaling(name, _dynamic(oracle, factor, original))


def _always(angles: Angles) -> Callable[[int], Angles]:
    return lambda at: angles


def _dynamic(oracle: Oracle, factor: float, original: int) -> Callable[[int], Angles]:
    """The base grows with the sequence, beyond its original length."""

    def of(at: int) -> Angles:
        return dynamic(oracle, factor, original, at + 1), 1.0

    return of


def dynamic(oracle: Oracle, factor: float, original: float, length: int) -> F64:
    """Frequencies of dynamic NTK scaling at a length."""
    own, stated = oracle.frequencies, oracle.decoder.config.rope_theta
    grown = max(factor * length / original - (factor - 1.0), 1.0)
    return base(own, stated, stated * grown ** (len(own) / (len(own) - 1)))


def base(own: F64, stated: float, theta: float) -> F64:
    """Frequencies of another base."""
    changed: F64 = own ** (np.log(theta) / np.log(stated))
    return changed


def yarn(own: F64, theta: float, factor: float, original: float, betas: tuple[float, float] = _BETAS[0]) -> F64:
    """Frequencies of YaRN (arXiv 2309.00071), its ramp between two numbers of rotations."""
    dim = 2 * len(own)

    def at(rotations: float) -> float:
        return float(dim * np.log(original / (rotations * 2 * np.pi)) / (2 * np.log(theta)))

    low, high = max(np.floor(at(betas[0])), 0.0), min(np.ceil(at(betas[1])), dim - 1.0)
    return ramped(own, factor, low, high)


def ramped(own: F64, factor: float, low: float, high: float) -> F64:
    """Frequencies up to the index `low` as they are, from `high` on divided, blended between."""
    ramp = np.clip((np.arange(len(own)) - low) / max(high - low, 0.001), 0.0, 1.0)
    scaled: F64 = own / factor * ramp + own * (1.0 - ramp)
    return scaled


def llama3(own: F64, factor: float, original: float) -> F64:
    """Llama 3's scaling: wavelengths blended between a quarter of the original length and all of it."""
    wavelength = 2 * np.pi / own
    smooth = np.clip((original / wavelength - 1.0) / 3.0, 0.0, 1.0)
    scaled: F64 = (1.0 - smooth) * own / factor + smooth * own
    return scaled
