"""The matrix product that the Triton backends share: a[m,s] times b[s,n] summed over s in ascending order.

Any strides, so one kernel serves the forward product and both gradients; the tree over `segments` is inside it. Tile
shapes change no bit (a test proves it), so the launch table is free to follow the shape.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import cdiv
from rl_kernel.ops.triton_scalar import stored

MAX_SEGMENTS = 8


@triton.jit
def push(carry, segment, s0, s1, s2, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add finished segment number `segment` to the tree; s0, s1, s2 hold the pending left halves of each level.

    Like a binary counter: where a bit is set, a left half waits to be added; the first clear bit is where the sum
    waits in turn. After the last segment every bit was set and the carry is the whole tree.
    """
    if LEVELS > 0:
        one = segment % 2 == 1
        carry, s0 = tl.where(one, s0 + carry, carry), tl.where(one, s0, carry)
    if LEVELS > 1:
        two = segment % 4 == 3
        carry, s1 = tl.where(two, s1 + carry, carry), tl.where(two | (segment % 4 != 1), s1, carry)
    if LEVELS > 2:
        three = segment % 8 == 7
        carry, s2 = tl.where(three, s2 + carry, carry), tl.where(three | (segment % 8 != 3), s2, carry)
    return carry, s0, s1, s2


@triton.jit(do_not_specialize=["m"])  # m = 1 as a constant would spoil the loads of a
def gemm_kernel(
    y, a, b, m, n, length, am, ak, bk, bn, segments,
    LEVELS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, FEW: tl.constexpr, FP32: tl.constexpr, CONTINUE: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One program computes a BM×BN tile of y; CONTINUE starts the chain from what y holds.

    length: summed indices of one segment; EVEN: it is a multiple of BK; FEW: rows may be absent from most of the tile.
    """
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    band = GROUP * tiles_n
    first = (pid // band) * GROUP
    height = min(tiles_m - first, GROUP)
    row = (first + (pid % band) % height) * BM + tl.arange(0, BM)
    column = ((pid % band) // height) * BN + tl.arange(0, BN)
    # Columns past the end read a valid neighbour and are not stored; rows are not read at all where most are absent.
    row_in = tl.where(row < m, row, 0).to(tl.int64)
    column_in = tl.where(column < n, column, 0).to(tl.int64)
    s = tl.arange(0, BK)
    a_at = a + row_in[:, None] * am + s[None, :] * ak
    b_at = b + s[:, None] * bk + column_in[None, :] * bn
    here = (row < m)[:, None] & (column < n)[None, :]
    y_at = y + row.to(tl.int64)[:, None] * n + column[None, :]
    present = (row < m)[:, None]
    acc = tl.load(y_at, mask=here, other=0.0) if CONTINUE else tl.zeros((BM, BN), tl.float32)
    steps = tl.cdiv(length, BK)
    if LEVELS == 0:
        for step in range(steps):
            if EVEN:
                left = tl.load(a_at, mask=present, other=0.0) if FEW else tl.load(a_at)
                right = tl.load(b_at)
            else:
                left = tl.load(a_at, mask=present & (s < length - step * BK)[None, :], other=0.0)
                right = tl.load(b_at, mask=(s < length - step * BK)[:, None], other=0.0)
            acc = tl.dot(left, right, acc)
            a_at += BK * ak
            b_at += BK * bk
    else:
        s0, s1, s2, result = acc, acc, acc, acc
        for flat in range(steps * segments):
            segment, step = flat // steps, flat % steps
            base = segment.to(tl.int64) * length + step * BK
            if EVEN:
                left = tl.load(a_at + base * ak, mask=present, other=0.0) if FEW else tl.load(a_at + base * ak)
                right = tl.load(b_at + base * bk)
            else:
                left = tl.load(a_at + base * ak, mask=present & (s < length - step * BK)[None, :], other=0.0)
                right = tl.load(b_at + base * bk, mask=(s < length - step * BK)[:, None], other=0.0)
            acc = tl.dot(left, right, acc)
            if step == steps - 1:
                result, s0, s1, s2 = push(acc, segment, s0, s1, s2, LEVELS)
                acc = tl.zeros((BM, BN), tl.float32)
        acc = result
    tl.store(y_at, stored(acc, FP32), mask=here)


@dataclass(frozen=True, slots=True)
class Launch:
    """Tile shape, warps and pipeline stages of one launch. It may change speed only."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


def launch_for(m: int, n: int, length: int, segments: int) -> Launch:
    """The static launch table: a function of the shape alone."""
    if m <= 16:
        return Launch(16, 32, 256, 4, 5 if n <= 4096 else 4) if length % 256 == 0 else Launch(16, 32, 128, 4, 6)
    if m <= 32:
        return Launch(32, 32, 128, 4, 5)
    if m <= 64:
        return Launch(64, 32, 128, 4, 5) if segments > 1 else Launch(64, 64, 128, 4, 4)
    if segments > 1:
        return Launch(128, 64, 128, 8, 3) if length % 128 == 0 else Launch(128, 64, 64, 8, 4)
    return Launch(128, 256, 64, 8, 3) if m >= 1024 and n >= 1024 else Launch(128, 128, 64, 8, 4)


def product(
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    segments: int,
    keep: bool = False,
    launch: Launch | None = None,
) -> torch.Tensor:
    """y[m,n] <- a[m,s] @ b[s,n] over ascending s; a and b of any strides. `keep` continues from what y holds."""
    (m, total), n = a.shape, b.shape[1]
    if segments < 1 or segments & (segments - 1) or segments > MAX_SEGMENTS:
        raise ShapeError(f"gemm: segments {segments}; the kernel has 1, 2, 4 and {MAX_SEGMENTS}")
    if total % segments:
        raise ShapeError(f"gemm: the summed dimension {total} is not divisible by segments {segments}")
    if not y.numel():
        return y
    length = total // segments
    shape = launch or launch_for(m, n, length, segments)
    grid = (cdiv(m, shape.bm) * cdiv(n, shape.bn),)
    gemm_kernel[grid](
        y, a, b, m, n, length, a.stride(0), a.stride(1), b.stride(0), b.stride(1), segments,
        LEVELS=segments.bit_length() - 1, BM=shape.bm, BN=shape.bn, BK=shape.bk, GROUP=8,
        EVEN=length % shape.bk == 0, FEW=shape.bm == 16, FP32=y.dtype == torch.float32, CONTINUE=keep,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return y
