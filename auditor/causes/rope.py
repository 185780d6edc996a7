"""Rotations: another base or scaling on one side, or positions that go another way from some token on."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final

import numpy as np

from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import CERTAIN, Evidence, Suggestion
from auditor.causes.fit import best_fit, few_digits
from auditor.causes.oracle import F64, Oracle
from auditor.causes.search import Candidate, Model, nearest, nearest_model
from auditor.causes.seen import some_layers
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, I64, Bits, Reference

_THETAS: Final = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0, 5_000_000.0)
_FACTORS: Final = (2.0, 4.0, 8.0, 3.0, 1.5, 6.0, 16.0, 32.0, 0.5, 2.5, 5.0, 10.0)
_OFFSETS: Final = (1, -1, 2, -2, 3, -3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64, 128)
_ROUNDING: Final = 0.1  # a median difference above which positions do more than round
_FEW: Final = 4
_TRIAL: Final = 12
_PROMISING: Final = 0.7
_KINDS: Final = ("Llama 3 scaling", "YaRN scaling", "YaRN scaling with lengths left as they are")
_SKIPS: Final = (1, -1, 2, 8)
_MOST_PADS: Final = 96


def rope(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Try what people get wrong; the best one that explains enough is named."""
    best = nearest_model(evidence, oracle, _models(evidence, oracle))
    if evidence.begins is None and (best is None or (best.score < CERTAIN and best.cause == "rope_scaling")):
        fits = chain(_stretched(evidence, oracle), _fitted(evidence, oracle), _skips(evidence, oracle))
        fitted = nearest(evidence, oracle, fits)
        if fitted is not None and (best is None or fitted.score > best.score):
            best = fitted
    if best is not None:
        yield best


