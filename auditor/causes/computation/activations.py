"""Products in fewer bits: of their inputs, or of their weights too; which products, in which layers, from where on.

A rounding's errors are known where it is applied, and what they do is known to the first order. Where errors of one
product change what the next one rounds, the first order still says which rounding it is; bits then say whether.

B rows that are asked for, T tokens, F roundings, L layers.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np

from auditor.causes.computation.precision import CASTS, Coarse
from auditor.causes.edits import DOWN, GATE, UP, Edit, K, O, Q, V, edited
from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import F64, Oracle
from auditor.causes.weights.grids import (
    BLOCK,
    E4M3,
    E5M2,
    FP4,
    INT4,
    INT8,
    INT8_RANGE,
    ROW,
    TENSOR,
    Sharing,
    coarse,
    group,
    said,
)  # fmt: skip
from auditor.causes.weights.mixture import Guess, Measured, measured_of
from auditor.causes.weights.response import Response
from auditor.causes.weights.versions import told
from rl_kernel.reference.ops import Bits, Reference, widen

_LEAST: Final = 1.2  # in roundings: less is made by any order of sums
_TRIED: Final = 24
_IN_ALL: Final = 96
_FIXED: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # largest values that somebody may have calibrated
_PRODUCTS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # in order of calls
_SETS: Final = (
    ("", (Q, K, V, O, GATE, UP, DOWN)), (" of attention", (Q, K, V, O)), (" of feed-forward parts", (GATE, UP, DOWN)),
    (" of queries, keys and values", (Q, K, V)), (" of attention's output", (O,)), (" of gate and up", (GATE, UP)),
    (" of feed-forward outputs", (DOWN,)), (" that ranks cut by rows", (O, DOWN)),
    (" that ranks cut by columns", (Q, K, V, GATE, UP)),
)  # fmt: skip


class _Rounding(NamedTuple):
    """Of a product's inputs, and of its weights. whole: whether a token's depends on those behind it."""

    name: str
    inputs: Coarse
    weights: Coarse | None
    whole: bool


def products_in_fewer_bits(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The rounding that has the side's bits, or that the difference points to."""
    measured = measured_of(evidence, oracle)
    if measured is None or not isinstance(measured.response, Response) or measured.size < _LEAST:
        return
    by_rounding = list(_guesses(measured, measured.response))
    guesses = [guess for _, guess in sorted(by_rounding, key=lambda pair: pair[1].unlikely)]
    exact = measured.first_exact(guesses, _TRIED) or measured.first_exact(_in_all_products(by_rounding), _IN_ALL)
    yield from told(evidence, measured, exact, guesses[0])


def _in_all_products(guesses: list[tuple[int, Guess]]) -> Iterator[Guess]:
    """Each rounding in all products, the sooner the likelier it is in some: what the first changes, the next rounds."""
    best: dict[int, float] = {}
    for rounding, guess in guesses:
        best[rounding] = min(guess.unlikely, best.get(rounding, np.inf))
    for rounding, guess in guesses:
        if guess.said.startswith("products with"):
            yield replace(guess, unlikely=best[rounding])


def _roundings() -> Iterator[_Rounding]:
    rows = (ROW, TENSOR, group(128), group(64), group(32))
    for grid, sharing in (
        *product((E4M3, INT8, E5M2, INT8_RANGE), rows),
        (E4M3, group(32, "microscaled")), (FP4, group(32, "microscaled")), (FP4, group(16, "in FP8")), (INT4, ROW),
        *((INT8, Sharing("", (0, 1), fixed=most)) for most in _FIXED),
    ):  # fmt: skip
        inputs, name = coarse(grid, sharing), f"with inputs {said(grid, sharing)}"
        yield _Rounding(name, inputs, None, sharing.whole)
        if grid in (INT8_RANGE, INT4) or sharing.fixed:
            continue
        own = (sharing,) if sharing.group in (16, 32) else (ROW, TENSOR, BLOCK) if sharing.group in (0, 128) else ()
        for of_weights in own:
            both = f"{name} and weights {said(grid, of_weights)}"
            yield _Rounding(both, inputs, coarse(grid, of_weights), sharing.whole)
    for name, change in CASTS:
        yield _Rounding(f"with inputs {name}", change, None, False)


