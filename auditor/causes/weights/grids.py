"""Few bits: which values a format has, which values share a scale, and how the scale is chosen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from auditor.causes.computation.precision import FORMATS, Coarse
from rl_kernel.reference.ops import F32, Bits, narrow, widen

_TO_E4M3, _TO_E5M2 = FORMATS[0][1], FORMATS[2][1]
_LEAST: Final = np.float32(1e-12)
_AT_A_TIME: Final = 128  # rows of a matrix, which fit into a core's cache
_E2M1: Final = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_NF4: Final = np.array(
    [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
     0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0], np.float32,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Grid:
    """Values that a format has, up to a limit. zero: of a range that need not have 0 in its middle, real or whole."""

    name: str
    rounded: Callable[[F32], F32]
    limit: float
    zero: str = ""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What shares a scale: axes, so many values of a row (or tokens of a head), or blocks of so many rows and columns.

    rule: how the scale follows from the largest value, see `_RULES`. fixed: the largest value, where it is not looked
    for.
    """

    name: str
    axes: tuple[int, ...] = ()
    group: int = 0
    block: int = 0
    rule: str = "largest"
    fixed: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether a token's values depend on those behind it."""
        return 0 in self.axes and not self.fixed


def _to_e2m1(x: F32) -> F32:
    result: F32 = np.copysign(_E2M1[np.searchsorted((_E2M1[1:] + _E2M1[:-1]) / 2, np.abs(x))], x)
    return result


def _to_nf4(x: F32) -> F32:
    return _NF4[np.searchsorted((_NF4[1:] + _NF4[:-1]) / 2, x)]


E4M3: Final = Grid("FP8 (E4M3)", _TO_E4M3, 448.0)
E5M2: Final = Grid("FP8 (E5M2)", _TO_E5M2, 57344.0)
INT8: Final = Grid("8-bit integers", np.rint, 127.0)
INT8_RANGE: Final = Grid("8-bit integers with a zero point", np.rint, 255.0, "real")
INT8_ZERO: Final = Grid("8-bit integers with a whole zero point", np.rint, 255.0, "whole")
INT4: Final = Grid("4-bit integers", np.rint, 7.0)
INT4_RANGE: Final = Grid("4-bit integers with a zero point", np.rint, 15.0, "real")
INT4_ZERO: Final = Grid("4-bit integers with a whole zero point", np.rint, 15.0, "whole")
INT4_FULL: Final = Grid("4-bit integers from -8 on", lambda x: np.clip(np.rint(x), -8.0, 7.0), 7.5)
FP4: Final = Grid("FP4 (E2M1)", _to_e2m1, 6.0)
NF4: Final = Grid("NF4", _to_nf4, 1.0)

ROW: Final = Sharing("a row", (1,))
TENSOR: Final = Sharing("a tensor", (0, 1))
COLUMN: Final = Sharing("a column", (0,))
BLOCK: Final = Sharing("a block of 128 by 128", block=128)


def group(size: int, rule: str = "largest") -> Sharing:
    """So many values of a row."""
    return Sharing(f"{size} values of a row", group=size, rule=rule)


_RULES: Final[dict[str, Callable[[F32, float], F32]]] = {
    "largest": lambda most, limit: most / np.float32(limit),
    "power of two": lambda most, limit: np.exp2(np.ceil(np.log2(most / np.float32(limit)))),
    "microscaled": lambda most, limit: np.exp2(np.floor(np.log2(most)) - np.floor(np.log2(np.float32(limit)))),
    "in FP8": lambda most, limit: _in_fp8(most / np.float32(limit)),
}


def said(grid: Grid, sharing: Sharing) -> str:
    """`in FP8 (E4M3) with a scale for a row`, and how it is chosen where that is not the usual way."""
    if sharing.fixed:
        return f"in {grid.name} of values up to {sharing.fixed:g}"
    chosen = {"largest": "", "power of two": ", a power of two", "microscaled": ", microscaled", "in FP8": ", in FP8"}
    return f"in {grid.name} with a scale for {sharing.name}{chosen[sharing.rule]}"


def coarse(grid: Grid, sharing: Sharing, like: F32 | None = None) -> Coarse:
    """bf16 → bf16, rounded under scales of its own, or of another array of its shape."""

    def rounded(bits: Bits) -> Bits:
        if like is None and bits.ndim == 2 and len(bits) > _AT_A_TIME and _by_rows(sharing):
            few = range(0, len(bits), _AT_A_TIME)
            return np.concatenate([rounded(bits[at : at + _AT_A_TIME]) for at in few])
        x = widen(bits)
        parts, axes = _parted(x, sharing)
        scales = parts if like is None else _parted(like, sharing)[0]
        whole = _on_grid(parts, scales, axes, grid, sharing).reshape(_padded(x.shape, sharing))
        return narrow(whole[tuple(slice(0, n) for n in x.shape)])

    return rounded


def _by_rows(sharing: Sharing) -> bool:
    """Whether a few rows of a matrix are rounded as they are among all."""
    return bool(
        sharing.fixed or sharing.group or sharing.axes == (1,) or (sharing.block and not _AT_A_TIME % sharing.block)
    )


def _padded(shape: tuple[int, ...], sharing: Sharing) -> tuple[int, ...]:
    if sharing.block:
        return tuple(n + -n % sharing.block for n in shape)
    if not sharing.group:
        return shape
    axis = 0 if len(shape) == 3 else 1  # so many tokens of each head
    return tuple(n + -n % sharing.group if at == axis else n for at, n in enumerate(shape))


def _parted(x: F32, sharing: Sharing) -> tuple[F32, tuple[int, ...]]:
    """The values in a shape of which some axes share a scale."""
    if not (sharing.block or sharing.group):
        return x, sharing.axes
    shape = _padded(x.shape, sharing)
    x = np.pad(x, [(0, to - n) for n, to in zip(x.shape, shape, strict=True)], mode="edge")
    if sharing.block:
        size = sharing.block
        return x.reshape(shape[0] // size, size, -1, size), (1, 3)
    if len(shape) == 3:
        return x.reshape(-1, sharing.group, *shape[1:]), (1, 3)
    return x.reshape(shape[0], -1, sharing.group), (2,)


def _on_grid(x: F32, like: F32, axes: tuple[int, ...], grid: Grid, sharing: Sharing) -> F32:
    if grid.zero:
        low, high = like.min(axis=axes, keepdims=True), like.max(axis=axes, keepdims=True)
        scale = np.maximum(high - low, _LEAST) / np.float32(grid.limit)
        if grid.zero == "real":
            shifted: F32 = (grid.rounded(((x - low) / scale).astype(np.float32)) * scale + low).astype(np.float32)
            return shifted
        zero = np.rint(-low / scale)
        levels = np.clip(np.rint(x / scale) + zero, 0.0, np.float32(grid.limit))
        moved: F32 = ((levels - zero) * scale).astype(np.float32)
        return moved
    most = np.maximum(np.abs(like).max(axis=axes, keepdims=True), _LEAST)
    scale = _RULES[sharing.rule](np.full_like(most, sharing.fixed) if sharing.fixed else most, grid.limit)
    levels = np.clip((x / scale).astype(np.float32), -grid.limit, grid.limit)
    result: F32 = (grid.rounded(levels) * scale).astype(np.float32)
    return result


def _in_fp8(scale: F32) -> F32:
    """Scales in FP8, under one of the tensor's own."""
    top = np.maximum(scale.max() / np.float32(448.0), _LEAST)
    result: F32 = np.maximum(_TO_E4M3((scale / top).astype(np.float32)) * top, _LEAST)
    return result
