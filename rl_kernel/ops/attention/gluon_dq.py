"""Gradient of the queries on Hopper, warp-specialised: one warp copies, two warpgroups hold 64 queries each.

The bits are those of `triton_backward`: the same products, one chain over the keys in ascending order. A step computes
the scores of a block of 64 keys while the sums still get the block before. T tokens, H query heads, G kv heads,
D head_dim, R sequences. Also here: what `gluon_dkdv` shares.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rl_kernel.ops.attention.gluon_blocks import BLOCK, ROWS, SCORES, hold
from rl_kernel.ops.attention.gluon_copy import TILE, find_tile, uniform
from rl_kernel.ops.gluon_scalar import narrow


@gluon.jit
def clear(block, left):  # type: ignore[no-untyped-def]
    """The rows of a block from `left` on become zero: they are of another sequence, and may be anything.

    Each warpgroup does so for itself, before it multiplies: whoever comes second writes what is there.
    """
    D: gl.constexpr = block.shape[1]
    W: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    rows = block.load(W)
    here = gl.arange(0, BLOCK, gl.SliceLayout(1, W)) < left
    block.store(gl.where(here[:, None], rows, 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def ring(STAGES: gl.constexpr, TOLD: gl.constexpr):  # type: ignore[no-untyped-def]
    """Barriers of a ring of copies: full, of which TOLD arrivals tell, and empty, of which both warpgroups do."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=TOLD)
        mbarrier.init(empty.index(slot), count=2)
    return full, empty


