"""Rotations: another base or scaling on one side, or positions that go another way from some token on."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np

from auditor.causes.context.factors import free_factors
from auditor.causes.context.scalings import (
    FACTORS,
    LLAMA3,
    THETAS,
    YARN,
    YARN_PLAIN,
    base,
    by_frequency,
    constant,
    dynamic,
    stretched,
    usual,
)
from auditor.causes.context.seen import some_layers
from auditor.causes.context.stepwise import Kept, Row
from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import CERTAIN, STRONG, Evidence, Suggestion
from auditor.causes.fit import best_fit, climbed, few_digits
from auditor.causes.oracle import F64, Oracle
from auditor.causes.search import Candidate, Model, nearest, nearest_model
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, I64, Bits, Reference

_CACHED: Final = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # tokens of a prefix, in whole blocks
_OFFSETS: Final = (1, -1, 2, -2, 3, -3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64, 128)
_ROUNDING: Final = 0.1  # a median difference above which positions do more than round
_FEW: Final = 4
_TRIAL: Final = 12
_PROMISING: Final = 0.7
_RANKS: Final = (2, 4, 8, 3)
_USUAL: Final = 16  # scalings
_ORIGINAL: Final = tuple(2**power for power in range(5, 18))
_SKIPS: Final = (1, -1, 2, -2, 3, 4, 5, 8, 16)
_STILL: Final = (3, 6, 12, 32, 128)  # tokens at one position
_MOST_PADS: Final = 96
_IT: Final = 0.9 * STRONG
_FARTHEST: Final = 256  # positions between prompt and response
_TOGETHER: Final = 64
_CLOSEST: Final = 12

Stretch = tuple[str, float, float]  # kind, factor, original length
Skip = tuple[int, int, int]  # from which token on, by how many, or for how many they stand still


def rope(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Try what people get wrong; the best one that explains enough is named."""
    best = nearest_model(evidence, oracle, _models(evidence, oracle))
    if evidence.begins is None and (best is None or (best.score < CERTAIN and best.cause == "rope_scaling")):
        fits = chain(*(fit(evidence, oracle) for fit in (_stretched, _fitted, _far_away, _skips, _of_each)))
        fitted = nearest(evidence, oracle, fits)
        if fitted is not None and (best is None or fitted.score > best.score):
            best = fitted
    if best is not None and best.cause == "position_offset" and evidence.begins is not None and best.score < _IT:
        # Positions alone would be it to the bit: there are as many tokens more, or fewer.
        best = replace(best, cause="other_context")
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
        moved = edited(oracle.decoder, turned(oracle, where + pads))
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
        ("RoPE base", 0.02 * stated, 200.0 * stated, lambda theta: base(own, stated, theta)),
        ("linear RoPE scaling by", 0.25, 64.0, lambda factor: own / factor),
    )
    for name, low, high, scaled in kinds:

        def under(value: float, scaled: Callable[[float], F64] = scaled) -> Decoder:
            return edited(oracle.decoder, turned(oracle, where, scaled(value)))

        def error(value: float, under: Callable[[float], Decoder] = under) -> float:
            return float(np.abs(oracle.logprobs_of_rows(under(value), few) - found).mean())

        fitted = best_fit(error, low, high, grid=12, steps=10, hopeless=0.8 * float(np.abs(truth - found).mean()))
        for value in few_digits(fitted) if fitted is not None else []:
            yield "rope_scaling", f"{name} {value:g}", oracle.logprobs(under(value))


