"""The product with a tree over segments on Hopper, warp-specialised: y[m,n] = tree over segments of a[m,s] b[n,s].

One warp copies tiles through the bulk copy engine; two warpgroups, each with half of a 128×128 tile, run the chains.
A chain that ends waits only for itself: the copies go on, and so does the other warpgroup. The lowest level of the tree
waits in registers, the second in shared memory, the third, which is written and read once a tile, in the L2.
"""

import torch
import triton
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

from rl_kernel.ops.accelerator import multiprocessors
from rl_kernel.ops.gluon_scalar import stored

BM, BN, BK, GROUP = 128, 128, 64, 8
STAGES = 4
SEGMENTS = (1, 2, 4, 8)
MIN_ROWS = 384  # below, too few tiles to fill the device


@gluon.jit
def origin(tile, m, n, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """First row and column of a tile; GROUP tiles of rows share the columns that the L2 holds."""
    tiles_m, tiles_n = gl.cdiv(m, BM), gl.cdiv(n, BN)
    band = GROUP * tiles_n
    first = (tile // band) * GROUP
    height = min(tiles_m - first, GROUP)
    return (first + (tile % band) % height) * BM, ((tile % band) // height) * BN


@gluon.jit
def copy_tiles(
    a, b, a_buffers, b_buffers, full, empty, m, n, steps,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ROWS_OF_B: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The copying warp: the tiles of this program, `steps` steps of BK each, through STAGES buffers."""
    count = 0
    for tile in range(gl.program_id(0), gl.cdiv(m, BM) * gl.cdiv(n, BN), gl.num_programs(0)):
        row, column = origin(tile, m, n, BM, BN, GROUP)
        for step in range(steps):
            slot, turn = count % STAGES, count // STAGES
            mbarrier.wait(empty.index(slot), (turn & 1) ^ 1)
            mbarrier.expect(full.index(slot), (BM + BN) * BK * 2)
            tma.async_copy_global_to_shared(a, [row, step * BK], full.index(slot), a_buffers.index(slot))
            if ROWS_OF_B:
                tma.async_copy_global_to_shared(b, [column, step * BK], full.index(slot), b_buffers.index(slot))
            else:
                tma.async_copy_global_to_shared(b, [step * BK, column], full.index(slot), b_buffers.index(slot))
            count += 1


@gluon.jit
def _multiply(
    y, a_buffers, b_buffers, spare, parked, full, empty, m, n, steps,
    HALF: gl.constexpr, SEGMENTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, ROWS_OF_B: gl.constexpr, FP32: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    rows: gl.constexpr = BM // 2
    parked += (gl.program_id(0) * 2 + HALF) * rows * BN
    parked_at = parked + gl.arange(0, rows, gl.SliceLayout(1, layout))[:, None] * BN
    parked_at += gl.arange(0, BN, gl.SliceLayout(0, layout))[None, :]
    count = 0
    for tile in range(gl.program_id(0), gl.cdiv(m, BM) * gl.cdiv(n, BN), gl.num_programs(0)):
        s0 = gl.zeros((rows, BN), gl.float32, layout)
        acc = s0
        for segment in gl.static_range(SEGMENTS):
            acc = gl.zeros((rows, BN), gl.float32, layout)
            for step in range(steps // SEGMENTS):
                slot = count % STAGES
                mbarrier.wait(full.index(slot), (count // STAGES) & 1)
                left = a_buffers.index(slot).slice(HALF * rows, rows)
                if ROWS_OF_B:
                    right = b_buffers.index(slot).permute((1, 0))
                else:
                    right = b_buffers.index(slot)
                token = warpgroup_mma(left, right, acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(token,))
                # One product may still run, the one before it is done with its tiles.
                mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
                count += 1
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
            if segment < SEGMENTS - 1 and segment % 2 == 0:
                s0 = acc
            if segment % 2 == 1:
                acc = s0 + acc
            if segment % 4 == 1 and SEGMENTS > 2:
                spare.index(HALF).store(acc)
            if segment % 4 == 3:
                acc = spare.index(HALF).load(layout) + acc
            if segment == 3 and SEGMENTS > 4:
                gl.store(parked_at, acc)
            if segment == 7:
                acc = gl.load(parked_at) + acc
        row, column = origin(tile, m, n, BM, BN, GROUP)
        i = row + HALF * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))
        j = column + gl.arange(0, BN, gl.SliceLayout(0, layout))
        at = y + i.to(gl.int64)[:, None] * n + j[None, :]
        gl.store(at, stored(acc, FP32), mask=(i < m)[:, None] & (j < n)[None, :])


@gluon.jit(do_not_specialize=["m"])
def gemm_tree_kernel(
    y, parked, a, b, m, n, steps,
    SEGMENTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, ROWS_OF_B: gl.constexpr, FP32: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """steps: of BK summed indices, over all segments. ROWS_OF_B: b is [n,s]; otherwise [s,n].

    parked: fp32, BM*BN a program, where SEGMENTS is 8.
    """
    a_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], a.layout)
    b_shape: gl.constexpr = [STAGES, BN, BK] if ROWS_OF_B else [STAGES, BK, BN]
    b_buffers = gl.allocate_shared_memory(gl.bfloat16, b_shape, b.layout)
    spread: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])  # a warp's eight rows in different banks
    spare_rows: gl.constexpr = BM // 2 if SEGMENTS > 2 else 1
    spare = gl.allocate_shared_memory(gl.float32, [2, spare_rows, BN], spread)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (y, a_buffers, b_buffers, spare, parked, full, empty, m, n, steps,
                         0, SEGMENTS, BM, BN, BK, STAGES, GROUP, ROWS_OF_B, FP32)),
            (_multiply, (y, a_buffers, b_buffers, spare, parked, full, empty, m, n, steps,
                         1, SEGMENTS, BM, BN, BK, STAGES, GROUP, ROWS_OF_B, FP32)),
            (copy_tiles, (a, b, a_buffers, b_buffers, full, empty, m, n, steps, BM, BN, BK, STAGES, GROUP, ROWS_OF_B)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip


def serves(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, segments: int) -> bool:
    """Whether this kernel computes y = a @ b: enough rows, whole steps in a segment, operands that it can copy."""
    rows_of_b = b.stride(0) == 1
    strides = (a.stride(0), b.stride(1) if rows_of_b else b.stride(0))
    straight = a.stride(1) == 1 and (rows_of_b or b.stride(1) == 1)
    aligned = all(s % 8 == 0 for s in strides) and (a.data_ptr() | b.data_ptr()) % 16 == 0
    return (
        straight and aligned and segments in SEGMENTS and a.shape[0] >= MIN_ROWS and a.shape[1] % (segments * BK) == 0
    )


def tree_product(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, segments: int) -> torch.Tensor:
    """y[m,n] <- tree over segments of a[m,s] @ b[s,n]; see `serves`."""
    (m, total), n = a.shape, b.shape[1]
    rows_of_b = b.stride(0) == 1
    right, b_block = (b.t(), [BN, BK]) if rows_of_b else (b, [BK, BN])
    descriptors = [
        TensorDescriptor(
            x, list(x.shape), [x.stride(0), 1], block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
        )
        for x, block in ((a, [BM, BK]), (right, b_block))
    ]
    programs = min(triton.cdiv(m, BM) * triton.cdiv(n, BN), multiprocessors(y.get_device()))
    parked = torch.empty((programs, BM, BN), dtype=torch.float32, device=y.device) if segments == 8 else y
    gemm_tree_kernel[(programs,)](
        y, parked, *descriptors, m, n, total // BK,
        SEGMENTS=segments, BM=BM, BN=BN, BK=BK, STAGES=STAGES, GROUP=GROUP, ROWS_OF_B=rows_of_b,
        FP32=y.dtype == torch.float32, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y
