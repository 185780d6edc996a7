"""Attention forward on Hopper, warp-specialised: one warp copies, two warpgroups hold 64 queries each.

The bits are those of `triton_kernel`: the same blocks, partials and chains. What differs is time: the sums of one block
run while the exponentials of the next are computed, and each warpgroup works while the other waits. Programs stay and
walk the tiles, longest first. R sequences, H query heads, G kv heads, D head_dim.
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

from rl_kernel.contracts.v1 import KV_PARTIAL
from rl_kernel.ops.accelerator import multiprocessors
from rl_kernel.ops.gluon_scalar import canonical, narrow

HEAD_DIMS = (64, 128)
STAGES = {64: 5, 128: 3}  # blocks of keys and of values in flight, as many as shared memory holds

ROWS = gl.constexpr(128)  # queries of a tile
HALF_ROWS = gl.constexpr(64)  # queries of a warpgroup
BLOCK = gl.constexpr(64)
ONES = gl.constexpr(16)
NEG_INF = gl.constexpr(float("-inf"))


@gluon.jit
def _tile(cu_q, cu_k, sequences, tile, WIDTH: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Tile number → (first query row, queries, first query of the tile, first key row, keys) of its sequence."""
    r = gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [WARPS], [0]))
    begin = gl.load(cu_q + r, mask=r < sequences, other=0)
    mine = (begin // ROWS + r <= tile) & (r < sequences)
    sequence = gl.sum(mine.to(gl.int32), 0) - 1
    start = gl.load(cu_q + sequence)
    key_start = gl.load(cu_k + sequence)
    length, keys = gl.load(cu_q + sequence + 1) - start, gl.load(cu_k + sequence + 1) - key_start
    return start, length, (tile - start // ROWS - sequence) * ROWS, key_start, keys


@gluon.jit
def _copy(
    q, k, v, q_buffer, k_buffers, v_buffers, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    cu_q, cu_k, sequences, tiles,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    count, turn = 0, 0
    for work in range(gl.program_id(0), tiles * HEADS, gl.num_programs(0)):
        head = work % HEADS
        start, length, first, key_start, keys = _tile(cu_q, cu_k, sequences, tiles - 1 - work // HEADS, WIDTH, 1)
        if first < length:
            mbarrier.wait(q_empty, (turn & 1) ^ 1)
            mbarrier.expect(q_full, ROWS * D * 2)
            tma.async_copy_global_to_shared(q, [start + first, head * D], q_full, q_buffer)
            turn += 1
            column = head // (HEADS // KV_HEADS) * D
            for block in range(gl.cdiv(min(keys, keys - length + first + ROWS), BLOCK)):
                slot, phase = count % STAGES, (count // STAGES) & 1
                mbarrier.wait(k_empty.index(slot), phase ^ 1)
                mbarrier.expect(k_full.index(slot), BLOCK * D * 2)
                row = key_start + block * BLOCK
                tma.async_copy_global_to_shared(k, [row, column], k_full.index(slot), k_buffers.index(slot))
                mbarrier.wait(v_empty.index(slot), phase ^ 1)
                mbarrier.expect(v_full.index(slot), BLOCK * D * 2)
                tma.async_copy_global_to_shared(v, [row, column], v_full.index(slot), v_buffers.index(slot))
                count += 1


@gluon.jit
def _merge(m1, l1, acc1, m2, l2, acc2, S: gl.constexpr, L: gl.constexpr, O: gl.constexpr):  # type: ignore[no-untyped-def]
    """Two neighbouring partials into one, as in triton_kernel.merge."""
    m = gl.maximum(m1, m2)
    shift = gl.where(m == NEG_INF, 0.0, m)
    a, b = gl.exp2(m1 - shift), gl.exp2(m2 - shift)
    l = l1 * _rows(a, L) + l2 * _rows(b, L)
    return m, l, acc1 * _rows(a, O) + acc2 * _rows(b, O)


@gluon.jit
def _rows(x, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """One value a row, to be broadcast along the columns of LAYOUT."""
    return gl.convert_layout(x, gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def _softmax(s, m, scale, opens, seen, MASKED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Scores of one block → (p, what the sums so far are worth, the maximum)."""
    s = s * scale
    if MASKED:
        s = gl.where(seen, s, NEG_INF)
    before = gl.where(opens, NEG_INF, m)
    top = gl.maximum(before, gl.max(s, 1))
    p = gl.exp2(s - top[:, None])
    if MASKED:
        p = gl.where(seen, p, 0.0)
    # A row that has seen no key of this partial yet keeps its zeros; -inf - -inf would be NaN.
    return p, gl.where(top == NEG_INF, 1.0, gl.exp2(before - top)), top


@gluon.jit
def _with_values_that_are_not_finite(
    acc, p, seen, weights, v_buffer, scratch, parked_at, O: gl.constexpr, P: gl.constexpr, V: gl.constexpr
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Return acc plus p times the values of a masked block of which some are infinite or NaN, as triton_kernel does.

    acc waits in the L2 meanwhile: with it and the counts, the whole kernel would run out of registers.
    """
    gl.store(parked_at, acc)
    some = gl.convert_layout(gl.where(seen & (p > 0.0), 1.0, 0.0).to(gl.bfloat16), P)
    none = gl.convert_layout(gl.where(seen & (p == 0.0), 1.0, 0.0).to(gl.bfloat16), P)
    wide = v_buffer.load(V).to(gl.float32)
    odd = (wide - wide) != 0.0
    code = gl.where(wide == float("inf"), 1.0, gl.where(wide == NEG_INF, 256.0, gl.where(odd, 65536.0, 0.0)))
    scratch.store(code.to(gl.bfloat16))
    fence_async_shared()
    count = warpgroup_mma(some, scratch, gl.zeros(acc.shape, gl.float32, O))
    wide = v_buffer.load(V).to(gl.float32)
    scratch.store(gl.where((wide - wide) != 0.0, 65536.0, 0.0).to(gl.bfloat16))
    fence_async_shared()
    count = warpgroup_mma(none, scratch, count).to(gl.int32)
    plus, minus = (count & 255) > 0, ((count >> 8) & 255) > 0
    infinite = gl.where(plus, float("inf"), gl.where(minus, NEG_INF, 0.0))
    infinite = gl.where((count > 65535) | (plus & minus), float("nan"), infinite)
    wide = v_buffer.load(V).to(gl.float32)
    scratch.store(gl.where((wide - wide) != 0.0, 0.0, wide).to(gl.bfloat16))
    fence_async_shared()
    return warpgroup_mma(weights, scratch, gl.load(parked_at) + infinite)


@gluon.jit
def _blocks_in_full(
    m, l_done, acc_done, m_all, l_all, count, full, queries, buffers, bars, scale,
    D: gl.constexpr, STAGES: gl.constexpr, PARTIAL: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The first `full` > 0 blocks, which every row of this half sees. m, l, acc: the open partial; m_all, l_all and
    `merged`: those before it. count: blocks so far.
    """
    k_buffers, v_buffers, ones, merged, _scratch = buffers
    k_full, k_empty, v_full, v_empty = bars
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 16])
    PO: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=L, k_width=2)
    per_partial: gl.constexpr = PARTIAL // BLOCK
    empty_scores = gl.zeros((HALF_ROWS, BLOCK), gl.float32, S)
    mbarrier.wait(k_full.index(count % STAGES), (count // STAGES) & 1)
    these_keys = k_buffers.index(count % STAGES).permute((1, 0))
    s = warpgroup_mma(queries, these_keys, empty_scores, use_acc=False)
    mbarrier.arrive(k_empty.index(count % STAGES))
    p, _unused, m = _softmax(s, m, scale, True, True, False)
    weights = p.to(gl.bfloat16)
    mbarrier.wait(k_full.index((count + 1) % STAGES), ((count + 1) // STAGES) & 1, pred=full > 1)
    for block in range(1, full):
        # The scores of this block and the sums of the one before run while the exponentials are computed.
        slot, after = count % STAGES, (count + 1) % STAGES
        next_keys = k_buffers.index(after).permute((1, 0))
        scores = warpgroup_mma(queries, next_keys, empty_scores, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(slot), (count // STAGES) & 1)
        weights_o, weights_l = gl.convert_layout(weights, PO), gl.convert_layout(weights, PL)
        acc = warpgroup_mma(weights_o, v_buffers.index(slot), acc_done, is_async=True)
        l = warpgroup_mma(weights_l, ones, l_done, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=2, deps=(scores,))
        mbarrier.arrive(k_empty.index(after))
        opens = block % per_partial == 0
        p, alpha, top = _softmax(s, m, scale, opens, opens, False)
        # `ready` among the dependences, and a wait that loops, keep the assembler from moving the
        # exponentials behind the products that they are to overlap.
        ready = p.to(gl.bfloat16)
        following = count + 2
        mbarrier.wait(k_full.index(following % STAGES), (following // STAGES) & 1, pred=block + 1 < full)
        acc_done, l_done, _o, _l, weights = warpgroup_mma_wait(0, (acc, l, weights_o, weights_l, ready))
        mbarrier.arrive(v_empty.index(slot))
        if opens:
            m_all, l_all, total = _merge(m_all, l_all, merged.load(O), m, l_done, acc_done, S, L, O)
            merged.store(total)
            l_done = gl.zeros((HALF_ROWS, ONES), gl.float32, L)
            acc_done = gl.zeros((HALF_ROWS, D), gl.float32, O)
        m = top
        acc_done = acc_done * _rows(alpha, O)
        l_done = l_done * _rows(alpha, L)
        count += 1
    slot = count % STAGES
    mbarrier.wait(v_full.index(slot), (count // STAGES) & 1)
    acc_done = warpgroup_mma(gl.convert_layout(weights, PO), v_buffers.index(slot), acc_done)
    l_done = warpgroup_mma(gl.convert_layout(weights, PL), ones, l_done)
    mbarrier.arrive(v_empty.index(slot))
    count += 1
    return m, l_done, acc_done, m_all, l_all, count


@gluon.jit
def _masked_blocks(
    m, l_done, acc_done, m_all, l_all, count, first_block, end_block, last, queries, buffers, bars, parked, scale,
    D: gl.constexpr, STAGES: gl.constexpr, PARTIAL: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Blocks first_block .. end_block on the diagonal; last[rows]: the last key that each row sees."""
    k_buffers, v_buffers, ones, merged, scratch = buffers
    k_full, k_empty, v_full, v_empty = bars
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 16])
    PO: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=L, k_width=2)
    V: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    per_partial: gl.constexpr = PARTIAL // BLOCK
    empty_scores = gl.zeros((HALF_ROWS, BLOCK), gl.float32, S)
    for block in range(first_block, end_block):
        slot = count % STAGES
        mbarrier.wait(k_full.index(slot), (count // STAGES) & 1)
        these_keys = k_buffers.index(slot).permute((1, 0))
        s = warpgroup_mma(queries, these_keys, empty_scores, use_acc=False)
        mbarrier.arrive(k_empty.index(slot))
        key = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, S))
        seen = key[None, :] <= last[:, None]
        opens = block % per_partial == 0
        p, alpha, top = _softmax(s, m, scale, opens, seen, True)
        if opens & (block > 0):
            m_all, l_all, total = _merge(m_all, l_all, merged.load(O), m, l_done, acc_done, S, L, O)
            merged.store(total)
            l_done = gl.zeros((HALF_ROWS, ONES), gl.float32, L)
            acc_done = gl.zeros((HALF_ROWS, D), gl.float32, O)
        m = top
        acc_done = acc_done * _rows(alpha, O)
        l_done = l_done * _rows(alpha, L)
        weights = p.to(gl.bfloat16)
        weights_o = gl.convert_layout(weights, PO)
        mbarrier.wait(v_full.index(slot), (count // STAGES) & 1)
        odd = (v_buffers.index(slot).load(V).to(gl.int16, bitcast=True) & 0x7F80) == 0x7F80
        if gl.max(gl.max(odd.to(gl.int32), 1), 0) > 0:
            parked_at = parked + gl.arange(0, HALF_ROWS, gl.SliceLayout(1, O))[:, None] * D
            parked_at += gl.arange(0, D, gl.SliceLayout(0, O))[None, :]
            acc_done = _with_values_that_are_not_finite(
                acc_done, p, seen, weights_o, v_buffers.index(slot), scratch, parked_at, O, PO, V
            )
        else:
            acc_done = warpgroup_mma(weights_o, v_buffers.index(slot), acc_done)
        l_done = warpgroup_mma(gl.convert_layout(weights, PL), ones, l_done)
        fence_async_shared()
        mbarrier.arrive(v_empty.index(slot))
        count += 1
    return m, l_done, acc_done, m_all, l_all, count


@gluon.jit
def _store(
    out, m_out, l_out, m_all, l_all, total, first_row, row, start, length, head,
    HEADS: gl.constexpr, D: gl.constexpr, S: gl.constexpr, O: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    row_sum = gl.max(l_all, 1)
    value = narrow(gl.div_rn(total + 0.0, _rows(row_sum, O) + gl.zeros_like(total)))
    i = first_row + gl.arange(0, HALF_ROWS, gl.SliceLayout(1, O))
    place = (start + i).to(gl.int64) * HEADS + head
    d = gl.arange(0, D, gl.SliceLayout(0, O))
    gl.store(out + place[:, None] * D + d[None, :], value, mask=(i < length)[:, None])
    place = (start + row).to(gl.int64) * HEADS + head
    gl.store(m_out + place, canonical(m_all), mask=row < length)
    row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, S))
    gl.store(l_out + place, canonical(row_sum), mask=row < length)


@gluon.jit
def _attend(
    out, m_out, l_out, parked, q_buffer, k_buffers, v_buffers, ones, merged, scratch,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, cu_q, cu_k, sequences, tiles, scale,
    HALF: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    PARTIAL: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 16])
    Q: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S, k_width=2)
    parked += (gl.program_id(0) * 2 + HALF) * HALF_ROWS * D
    count, turn = 0, 0
    for work in range(gl.program_id(0), tiles * HEADS, gl.num_programs(0)):
        head = work % HEADS
        start, length, first, _key_start, keys = _tile(cu_q, cu_k, sequences, tiles - 1 - work // HEADS, WIDTH, 4)
        if first < length:
            end = gl.cdiv(min(keys, keys - length + first + ROWS), BLOCK)
            # This half's own last block, and the blocks that each of its rows sees in full.
            mine = max(1, gl.cdiv(min(keys, keys - length + first + (HALF + 1) * HALF_ROWS), BLOCK))
            full = min((keys - length + first + HALF * HALF_ROWS + 1) // BLOCK, mine)
            row = first + HALF * HALF_ROWS + gl.arange(0, HALF_ROWS, gl.SliceLayout(1, S))
            last = keys - length + row
            m = gl.full((HALF_ROWS,), NEG_INF, gl.float32, gl.SliceLayout(1, S))
            m_all = m
            l_all = gl.zeros((HALF_ROWS, ONES), gl.float32, L)
            merged.store(gl.zeros((HALF_ROWS, D), gl.float32, O))
            acc_done, l_done = gl.zeros((HALF_ROWS, D), gl.float32, O), l_all
            mbarrier.wait(q_full, turn & 1)
            # In registers: products that read them from shared memory would take all of its bandwidth, and the next
            # tile's queries can come.
            queries = q_buffer.slice(HALF * HALF_ROWS, HALF_ROWS).load(Q)
            fence_async_shared()
            mbarrier.arrive(q_empty)
            turn += 1
            buffers = (k_buffers, v_buffers, ones, merged, scratch)
            bars = (k_full, k_empty, v_full, v_empty)
            if full > 0:
                m, l_done, acc_done, m_all, l_all, count = _blocks_in_full(
                    m, l_done, acc_done, m_all, l_all, count, full, queries, buffers, bars, scale,
                    D, STAGES, PARTIAL,
                )  # fmt: skip
            m, l_done, acc_done, m_all, l_all, count = _masked_blocks(
                m, l_done, acc_done, m_all, l_all, count, full, mine, last, queries, buffers, bars, parked, scale,
                D, STAGES, PARTIAL,
            )  # fmt: skip
            # Blocks that only the other half sees are handed back once they have arrived, to keep the turns in step.
            for _ in range(mine, end):
                slot = count % STAGES
                mbarrier.wait(k_full.index(slot), (count // STAGES) & 1)
                mbarrier.arrive(k_empty.index(slot))
                mbarrier.wait(v_full.index(slot), (count // STAGES) & 1)
                mbarrier.arrive(v_empty.index(slot))
                count += 1
            m_all, l_all, total = _merge(m_all, l_all, merged.load(O), m, l_done, acc_done, S, L, O)
            first_row = first + HALF * HALF_ROWS
            _store(out, m_out, l_out, m_all, l_all, total, first_row, row, start, length, head, HEADS, D, S, O)


@gluon.jit
def attention_kernel(
    out, m_out, l_out, parked, q, k, v, cu_q, cu_k, sequences, tiles, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    PARTIAL: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """out[T,H,D], m and l[T,H]; q, k, v: descriptors of [T,H*D] and [T',G*D]. tiles: no fewer than there are.

    parked: fp32, 128*D a program.
    """
    q_buffer = gl.allocate_shared_memory(gl.bfloat16, [ROWS, D], q.layout)
    k_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, D], k.layout)
    v_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, D], v.layout)
    ones_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ONES, BLOCK], gl.bfloat16)
    writer: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ones = gl.allocate_shared_memory(gl.bfloat16, [ONES, BLOCK], ones_layout)
    ones.store(gl.full((ONES, BLOCK), 1.0, gl.bfloat16, writer))
    # Eight rows that a warp writes together fall into different banks.
    spread: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    merged = gl.allocate_shared_memory(gl.float32, [2, HALF_ROWS, D], spread)
    scratch = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, D], v.layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_full, q_empty = gl.allocate_shared_memory(gl.int64, [1], bars), gl.allocate_shared_memory(gl.int64, [1], bars)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=2)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=2)
    fence_async_shared()
    turned = ones.permute((1, 0))
    gl.warp_specialize(
        [
            (_attend, (out, m_out, l_out, parked, q_buffer, k_buffers, v_buffers, turned,
                       merged.index(0), scratch.index(0),
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, cu_q, cu_k, sequences, tiles, scale,
                       0, HEADS, D, WIDTH, STAGES, PARTIAL)),
            (_attend, (out, m_out, l_out, parked, q_buffer, k_buffers, v_buffers, turned,
                       merged.index(1), scratch.index(1),
                       q_full, q_empty, k_full, k_empty, v_full, v_empty, cu_q, cu_k, sequences, tiles, scale,
                       1, HEADS, D, WIDTH, STAGES, PARTIAL)),
            (_copy, (q, k, v, q_buffer, k_buffers, v_buffers, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                     cu_q, cu_k, sequences, tiles, HEADS, KV_HEADS, D, WIDTH, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def attention(
    out: torch.Tensor, m: torch.Tensor, l: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_q: torch.Tensor, cu_k: torch.Tensor, strides: tuple[int, int, int], scale: float,
) -> None:  # fmt: skip
    """Fill out[T,H,D], m and l[T,H] from q[T,H,D], k and v[T',G,D], whose tokens lie `strides` elements apart."""
    (tokens, heads, dim), sequences = q.shape, cu_q.shape[0] - 1
    tiles = tokens // 128 + sequences
    descriptors = []
    for x, stride, rows in zip((q, k, v), strides, (128, 64, 64), strict=True):
        layout = gl.NVMMASharedLayout.get_default_for([rows, dim], gl.bfloat16)
        descriptors.append(TensorDescriptor(x, [x.shape[0], x.shape[1] * dim], [stride, 1], [rows, dim], layout))
    programs = min(tiles * heads, multiprocessors(q.get_device()))
    parked = torch.empty((programs, 128, dim), dtype=torch.float32, device=q.device)
    attention_kernel[(programs,)](
        out, m, l, parked, *descriptors, cu_q, cu_k, sequences, tiles, scale,
        HEADS=heads, KV_HEADS=k.shape[1], D=dim, WIDTH=triton.next_power_of_2(sequences), STAGES=STAGES[dim],
        PARTIAL=KV_PARTIAL, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
