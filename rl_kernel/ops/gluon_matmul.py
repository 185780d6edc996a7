"""The product with a tree over segments on Hopper, warp-specialised: y[m,n] = tree over segments of a[m,s] b[n,s].

One warp copies tiles through the bulk copy engine; warpgroups of 64 rows each run the chains. A chain that ends waits
only for itself: the copies go on, and so does the other warpgroup. Where tiles are too few for the device, programs
share one: `cluster_matmul`.

Of the sums that wait to be added, the first and second level of the tree are in registers. The third waits in shared
memory, since it moves once a tile and the products need all that shared memory can move.
"""

from dataclasses import dataclass

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
from rl_kernel.ops.gluon_scalar import stored

BK, GROUP = 64, 8
SEGMENTS = (1, 2, 4, 8)
MIN_ROWS = 17  # below, the plain kernel's narrow tiles read the weight faster


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows and columns of a tile, copies under way. It may change speed only."""

    bm: int
    bn: int
    stages: int


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
    """The copying warp: this program's tiles, `steps` steps of BK each, through STAGES buffers."""
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
def _issue(
    acc, use_acc, a_buffers, b_buffers, full, count,
    HALF: gl.constexpr, STAGES: gl.constexpr, ROWS_OF_B: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One step of a chain, which is left running."""
    slot = count % STAGES
    mbarrier.wait(full.index(slot), (count // STAGES) & 1)
    left = a_buffers.index(slot).slice(HALF * 64, 64)
    if ROWS_OF_B:
        right = b_buffers.index(slot).permute((1, 0))
    else:
        right = b_buffers.index(slot)
    return warpgroup_mma(left, right, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _multiply(
    y, y_tiles, a_buffers, b_buffers, spare, full, empty, m, n, steps,
    HALF: gl.constexpr, SEGMENTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, ROWS_OF_B: gl.constexpr, FP32: gl.constexpr, STAGED: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One warpgroup: rows [64 HALF, 64 HALF + 64) of each tile of this program."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    count = 0
    for tile in range(gl.program_id(0), gl.cdiv(m, BM) * gl.cdiv(n, BN), gl.num_programs(0)):
        acc = gl.zeros((64, BN), gl.float32, layout)
        s0, s1 = acc, acc
        for segment in gl.static_range(SEGMENTS):
            if segment % 2 == 1:
                # The chain before this one ends while this one begins, in registers of its own.
                nothing = gl.zeros((64, BN), gl.float32, layout)
                token = _issue(nothing, False, a_buffers, b_buffers, full, count, HALF, STAGES, ROWS_OF_B)
                s0, acc = warpgroup_mma_wait(num_outstanding=1, deps=(s0, token))
                mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
                count += 1
            for step in range(segment % 2, steps // SEGMENTS):
                token = _issue(acc, step > 0, a_buffers, b_buffers, full, count, HALF, STAGES, ROWS_OF_B)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(token,))
                # One product may still run, the one before it is done with its tiles.
                mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
                count += 1
            # A binary counter: where a bit is set a left half waits; at the first clear bit the sum waits in turn.
            if segment % 2 == 0 and segment < SEGMENTS - 1:
                s0 = acc  # its last product still runs
            else:
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
                if STAGED and (segment == 3 or segment == SEGMENTS - 1):
                    tma.store_wait(0)  # the tile before has left `spare`
                if segment % 2 == 1:
                    acc = s0 + acc
                if segment % 4 == 3:
                    acc = s1 + acc
                if segment % 8 == 7:
                    acc = spare.index(HALF).load(layout) + acc
                if segment % 4 == 1 and segment < SEGMENTS - 1:
                    s1 = acc
                elif segment < SEGMENTS - 1:
                    spare.index(HALF).store(acc)
        row, column = origin(tile, m, n, BM, BN, GROUP)
        if STAGED:
            staging = spare.index(HALF)._reinterpret(y_tiles.dtype, [64, BN], y_tiles.layout)
            staging.store(stored(acc, FP32))
            fence_async_shared()
            tma.async_copy_shared_to_global(y_tiles, [row + HALF * 64, column], staging)
        else:
            i = row + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
            j = column + gl.arange(0, BN, gl.SliceLayout(0, layout))
            at = y + i.to(gl.int64)[:, None] * n + j[None, :]
            gl.store(at, stored(acc, FP32), mask=(i < m)[:, None] & (j < n)[None, :])
    if STAGED:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["m"])
def gemm_tree_kernel(
    y, y_tiles, a, b, m, n, steps,
    SEGMENTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, ROWS_OF_B: gl.constexpr, FP32: gl.constexpr, STAGED: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """steps: of BK summed indices. ROWS_OF_B: b is [n,s]; otherwise [s,n].

    STAGED: y leaves through y_tiles by the bulk copy engine, in whole lines and while the next tile is computed.
    """
    a_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], a.layout)
    b_shape: gl.constexpr = [STAGES, BN, BK] if ROWS_OF_B else [STAGES, BK, BN]
    b_buffers = gl.allocate_shared_memory(gl.bfloat16, b_shape, b.layout)
    spread: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])  # a warp's eight rows in different banks
    spare_rows: gl.constexpr = 64 if SEGMENTS > 4 or STAGED else 1
    spare = gl.allocate_shared_memory(gl.float32, [BM // 64, spare_rows, BN], spread)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=BM // 64)
    fence_async_shared()
    if BM == 128:
        gl.warp_specialize(
            [
                (_multiply, (y, y_tiles, a_buffers, b_buffers, spare, full, empty, m, n, steps,
                             0, SEGMENTS, BM, BN, BK, STAGES, GROUP, ROWS_OF_B, FP32, STAGED)),
                (_multiply, (y, y_tiles, a_buffers, b_buffers, spare, full, empty, m, n, steps,
                             1, SEGMENTS, BM, BN, BK, STAGES, GROUP, ROWS_OF_B, FP32, STAGED)),
                (copy_tiles, (a, b, a_buffers, b_buffers, full, empty, m, n, steps,
                              BM, BN, BK, STAGES, GROUP, ROWS_OF_B)),
            ],
            [4, 1],
            [232, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (y, y_tiles, a_buffers, b_buffers, spare, full, empty, m, n, steps,
                             0, SEGMENTS, BM, BN, BK, STAGES, GROUP, ROWS_OF_B, FP32, STAGED)),
                (copy_tiles, (a, b, a_buffers, b_buffers, full, empty, m, n, steps,
                              BM, BN, BK, STAGES, GROUP, ROWS_OF_B)),
            ],
            [1],
            [24],
        )  # fmt: skip


def serves(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, segments: int) -> bool:
    """Whether this kernel computes y = a @ b: enough rows, whole steps in a segment, operands that it can copy."""
    rows_of_b = b.stride(0) == 1
    strides = (a.stride(0), b.stride(1) if rows_of_b else b.stride(0))
    straight = a.stride(1) == 1 and (rows_of_b or b.stride(1) == 1) and a.stride(0) >= a.shape[1]
    aligned = all(s % 8 == 0 for s in strides) and (a.data_ptr() | b.data_ptr()) % 16 == 0
    return (
        straight and aligned and segments in SEGMENTS and a.shape[0] >= MIN_ROWS and a.shape[1] % (segments * BK) == 0
    )


def shape_for(m: int) -> Shape:
    """The static table: a function of the rows alone."""
    bm, bn = (64, 64) if m <= 64 else (128, 64) if m <= 128 else (128, 128)
    return Shape(bm, bn, {128: 8, 192: 5, 256: 5}[bm + bn])


def _tiles(y: torch.Tensor, columns: int) -> TensorDescriptor:
    """y[m,n] as the bulk copy engine writes it, half a tile at a time."""
    box = [64, columns]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.float32 if y.dtype == torch.float32 else gl.bfloat16)
    return TensorDescriptor(y, list(y.shape), [y.shape[1], 1], box, layout)


def tree_product(
    y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, segments: int, shape: Shape | None = None
) -> torch.Tensor:
    """y[m,n] <- tree over segments of a[m,s] @ b[s,n]; see `serves`."""
    (m, total), n = a.shape, b.shape[1]
    shape = shape or shape_for(m)
    rows_of_b = b.stride(0) == 1
    right, b_block = (b.t(), [shape.bn, BK]) if rows_of_b else (b, [BK, shape.bn])
    descriptors = [
        TensorDescriptor(
            x, list(x.shape), [x.stride(0), 1], block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
        )
        for x, block in ((a, [shape.bm, BK]), (right, b_block))
    ]
    tiles = cdiv(m, shape.bm) * cdiv(n, shape.bn)
    staged = n * y.element_size() % 16 == 0 and y.data_ptr() % 16 == 0
    gemm_tree_kernel[(min(tiles, multiprocessors(y.get_device())),)](
        y, _tiles(y, shape.bn) if staged else y, *descriptors, m, n, total // BK,
        SEGMENTS=segments, BM=shape.bm, BN=shape.bn, BK=BK, STAGES=shape.stages, GROUP=GROUP,
        ROWS_OF_B=rows_of_b, FP32=y.dtype == torch.float32, STAGED=staged, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y
