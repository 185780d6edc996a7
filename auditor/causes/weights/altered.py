"""The named version's weights, read in a wrong place: of another projection, another layer, another rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from auditor.causes.evidence import SETTLED, Evidence, Suggestion
from auditor.causes.oracle import Oracle
from auditor.causes.search import Model, nearest_model
from auditor.causes.weights.mixture import Source, measured_of
from auditor.causes.weights.parts import Layout, by_column
from auditor.causes.weights.rounded import Changed
from auditor.causes.weights.versions import searched
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
_FAR: Final = 12.0  # in roundings
_NEAR: Final = 64  # mistakes that are tried where the first order says which are likely
_LOST: Final = 100  # the same as `_TRIED`, for what is lost
_TRIED: Final = 540  # of what moves values too far for the first order to tell


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
        # What moves values that far tells nothing to the first order: mistakes are tried as they are common.
        far = measured.response is None or measured.size > _FAR
        effects = [{} for _ in sources] if far else measured.effects(sources)
        most = _TRIED if far else _NEAR
        yield from searched(evidence, measured, sources, Layout.tensors, effects=effects, most=most)
        lost = Source("other_weights", "no values in {}", Changed(decoder.weights, np.zeros_like))
        effects = measured.effects([lost], parts=True)
        yield from searched(evidence, measured, [lost], Layout.tensors, effects=effects, most=_LOST, in_runs=True)


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
        "neighbouring layers' weights swapped": np.minimum(every ^ 1, layers - 1),
        "the first half of the layers twice": every % max(1, layers // 2),
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
    """What a matrix is put together wrong by: rows or columns of ranks, of heads, of pairs, along which it is cut."""
    dim = decoder.config.head_dim

    def each(axis: int, move: Callable[[Bits], Bits], part: str = "") -> Mapping[str, Bits]:
        matrices = {name for name, weight in decoder.weights.items() if weight.ndim == 2}
        return Changed(decoder.weights, move, lambda n: n in matrices and by_column(n) == axis and part in n)

    for axis, what in ((0, "rows"), (1, "columns")):
        for ranks in _RANKS:
            yield f"the {what} of {ranks} ranks in reverse order", each(axis, partial(_reversed, ranks, axis))
        yield f"the {what} of the first of 2 ranks in both", each(axis, partial(_first, 2, axis))
        yield f"{what} dealt out to 2 ranks in turn", each(axis, partial(_dealt, 2, axis))
        for said, order in (
            ("in reverse order", lambda heads: heads[::-1]),
            ("one head too far", lambda heads: np.roll(heads, 1, axis=0)),
            ("swapped with their neighbours", lambda heads: heads[np.arange(len(heads) // 2 * 2) ^ 1]),
        ):
            heads = each(axis, partial(_of_heads, dim, axis, order), "self_attn")
            yield f"the {what} of heads {said}", heads
    yield "its rows one too far", _each(decoder, lambda w: np.roll(w, 1, axis=0))
    for said, apart in (("two by two", (-1, 2)), ("half by half", (2, -1))):
        yield f"the values of each head {said}", each(0, partial(_turned, dim, apart), "self_attn")


def _each(decoder: Decoder, move: Callable[[Bits], Bits]) -> Mapping[str, Bits]:
    return Changed(decoder.weights, lambda w: move(w) if w.ndim == 2 else w)


def _reversed(ranks: int, axis: int, w: Bits) -> Bits:
    return np.concatenate(np.array_split(w, ranks, axis)[::-1], axis)


def _first(ranks: int, axis: int, w: Bits) -> Bits:
    if w.shape[axis] % ranks:
        return w
    return np.concatenate([np.split(w, ranks, axis)[0]] * ranks, axis)


def _dealt(ranks: int, axis: int, w: Bits) -> Bits:
    if w.shape[axis] % ranks:
        return w
    return np.concatenate([w.take(np.arange(rank, w.shape[axis], ranks), axis) for rank in range(ranks)], axis)


def _of_heads(dim: int, axis: int, order: Callable[[Bits], Bits], w: Bits) -> Bits:
    """Heads in another order."""
    if w.shape[axis] % dim:
        return w
    heads = order(np.stack(np.split(w, w.shape[axis] // dim, axis)))
    moved = np.concatenate(list(heads), axis)
    return moved if moved.shape == w.shape else w


def _turned(dim: int, apart: tuple[int, int], w: Bits) -> Bits:
    """Rows of a head as another layout of its rotation has them."""
    if len(w) % dim:
        return w
    heads = w.reshape(-1, dim, w.shape[1])
    return np.concatenate([head.reshape(*apart, w.shape[1]).swapaxes(0, 1).reshape(dim, -1) for head in heads])
