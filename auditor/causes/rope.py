"""Positions: another rotary base or scaling on one side, or positions that are some tokens off from some point on."""

from collections.abc import Iterator

import numpy as np

from auditor.causes.evidence import CERTAIN, HINT, Evidence, Suggestion, bits_hit, explained, worth_saying
from auditor.causes.fit import best_fit
from auditor.causes.oracle import F64, Oracle, own_frequencies
from auditor.causes.other_models import nearest_model
from auditor.compare import Logprobs
from rl_kernel.reference.model import Decoder

_THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0, 5_000_000.0)
_FACTORS = (2.0, 4.0, 8.0, 3.0, 1.5, 6.0, 16.0, 32.0, 0.5, 2.5, 5.0, 10.0)
_GROWTH = 0.02  # mean difference of the last quarter below which a trend is one of rounding
_ROUNDING = 0.1  # a median difference above which positions do more than round
_FEW = 4
_MOST_PADS = 128
_OFFSETS = (1, -1, 2, -2, 8, 16, 64)


def rope(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Try what people get wrong; the best one that explains enough is named."""
    best = nearest_model(evidence, oracle, _variants(oracle))
    if best is None or (best.score < CERTAIN and best.cause == "rope_scaling"):
        best = _fitted_base(evidence, oracle, best)
    if best is not None:
        yield best


def padded_positions(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Positions that count padding in front. Rotations are relative, so all that shows is the rounding of angles."""
    window = oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    differs = np.flatnonzero(evidence.differs[window])
    if differs.size < 4 or np.median(np.abs(evidence.delta[window][differs])) > _ROUNDING:
        return
    few = differs[:_FEW]
    where = np.arange(len(oracle.tokens), dtype=np.float64)
    for pads in range(1, _MOST_PADS + 1):
        moved = oracle.with_positions(where + pads)
        trial = oracle.logprobs_of_rows(moved, few)
        if (trial.view(np.uint32) == found[few].view(np.uint32)).all():
            predicted = oracle.logprobs(moved)
            score = explained(found, truth, predicted, active)
            if worth_saying(score):
                hit = bits_hit(found, predicted, active)
                said = f"the values are those of positions that begin at {pads}, as behind padding; {hit}"
                yield Suggestion("position_offset", score, said)
                return


def _fitted_base(evidence: Evidence, oracle: Oracle, best: Suggestion | None) -> Suggestion | None:
    """A base that is none of the usual ones: the one that fits best, and its roundings. Some thirty forwards."""
    window, stated, own = oracle.window, oracle.decoder.config.rope_theta, own_frequencies(oracle.decoder)
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    usable = active & np.isfinite(found)

    def under(theta: float) -> Logprobs:
        return oracle.logprobs(oracle.with_frequencies(_base(own, stated, theta)))

    def error(theta: float) -> float:
        return float(np.abs(under(theta)[usable].astype(np.float64) - found[usable]).mean()) if usable.any() else 0.0

    before = float(np.abs(truth[usable].astype(np.float64) - found[usable]).mean()) if usable.any() else 0.0
    fitted = best_fit(error, 0.02 * stated, 200.0 * stated, grid=12, steps=8, hopeless=0.8 * before)
    if fitted is None:
        return best
    for theta in dict.fromkeys((float(f"{fitted:.1g}"), float(f"{fitted:.2g}"), fitted)):
        predicted = under(theta)
        score = explained(found, truth, predicted, active)
        if worth_saying(score) and (best is None or score > best.score):
            name = f"the values are those of RoPE base {theta:g} (config: {stated:g})"
            best = Suggestion("rope_scaling", score, f"{name}; {bits_hit(found, predicted, active)}")
    return best


def grows_with_position(evidence: Evidence) -> Iterator[Suggestion]:
    """Differences that grow along the response, as a rotation by slightly wrong angles makes them."""
    size = np.abs(evidence.delta)[evidence.active]
    if size.size < 12:
        return
    first, last = np.array_split(size, 4)[0], np.array_split(size, 4)[-1]
    if (first > 0.0).mean() < 0.5:
        return  # what begins somewhere does not grow
    rank = _rank_correlation(size)
    if rank > 0.5 and last.mean() > max(_GROWTH, 4.0 * float(first.mean())):
        yield Suggestion(
            "rope_scaling",
            HINT,
            f"the difference grows along the response: mean {first.mean():.3g} in its first quarter,"
            f" {last.mean():.3g} in its last, rank correlation with position {rank:.2f}",
        )


def _variants(oracle: Oracle) -> Iterator[tuple[str, str, Decoder]]:
    """Cause, name and decoder; what is common before what is rare."""
    scalings, offsets = list(_scalings(oracle)), list(_moves(oracle))
    for name, frequencies, length in scalings[:3]:
        yield "rope_scaling", name, oracle.with_frequencies(frequencies, length=length)
    for name, positions in offsets:
        yield "position_offset", name, oracle.with_positions(positions)
    for name, frequencies, length in scalings[3:]:
        yield "rope_scaling", name, oracle.with_frequencies(frequencies, length=length)


def _scalings(oracle: Oracle) -> Iterator[tuple[str, F64, float]]:
    """Name, frequencies, and what cosine and sine are multiplied by."""
    own, stated = own_frequencies(oracle.decoder), oracle.decoder.config.rope_theta
    for factor in _FACTORS:
        yield f"linear RoPE scaling by {factor:g}", own / factor, 1.0
    for theta in _THETAS:
        if theta != stated:
            yield f"RoPE base {theta:g} (config: {stated:g})", _base(own, stated, theta), 1.0
    for factor in (2.0, 4.0, 8.0):
        yield f"NTK scaling by {factor:g}", _base(own, stated, stated * factor ** (len(own) / (len(own) - 1))), 1.0
        for original in dict.fromkeys((oracle.decoder.config.max_position, 4096, 32768)):
            yield f"YaRN scaling by {factor:g}", _yarn(own, stated, factor, original), 0.1 * np.log(factor) + 1.0
    yield "Llama 3 scaling by 8", _llama3(own), 1.0


def _moves(oracle: Oracle) -> Iterator[tuple[str, F64]]:
    where = np.arange(len(oracle.tokens), dtype=np.float64)
    for offset in (*_OFFSETS, -oracle.prompt_len):
        from_zero = ", to begin at 0 again" if offset == -oracle.prompt_len else ""
        moved = np.where(where >= oracle.prompt_len, where + offset, where)
        yield f"response positions moved by {offset:+d}{from_zero}", moved
        if not from_zero:
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


def _llama3(own: F64) -> F64:
    """Llama 3's scaling: factor 8, original length 8192, wavelengths blended between 8192 / 4 and 8192."""
    wavelength = 2 * np.pi / own
    smooth = np.clip((8192 / wavelength - 1.0) / 3.0, 0.0, 1.0)
    scaled: F64 = (1.0 - smooth) * own / 8.0 + smooth * own
    return scaled


def _rank_correlation(values: np.ndarray) -> float:
    """Spearman's, with the index."""
    if values.std() == 0.0:
        return 0.0
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])
