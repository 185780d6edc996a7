"""The named version's weights, read in a wrong place: of another projection, another layer, another rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from auditor.causes.evidence import SETTLED, Evidence, Suggestion
from auditor.causes.mixture import Source, measured_of
from auditor.causes.oracle import Oracle
from auditor.causes.parts import Layout
from auditor.causes.rounded import Changed
from auditor.causes.search import Model, nearest_model
from auditor.causes.weights import searched
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import Bits

_SWAPPED: Final = (
    ("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj"),
    ("input_layernorm", "post_attention_layernorm"), ("q_norm", "k_norm"),
)  # fmt: skip
_LARGEST: Final = 1 << 30  # bytes of weights
_COPIED: Final = 1 << 26  # the same, of which a copy is made for each mistake
_RANKS: Final = (2, 4)
_LEAST: Final = 1.5  # in roundings: less is made by no tensor that is another one
_TRIED: Final = 100  # of what moves values too far for the first order to tell


def altered_weights(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """What explains most of the difference is named; not on a model of which copies would fill the memory."""
    decoder = oracle.decoder
    size = sum(weight.nbytes for weight in decoder.weights.values())
    if size > _LARGEST:
        return
    measured = measured_of(evidence, oracle, near=False)
    if measured is not None and measured.response is not None and measured.size < _LEAST:
        return
    models = (Model("other_weights", name, replace(decoder, weights=dict(w))) for name, w in _misplaced(decoder))
    best = nearest_model(evidence, oracle, models)
    if best:
        yield best
    if measured is not None and size < _COPIED and (best is None or best.score < SETTLED):
        mistakes = (*_misplaced(decoder), *_moved(decoder))
        sources = [Source("other_weights", f"{{}} with {name}", weights) for name, weights in mistakes]
        yield from searched(evidence, measured, sources, Layout.tensors, most=_TRIED)
        lost = Source("other_weights", "no values in {}", Changed(decoder.weights, np.zeros_like))
        effects = measured.effects([lost], parts=True)
        yield from searched(evidence, measured, [lost], Layout.tensors, effects=effects, most=_TRIED)


def _misplaced(decoder: Decoder) -> Iterator[tuple[str, Mapping[str, Bits]]]:
    """Tensors in the place of others of their shape."""
    weights, layers = decoder.weights, decoder.config.layers
    for first, second in _SWAPPED:
        other = {n: n.replace(first, second) if first in n else n.replace(second, first) for n in weights}
        if set(other.values()) <= set(weights):
            yield f"{first} and {second} in each other's place", {n: weights[other[n]] for n in weights}
    every = np.arange(layers)
    orders = {
        "each layer's weights one layer too early": np.minimum(every + 1, layers - 1),
        "each layer's weights one layer too late": np.maximum(every - 1, 0),
        "the layers' weights in reverse order": every[::-1],
    }
    for name, order in orders.items():
        yield name, {n: weights[_in_layer(n, order)] for n in weights}
    for first, second in (("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj")):
        yield f"{first} and {second} row by row in turn", _in_turn(weights, first, second)


def _in_layer(name: str, order: Sequence[int] | np.ndarray) -> str:
    if not name.startswith("model.layers."):
        return name
    parts = name.split(".")
    parts[2] = str(int(order[int(parts[2])]))
    return ".".join(parts)


def _in_turn(weights: Mapping[str, Bits], first: str, second: str) -> dict[str, Bits]:
    """Of two matrices that are held as one: one's rows are the even ones of both, and the other's the odd ones."""
    result = dict(weights)
    for name in weights:
        if first in name:
            both = np.concatenate([weights[name], weights[name.replace(first, second)]])
            result[name], result[name.replace(first, second)] = both[::2].copy(), both[1::2].copy()
    return result


def _moved(decoder: Decoder) -> Iterator[tuple[str, Mapping[str, Bits]]]:
    """What a matrix is put together wrong by: rows or columns of ranks, of heads, of pairs."""
    dim = decoder.config.head_dim
    for ranks in _RANKS:
        for axis, what in ((0, "rows"), (1, "columns")):
            yield f"the {what} of {ranks} ranks in reverse order", _each(decoder, partial(_reversed, ranks, axis))
    yield "its rows one too far", _each(decoder, lambda w: np.roll(w, 1, axis=0))
    for said, apart in (("two by two", (-1, 2)), ("half by half", (2, -1))):
        yield f"the values of each head {said}", _each(decoder, partial(_turned, dim, apart))
    yield "neighbouring heads swapped", _each(decoder, partial(_heads_swapped, dim))


def _each(decoder: Decoder, move: Callable[[Bits], Bits]) -> Mapping[str, Bits]:
    return Changed(decoder.weights, lambda w: move(w) if w.ndim == 2 else w)


def _reversed(ranks: int, axis: int, w: Bits) -> Bits:
    return np.concatenate(np.array_split(w, ranks, axis)[::-1], axis)


def _turned(dim: int, apart: tuple[int, int], w: Bits) -> Bits:
    """Rows of a head as another layout of its rotation has them."""
    if len(w) % dim:
        return w
    heads = w.reshape(-1, dim, w.shape[1])
    return np.concatenate([head.reshape(*apart, w.shape[1]).swapaxes(0, 1).reshape(dim, -1) for head in heads])


def _heads_swapped(dim: int, w: Bits) -> Bits:
    if len(w) % (2 * dim):
        return w
    return w.reshape(-1, 2, dim, w.shape[1])[:, ::-1].reshape(w.shape)
