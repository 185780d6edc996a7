"""The fused LM head on Hopper, warp-specialised: 128 tokens against 256 ids, the logits never leave the registers.

Each of two warpgroups holds 64 tokens; of one, where tokens are few (`rows_for`). When its chain ends it reduces its
logits to the statistics of four 64-id tiles while the copies for the next tile are under way. Where all statistics of
a call are wanted merged, one more warp does that meanwhile (`gluon_merge`). T tokens, K features.
"""

from dataclasses import dataclass

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

from rl_kernel.ops import gluon_join
from rl_kernel.ops.accelerator import cdiv, multiprocessors
from rl_kernel.ops.gluon_matmul import copy_tiles, origin
from rl_kernel.ops.gluon_scalar import canonical
from rl_kernel.ops.linear_logp.gluon_merge import AHEAD, BATCH, TURNS, merge, raise_flags

BN, BK, GROUP = 256, 64, 8
STAGES = {64: 5, 128: 4}  # copies under way, by the tokens of a tile
FEWEST = 16  # tokens from which merging inside is faster than the plain kernel's narrow tiles and a launch behind them
TILE = gl.constexpr(64)
LOG2E = gl.constexpr(float.fromhex("0x1.715476p+0"))
NEG_INF = gl.constexpr(float("-inf"))


