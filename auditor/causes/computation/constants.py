"""One number of a model that is another one: a scale, a limit, a multiplier. It is fitted to the values."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from auditor.causes.edits import Edit, Place, edited, places
from auditor.causes.evidence import CERTAIN, Evidence, Suggestion
from auditor.causes.fit import best_fit, few_digits
from auditor.causes.oracle import Oracle
from auditor.causes.search import Candidate, nearest
from rl_kernel.reference import _reference
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, I32, Bits, Reference, narrow, widen

_ROWS: Final = 8  # wrong rows on which a number is fitted
_GRID: Final = 9
_STEPS: Final = 14
_PROMISING: Final = 0.75  # of the difference: what is left of it where a number is worth refining
_ANYWHERE: Final = 0.88  # the same, where it may be one place's number
_NEAR: Final = 0.03  # of a fitted number: where a usual one is tried
_MOST: Final = 4  # layers that are told apart
# YaRN's magnitudes, once on queries and keys alike or twice on scores.
_MAGNITUDES: Final = tuple((0.1 * np.log(f) + 1) ** k for f in (2, 4, 8, 16, 32, 40, 64, 128) for k in (1, 2))


class Constant(NamedTuple):
    """said: with `{:g}` for the number. change: of the op, by the number. low, high: its range. usual: tried first."""

    said: str
    op: str
    change: Callable[[float], Callable[..., Any]]
    low: float
    high: float
    usual: tuple[float, ...] = ()


def other_constants(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The number that explains most of the difference, everywhere or in some places."""
    window = oracle.window
    few = np.flatnonzero(evidence.differs[window] & np.isfinite(evidence.found[window]))[:_ROWS]
    if evidence.begins is not None or few.size < _ROWS // 2:
        return
    best: Suggestion | None = None
    for constant in _constants(oracle.decoder):
        found = nearest(evidence, oracle, _fitted(evidence, oracle, constant, few))
        if found is not None and (best is None or found.score > best.score):
            best = found
        if best is not None and best.score >= CERTAIN:
            break
    if best is not None:
        yield best


def _fitted(evidence: Evidence, oracle: Oracle, constant: Constant, few: np.ndarray) -> Iterator[Candidate]:
    """Values under the best number, and under usual and round ones near it."""
    found, truth = (values[oracle.window][few].astype(np.float64) for values in (evidence.found, evidence.truth))
    before = float(np.abs(truth - found).mean())
    least = np.inf

    def under(at: tuple[Place, ...], number: float) -> Decoder:
        edit = Edit(constant.op, constant.change(number))
        return edited(oracle.decoder, edit.at(*at) if at else edit)

    def error(at: tuple[Place, ...], number: float) -> float:
        nonlocal least
        left = float(np.abs(oracle.logprobs_of_rows(under(at, number), few) - found).mean())
        least = min(least, left)
        return left

    for where, at in _groups(oracle.decoder, constant.op):
        if at and least > _ANYWHERE * before:
            return
        fitted = best_fit(partial(error, at), constant.low, constant.high, _GRID, _STEPS, hopeless=_PROMISING * before)
        if fitted is not None:
            usual = [number for number in constant.usual if abs(number - fitted) < _NEAR * fitted]
            for number in dict.fromkeys([*usual, *few_digits(fitted)]):
                name = constant.said.format(number) + where
                yield "model_config", name, oracle.logprobs(under(at, number))
            if least < _PROMISING * before / 2:
                return


def _groups(decoder: Decoder, op: str) -> Iterator[tuple[str, tuple[Place, ...]]]:
    """Everywhere, and then what stands at one place of all layers, and single layers where there are few."""
    yield "", ()
    every = places(decoder, op)
    calls, layers = ({place[at] for place in every} for at in (1, 0))
    for call in sorted(calls) if len(calls) > 1 else ():
        yield f", at place {call} of each layer", tuple(place for place in every if place[1] == call)
    for layer in sorted(layers) if 1 < len(layers) <= _MOST else ():
        yield f", in layer {layer}", tuple(place for place in every if place[0] == layer)


