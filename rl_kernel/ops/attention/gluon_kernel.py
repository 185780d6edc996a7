"""Attention forward on Hopper, warp-specialised: one warp copies, two warpgroups hold 64 queries each.

The bits are those of `triton_prefill`: the same blocks, partials and chains, the blocks in pairs (`gluon_blocks`). What
the matrix instruction cannot know (that a value is hidden from some row, where it is not finite) and what a fast
division cannot do (a sum out of its range) shows in the result, and the caller computes that tile again. Programs stay
and take tiles, the longest first. R sequences, H query heads, G kv heads, D head_dim.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_kernel.contracts.v1 import KV_PARTIAL
from rl_kernel.ops import gluon_join
from rl_kernel.ops.accelerator import multiprocessors
from rl_kernel.ops.attention.gluon_blocks import (
    BLOCK,
    NEG_INF,
    ONES,
    PAIR,
    ROWS,
    SCORES,
    SUMS,
    edge_step,
    full_step,
    rows,
    worth,
)  # fmt: skip
from rl_kernel.ops.attention.gluon_copy import PANEL, TILE, copy, pairs_of, read
from rl_kernel.ops.attention.triton_blocks import width_for
from rl_kernel.ops.dependent_launch import DEPENDENT, announce, await_before
from rl_kernel.ops.gluon_scalar import canonical

HEAD_DIMS = (64, 128)
STAGES = {64: 3, 128: 2}  # pairs of key and value blocks in flight, as many as shared memory holds


@gluon.jit
def _here(x):  # type: ignore[no-untyped-def]
    """x, of which the compiler knows nothing: what depends on it is computed here and holds no register elsewhere."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _quotient(total, row_sum):  # type: ignore[no-untyped-def]
    """total / row_sum, correctly rounded, and 1 where some of it may not be.

    By the correctly rounded reciprocal y: q = total * y is within two ulps and its remainder brings it within one; then
    its remainder is exact, and one more correction rounds as the division does (Markstein, IBM J. Res. Dev. 34, 1990).
    That takes a q that does not overflow and remainders that are multiples of 2^-149: the sum in [1, 2^40), |total|
    finite, and zero or over 2^-80. Of -0 the first correction makes 0. A row that adds up past fp32 counts as infinite.
    """
    O: gl.constexpr = total.type.layout
    # Zero becomes the largest of these numbers, a small number a small one; zero times what is not finite is NaN.
    size = (total.to(gl.uint32, bitcast=True) << 1) - 1
    d = gl.convert_layout(row_sum, gl.SliceLayout(1, O))
    exact = (gl.min(size, 1) > 2 * (127 - 80) * 2**23) & (gl.sum(total, 1) * 0.0 == 0.0) & (d >= 1.0) & (d < 2.0**40)
    y = gl.div_rn(gl.full_like(d, 1.0), d)[:, None] + gl.zeros_like(total)
    d = d[:, None] + gl.zeros_like(total)
    q = total * y
    for _ in gl.static_range(2):
        q = gl.fma(gl.fma(-1.0 * q, d, total), y, q)
    return q, gl.max(gl.where(exact, 0, 1), 0)


