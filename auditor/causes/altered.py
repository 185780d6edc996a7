"""The named version's weights, read in a wrong place: of another projection, another layer, another rank."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import Oracle
from auditor.causes.search import Model, nearest_model
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import Bits

_SWAPPED: Final = (
    ("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj"),
    ("input_layernorm", "post_attention_layernorm"), ("q_norm", "k_norm"),
)  # fmt: skip
_LARGEST: Final = 1 << 30  # bytes of weights
_RANKS: Final = (2, 4)


def altered_weights(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """What explains most of the difference is named; not on a model of which copies would fill the memory."""
    if sum(weight.nbytes for weight in oracle.decoder.weights.values()) > _LARGEST:
        return
    if best := nearest_model(evidence, oracle, _models(oracle.decoder)):
        yield best


def _models(decoder: Decoder) -> Iterator[Model]:
    for name, weights in _misplaced(decoder):
        if all(value.shape == decoder.weights[key].shape for key, value in weights.items()):
            yield Model("other_weights", name, replace(decoder, weights=weights))


def _misplaced(decoder: Decoder) -> Iterator[tuple[str, dict[str, Bits]]]:
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
    for kind in sorted({n.rsplit(".", 2)[-2] for n, w in weights.items() if w.ndim == 2}):
        for name, moved in _moves():
            yield f"{kind} with {name}", {n: moved(w) if f"{kind}.weight" in n else w for n, w in weights.items()}


def _in_layer(name: str, order: Sequence[int] | np.ndarray) -> str:
    if not name.startswith("model.layers."):
        return name
    parts = name.split(".")
    parts[2] = str(int(order[int(parts[2])]))
    return ".".join(parts)


def _moves() -> Iterator[tuple[str, Callable[[Bits], Bits]]]:
    """What a rank's slice is put together wrong by."""
    for ranks in _RANKS:
        for axis, what in ((0, "rows"), (1, "columns")):
            yield f"the {what} of {ranks} ranks in reverse order", _reversed(ranks, axis)
    yield "its rows one too far", lambda w: np.roll(w, 1, axis=0)
    yield "no values", np.zeros_like


def _reversed(ranks: int, axis: int) -> Callable[[Bits], Bits]:
    return lambda w: np.concatenate(np.array_split(w, ranks, axis)[::-1], axis)
