"""Rotations: another base or scaling on one side, or positions that go another way from some token on."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import CERTAIN, Evidence, Suggestion
from auditor.causes.fit import best_fit, few_digits
from auditor.causes.oracle import F64, Oracle
from auditor.causes.search import Candidate, Model, nearest, nearest_model
from auditor.compare import Logprobs
from rl_kernel.reference.ops import F32, I64, Bits, Reference

_THETAS: Final = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0, 5_000_000.0)
_FACTORS: Final = (2.0, 4.0, 8.0, 3.0, 1.5, 6.0, 16.0, 32.0, 0.5, 2.5, 5.0, 10.0)
_OFFSETS: Final = (1, -1, 2, -2, 3, -3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64, 128)
_ROUNDING: Final = 0.1  # a median difference above which positions do more than round
_FEW: Final = 4
_MOST_PADS: Final = 96


def rope(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Try what people get wrong; the best one that explains enough is named."""
    best = nearest_model(evidence, oracle, _models(evidence, oracle))
    if best is None or (best.score < CERTAIN and best.cause == "rope_scaling"):
        fitted = nearest(evidence, oracle, _fitted_bases(evidence, oracle))
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


def _fitted_bases(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    """A base that is none of the usual ones: the one that fits best, and its roundings. Some thirty forwards."""
    window, stated, own = oracle.window, oracle.decoder.config.rope_theta, oracle.frequencies
    found, truth = evidence.found[window], evidence.truth[window]
    usable = np.flatnonzero(evidence.active[window] & np.isfinite(found))
    if not usable.size:
        return

    def under(theta: float) -> Logprobs:
        where = np.arange(len(oracle.tokens), dtype=np.float64)
        return oracle.logprobs(edited(oracle.decoder, _turned(oracle, where, _base(own, stated, theta))))

    def error(theta: float) -> float:
        return float(np.abs(under(theta)[usable].astype(np.float64) - found[usable]).mean())

    before = float(np.abs(truth[usable].astype(np.float64) - found[usable]).mean())
    fitted = best_fit(error, 0.02 * stated, 200.0 * stated, grid=12, steps=8, hopeless=0.8 * before)
    for theta in few_digits(fitted) if fitted is not None else []:
        yield "rope_scaling", f"RoPE base {theta:g} (config: {stated:g})", under(theta)


def _models(evidence: Evidence, oracle: Oracle) -> Iterator[Model]:
    """What is common before what is rare."""
    where = np.arange(len(oracle.tokens), dtype=np.float64)
    scalings = [
        Model.of(oracle.decoder, "rope_scaling", name, _turned(oracle, where, frequencies, length))
        for name, frequencies, length in _scalings(oracle)
    ]
    yield from scalings[:3]
    for name, positions in _moves(evidence, oracle):
        yield Model.of(oracle.decoder, "position_offset", name, _turned(oracle, positions))
    yield from scalings[3:]


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
        for original in dict.fromkeys((oracle.decoder.config.max_position, 4096, 32768)):
            yarn = _yarn(own, stated, factor, original)
            yield f"YaRN scaling by {factor:g} of {original}", yarn, 0.1 * np.log(factor) + 1.0
            yield f"YaRN scaling by {factor:g} of {original}, lengths left as they are", yarn, 1.0
    for factor in (8.0, 32.0):
        yield f"Llama 3 scaling by {factor:g}", _llama3(own, factor), 1.0


def _moves(evidence: Evidence, oracle: Oracle) -> Iterator[tuple[str, F64]]:
    """Positions that take another way from some token on: where values go wrong, where the response begins."""
    where = np.arange(len(oracle.tokens), dtype=np.float64)
    begins = [] if evidence.begins is None else [evidence.begins, evidence.begins + 1]
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


def _yarn(own: F64, theta: float, factor: float, original: int) -> F64:
    """Frequencies of YaRN (arXiv 2309.00071), its ramp from 32 to 1 rotations."""
    dim = 2 * len(own)

    def at(rotations: float) -> float:
        return float(dim * np.log(original / (rotations * 2 * np.pi)) / (2 * np.log(theta)))

    low, high = max(np.floor(at(32.0)), 0.0), min(np.ceil(at(1.0)), dim - 1.0)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    scaled: F64 = own / factor * ramp + own * (1.0 - ramp)
    return scaled


def _llama3(own: F64, factor: float) -> F64:
    """Llama 3's scaling: original length 8192, wavelengths blended between 8192 / 4 and 8192."""
    wavelength = 2 * np.pi / own
    smooth = np.clip((8192 / wavelength - 1.0) / 3.0, 0.0, 1.0)
    scaled: F64 = (1.0 - smooth) * own / factor + smooth * own
    return scaled