@gluon.jit
def _store(
    out, m_out, l_out, redo, m_all, l_all, merged, m, l, acc, several, row, begin, start, length, head,
    HEADS: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The last partial joins those before it, if there are several, and the quotients leave. begin: the first row."""
    O: gl.constexpr = acc.type.layout
    D: gl.constexpr = merged.shape[1]
    m_all, l_all, a, b = worth(m_all, l_all, m, l)
    total = acc * rows(b, O)
    if several:
        total = merged.load(O) * rows(a, O) + total
    row_sum = gl.max(l_all, 1)
    value, again = _quotient(total, row_sum)
    gl.store(redo, again)
    # Through shared memory, so that a row leaves in whole lines.
    W: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    lines: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], gl.bfloat16)
    staging = merged._reinterpret(gl.bfloat16, [ROWS, D], lines)
    staging.store(value.to(gl.bfloat16))
    i = _here(begin) + gl.arange(0, ROWS, gl.SliceLayout(1, W))
    place = (start + i).to(gl.int64) * HEADS + head
    d = gl.arange(0, D, gl.SliceLayout(0, W))
    gl.store(out + place[:, None] * D + d[None, :], staging.load(W), mask=(i < length)[:, None])
    place = (start + row).to(gl.int64) * HEADS + head
    gl.store(m_out + place, canonical(m_all), mask=row < length)
    row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, SCORES))
    gl.store(l_out + place, canonical(row_sum), mask=row < length)


@gluon.jit
def _attend(
    out, m_out, l_out, redo, q_buffer, buffers, bars, merged, letter, q_full, q_empty, scale,
    HALF: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, PARTIAL: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    queries = q_buffer.slice(HALF * ROWS, ROWS)
    keys_in, values, ones = buffers
    buffers = (keys_in, values, ones, merged)
    count, turn = 0, 0
    mbarrier.wait(q_full, 0)
    slot = read(letter, 0)
    while slot >= 0:
        start, length, first, keys = read(letter, 1), read(letter, 2), read(letter, 3), read(letter, 4)
        pairs = pairs_of(keys, length, first)
        begin = first + HALF * ROWS
        low = keys - length + begin  # the last key that the first row sees
        full = min((low + 1) // PAIR, pairs)  # pairs that each row of the half sees
        places = (pairs, full, low + ROWS - 1)
        row = begin + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        last = keys - length + row
        m = gl.full((ROWS,), NEG_INF, gl.float32, gl.SliceLayout(1, SCORES))
        l, acc = gl.zeros((ROWS, ONES), gl.float32, SUMS), gl.zeros((ROWS, D), gl.float32, O)
        m_all, l_all = m, l
        several = pairs > PARTIAL // PAIR
        if several:
            merged.store(acc)
        a, beta = gl.zeros((ROWS, BLOCK), gl.bfloat16, P), gl.full_like(m, 1.0)
        b = a
        pair = 0
        while pair <= pairs:
            if pair == pairs:
                mbarrier.arrive(q_empty)  # the last scores are computed
            a, b, beta, m, l, acc, m_all, l_all = edge_step(
                a, b, beta, m, l, acc, m_all, l_all, count, pair, places, last, queries, buffers, bars, scale,
                STAGES, PARTIAL,
            )  # fmt: skip
            count += 1
            pair += 1
            for middle in range(pair, full):
                a, b, beta, m, l, acc, m_all, l_all = full_step(
                    a, b, beta, m, l, acc, m_all, l_all, count, middle, queries, buffers, bars, scale,
                    STAGES, PARTIAL,
                )  # fmt: skip
                count += 1
            pair = max(pair, full)
        _store(
            out, m_out, l_out, redo + slot * 2 + HALF, m_all, l_all, merged, m, l, acc, several, row, begin, start,
            length, slot % HEADS, HEADS,
        )  # fmt: skip
        turn += 1
        mbarrier.wait(q_full, turn & 1)
        slot = read(letter, 0)


@gluon.jit(
    do_not_specialize=["sequences", "tiles", "table_width", "page_rows"],
    do_not_specialize_on_alignment=["queue"],  # of a word anywhere among others
)
def attention_kernel(
    out, m_out, l_out, redo, queue, q, k, v, table, cu_q, cu_k, lens, sequences, tiles, table_width, page_rows, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    PARTIAL: gl.constexpr, PAGE: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """out[T,H,D], m and l[T,H]; q, k, v: descriptors of [T,H*D] and [T',G*D]. tiles: no fewer than there are.

    PAGE: keys a page of the cache, which begins every page_rows rows of k and v, by table[R,table_width] and lens[R];
    0 where the keys of a sequence are rows from cu_k on. redo[tiles,H,2]: 1 where a half tile's output is to be
    computed in another way, 0 elsewhere. queue[1]: 0, and 0 again afterwards.
    """
    announce()
    q_buffer = gl.allocate_shared_memory(gl.bfloat16, [TILE, D], q.layout)
    blocks: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], gl.bfloat16)
    k_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PAIR, D], blocks)
    v_buffers = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, BLOCK, D], blocks)
    ones_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ONES, BLOCK], gl.bfloat16)
    writer: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ones = gl.allocate_shared_memory(gl.bfloat16, [ONES, BLOCK], ones_layout)
    ones.store(gl.full((ONES, BLOCK), 1.0, gl.bfloat16, writer))
    # Eight rows that a warp writes together fall into different banks.
    spread: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    merged = gl.allocate_shared_memory(gl.float32, [2, ROWS, D], spread)
    letter = gl.allocate_shared_memory(gl.int32, [5, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_full, q_empty = gl.allocate_shared_memory(gl.int64, [1], bars), gl.allocate_shared_memory(gl.int64, [1], bars)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    buffers = (k_buffers, v_buffers, ones.permute((1, 0)))
    await_before()
    gl.warp_specialize(
        [
            (_attend, (out, m_out, l_out, redo, q_buffer, buffers, (full, empty), merged.index(0), letter, q_full,
                       q_empty, scale, 0, HEADS, D, STAGES, PARTIAL)),
            (_attend, (out, m_out, l_out, redo, q_buffer, buffers, (full, empty), merged.index(1), letter, q_full,
                       q_empty, scale, 1, HEADS, D, STAGES, PARTIAL)),
            (copy, (redo, queue, q, k, v, q_buffer, k_buffers, v_buffers, letter, q_full, q_empty, full, empty, table,
                    cu_q, cu_k, lens, sequences, tiles, table_width, page_rows, HEADS, KV_HEADS, D, WIDTH, STAGES,
                    PAGE)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def attention(
    out: torch.Tensor, m: torch.Tensor, l: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_q: torch.Tensor, cu_k: torch.Tensor, strides: tuple[int, int, int], scale: float,
) -> torch.Tensor:  # fmt: skip
    """Fill out[T,H,D], m and l[T,H] from q[T,H,D], k and v[T',G,D], whose tokens lie `strides` elements apart.

    Return redo[tiles,H,2] int32: 1 where `gluon_again` must compute half a tile once more.
    """
    boxes = ((128, q.shape[2]), (128, q.shape[2]), (64, q.shape[2]))
    rows = (q.shape[0], k.shape[0], v.shape[0])
    return _launch(out, m, l, (q, k, v), rows, strides, boxes, (cu_q, cu_q, cu_k, cu_q), (0, 0, 0), scale)


def serves_pages(page: int, strides: tuple[int, ...]) -> bool:
    """Whether such a cache is a matrix of rows; strides: of a page and a token of the keys, then of the values."""
    k_page, k_token, v_page, v_token = strides
    whole = page % 16 == 0 and (64 % page == 0 or page % 64 == 0)
    return whole and k_page % k_token == v_page % v_token == 0 and k_page // k_token == v_page // v_token


def paged_attention(
    out: torch.Tensor, m: torch.Tensor, l: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    table: torch.Tensor, cu_q: torch.Tensor, lens: torch.Tensor, strides: tuple[int, int, int], scale: float,
) -> torch.Tensor:  # fmt: skip
    """As `attention`, of caches[B,page,G,D] with `serves_pages`, table[R,width], lens[R]; strides are of tokens."""
    pages, page = k_cache.shape[:2]
    page_rows = k_cache.stride(0) // strides[1]
    rows = (pages - 1) * page_rows + page
    box = (min(page, 64), PANEL.value)
    return _launch(
        out, m, l, (q, k_cache, v_cache), (q.shape[0], rows, rows), strides, ((128, q.shape[2]), box, box),
        (table, cu_q, cu_q, lens), (page, table.stride(0), page_rows), scale,
    )  # fmt: skip


def _launch(
    out: torch.Tensor, m: torch.Tensor, l: torch.Tensor, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: tuple[int, int, int], strides: tuple[int, int, int], boxes: tuple[tuple[int, int], ...],
    places: tuple[torch.Tensor, ...], paging: tuple[int, int, int], scale: float,
) -> torch.Tensor:  # fmt: skip
    q = tensors[0]
    (tokens, heads, dim), kv_heads = q.shape, tensors[1].shape[-2]
    sequences = places[1].shape[0] - 1
    tiles = -(-tokens // 128) if sequences == 1 else tokens // 128 + sequences
    width = 1 if sequences == 1 else width_for(sequences)  # of one nothing is looked up
    descriptors = []
    for x, count, stride, box in zip(tensors, rows, strides, boxes, strict=True):
        layout = gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16)
        descriptors.append(TensorDescriptor(x, [count, x.shape[-2] * dim], [stride, 1], list(box), layout))
    redo = torch.empty((tiles, heads, 2), dtype=torch.int32, device=q.device)
    page, table_width, page_rows = paging
    attention_kernel[(min(tiles * heads, multiprocessors(q.get_device())),)](
        out, m, l, redo, gluon_join.queue(q.device), *descriptors, *places, sequences, tiles, table_width, page_rows,
        scale,
        HEADS=heads, KV_HEADS=kv_heads, D=dim, WIDTH=width, STAGES=STAGES[dim],
        PARTIAL=KV_PARTIAL, PAGE=page, num_warps=4, enable_fp_fusion=False, **DEPENDENT,
    )  # fmt: skip
    return redo
