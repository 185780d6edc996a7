"""Parts of a model's weights that one transfer, one rank or one mistake may touch: which ones there are.

A part is a run of a tensor's rows, or of its columns where a rank holds columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Final, NamedTuple

import numpy as np

from rl_kernel.reference.ops import Bits

_BY_COLUMN: Final = ("o_proj", "down_proj")
_TILE: Final = 64  # tokens of the vocabulary that a rank has whole
_BLOCKS: Final = ("self_attn.", "mlp.", "norm", "proj")
_STAGES: Final = (2, 3, 4, 5, 6, 8)  # of a pipeline
_RUNS: Final = 16  # of layers, or of the tensors in their order, that are told apart
_FUSED: Final = (("q_proj", "k_proj"), ("k_proj", "v_proj"), ("gate_proj", "up_proj"))  # are held as one, or rotated
_LATER: Final = 0.01  # a cost, by which smaller sets are tried when larger ones of every kind have been
_ALONE: Final = 1.15  # a cost
MOST: Final = 64  # tensors that are told apart one by one

Names = frozenset[str]


class Part(NamedTuple):
    """Rows (axis 0) or columns (1) first..last of a tensor."""

    name: str
    axis: int
    first: int
    last: int


class Choice(NamedTuple):
    """Parts that go together. cost: how much less likely beforehand than the likeliest, as a logarithm."""

    said: str
    parts: tuple[Part, ...]
    cost: float


def by_column(name: str) -> int:
    """The axis of this matrix of which ranks hold parts."""
    return int(any(kind in name for kind in _BY_COLUMN))


def kind_of(name: str) -> str:
    """A tensor's name without its layer."""
    return name.split(".", 3)[3] if name.startswith("model.layers.") else name