def _constants(decoder: Decoder) -> Iterator[Constant]:
    dim = decoder.config.head_dim
    yield Constant("scores multiplied by {:g}", "attention", partial(_scaled, dim**-0.5), 0.25, 4.0, _MAGNITUDES)
    layers = (2.0 * decoder.config.layers) ** -0.5
    yield Constant("blocks multiplied by {:g}", "residual_add", _multiplied, 0.1, 8.0, (layers, 2.0**0.5, 0.5**0.5))
    yield Constant("gates cut at {:g}", "swiglu", _limited, 0.5, 16.0, (7.0,))
    yield Constant("SiLU of {:g} times the gate", "swiglu", _steeper, 0.3, 4.0, (1.702,))
    yield Constant("a sink of {:g} beside the keys", "attention", _with_sink, 0.05, 20.0, (1.0,))
    yield Constant("scores softly capped at {:g}", "attention", capped, 4.0, 100.0, (50.0, 30.0, 20.0))


def scaled(scale: float) -> Callable[..., Any]:
    """Attention with another factor of its scores."""

    def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        out = np.empty_like(q)
        m, l = np.empty(q.shape[:2], np.float32), np.empty(q.shape[:2], np.float32)
        factor = np.float32(np.log2(np.e) * scale)
        _reference.attention(out, m, l, q, k, v, cu_q, cu_k, factor, plain.kv_partial, plain.mma, plain.exp2_model)
        return out, m, l

    return attention


def _scaled(own: float, number: float) -> Callable[..., Any]:
    return scaled(own * number)


def capped(cap: float) -> Callable[..., Any]:
    """Attention whose scores are no larger, not in the contract's order: what it gives is near, not equal."""

    def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        group = q.shape[1] // k.shape[1]
        keys, values = (np.repeat(widen(a), group, axis=1) for a in (k, v))
        scores = np.einsum("thd,shd->hts", widen(q), keys) / np.float32(np.sqrt(q.shape[2]))
        scores = np.float32(cap) * np.tanh(scores / np.float32(cap))
        scores[:, np.triu(np.ones((len(q), len(k)), np.bool_), 1)] = -np.inf
        p = np.exp(scores - scores.max(axis=2, keepdims=True))
        out = np.einsum("hts,shd->thd", p / p.sum(axis=2, keepdims=True), values)
        nothing = np.zeros(q.shape[:2], np.float32)
        return narrow(out), nothing, nothing

    return attention


def _with_sink(weight: float) -> Callable[..., Any]:
    """What a row sees is less by as much as one more key of this weight would take."""

    def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        out, m, l = plain.attention(q, k, v, cu_q, cu_k)
        kept = l / (l + np.float32(weight) * np.exp2(-m))
        return narrow(widen(out) * kept[:, :, None].astype(np.float32)), m, l

    return attention


def _multiplied(number: float) -> Callable[..., Bits]:
    def residual_add(plain: Reference, block: Bits, stream: Bits) -> Bits:
        return plain.residual_add(narrow(widen(block) * np.float32(number)), stream)

    return residual_add


def _limited(limit: float) -> Callable[..., Bits]:
    def swiglu(plain: Reference, x: Bits) -> Bits:
        gate, up = (widen(part) for part in np.split(x, 2, axis=1))
        cut = np.concatenate([np.minimum(gate, np.float32(limit)), np.clip(up, -limit, limit)], axis=1)
        return plain.swiglu(narrow(cut.astype(np.float32)))

    return swiglu


def _steeper(factor: float) -> Callable[..., Bits]:
    def swiglu(plain: Reference, x: Bits) -> Bits:
        gate, up = (widen(part) for part in np.split(x, 2, axis=1))
        silu: F32 = gate / (1 + np.exp(-np.float32(factor) * gate))
        return narrow((silu * up).astype(np.float32))

    return swiglu
