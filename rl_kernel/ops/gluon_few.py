"""The product of few rows with a large weight on Hopper, bound by memory: y = tree over segments of a[m,s] b[s,n].

The weight's columns in b are the rows of wgmma and the few rows of a its columns, so that a warpgroup multiplies what
one warp copies and never waits for registers to be filled. Programs stay, one on each multiprocessor, and the copies of
the next tile follow those of the last without a gap. A sum is four or eight registers of a thread, so that the tree
over segments costs nothing but the end of each chain, which the copies under way cover.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_kernel.ops.accelerator import cdiv, multiprocessors
from rl_kernel.ops.dependent_launch import DEPENDENT, announce, await_before
from rl_kernel.ops.gluon_scalar import stored

BN, BK = 64, 256
STAGES = {8: 6, 16: 5}  # copies under way, by the rows of a tile
SEGMENTS = (1, 2, 4, 8)
MAX_ROWS = 16
MIN_TILES = 64  # below, narrower tiles spread the weight over more multiprocessors


@gluon.jit
def _copy(
    a, w, a_buffers, w_buffers, full, empty, tiles, steps,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, ROWS_OF_B: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The copying warp."""
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), (BM + BN) * BK * 2)
            if ROWS_OF_B:
                tma.async_copy_global_to_shared(w, [tile * BN, step * BK], full.index(slot), w_buffers.index(slot))
            else:
                tma.async_copy_global_to_shared(w, [step * BK, tile * BN], full.index(slot), w_buffers.index(slot))
            tma.async_copy_global_to_shared(a, [0, step * BK], full.index(slot), a_buffers.index(slot))
            count += 1


@gluon.jit
def _multiply(
    y, a_buffers, w_buffers, full, empty, m, n, tiles, steps,
    SEGMENTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    ROWS_OF_B: gl.constexpr, FP32: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The warpgroup. Rows of a past the last are zeros, as the copies leave them, and are not stored."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros((BN, BM), gl.float32, layout)
        s0, s1, s2 = acc, acc, acc
        for segment in gl.static_range(SEGMENTS):
            for step in range(steps // SEGMENTS):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                if ROWS_OF_B:
                    left = w_buffers.index(slot)
                else:
                    left = w_buffers.index(slot).permute((1, 0))
                right = a_buffers.index(slot).permute((1, 0))
                token = warpgroup_mma(left, right, acc, use_acc=step > 0, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(token,))
                # One product may still run, the one before it is done with its tiles.
                mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
                count += 1
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
            # A binary counter: where a bit is set a left half waits; at the first clear bit the sum waits in turn.
            if segment % 2 == 1:
                acc = s0 + acc
            if segment % 4 == 3:
                acc = s1 + acc
            if segment % 8 == 7:
                acc = s2 + acc
            if segment % 2 == 0:
                s0 = acc
            elif segment % 4 == 1:
                s1 = acc
            else:
                s2 = acc
        column = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, layout))
        row = gl.arange(0, BM, gl.SliceLayout(0, layout))
        at = y + row.to(gl.int64)[None, :] * n + column[:, None]
        gl.store(at, stored(acc, FP32), mask=(column < n)[:, None] & (row < m)[None, :])


@gluon.jit(do_not_specialize=["m"])
def gemm_few_kernel(
    y, a, w, m, n, steps,
    SEGMENTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    ROWS_OF_B: gl.constexpr, FP32: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """steps: of BK summed indices. BM: rows of a tile, 8 or 16, no fewer than m. ROWS_OF_B: w is [n,s], else [s,n]."""
    w_shape: gl.constexpr = [STAGES, BN, BK] if ROWS_OF_B else [STAGES, BK, BN]
    w_buffers = gl.allocate_shared_memory(gl.bfloat16, w_shape, w.layout)
    a_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], a.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    announce()
    await_before()
    tiles = gl.cdiv(n, BN)
    gl.warp_specialize(
        [
            (_multiply, (y, a_buffers, w_buffers, full, empty, m, n, tiles, steps,
                         SEGMENTS, BM, BN, BK, STAGES, ROWS_OF_B, FP32)),
            (_copy, (a, w, a_buffers, w_buffers, full, empty, tiles, steps, BM, BN, BK, STAGES, ROWS_OF_B)),
        ],
        [1],
        [24],
    )  # fmt: skip


def serves(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, segments: int) -> bool:
    """Whether this kernel computes y = a @ b: few rows, b lying straight, whole steps, tiles for the whole device."""
    (m, total), n = a.shape, b.shape[1]
    fits = 0 < m <= MAX_ROWS and segments in SEGMENTS and total % (segments * BK) == 0 and total > 0
    apart = b.stride(1) if b.stride(0) == 1 else b.stride(0)
    straight = a.stride(1) == 1 and 1 in b.stride() and a.stride(0) % 8 == 0 and apart % 8 == 0
    if not fits or not straight or a.stride(0) < total or (a.data_ptr() | b.data_ptr()) % 16:
        return False
    return bool(n >= MIN_TILES * BN)


def few_product(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, segments: int = 1) -> torch.Tensor:
    """y[m,n] (bf16 or fp32) <- tree over segments of a[m,s] @ b[s,n]; see `serves`."""
    (m, total), n = a.shape, b.shape[1]
    bm = 8 if m <= 8 else 16
    rows_of_b = b.stride(0) == 1
    right, block = (b.t(), [BN, BK]) if rows_of_b else (b, [BK, BN])
    descriptors = [
        TensorDescriptor(
            x, list(x.shape), [x.stride(0), 1], block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
        )
        for x, block in ((a, [bm, BK]), (right, block))
    ]
    gemm_few_kernel[(min(cdiv(n, BN), multiprocessors(y.get_device())),)](
        y, *descriptors, m, n, total // BK,
        SEGMENTS=segments, BM=bm, BN=BN, BK=BK, STAGES=STAGES[bm], ROWS_OF_B=rows_of_b, FP32=y.dtype == torch.float32,
        num_warps=4, enable_fp_fusion=False, **DEPENDENT,
    )  # fmt: skip
    return y