def layer_of(name: str) -> int:
    """−1 outside of the layers."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def span(name: str, width: int, rank: int, ranks: int, even: bool = False) -> tuple[int, int]:
    """A rank's part of so many rows or columns; of a vocabulary whole tiles, or an even part of all tiles."""
    tile = _TILE if "embed" in name or "lm_head" in name else 1
    size = -(-width // (ranks * tile)) * tile if not even else -(-width // tile) * tile // ranks
    first = min(rank * size, width)
    return first, width if rank == ranks - 1 else min(first + size, width)


def replaced(now: Mapping[str, Bits], other: Mapping[str, Bits], parts: Sequence[Part]) -> dict[str, Bits]:
    """Weights of which some parts are those of another set."""
    mixed = dict(now)
    for name, axis, first, last in parts:
        where = np.s_[:, first:last] if axis else np.s_[first:last]
        if mixed[name] is now[name]:
            if last - first == now[name].shape[axis]:
                mixed[name] = other[name]
                continue
            mixed[name] = now[name].copy()
        mixed[name][where] = other[name][where]
    return mixed


class Layout:
    """The tensors that two sets of weights do not share, in the order of the file. shapes: of each."""

    def __init__(self, weights: Mapping[str, Bits], names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.shapes = {name: weights[name].shape for name in names}

    def whole(self, names: Names) -> tuple[Part, ...]:
        """Whole tensors."""
        return tuple(Part(name, 0, 0, self.shapes[name][0]) for name in self.names if name in names)

    def rest(self, among: Sequence[str], parts: Sequence[Part]) -> tuple[Part, ...]:
        """What some parts, one of a tensor at most, leave of some tensors."""
        taken = {part.name: part for part in parts}
        left: list[Part] = []
        for name in among:
            axis, first, last = taken[name][1:] if name in taken else (0, 0, 0)
            ends = ((0, first), (last, self.shapes[name][axis]))
            left += (Part(name, axis, a, b) for a, b in ends if a < b)
        return tuple(left)

    def large(self) -> Iterator[tuple[str, Names]]:
        """What is likely to be touched as a whole: all, a block, a kind, layers, a block of a layer."""
        every = frozenset(self.names)
        if not every:
            return
        yield from self.everywhere()
        layers = sorted({layer_of(n) for n in every})
        for run in np.array_split(layers, min(len(layers), _RUNS)):
            inside = frozenset(n for n in every if layer_of(n) in run)
            where = f"layers {run[0]} to {run[-1]}" if len(run) > 1 else f"layer {run[0]}"
            yield (where if run[-1] >= 0 else "embedding, last norm and output layer"), inside
            for block in _BLOCKS:
                if run[0] >= 0:
                    yield f"{block.strip('.')} tensors of {where}", frozenset(n for n in inside if block in n)

    def everywhere(self) -> Iterator[tuple[str, Names]]:
        """Of these, what is not of some layers only."""
        every = frozenset(self.names)
        yield "all tensors", every
        for block in _BLOCKS:
            yield f"{block.strip('.')} tensors", frozenset(n for n in every if block in n)
        for kind in dict.fromkeys(map(kind_of, self.names)):
            yield kind, frozenset(n for n in every if kind_of(n) == kind)
        for first, second in _FUSED:
            yield f"{first} and {second}", frozenset(n for n in every if first in n or second in n)
        yield "vocabulary tensors", frozenset(n for n in every if "embed" in n or "lm_head" in n)

    def blocks(self) -> Iterator[Choice]:
        """All tensors, and those of a block of every layer."""
        for said, names in islice(self.large(), 1 + len(_BLOCKS)):
            yield Choice(said, self.whole(names), 1.0)

    def tensors(self) -> Iterator[Choice]:
        """Whole tensors: large sets of them, the larger ones sooner, and each by itself."""
        seen: set[Names] = set()
        for at, (said, names) in enumerate(self.large()):
            if names and names not in seen:
                seen.add(names)
                yield Choice(said, self.whole(names), 1.0 + _LATER * at)
        for name in self.names[:MOST]:
            yield Choice(name, self.whole(frozenset([name])), _ALONE)

    def choices(self) -> Iterator[Choice]:
        """Everything that one mistake is likely to touch, whole tensors first."""
        every = frozenset(self.names)
        for said, names in self.large():
            yield Choice(said, self.whole(names), 1.0)
            yield Choice(f"all but {said}", self.whole(every - names), 2.0)
        yield from self._ends()
        yield from self._stages()
        for name in self.names[:MOST]:
            yield Choice(name, self.whole(frozenset([name])), 3.0)
            yield Choice(f"all but {name}", self.whole(every - {name}), 4.0)

    def _stages(self) -> Iterator[Choice]:
        """Layers in their order, as stages of a pipeline or as a transfer that was cut off; with what stands beside."""
        layers = sorted({layer_of(name) for name in self.names} - {-1})
        cuts = {(cut[0], cut[-1]): 1.5 for count in _STAGES for cut in np.array_split(layers, count) if len(cut) > 1}
        for first, last in pairwise(layers):
            cuts |= {(layers[0], first): 2.0, (last, layers[-1]): 2.0}
        for (first, last), cost in cuts.items():
            inside = frozenset(name for name in self.names if first <= layer_of(name) <= last)
            front = frozenset(n for n in self.names if "embed" in n) if first == layers[0] else frozenset()
            behind = frozenset(n for n in self.names if layer_of(n) < 0 and "embed" not in n)
            for more in dict.fromkeys((frozenset[str](), front, behind if last == layers[-1] else front)):
                what = " and what stands beside them" if more else ""
                where = f"layers {first} to {last}" if first < last else f"layer {first}"
                yield Choice(where + what, self.whole(inside | more), cost)

    def _ends(self) -> Iterator[Choice]:
        """The first or the last tensors of a transfer, in the order of the file or of their names."""
        for order in dict.fromkeys((self.names, tuple(sorted(self.names)))):
            step = max(1, -(-len(order) // MOST))
            for cut in range(step, len(order), step):
                yield Choice(f"the tensors up to {order[cut - 1]}", self.whole(frozenset(order[:cut])), 2.0)
                yield Choice(f"the tensors from {order[cut]} on", self.whole(frozenset(order[cut:])), 2.0)
