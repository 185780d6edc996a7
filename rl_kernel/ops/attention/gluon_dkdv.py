"""Gradients of the keys and values on Hopper, warp-specialised: one warp copies, two warpgroups hold 64 keys each.

The bits are those of `triton_backward`: the same products, chains over the queries in ascending order. Scores stand
here with the keys as rows, so that a block's weights are the left side of the products as they lie in registers; what
belongs to a query is read from shared memory, a column at a time.
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

from rl_kernel.ops.attention.gluon_blocks import BLOCK, ROWS, SCORES
from rl_kernel.ops.attention.gluon_copy import TILE
from rl_kernel.ops.attention.gluon_dq import clear, known, place_of, ring


@gluon.jit
def _term(terms, slot, FIELD: gl.constexpr):  # type: ignore[no-untyped-def]
    """0: maxima, 1: reciprocals of the row sums, 2: delta, of the queries of a block, along the columns."""
    return terms.index(slot * 3 + FIELD).load(gl.SliceLayout(0, SCORES))[None, :]


@gluon.jit
def _step(
    dk, dv, ds_before, block, release, key, place, keys, values, buffers, bars, scale,
    STAGES: gl.constexpr, EDGE: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One block of queries. The products with ds_before still run at the begin, those with this ds at the end.

    release: whether there was a block before. EDGE: some key may not be seen by all, or some query is of no sequence.
    """
    _start, length, first = place
    q_buffers, do_buffers, terms = buffers
    full, empty = bars
    P: gl.constexpr = ds_before.type.layout
    count = block - first // BLOCK
    slot = count % STAGES
    mbarrier.wait(full.index(slot), (count // STAGES) & 1)
    q_in, do = q_buffers.index(slot), do_buffers.index(slot)
    if EDGE:
        if (block + 1) * BLOCK > length:
            clear(q_in, length - block * BLOCK)
            clear(do, length - block * BLOCK)
    nothing = gl.zeros((ROWS, BLOCK), gl.float32, SCORES)
    s = warpgroup_mma(keys, q_in.permute((1, 0)), nothing, use_acc=False, is_async=True)
    dp = warpgroup_mma(values, do.permute((1, 0)), nothing, use_acc=False, is_async=True)
    s, dk, _before = warpgroup_mma_wait(1, (s, dk, ds_before))
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=release)
    p = gl.exp2(s * scale - _term(terms, slot, 0)) * _term(terms, slot, 1)
    if EDGE:
        query = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
        below = (key + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)))[:, None] <= query[None, :]
        seen = below & (query < length)[None, :]
        p = gl.where(seen, p, 0.0)
    weights = gl.convert_layout(p.to(gl.bfloat16), P)
    dv = warpgroup_mma(weights, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, (dp,))
    ds = p * (dp - _term(terms, slot, 2))
    if EDGE:
        ds = gl.where(seen, ds, 0.0)
    ds_now = gl.convert_layout(ds.to(gl.bfloat16), P)
    dk = warpgroup_mma(ds_now, q_in, dk, is_async=True)
    dk, dv, _weights = warpgroup_mma_wait(1, (dk, dv, weights))
    return dk, dv, ds_now


