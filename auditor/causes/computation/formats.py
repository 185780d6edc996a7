"""All products of a large model in a usual format: which formats are tried follows from how much is wrong.

To round all weights costs more than a forward. A format's errors are so large beside the weights as its values are far
apart, and another version's change, whose effect is known, is measured by the same. So the formats that would make as
much as is wrong are known, and which of them it is shows where only the last layers are rounded: to the first order
that is a part of what rounding all of them makes.

W tokens of the window.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from auditor.causes.computation.precision import Coarse, product_of
from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import STRONG, Evidence, Suggestion
from auditor.causes.oracle import F64, I64, Oracle, VersionUnavailable
from auditor.causes.search import Candidate, cosine, nearest
from auditor.causes.weights.grids import (
    BLOCK,
    E4M3,
    E5M2,
    FP4,
    INT4,
    INT4_FULL,
    INT4_ZERO,
    INT8,
    NF4,
    ROW,
    TENSOR,
    Grid,
    Sharing,
    coarse,
    group,
    said,
)  # fmt: skip
from auditor.causes.weights.parts import layer_of
from auditor.causes.weights.rounded import LARGEST
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import widen

_USUAL: Final[tuple[tuple[Grid, Sharing, tuple[Sharing, ...]], ...]] = (  # of weights, and of inputs beside them
    (E4M3, BLOCK, (group(128),)),
    (E4M3, ROW, (ROW,)),
    (E4M3, TENSOR, (TENSOR, ROW)),
    (INT8, ROW, (ROW,)),
    (INT8, BLOCK, (group(128),)),
    (INT8, TENSOR, (TENSOR,)),
    (INT4, group(128), ()),
    (INT4_ZERO, group(128), ()),
    (INT4_FULL, group(128), ()),
    (INT4, group(32), ()),
    (INT4_ZERO, group(64), ()),
    (NF4, group(64), ()),
    (FP4, group(32, "microscaled"), (group(32, "microscaled"),)),
    (FP4, group(16, "in FP8"), (group(16, "in FP8"),)),
    (E4M3, group(32, "microscaled"), (group(32, "microscaled"),)),
    (INT8, group(128), (ROW,)),
    (INT4, ROW, ()),
    (E5M2, ROW, (ROW,)),
    (E5M2, TENSOR, (TENSOR,)),
)
_PRODUCTS: Final = "proj.weight"
_SAMPLED: Final = 128  # rows of a matrix
_SHARE: Final = 3  # of the layers, the last one in so many is rounded
_LEAST: Final = 16  # wrong rows
_SMALLER: Final = 0.6  # times what is wrong: what a format's weights would make, or else
_LARGER: Final = 3.0
_NOTHING: Final = 1e-6
_MOST: Final = 3.0  # times the median
_SURELY: Final = 3.0  # standard deviations of a cosine between two effects that have nothing to do with each other
_CLEARLY: Final = 0.55  # a cosine: no other is waited for
_TRIED: Final = 2
_BOTH: Final = 2.0**0.5  # times as much as of weights alone where inputs are rounded, too


@dataclass(frozen=True, slots=True)
class _Format:
    grid: Grid
    sharing: Sharing
    of_inputs: tuple[Sharing, ...]

    @property
    def weights(self) -> Coarse:
        return coarse(self.grid, self.sharing)


def usual_formats(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The format that has the side's bits, or to which the difference points."""
    window = oracle.window
    found, truth = evidence.found[window].astype(np.float64), evidence.truth[window].astype(np.float64)
    rows = np.flatnonzero(evidence.differs[window] & np.isfinite(found))
    small = sum(weight.nbytes for weight in oracle.decoder.weights.values()) <= LARGEST
    if small or evidence.begins is not None or rows.size < _LEAST:
        return
    delta = (found - truth)[rows]
    moves, pointing = moved_by(oracle)[rows], []
    for format_ in _as_large(evidence, oracle, delta, rows):
        effect = oracle.logprobs(_last_layers_in(oracle, format_)).astype(np.float64) - truth
        pointing.append((cosine(_cut(effect[rows] / moves), _cut(delta / moves)), format_))
        if pointing[-1][0] > _CLEARLY:
            break
    pointing.sort(key=lambda pair: -pair[0])
    surely = _SURELY / rows.size**0.5
    likely = [format_ for alike, format_ in pointing[:_TRIED] if alike > surely] or [f for _, f in pointing[:1]]
    best = nearest(evidence, oracle, (c for format_ in likely for c in _whole(oracle, format_)))
    if best is not None:
        yield best
    elif pointing and pointing[0][0] > surely:
        alike, format_ = pointing[0]
        name = f"weights {said(format_.grid, format_.sharing)}"
        text = f"the difference at {rows.size} tokens points where {name} would move it"
        yield Suggestion(
            "weight_precision", _score(alike), f"{text}: cosine {alike:.2f} with the last layers' part", True
        )


