"""The fused LM head on Hopper, warp-specialised: 128 tokens against 256 ids, the logits never leave the registers.

Each of two warpgroups holds 64 tokens; when its chain ends it reduces its logits to the statistics of four 64-id tiles
while the copies for the next tile are under way. T tokens, K features.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_kernel.ops.accelerator import cdiv, multiprocessors
from rl_kernel.ops.gluon_matmul import copy_tiles, origin
from rl_kernel.ops.gluon_scalar import canonical

BM, BN, BK, STAGES, GROUP = 128, 256, 64, 4, 16
TILE = gl.constexpr(64)
LOG2E = gl.constexpr(float.fromhex("0x1.715476p+0"))
NEG_INF = gl.constexpr(float("-inf"))


@gluon.jit
def _statistics(
    m, s, z_target, logits, target, temperature, row, id, tokens, vocab_start, vocab, last, tile, tiles,
    token_stride, tile_stride, HEATED: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """logits[R,N] of the rows `row` and ids `id` → maximum and tree of exponentials of each 64-id tile."""
    if HEATED:
        logits = gl.div_rn(logits, gl.zeros_like(logits) + temperature)
    wanted = gl.load(target + row, mask=row < tokens, other=-1) - vocab_start
    hit = (id[None, :] == wanted[:, None]) & ((id < last) & (id < vocab))[None, :] & (row < tokens)[:, None]
    gl.store(z_target + row[:, None] + gl.zeros_like(logits).to(gl.int32), logits, mask=hit)
    rows: gl.constexpr = logits.shape[0]
    count: gl.constexpr = logits.shape[1] // TILE
    real = ((id < vocab) & (id < last))[None, :] & (row >= 0)[:, None]
    # An id that does not count is -inf here and worth +0 below; a real logit of -inf is worth +0 as well.
    folded = gl.where(real, logits, NEG_INF).reshape([rows, count, TILE])
    real = real.to(gl.int32).reshape([rows, count, TILE]) != 0
    top = gl.max(folded, 2)
    shift = gl.where(top == NEG_INF, 0.0, top)
    terms = gl.where(real, gl.exp2((folded - gl.expand_dims(shift, 2)) * LOG2E), 0.0)
    for level in gl.static_range(6):
        terms = gl.sum(terms.reshape([rows, count, TILE >> (level + 1), 2]), 3)
    total = terms.reshape([rows, count])
    layout: gl.constexpr = total.type.layout
    top = gl.convert_layout(top, layout)
    token = gl.convert_layout(row, gl.SliceLayout(1, layout))[:, None]
    here = tile + gl.arange(0, count, gl.SliceLayout(0, layout))[None, :]
    at = here.to(gl.int64) * tile_stride + token.to(gl.int64) * token_stride
    gl.store(m + at, canonical(top), mask=(token < tokens) & (here < tiles))
    gl.store(s + at, canonical(total), mask=(token < tokens) & (here < tiles))


@gluon.jit
def _multiply(
    m, s, z_target, target, temperature, a_buffers, b_buffers, full, empty, tokens, width, steps,
    vocab_start, vocab, tiles, token_stride, tile_stride,
    HALF: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    HEATED: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    rows: gl.constexpr = BM // 2
    count = 0
    for tile in range(gl.program_id(0), gl.cdiv(tokens, BM) * gl.cdiv(width, BN), gl.num_programs(0)):
        acc = gl.zeros((rows, BN), gl.float32, layout)
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            left = a_buffers.index(slot).slice(HALF * rows, rows)
            token = warpgroup_mma(left, b_buffers.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(token,))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
            count += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
        row0, column = origin(tile, tokens, width, BM, BN, GROUP)
        row = row0 + HALF * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))
        id = column + gl.arange(0, BN, gl.SliceLayout(0, layout))
        _statistics(
            m, s, z_target, acc, target, temperature, row, id, tokens, vocab_start, vocab, width,
            column // TILE, tiles, token_stride, tile_stride, HEATED,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["tokens"])
def linear_stats_kernel(
    m, s, z_target, target, temperature, h, w, tokens, width, steps, vocab_start, vocab, tiles,
    token_stride, tile_stride,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    HEATED: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """h, w: descriptors of [T,K] and of the `width` rows of the weight of this call, from which vocab counts."""
    a_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], h.layout)
    b_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (m, s, z_target, target, temperature, a_buffers, b_buffers, full, empty, tokens, width, steps,
                         vocab_start, vocab, tiles, token_stride, tile_stride, 0, BM, BN, STAGES, GROUP, HEATED)),
            (_multiply, (m, s, z_target, target, temperature, a_buffers, b_buffers, full, empty, tokens, width, steps,
                         vocab_start, vocab, tiles, token_stride, tile_stride, 1, BM, BN, STAGES, GROUP, HEATED)),
            (copy_tiles, (h, w, a_buffers, b_buffers, full, empty, tokens, width, steps,
                          BM, BN, BK, STAGES, GROUP, True, 1)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip


def serves(h: torch.Tensor, h_stride: int, w: torch.Tensor) -> bool:
    """Whether this kernel can copy the operands (whole steps of K, 16-byte rows) and the tokens fill its tiles."""
    return h.shape[1] % BK == 0 and h_stride % 8 == 0 and (h.data_ptr() | w.data_ptr()) % 16 == 0 and h.shape[0] > 64


def linear_stats(
    m: torch.Tensor, s: torch.Tensor, z: torch.Tensor, h: torch.Tensor, h_stride: int, w: torch.Tensor,
    target: torch.Tensor, temperature: float, vocab_start: int, vocab: int, strides: tuple[int, int],
) -> None:  # fmt: skip
    """Tile statistics of h[T,K] w[width,K]ᵀ into m and s; z[T] where w holds the target. `strides`: of token and tile.

    vocab_start: the id of w's first row; vocab: rows of w that count.
    """
    (tokens, k), width = h.shape, w.shape[0]
    descriptors = [
        TensorDescriptor(
            x, list(x.shape), [stride, 1], [rows, BK], gl.NVMMASharedLayout.get_default_for([rows, BK], gl.bfloat16)
        )
        for x, stride, rows in ((h, h_stride, BM), (w, k, BN))
    ]
    tiles = cdiv(tokens, BM) * cdiv(width, BN)
    linear_stats_kernel[(min(tiles, multiprocessors(h.get_device())),)](
        m, s, z, target, temperature, *descriptors, tokens, width, k // BK, vocab_start, vocab,
        cdiv(width, 64), *strides,
        BM=BM, BN=BN, BK=BK, STAGES=STAGES, GROUP=GROUP, HEATED=temperature != 1.0, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