def padded_positions(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Positions that count padding in front. Rotations are relative, so all that shows is the rounding of angles."""
    differs = np.flatnonzero(evidence.differs[oracle.window])
    if differs.size < 4 or np.median(np.abs(evidence.delta[oracle.window][differs])) > _ROUNDING:
        return
    if best := nearest(evidence, oracle, _padded(evidence, oracle, differs[:_FEW])):
        yield best


def _padded(evidence: Evidence, oracle: Oracle, few: np.ndarray) -> Iterator[Candidate]:
    found, where = evidence.found[oracle.window][few], np.arange(len(oracle.tokens), dtype=np.float64)
    for pads in range(1, _MOST_PADS + 1):
        moved = edited(oracle.decoder, _turned(oracle, where + pads))
        if oracle.logprobs_of_rows(moved, few).tobytes() == found.tobytes():
            yield "position_offset", f"positions that begin at {pads}, as behind padding", oracle.logprobs(moved)
            return


def _fitted(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    """A base or a factor that is none of the usual ones: the one that fits best on a few rows, and its roundings."""
    few = _few_wrong(evidence, oracle)
    if few.size < _FEW:
        return
    stated, own = oracle.decoder.config.rope_theta, oracle.frequencies
    found, truth = (values[oracle.window][few].astype(np.float64) for values in (evidence.found, evidence.truth))
    where = np.arange(len(oracle.tokens), dtype=np.float64)
    kinds = (
        ("RoPE base", 0.02 * stated, 200.0 * stated, lambda theta: _base(own, stated, theta)),
        ("linear RoPE scaling by", 0.25, 64.0, lambda factor: own / factor),
    )
    for name, low, high, scaled in kinds:

        def under(value: float, scaled: Callable[[float], F64] = scaled) -> Decoder:
            return edited(oracle.decoder, _turned(oracle, where, scaled(value)))

        def error(value: float, under: Callable[[float], Decoder] = under) -> float:
            return float(np.abs(oracle.logprobs_of_rows(under(value), few) - found).mean())

        fitted = best_fit(error, low, high, grid=12, steps=10, hopeless=0.8 * float(np.abs(truth - found).mean()))
        for value in few_digits(fitted) if fitted is not None else []:
            yield "rope_scaling", f"{name} {value:g}", oracle.logprobs(under(value))


def _skips(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    """Positions that skip some, or repeat some, inside of the prompt: from whichever token fits best on a few rows."""
    few, prompt = _few_wrong(evidence, oracle), oracle.prompt_len
    if few.size < _FEW:
        return
    found, truth = (values[oracle.window][few].astype(np.float64) for values in (evidence.found, evidence.truth))
    where, said = np.arange(len(oracle.tokens), dtype=np.float64), dict[tuple[int, int], float]()

    def moved(start: int, by: int) -> Decoder:
        return edited(oracle.decoder, _turned(oracle, np.where(where >= start, where + by, where)))

    def error(skip: tuple[int, int]) -> float:
        if skip not in said:
            said[skip] = float(np.abs(oracle.logprobs_of_rows(moved(*skip), few) - found).mean())
        return said[skip]

    for by in _SKIPS:
        start, step = min(((prompt * quarter // 4, by) for quarter in (1, 2, 3)), key=error)[0], max(1, prompt // 8)
        while step and error((start, by)) > 0.0:
            closer = min((max(1, start - step), min(prompt, start + step)), key=lambda at: error((at, by)))
            if error((closer, by)) < error((start, by)):
                start = closer
            else:
                step //= 2
        if error((start, by)) < _PROMISING * float(np.abs(truth - found).mean()):
            name = f"positions from token {start} on moved by {by:+d}"
            yield "position_offset", name, oracle.logprobs(moved(start, by))


def _few_wrong(evidence: Evidence, oracle: Oracle) -> np.ndarray:
    return np.flatnonzero(evidence.differs[oracle.window] & np.isfinite(evidence.found[oracle.window]))[:_TRIAL]


def _models(evidence: Evidence, oracle: Oracle) -> Iterator[Model]:
    """What is common before what is rare; positions first where values are right up to some token."""
    where = np.arange(len(oracle.tokens), dtype=np.float64)
    scalings = [
        Model.of(oracle.decoder, "rope_scaling", name, _turned(oracle, where, frequencies, length))
        for name, frequencies, length in _scalings(oracle)
    ]
    moves = [
        Model.of(oracle.decoder, "position_offset", name, _turned(oracle, positions))
        for name, positions in _moves(evidence, oracle)
    ]
    if evidence.begins is not None:
        yield from moves
        return  # other angles are wrong from the first token on
    yield from (*scalings[:3], *moves, *scalings[3:])
    for name, frequencies, length in list(_scalings(oracle))[: len(_FACTORS) + len(_THETAS)]:
        for layers in some_layers(oracle.decoder.config.layers):
            there = _turned(oracle, where, frequencies, length).at(
                *((layer, call) for layer in layers for call in (0, 1))
            )
            said = f"{name}, in layers {', '.join(map(str, layers))}"
            yield Model("rope_scaling", said, edited(oracle.decoder, there))


def _turned(oracle: Oracle, positions: F64, frequencies: F64 | None = None, length: float = 1.0) -> Edit:
    """Token i turned as if it stood at positions[i], by other frequencies; `length` multiplies cosine and sine."""
    angle = positions[:, None] * (oracle.frequencies if frequencies is None else frequencies)[None, :]
    cos, sin = ((length * part).astype(np.float32) for part in (np.cos(angle), np.sin(angle)))

    def rope(plain: Reference, x: Bits, _cos: F32, _sin: F32, at: I64) -> Any:
        return plain.rope(x, cos, sin, at)

    return Edit("rope", rope)


def _scalings(oracle: Oracle) -> Iterator[tuple[str, F64, float]]:
    """Name, frequencies, and what cosine and sine are multiplied by."""
    own, stated = oracle.frequencies, oracle.decoder.config.rope_theta
    for factor in _FACTORS:
        yield f"linear RoPE scaling by {factor:g}", own / factor, 1.0
    for theta in _THETAS:
        if theta != stated:
            yield f"RoPE base {theta:g} (config: {stated:g})", _base(own, stated, theta), 1.0
    for factor in (2.0, 4.0, 8.0, 16.0, 32.0, 40.0):
        yield f"NTK scaling by {factor:g}", _base(own, stated, stated * factor ** (len(own) / (len(own) - 1))), 1.0


Stretch = tuple[int, float, float]  # kind, factor, original length


def _stretched(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    """YaRN and Llama 3's scaling: the factor and the original length that fit best on a few rows, in powers of two."""
    few = _few_wrong(evidence, oracle)
    if few.size < _FEW:
        return
    wanted, truth = (values[oracle.window][few].astype(np.float64) for values in (evidence.found, evidence.truth))
    said: dict[Stretch, float] = {}

    def error(stretch: Stretch) -> float:
        if stretch not in said:
            trial = oracle.logprobs_of_rows(edited(oracle.decoder, _of(oracle, stretch)), few)
            said[stretch] = float(np.abs(trial - wanted).mean())
        return said[stretch]

    for kind in range(len(_KINDS)):
        best = min(((kind, f, n) for f in (4.0, 16.0) for n in (64.0, 1024.0, 16384.0)), key=error)
        step = 4.0
        while step > 1.5 and error(best) > 0.0:
            _, factor, original = best
            near = [(kind, factor * by, original) for by in (step, 1 / step)]
            near += [(kind, factor, original * by) for by in (step, 1 / step)]
            closer = min(near, key=error)
            if error(closer) < error(best):
                best = closer
            else:
                step /= 2
        if error(best) < _PROMISING * float(np.abs(truth - wanted).mean()):
            name = f"{_KINDS[kind]} by {best[1]:g} of {best[2]:g} positions"
            yield "rope_scaling", name, oracle.logprobs(edited(oracle.decoder, _of(oracle, best)))


def _of(oracle: Oracle, stretch: Stretch) -> Edit:
    kind, factor, original = stretch
    where, own = np.arange(len(oracle.tokens), dtype=np.float64), oracle.frequencies
    if kind == 0:
        return _turned(oracle, where, _llama3(own, factor, original))
    yarn = _yarn(own, oracle.decoder.config.rope_theta, factor, original)
    return _turned(oracle, where, yarn, 0.1 * np.log(factor) + 1.0 if kind == 1 else 1.0)


def _moves(evidence: Evidence, oracle: Oracle) -> Iterator[tuple[str, F64]]:
    """Positions that take another way from some token on: where values go wrong, where the response begins."""
    where = np.arange(len(oracle.tokens), dtype=np.float64)
    begins = [] if evidence.begins is None else [evidence.begins + by for by in (0, 1, -1)]
    yield "all positions moved by +1", where + 1
    for start in dict.fromkeys((*begins, oracle.prompt_len)):
        after = where - start
        said = "response positions" if start == oracle.prompt_len else f"positions from token {start} on"
        for offset in _OFFSETS:
            yield f"{said} moved by {offset:+d}", np.where(after >= 0, where + offset, where)
        yield f"{said} beginning at 0 again", np.where(after >= 0, after, where)
        for step in (0.0, 2.0, 0.5):
            yield f"{said} in steps of {step:g}", np.where(after >= 0, start + step * after, where)
    for offset in (-1, 2):
        yield f"all positions moved by {offset:+d}", where + offset


def _base(own: F64, stated: float, theta: float) -> F64:
    changed: F64 = own ** (np.log(theta) / np.log(stated))
    return changed


def _yarn(own: F64, theta: float, factor: float, original: float) -> F64:
    """Frequencies of YaRN (arXiv 2309.00071), its ramp from 32 to 1 rotations."""
    dim = 2 * len(own)

    def at(rotations: float) -> float:
        return float(dim * np.log(original / (rotations * 2 * np.pi)) / (2 * np.log(theta)))

    low, high = max(np.floor(at(32.0)), 0.0), min(np.ceil(at(1.0)), dim - 1.0)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    scaled: F64 = own / factor * ramp + own * (1.0 - ramp)
    return scaled


def _llama3(own: F64, factor: float, original: float) -> F64:
    """Llama 3's scaling: wavelengths blended between a quarter of the original length and all of it."""
    wavelength = 2 * np.pi / own
    smooth = np.clip((original / wavelength - 1.0) / 3.0, 0.0, 1.0)
    scaled: F64 = (1.0 - smooth) * own / factor + smooth * own
    return scaled