def _of_each(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    where = np.arange(len(oracle.tokens), dtype=np.float64)
    yield from free_factors(evidence, oracle, lambda own: edited(oracle.decoder, turned(oracle, where, own)))


def _far_away(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    """Any number of positions between the prompt and the response: what makes its first rows' values."""
    few, prompt, found = _few_wrong(evidence, oracle), oracle.prompt_len, evidence.found[oracle.window]
    at = np.flatnonzero(oracle.rows == prompt)
    if few.size < _FEW or not at.size or np.median(np.abs(evidence.delta[oracle.window][few])) < _ROUNDING:
        return
    kept, offsets = Kept(oracle), np.arange(-_FARTHEST, _FARTHEST + 1)
    parts = np.array_split(offsets, 1 + offsets.size // _TOGETHER)
    values = np.concatenate([kept.values(prompt, [Row(offset=int(by)) for by in part]) for part in parts])
    where = np.arange(len(oracle.tokens), dtype=np.float64)
    left: list[tuple[float, int]] = []
    for by in offsets[np.argsort(np.abs(values - found[at[0]]))[:_CLOSEST]].tolist():
        trial = oracle.logprobs_of_rows(edited(oracle.decoder, turned(oracle, where + by * (where >= prompt))), few)
        left.append((float(np.abs(trial - found[few]).mean()), by))
    error, by = min(left)
    if error < _PROMISING * float(np.abs(evidence.delta[oracle.window][few]).mean()):
        moved = edited(oracle.decoder, turned(oracle, where + by * (where >= prompt)))
        yield "position_offset", f"response positions moved by {by:+d}", oracle.logprobs(moved)


def _skips(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    """Positions that skip some, repeat some, or stand still for a while inside of the prompt.

    From whichever token on, and for as long, as fits best on a few rows.
    """
    few, prompt = _few_wrong(evidence, oracle)[: 2 * _FEW], oracle.prompt_len
    found, truth = (values[oracle.window][few].astype(np.float64) for values in (evidence.found, evidence.truth))
    if few.size < _FEW or np.median(np.abs(found - truth)) < _ROUNDING:
        return
    where, said = np.arange(len(oracle.tokens), dtype=np.float64), dict[Skip, float]()

    def moved(skip: Skip) -> Decoder:
        start, by, still = skip
        after = np.clip(where - start + 1, 0, still) if still else by * (where >= start)
        return edited(oracle.decoder, turned(oracle, where - after if still else where + after))

    def error(skip: Skip) -> float:
        if skip not in said:
            out = not 1 <= skip[0] <= prompt or skip[2] < 0
            trial = np.full(few.size, np.inf) if out else oracle.logprobs_of_rows(moved(skip), few)
            said[skip] = float(np.abs(trial - found).mean())
        return said[skip]

    stills: list[Skip] = [(prompt * at // 4, 0, size) for size in _STILL for at in (1, 2, 3) if size < prompt]
    kinds: list[list[Skip]] = [[(prompt * at // 4, by, 0) for at in (1, 2, 3)] for by in _SKIPS]
    for kind in filter(None, (*kinds, stills)):
        best = climbed(min(kind, key=error), _beside, error, max(1, prompt // 8))
        if error(best) < _PROMISING * float(np.abs(truth - found).mean()):
            start, by, still = best
            how = f"standing still for {still} tokens" if still else f"moved by {by:+d}"
            yield "position_offset", f"positions from token {start} on {how}", oracle.logprobs(moved(best))


def _beside(skip: Skip, step: int) -> Iterator[Skip]:
    """From an earlier or a later token on, and where positions stand still, for longer or not as long."""
    start, by, still = skip
    for way in (step, -step):
        yield start + way, by, still
        if still:
            yield from ((start, by, still + way), (start - way, by, still + way))


def _few_wrong(evidence: Evidence, oracle: Oracle) -> np.ndarray:
    return np.flatnonzero(evidence.differs[oracle.window] & np.isfinite(evidence.found[oracle.window]))[:_TRIAL]


def _models(evidence: Evidence, oracle: Oracle) -> Iterator[Model]:
    """What is common before what is rare; positions first where values are right up to some token."""
    where = np.arange(len(oracle.tokens), dtype=np.float64)
    known = (*usual(oracle), *constant(oracle), *by_frequency(oracle), *_at_lengths(oracle))
    scalings = [
        Model.of(oracle.decoder, "rope_scaling", name, turned(oracle, where, frequencies, length))
        for name, (frequencies, length) in {name: (own, length) for name, own, length in known}.items()
    ]
    moves = [
        Model.of(oracle.decoder, "position_offset", name, turned(oracle, positions))
        for name, positions in _moves(evidence, oracle)
    ]
    if evidence.begins is not None:
        yield from moves
        return  # other angles are wrong from the first token on
    ranks = [
        Model.of(oracle.decoder, "context_parallel", name, turned(oracle, positions[: len(where)]))
        for name, positions in _of_ranks(len(evidence.rollout.tokens))
    ]
    yield from (*scalings[:2], moves[0], *scalings[2:_USUAL], *moves[1:], *ranks, *scalings[_USUAL:])
    for name, frequencies, length in list(constant(oracle))[: len(FACTORS) + len(THETAS)]:
        for layers in some_layers(oracle.decoder.config.layers):
            there = turned(oracle, where, frequencies, length).at(
                *((layer, call) for layer in layers for call in (0, 1))
            )
            said = f"{name}, in layers {', '.join(map(str, layers))}"
            yield Model("rope_scaling", said, edited(oracle.decoder, there))


def _at_lengths(oracle: Oracle) -> Iterator[tuple[str, F64, float]]:
    """Dynamic scaling by the whole length, which takes all rows along."""
    total = len(oracle.tokens)
    for factor in (1.0, 2.0, 4.0, 8.0):
        for original in (length for length in _ORIGINAL if length < total):
            name = f"dynamic NTK scaling by {factor:g} of {original} positions"
            yield name, dynamic(oracle, factor, original, total), 1.0


def _of_ranks(total: int) -> Iterator[tuple[str, F64]]:
    """Positions that count a rank's own slices, or slices in another order than the sequence's."""
    where = np.arange(total, dtype=np.float64)
    for ranks in _RANKS:
        edges = np.round(np.arange(2 * ranks + 1) * total / (2 * ranks)).astype(np.int64)
        spans = [np.arange(a, b) for a, b in pairwise(edges)]
        mine = [np.concatenate([spans[rank], spans[-1 - rank]]) for rank in range(ranks)]
        order = np.concatenate(mine)
        own, placed = np.empty(total), np.empty(total)
        for held in mine:
            own[held] = np.arange(len(held))
        placed[order] = where
        yield f"positions in the order of {ranks} ranks' slices", placed
        yield f"positions of {ranks} ranks' slices, put back in a wrong order", where[order]
        yield f"positions that each of {ranks} ranks counts by itself, two slices each", own
        cuts = np.round(np.arange(ranks + 1) * total / ranks).astype(np.int64)
        begun = np.concatenate([np.arange(b - a, dtype=np.float64) for a, b in pairwise(cuts)])
        yield f"positions that each of {ranks} ranks counts by itself", begun


def turned(oracle: Oracle, positions: F64, frequencies: F64 | None = None, length: float = 1.0) -> Edit:
    """Token i turned as if it stood at positions[i], by other frequencies; `length` multiplies cosine and sine."""
    angle = positions[:, None] * (oracle.frequencies if frequencies is None else frequencies)[None, :]
    cos, sin = ((length * part).astype(np.float32) for part in (np.cos(angle), np.sin(angle)))

    def rope(plain: Reference, x: Bits, _cos: F32, _sin: F32, at: I64) -> Any:
        return plain.rope(x, cos, sin, at)

    return Edit("rope", rope)


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

    for kind in (LLAMA3, YARN, YARN_PLAIN):
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
            name = f"{kind} by {best[1]:g} of {best[2]:g} positions"
            yield "rope_scaling", name, oracle.logprobs(edited(oracle.decoder, _of(oracle, best)))


def _of(oracle: Oracle, stretch: Stretch) -> Edit:
    kind, factor, original = stretch
    where = np.arange(len(oracle.tokens), dtype=np.float64)
    return turned(oracle, where, *stretched(oracle, kind, factor, original, (32.0, 1.0)))


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
    for start in _CACHED if evidence.begins is None else ():
        if start < oracle.prompt_len:
            after = where - start
            said = "beginning at 0 again, as behind a cached prefix"
            rest = (after >= 0) & (where < oracle.prompt_len)
            yield f"positions from token {start} of the prompt to its end {said}", np.where(rest, after, where)
            yield f"positions from token {start} on {said}", np.where(after >= 0, after, where)