@gluon.jit
def _walk(
    dk_out, dv_out, k_buffer, v_buffer, buffers, kv_full, bars, place, head, scale,
    HALF: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One warpgroup: the keys [64 HALF, 64 HALF + 64) of the tile."""
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    start, length, first = known(place)
    place = (start, length, first)
    full, empty = bars
    keys, values = k_buffer.slice(HALF * ROWS, ROWS), v_buffer.slice(HALF * ROWS, ROWS)
    dk, dv = gl.zeros((ROWS, D), gl.float32, O), gl.zeros((ROWS, D), gl.float32, O)
    ds = gl.zeros((ROWS, BLOCK), gl.bfloat16, P)
    key = first + HALF * ROWS
    own, blocks, whole = key // BLOCK, gl.cdiv(length, BLOCK), length // BLOCK
    if first < length:
        mbarrier.wait(kv_full, 0)
        if HALF == 1:
            # No query of the first block sees these keys.
            mbarrier.wait(full.index(0), 0)
            mbarrier.arrive(empty.index(0))
    block = own
    while block < blocks:
        dk, dv, ds = _step(
            dk, dv, ds, block, block > own, key, place, keys, values, buffers, bars, scale, STAGES, True
        )  # fmt: skip
        block += 1
        for middle in range(block, whole):
            dk, dv, ds = _step(
                dk, dv, ds, middle, True, key, place, keys, values, buffers, bars, scale, STAGES, False
            )  # fmt: skip
        dk, ds = warpgroup_mma_wait(0, (dk, ds))
        block = max(block, whole)
    row = key + gl.arange(0, ROWS, gl.SliceLayout(1, O))
    column = gl.arange(0, D, gl.SliceLayout(0, O))
    at = ((start + row).to(gl.int64) * HEADS + head)[:, None] * D + column[None, :]
    gl.store(dk_out + at, dk, mask=(row < length)[:, None])
    gl.store(dv_out + at, dv, mask=(row < length)[:, None])


@gluon.jit
def _copy(
    q, dout, k, v, terms, tokens, k_buffer, v_buffer, buffers, kv_full, bars, place, head,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The copying warp: keys and values once, then queries, their gradient and their terms block by block."""
    start, length, first = known(place)
    q_buffers, do_buffers, terms_buffers = buffers
    full, empty = bars
    L: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    begin, blocks = first // BLOCK, gl.cdiv(length, BLOCK)
    terms += head.to(gl.int64) * tokens + start
    plane = tokens.to(gl.int64) * HEADS
    if begin < blocks:
        column = head // (HEADS // KV_HEADS) * D
        mbarrier.expect(kv_full, 2 * TILE * D * 2)
        tma.async_copy_global_to_shared(k, [start + first, column], kv_full, k_buffer)
        tma.async_copy_global_to_shared(v, [start + first, column], kv_full, v_buffer)
    for count in range(0, blocks - begin):
        query = (begin + count) * BLOCK
        row = query + gl.arange(0, BLOCK, L)
        top = gl.load(terms + row, mask=row < length, other=0.0)
        inverse = gl.load(terms + plane + row, mask=row < length, other=0.0)
        delta = gl.load(terms + 2 * plane + row, mask=row < length, other=0.0)
        slot = count % STAGES
        mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), 2 * BLOCK * D * 2)
        tma.async_copy_global_to_shared(q, [start + query, head * D], full.index(slot), q_buffers.index(slot))
        tma.async_copy_global_to_shared(dout, [start + query, head * D], full.index(slot), do_buffers.index(slot))
        terms_buffers.index(slot * 3).store(top)
        terms_buffers.index(slot * 3 + 1).store(inverse)
        terms_buffers.index(slot * 3 + 2).store(delta)
        gl.thread_barrier()
        mbarrier.arrive(full.index(slot))


@gluon.jit(do_not_specialize=["sequences", "tokens"])
def dkdv_kernel(
    dk, dv, dout, q, k, v, terms, cu, sequences, tokens, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """dk, dv[T,H,D] fp32, unscaled, of each query head; the other arguments as of `gluon_dq.dq_kernel`.

    A program has 128 keys and one query head.
    """
    head = gl.program_id(0)
    place = place_of(cu, sequences, gl.program_id(1), WIDTH)  # the longest first
    k_buffer = gl.allocate_shared_memory(gl.bfloat16, [TILE, D], k.layout)
    v_buffer = gl.allocate_shared_memory(gl.bfloat16, [TILE, D], v.layout)
    q_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, D], q.layout)
    do_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, D], dout.layout)
    terms_buffers = gl.allocate_shared_memory(gl.float32, [3 * STAGES, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    bars = ring(STAGES, 2)
    fence_async_shared()
    buffers = (q_buffers, do_buffers, terms_buffers)
    gl.warp_specialize(
        [
            (_walk, (dk, dv, k_buffer, v_buffer, buffers, kv_full, bars, place, head, scale, 0, HEADS, D, STAGES)),
            (_walk, (dk, dv, k_buffer, v_buffer, buffers, kv_full, bars, place, head, scale, 1, HEADS, D, STAGES)),
            (_copy, (q, dout, k, v, terms, tokens, k_buffer, v_buffer, buffers, kv_full, bars, place, head,
                     HEADS, KV_HEADS, D, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