@gluon.jit
def _statistics(
    m, s, z_target, logits, wanted, temperature, row, column, tokens, limit, tiles, token_stride, tile_stride,
    HEATED: gl.constexpr, MERGE: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """logits[R,N] of the rows `row` and the ids from `column` on → maximum and tree of exponentials of each 64-id tile.

    wanted[R]: the id whose logit goes to z_target, or -1; limit: ids that count. Few tiles hold a wanted id or the last
    one that counts, and looking costs as much as all the rest: so it is asked first whether this is one of them.
    """
    if HEATED:
        logits = gl.div_rn(logits, gl.zeros_like(logits) + temperature)
    rows: gl.constexpr = logits.shape[0]
    width: gl.constexpr = logits.shape[1]
    count: gl.constexpr = width // TILE
    id = gl.arange(0, width, gl.SliceLayout(0, logits.type.layout))
    here = wanted - column
    if gl.max(gl.where((here >= 0) & (here < width), 1, 0), 0) > 0:
        at = z_target + row[:, None] + gl.zeros_like(logits).to(gl.int32)
        gl.store(at, logits, mask=id[None, :] == here[:, None])
    if column + width > limit:
        # An id that does not count is -inf, so that its term is +0.
        logits = gl.where((id < limit - column)[None, :], logits, NEG_INF)
    folded = logits.reshape([rows, count, TILE])
    top = gl.max(folded, 2)
    shift = gl.where(top == NEG_INF, 0.0, top)
    terms = gl.exp2((folded - gl.expand_dims(shift, 2)) * LOG2E)
    for level in gl.static_range(6):
        terms = gl.sum(terms.reshape([rows, count, TILE >> (level + 1), 2]), 3)
    total = terms.reshape([rows, count])
    layout: gl.constexpr = total.type.layout
    top = gl.convert_layout(top, layout)
    token = gl.convert_layout(row, gl.SliceLayout(1, layout))[:, None]
    here = column // TILE + gl.arange(0, count, gl.SliceLayout(0, layout))[None, :]
    if MERGE:
        at = ((token // 32).to(gl.int64) * tiles + here) * 32 + token % 32
    else:
        at = here.to(gl.int64) * tile_stride + token.to(gl.int64) * token_stride
    gl.store(m + at, canonical(top), mask=(token < tokens) & (here < tiles))
    gl.store(s + at, canonical(total), mask=(token < tokens) & (here < tiles))


@gluon.jit
def _multiply(
    inputs, HALF: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    HEATED: gl.constexpr, MERGE: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One warpgroup: 64 tokens of each tile of this program."""
    (m, s, z_target, target, temperature, done, free, a_buffers, b_buffers, full, empty, tokens, width, steps,
     vocab_start, vocab, tiles, token_stride, tile_stride) = inputs  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    rows: gl.constexpr = 64
    limit = gl.minimum(width, vocab)
    count = 0
    for tile in range(gl.program_id(0), gl.cdiv(tokens, BM) * gl.cdiv(width, BN), gl.num_programs(0)):
        row0, column = origin(tile, tokens, width, BM, BN, GROUP)
        row = row0 + HALF * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))
        wanted = gl.load(target + row, mask=row < tokens, other=-1) - vocab_start
        wanted = gl.where((wanted >= 0) & (wanted < limit), wanted, -1).to(gl.int32)
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
        _statistics(
            m, s, z_target, acc, wanted, temperature, row, column, tokens, limit, tiles, token_stride, tile_stride,
            HEATED, MERGE,
        )  # fmt: skip
        if MERGE:
            turn = tile // gl.num_programs(0)
            slot = HALF * TURNS + turn % TURNS
            mbarrier.wait(free.index(slot), ((turn // TURNS) & 1) ^ 1)
            gl.thread_barrier()
            mbarrier.arrive(done.index(slot))


@gluon.jit(do_not_specialize=["tokens"])
def linear_stats_kernel(
    lse, logp, top_io, sum_io, flags, m, s, z_target, target, temperature, h, w, tokens, width, steps, vocab_start,
    vocab, tiles, token_stride, tile_stride,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    HEATED: gl.constexpr, MERGE: gl.constexpr, CONTINUE: gl.constexpr, FINISH: gl.constexpr, BATCH: gl.constexpr,
    AHEAD: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """h, w: descriptors of [T,K] and of the `width` rows of the weight of this call, from which vocab counts.

    MERGE: m and s are [T/32,tiles,32], tiles in whole batches, and the first five arguments count; see `merge`.
    """
    a_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], h.layout)
    b_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    slots: gl.constexpr = 2 * AHEAD if MERGE else 1
    ring = gl.allocate_shared_memory(gl.float32, [slots, BATCH, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    done = gl.allocate_shared_memory(gl.int64, [BM // 64 * TURNS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BM // 64 * TURNS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(BM // 64 * TURNS):
        mbarrier.init(done.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=BM // 64)
    fence_async_shared()
    inputs = (m, s, z_target, target, temperature, done, free, a_buffers, b_buffers, full, empty, tokens, width, steps,
              vocab_start, vocab, tiles, token_stride, tile_stride)  # fmt: skip
    merges = (lse, logp, z_target, target, top_io, sum_io, m, s, flags, ring, tokens, width, vocab_start, vocab)
    if BM == 64:
        gl.warp_specialize(
            [
                (_multiply, (inputs, 0, BM, BN, STAGES, GROUP, HEATED, MERGE)),
                (copy_tiles, (h, w, a_buffers, b_buffers, full, empty, tokens, width, steps,
                              BM, BN, BK, STAGES, GROUP, True)),
                (merge, (merges, BM, BN, CONTINUE, FINISH, BATCH, AHEAD)),
                (raise_flags, (flags, done, free, tokens, width, BM, BN, GROUP)),
            ],
            [1, 1, 1],
            [40, 40, 40],
        )  # fmt: skip
    elif MERGE:
        gl.warp_specialize(
            [
                (_multiply, (inputs, 0, BM, BN, STAGES, GROUP, HEATED, MERGE)),
                (_multiply, (inputs, 1, BM, BN, STAGES, GROUP, HEATED, MERGE)),
                (copy_tiles, (h, w, a_buffers, b_buffers, full, empty, tokens, width, steps,
                              BM, BN, BK, STAGES, GROUP, True)),
                (merge, (merges, BM, BN, CONTINUE, FINISH, BATCH, AHEAD)),
                (raise_flags, (flags, done, free, tokens, width, BM, BN, GROUP)),
            ],
            [4, 1, 1, 1],
            [232, 40, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (inputs, 0, BM, BN, STAGES, GROUP, HEATED, MERGE)),
                (_multiply, (inputs, 1, BM, BN, STAGES, GROUP, HEATED, MERGE)),
                (copy_tiles, (h, w, a_buffers, b_buffers, full, empty, tokens, width, steps,
                              BM, BN, BK, STAGES, GROUP, True)),
            ],
            [4, 1],
            [232, 24],
        )  # fmt: skip


def serves(h: torch.Tensor, h_stride: int, w: torch.Tensor) -> bool:
    """Whether this kernel can copy the operands (whole steps of K, 16-byte rows, none over another)."""
    apart = h_stride % 8 == 0 and h_stride >= h.shape[1]
    return h.shape[1] % BK == 0 and apart and (h.data_ptr() | w.data_ptr()) % 16 == 0


@dataclass(frozen=True, slots=True)
class Merge:
    """What the statistics of a vocabulary become, fp32[T]: lse and logp, or what a later stretch continues from."""

    lse: torch.Tensor
    logp: torch.Tensor
    running: tuple[torch.Tensor, torch.Tensor]
    keep: bool = False
    finish: bool = True


def _launch(
    out: tuple[torch.Tensor, ...], m: torch.Tensor, s: torch.Tensor, z: torch.Tensor, h: torch.Tensor, h_stride: int,
    w: torch.Tensor, target: torch.Tensor, temperature: float, vocab_start: int, vocab: int, tiles: int,
    strides: tuple[int, int], bm: int, how: dict[str, bool],
) -> None:  # fmt: skip
    (tokens, k), width = h.shape, w.shape[0]
    descriptors = [
        TensorDescriptor(
            x, list(x.shape), [stride, 1], [rows, BK], gl.NVMMASharedLayout.get_default_for([rows, BK], gl.bfloat16)
        )
        for x, stride, rows in ((h, h_stride, bm), (w, k, BN))
    ]
    products = cdiv(tokens, bm) * cdiv(width, BN)
    linear_stats_kernel[(min(products, multiprocessors(h.get_device())),)](
        *out, m, s, z, target, temperature, *descriptors, tokens, width, k // BK, vocab_start, vocab, tiles, *strides,
        BM=bm, BN=BN, BK=BK, STAGES=STAGES[bm], GROUP=GROUP, HEATED=temperature != 1.0,
        BATCH=BATCH, AHEAD=AHEAD, **how, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def rows_for(tokens: int) -> int:
    """Tokens of a tile: a static table, it may change speed only."""
    # In twos of 64 an odd one would have a half of nothing beside it; past five that half is little.
    return 64 if tokens <= 192 or 256 < tokens <= 320 else 128


def linear_stats(
    m: torch.Tensor, s: torch.Tensor, z: torch.Tensor, h: torch.Tensor, h_stride: int, w: torch.Tensor,
    target: torch.Tensor, temperature: float, vocab_start: int, vocab: int, strides: tuple[int, int],
) -> None:  # fmt: skip
    """Tile statistics of h[T,K] w[width,K]ᵀ into m and s; z[T] where w holds the target. `strides`: of token and tile.

    vocab_start: the id of w's first row; vocab: rows of w that count.
    """
    how = {"MERGE": False, "CONTINUE": False, "FINISH": False}
    _launch(
        (m, m, m, m, m), m, s, z, h, h_stride, w, target, temperature, vocab_start, vocab, cdiv(w.shape[0], 64),
        strides, 128, how,
    )  # fmt: skip


def linear_merged(
    merge: Merge, z: torch.Tensor, h: torch.Tensor, h_stride: int, w: torch.Tensor, target: torch.Tensor,
    temperature: float, vocab_start: int, vocab: int,
) -> None:  # fmt: skip
    """The statistics of h[T,K] w[width,K]ᵀ, merged behind those of the ids before w's; arguments as `linear_stats`."""
    tokens, width = h.shape[0], w.shape[0]
    bm = rows_for(tokens)
    columns, blocks = cdiv(width, BN), cdiv(tokens, bm)
    tiles = cdiv(columns * (BN // 64), BATCH) * BATCH
    m, s = torch.empty((2, blocks * (bm // 32), tiles, 32), dtype=torch.float32, device=h.device)
    flags = gluon_join.columns(h.device, blocks * (bm // 64) * columns)
    _launch(
        (merge.lse, merge.logp, *merge.running, flags), m, s, z, h, h_stride, w, target, temperature, vocab_start,
        vocab, tiles, (0, 0), bm, {"MERGE": True, "CONTINUE": merge.keep, "FINISH": merge.finish},
    )  # fmt: skip