def moved_by(oracle: Oracle) -> F64:
    """How far each row's value goes where all logits are moved as far at random: a sure row hardly moves, [W]."""
    z = oracle.own_logits[:, : oracle.decoder.config.vocab].astype(np.float64) / oracle.temperature
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    drawn = p[np.arange(len(p)), oracle.targets]
    moved: F64 = np.sqrt((1.0 - drawn) ** 2 + (p * p).sum(axis=1) - drawn**2)
    return np.maximum(moved, _NOTHING)


def _cut(each: F64) -> F64:
    """Without the few rows that would outweigh all others."""
    most = _MOST * float(np.median(np.abs(each)))
    return np.clip(each, -most, most)


def _score(alike: float) -> float:
    """Of a cosine with a part of what would be made: more than a look."""
    whole = min(1.0, alike * alike * _SHARE)
    return max(0.46, STRONG * (1.0 - float(np.sqrt(1.0 - whole))))


def _as_large(evidence: Evidence, oracle: Oracle, delta: F64, rows: I64) -> list[_Format]:
    """Formats that would make about as much as is wrong, if another version says how much that is; else all."""
    formats, matrix = [_Format(*usual) for usual in _USUAL], _matrix(oracle)
    own = widen(oracle.decoder.weights[matrix][:_SAMPLED])
    stated = evidence.record.weight_version
    for version in sorted(oracle.versions, key=lambda v: abs(v - stated)):
        if version == stated:
            continue
        try:
            moved = oracle.logprobs_of(version)[rows] - evidence.truth[oracle.window][rows].astype(np.float64)
            other = widen(oracle.version(version).weights[matrix][:_SAMPLED])
        except VersionUnavailable:
            continue
        change = float(np.linalg.norm(other - own))
        if change > 0.0 and np.isfinite(moved).all():
            each = float(np.median(np.abs(moved))) / change
            return [f for f in formats if _fits(f, each * _errors(f, oracle, matrix), float(np.median(np.abs(delta))))]
    return formats


def _fits(format_: _Format, made: float, wrong: float) -> bool:
    """made: by its weights alone; of large errors the softmax lets less through."""
    return made < _LARGER * wrong and made * (_BOTH if format_.of_inputs else 1.0) > _SMALLER * wrong


def _errors(format_: _Format, oracle: Oracle, matrix: str) -> float:
    part = oracle.decoder.weights[matrix][:_SAMPLED]
    return float(np.linalg.norm(widen(format_.weights(part)) - widen(part)))


def _matrix(oracle: Oracle) -> str:
    return f"model.layers.{oracle.decoder.config.layers // 2}.mlp.up_proj.weight"


def _last_layers_in(oracle: Oracle, format_: _Format) -> Decoder:
    own = oracle.decoder
    first = own.config.layers - max(1, own.config.layers // _SHARE)
    rounded = {n: format_.weights(w) for n, w in own.weights.items() if _PRODUCTS in n and layer_of(n) >= first}
    return replace(own, weights={**own.weights, **rounded})


def _whole(oracle: Oracle, format_: _Format) -> Iterator[Candidate]:
    """All products' weights in a format; their inputs, too."""
    own, in_format = oracle.decoder, said(format_.grid, format_.sharing)
    rounded = {n: format_.weights(w) if _PRODUCTS in n else w for n, w in own.weights.items()}
    coarser = replace(own, weights=rounded)
    yield "weight_precision", f"all products' weights {in_format}", oracle.logprobs(coarser)
    for sharing in format_.of_inputs:
        both = edited(coarser, Edit("gemm", product_of(coarse(format_.grid, sharing), None)))
        name = f"products with inputs {said(format_.grid, sharing)} and weights {in_format}"
        yield "activation_precision", name, oracle.logprobs(both)