def _guesses(measured: Measured, response: Response) -> Iterator[tuple[int, Guess]]:
    """By its number, every rounding in every set of products, in all layers, in one, or in all but one at an end."""
    roundings, config = list(_roundings()), measured.oracle.decoder.config
    since = measured.oracle.prompt_len
    effects = _effects(response, roundings, _given(measured.oracle, len(response.backward.tokens)), since)
    layers = [("", list(range(config.layers)))]
    if config.layers > 1:
        layers += [(f", in layer {at}", [at]) for at in range(config.layers)]
    if config.layers > 2:
        layers += [(", not in the first layer", layers[0][1][1:]), (", not in the last layer", layers[0][1][:-1])]
    scopes = list(product(_SETS, layers, (0, since)))
    cost = math.log(len(scopes))
    for (where, calls), (which, run), first in scopes:
        inside = effects[:, list(calls)][:, :, run]
        moved = inside[:, :, :, 1:].sum(axis=(1, 2, 3)) if first else inside.sum(axis=(1, 2, 3))
        places = [(layer, call) for layer in run for call in calls]
        for at, (rounding, effect) in enumerate(zip(roundings, moved, strict=True)):
            name = f"products{where} {rounding.name}{which}" + (f", from token {first} on" if first else "")
            edit = replace(Edit("gemm", _changed(rounding)).at(*places), first=first)
            more = cost + math.log(len(roundings)) - 2.0 * (len(run) == config.layers and not first)
            unlikely = measured.unlikely(effect, more)
            yield at, Guess("activation_precision", name, unlikely, dict, effect, edits=(edit,), whole=rounding.whole)


def _given(oracle: Oracle, tokens: int) -> list[Bits]:
    """What the reference's products are given, in the order of their calls, to the bit."""
    kept: list[Bits] = []

    def keep(plain: Reference, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        kept.append(x)
        return plain.gemm(x, w, segments=segments)

    oracle.hidden(edited(oracle.decoder, Edit("gemm", keep)), oracle.tokens[:tokens])
    return kept


def _effects(response: Response, roundings: list[_Rounding], given: list[Bits], since: int) -> F64:
    """Of each product under each rounding, in the rows before some token and from it on, in roundings [F,7,L,2,B]."""
    calls = len(_PRODUCTS)
    found = np.zeros((len(roundings), calls, len(given) // calls, 2, len(response.spread)))
    for signal in response.backward.signals():
        if signal.given is None or not any(name in signal.tensor for name in _PRODUCTS):
            continue
        layer, call = int(signal.tensor.split(".")[2]), _PRODUCTS.index(signal.tensor.split(".")[4])
        x, weight = given[layer * calls + call], response.backward.decoder.weights[signal.tensor]
        own = widen(x) @ widen(weight).T
        changed = [_in_fewer_bits(rounding, x, weight) - own for rounding in roundings]
        for part, rows in enumerate((np.s_[:since], np.s_[since:])):
            slope = signal.of_output[:, rows].reshape(len(signal.of_output), -1)
            moved = slope @ np.stack([change[rows].reshape(-1) for change in changed], axis=1)
            found[:, call, layer, part] = response.in_roundings(moved.astype(np.float64)).T
    return found


def _in_fewer_bits(rounding: _Rounding, given: Bits, weight: Bits) -> Any:
    return widen(rounding.inputs(given)) @ widen(rounding.weights(weight) if rounding.weights else weight).T


def _changed(rounding: _Rounding) -> Callable[..., Bits]:
    def gemm(plain: Reference, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        weights = rounding.weights(w) if rounding.weights else w
        return plain.gemm(rounding.inputs(x), weights, segments=segments)

    return gemm