@gluon.jit
def place_of(cu, sequences, tile, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """First token of the sequence of a tile, its tokens, the first of the tile in it."""
    _, start, length, first, _, _ = find_tile(cu, cu, cu, sequences, tile, WIDTH, 0, 4)
    return start, length, first


@gluon.jit
def known(place):  # type: ignore[no-untyped-def]
    """A place as `place_of` found it, and the compiler told that all threads have the same."""
    start, length, first = place
    return uniform(start), uniform(length), uniform(first)


@gluon.jit
def _step(
    dq, ds_before, block, begin, length, terms, q_in, do, buffers, bars, scale,
    STAGES: gl.constexpr, EDGE: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One block of keys, and the sums of the one before, whose ds is ready. EDGE: some query may not see it all."""
    k_buffers, v_buffers = buffers
    full, empty = bars
    top, inverse, delta = terms
    P: gl.constexpr = ds_before.type.layout
    slot = block % STAGES
    # Before the first block there is none, and ds is zero: zero times the first block, which is there, adds nothing.
    before = max(block - 1, 0) % STAGES
    mbarrier.wait(full.index(slot), (block // STAGES) & 1)
    keys, values = k_buffers.index(slot), v_buffers.index(slot)
    if EDGE:
        if (block + 1) * BLOCK > length:
            clear(keys, length - block * BLOCK)
    nothing = gl.zeros((ROWS, BLOCK), gl.float32, SCORES)
    s = warpgroup_mma(q_in, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dp = warpgroup_mma(do, values.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dq = warpgroup_mma(ds_before, k_buffers.index(before), dq, is_async=True)
    s = warpgroup_mma_wait(2, (s,))
    p = gl.exp2(s * scale - top) * inverse
    hold(block)  # the exponentials overlap with the other products
    dp = warpgroup_mma_wait(1, (dp,))
    ds = p * (dp - delta)
    dq, ds, _before = warpgroup_mma_wait(0, (dq, ds, ds_before))
    mbarrier.arrive(empty.index(before), pred=block > 0)
    if EDGE:
        query = begin + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        key = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
        ds = gl.where(key[None, :] <= query[:, None], ds, 0.0)
    return dq, gl.convert_layout(ds.to(gl.bfloat16), P)


@gluon.jit
def _walk(
    dq_out, terms, tokens, q_buffer, do_buffer, buffers, q_full, bars, place, head, score_scale, scale,
    HALF: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One warpgroup: the queries [64 HALF, 64 HALF + 64) of the tile."""
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    Q: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=2)
    start, length, first = known(place)
    k_buffers, _v = buffers
    begin = first + HALF * ROWS
    row = begin + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    at = terms + head.to(gl.int64) * tokens + start + row
    plane = tokens.to(gl.int64) * HEADS
    top = gl.load(at, mask=row < length, other=0.0)[:, None]
    inverse = gl.load(at + plane, mask=row < length, other=0.0)[:, None]
    delta = gl.load(at + 2 * plane, mask=row < length, other=0.0)[:, None]
    dq, ds = gl.zeros((ROWS, D), gl.float32, O), gl.zeros((ROWS, BLOCK), gl.bfloat16, P)
    blocks = _blocks(first, length)
    own = begin // BLOCK  # the block with the diagonal
    staging = q_buffer.slice(HALF * ROWS, ROWS)
    mbarrier.wait(q_full, 0)
    q_in, do = staging.load(Q), do_buffer.slice(HALF * ROWS, ROWS).load(Q)
    for block in range(0, min(own, blocks)):
        dq, ds = _step(
            dq, ds, block, begin, length, (top, inverse, delta), q_in, do, buffers, bars, score_scale, STAGES, False
        )  # fmt: skip
    if own < blocks:
        dq, ds = _step(
            dq, ds, own, begin, length, (top, inverse, delta), q_in, do, buffers, bars, score_scale, STAGES, True
        )  # fmt: skip
    if blocks > 0:
        dq = warpgroup_mma(ds, k_buffers.index((min(own + 1, blocks) - 1) % STAGES), dq)
    # Through shared memory, so that a row leaves in whole lines.
    W: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    staging.store(narrow((dq + 0.0) * scale))
    i = begin + gl.arange(0, ROWS, gl.SliceLayout(1, W))
    column = gl.arange(0, D, gl.SliceLayout(0, W))
    out = dq_out + ((start + i).to(gl.int64) * HEADS + head)[:, None] * D + column[None, :]
    gl.store(out, staging.load(W), mask=(i < length)[:, None])


@gluon.jit
def _blocks(first, length):  # type: ignore[no-untyped-def]
    """Blocks of keys that a tile sees; none where it has no queries."""
    return gl.where(first < length, gl.cdiv(min(first + TILE, length), BLOCK), 0)


@gluon.jit
def _copy(
    q, dout, k, v, q_buffer, do_buffer, buffers, q_full, bars, place, head,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The copying warp: the queries and their gradient once, then keys and values block by block."""
    start, length, first = known(place)
    k_buffers, v_buffers = buffers
    full, empty = bars
    mbarrier.expect(q_full, 2 * TILE * D * 2)
    tma.async_copy_global_to_shared(q, [start + first, head * D], q_full, q_buffer)
    tma.async_copy_global_to_shared(dout, [start + first, head * D], q_full, do_buffer)
    column = head // (HEADS // KV_HEADS) * D
    for block in range(0, _blocks(first, length)):
        slot = block % STAGES
        mbarrier.wait(empty.index(slot), ((block // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), 2 * BLOCK * D * 2)
        row = start + block * BLOCK
        tma.async_copy_global_to_shared(k, [row, column], full.index(slot), k_buffers.index(slot))
        tma.async_copy_global_to_shared(v, [row, column], full.index(slot), v_buffers.index(slot))


@gluon.jit(do_not_specialize=["sequences", "tokens"])
def dq_kernel(
    dq, dout, q, k, v, terms, cu, sequences, tokens, score_scale, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """dq[T,H,D]; dout, q, k, v: descriptors of [T,H*D] and [T,G*D]; terms: see `triton_backward.row_terms_kernel`.

    A program has 128 queries of one head.
    """
    head, tile = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1)  # the longest first
    place = place_of(cu, sequences, tile, WIDTH)
    q_buffer = gl.allocate_shared_memory(gl.bfloat16, [TILE, D], q.layout)
    do_buffer = gl.allocate_shared_memory(gl.bfloat16, [TILE, D], dout.layout)
    k_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, D], k.layout)
    v_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, D], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    bars = ring(STAGES, 1)
    fence_async_shared()
    buffers = (k_buffers, v_buffers)
    gl.warp_specialize(
        [
            (_walk, (dq, terms, tokens, q_buffer, do_buffer, buffers, q_full, bars, place, head, score_scale, scale,
                     0, HEADS, D, STAGES)),
            (_walk, (dq, terms, tokens, q_buffer, do_buffer, buffers, q_full, bars, place, head, score_scale, scale,
                     1, HEADS, D, STAGES)),
            (_copy, (q, dout, k, v, q_buffer, do_buffer, buffers, q_full, bars, place, head,
                     HEADS, KV_HEADS, D, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
