"""RMSNorm of long rows on Hopper: a row comes and goes 16 bytes a thread, and through shared memory changes hands.

The contract's lane j adds the squares of the features j, j + 128, …, in order, so its thread must see one value of each
chunk of 128 features; memory wants neighbours in one thread. Where the plain kernel loads what its lanes add, 8 bytes a
thread, a row needs a warp's registers, and few rows are under way; here it needs a third of them.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rl_kernel.ops.accelerator import EX2, cdiv, power_of_two
from rl_kernel.ops.dependent_launch import DEPENDENT, announce, await_before
from rl_kernel.ops.gluon_scalar import narrow

MIN_CHUNKS, MAX_CHUNKS = 9, 64  # of 128 features
ROWS, MANY_HEADS = 16, 2048  # rows of one head, of a program and from how many on
SOME = 1024  # rows up to which the gains travel with the row; beyond, registers are worth more


@gluon.jit
def _halves(parts):  # type: ignore[no-untyped-def]
    """Each [128,N] as two [128,N/2], in order."""
    out = ()
    for p in gl.static_range(len(parts)):
        t = parts[p]  # type: ignore[var-annotated]
        first, second = gl.split(gl.permute(gl.reshape(t, (128, 2, t.shape[1] // 2)), (0, 2, 1)))
        out = out + (first, second)
    return out


@gluon.jit
def _sum_of_squares(value, CHUNKS: gl.constexpr, LEVELS: gl.constexpr):  # type: ignore[no-untyped-def]
    """value[CHUNKS,128] → the contract's lane_dot: each lane ascending by fma, then neighbours in pairs."""
    lane: gl.constexpr = gl.BlockedLayout([CHUNKS, 1], [1, 32], [1, 4], [1, 0])
    parts = (gl.permute(gl.convert_layout(value, lane), (1, 0)),)
    for _ in gl.static_range(LEVELS):
        parts = _halves(parts)
    lanes = gl.zeros_like(gl.reshape(parts[0], (128,))).to(gl.float32)
    for c in gl.static_range(CHUNKS):
        v = gl.reshape(parts[c], (128,)).to(gl.float32)
        lanes = gl.fma(v, v, lanes)
    for _ in gl.static_range(6):
        lanes = gl.sum(gl.reshape(lanes, (lanes.shape[0] // 2, 2)), 1)  # a sum of two has one order only
    return gl.sum(lanes, 0)


@gluon.jit
def rms_norm_long_kernel(
    y, new_residual, x, residual, w, inner, stride, n, eps,
    CHUNKS: gl.constexpr, LEVELS: gl.constexpr, RESIDUAL: gl.constexpr, EVEN: gl.constexpr, EARLY: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One program of 128 threads normalises a row of n <= 128*CHUNKS features, CHUNKS = 2^LEVELS.

    Row i of x starts at (i // inner) * stride + (i % inner) * n; everything else is contiguous. EARLY: gains are loaded
    with the row.
    """
    announce()
    await_before()
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.program_id(0)
    chunk, lane = gl.arange(0, CHUNKS, gl.SliceLayout(1, wide)), gl.arange(0, 128, gl.SliceLayout(0, wide))
    at = chunk[:, None] * 128 + lane[None, :]
    here = (at < n) | EVEN
    begin = row.to(gl.int64) * n
    value = gl.load(x + (row // inner).to(gl.int64) * stride + (row % inner) * n + at, mask=here, other=0.0)
    if RESIDUAL:
        other = gl.load(residual + begin + at, mask=here, other=0.0)
    if EARLY:
        gain = gl.load(w + at, mask=here, other=0.0)
    if RESIDUAL:
        value = narrow(value.to(gl.float32) + other.to(gl.float32))
        gl.store(new_residual + begin + at, value, mask=here)
    # An absent feature adds +0·+0 to a lane that is never -0: no bit changes.
    total = _sum_of_squares(value, CHUNKS, LEVELS)
    one = gl.full((1,), 1.0, gl.float32, layout=gl.SliceLayout(0, wide))
    r = gl.div_rn(one, gl.sqrt_rn(gl.div_rn(one * total, one * (n * 1.0)) + eps))[None, :]
    if not EARLY:
        gain = gl.load(w + at, mask=here, other=0.0)
    scaled = (value.to(gl.float32) * r).to(gl.bfloat16).to(gl.float32)
    gl.store(y + begin + at, narrow(scaled * gain.to(gl.float32)), mask=here)


@gluon.jit
def rms_norm_heads_kernel(
    y, x, w, rows, inner, stride, eps, ROWS: gl.constexpr
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One program normalises ROWS rows of 128 features, 16 threads each; rows lie as in `rms_norm_long_kernel`."""
    announce()
    await_before()
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    lane = gl.arange(0, 128, gl.SliceLayout(0, wide))
    here = (row < rows)[:, None] & (lane >= 0)[None, :]
    x_at = x + ((row // inner).to(gl.int64) * stride + (row % inner) * 128)[:, None] + lane[None, :]
    value = gl.load(x_at, mask=here, other=0.0)
    gain = gl.load(w + lane).to(gl.float32)[None, :]
    v = value.to(gl.float32)
    lanes = gl.fma(v, v, gl.zeros_like(v))
    for _ in gl.static_range(7):
        lanes = gl.sum(gl.reshape(lanes, (ROWS, lanes.shape[1] // 2, 2)), 2)
    total = gl.convert_layout(gl.reshape(lanes, (ROWS,)), gl.SliceLayout(1, wide))
    one = gl.full_like(total, 1.0)
    r = gl.div_rn(one, gl.sqrt_rn(gl.div_rn(total, one * 128.0) + eps))[:, None]
    scaled = (v * r).to(gl.bfloat16).to(gl.float32)
    gl.store(y + row.to(gl.int64)[:, None] * 128 + lane[None, :], narrow(scaled * gain), mask=here)


def serves_heads(rows: int, n: int) -> bool:
    """Whether these are many rows of a head's 128 features, on Hopper."""
    return EX2 and n == 128 and rows >= MANY_HEADS


def normalise_heads(
    y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rows: int, inner: int, stride: int, eps: float
) -> None:
    """y <- the norm of each of x's rows; see `serves_heads`."""
    rms_norm_heads_kernel[(cdiv(rows, ROWS),)](
        y, x, w, rows, inner, stride, eps, ROWS=ROWS, num_warps=4, enable_fp_fusion=False, **DEPENDENT
    )


def serves(n: int) -> bool:
    """Whether rows of n features are long enough, and not too long, for this kernel, on Hopper."""
    return EX2 and MIN_CHUNKS <= cdiv(n, 128) <= MAX_CHUNKS


def normalise(
    y: torch.Tensor, new_residual: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor,
    rows: int, inner: int, stride: int, eps: float, *, add: bool,
) -> None:  # fmt: skip
    """y <- the norm of x's rows, or of their sums with residual, which go to new_residual; see `serves`."""
    n = w.shape[0]
    rms_norm_long_kernel[(rows,)](
        y, new_residual, x, residual, w, inner, stride, n, eps, RESIDUAL=add, EARLY=rows <= SOME,
        **shape_for(n), num_warps=4, enable_fp_fusion=False, **DEPENDENT,
    )  # fmt: skip


def shape_for(n: int) -> dict[str, Any]:
    """Constants that follow from the length of a row."""
    chunks = power_of_two(cdiv(n, 128))
    return {"CHUNKS": chunks, "LEVELS": chunks.bit_length() - 1, "EVEN": n == 128 * chunks}
