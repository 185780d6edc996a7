"""Decode of few sequences on Hopper: programs share a partial of keys, its scores by keys and its sums by columns.

Scores know no order among keys, and the columns of the values nothing of each other; only a column's chain over keys is
one. So each of MEMBERS programs computes the scores of its share of the blocks, hands them round through the L2, and
walks all blocks for its share of the columns. Tiles stand upright (keys, or columns, by heads): few heads fit eight.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from rl_kernel.contracts.v1 import KV_BLOCK, KV_PARTIAL
from rl_kernel.ops import gluon_join
from rl_kernel.ops.accelerator import F32, multiprocessors, power_of_two
from rl_kernel.ops.dependent_launch import DEPENDENT, announce, await_before
from rl_kernel.ops.gluon_scalar import narrow

BLOCK = gl.constexpr(KV_BLOCK)
UNROLL = gl.constexpr(4)  # blocks whose weights are computed before any of their sums
NEG_INF = gl.constexpr(float("-inf"))
HEAD_DIMS = (64, 128)
MAX_GROUP = 16  # heads that share a kv head
ROUND = {8: 2, 4: 4, 2: 4}  # blocks of keys that a member holds at a time


@gluon.jit
def _copy(
    buffer, source, table, first, visible, page_stride, token_stride, PAGE: gl.constexpr, L: gl.constexpr
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Keys or values from `first` on into shared memory, as many as the buffer has rows; zeros past the query."""
    key = first + gl.arange(0, buffer.shape[0], gl.SliceLayout(1, L))
    column = gl.arange(0, buffer.shape[1], gl.SliceLayout(0, L))
    page = gl.load(table + key // PAGE, mask=key < visible, other=0).to(gl.int64)
    at = source + (page * page_stride + key % PAGE * token_stride)[:, None] + column[None, :]
    async_copy.async_copy_global_to_shared(buffer, at, mask=(key < visible)[:, None])
    async_copy.commit_group()


@gluon.jit
def _count(flag, count):  # type: ignore[no-untyped-def]
    """One thread adds `count`, after everything that the program wrote or read; needs a barrier before it."""
    gl.inline_asm_elementwise(
        """
        {
            .reg .u32 thread;
            .reg .pred first;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first red.release.gpu.global.add.u32 [$1], $2;
            mov.u32 $0, thread;
        }
        """,
        "=r,l,r",
        [flag, count],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _sequence(token, cu_q, lens, sequences, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """(the sequence of a query, how many keys the query sees: none where no sequence has it), in one trip to memory."""
    r = gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
    begin = gl.load(cu_q + r, mask=r < sequences, other=2147483647)
    end = gl.load(cu_q + r + 1, mask=r < sequences, other=0)
    keys = gl.load(lens + r, mask=r < sequences, other=0)
    sequence = gl.sum((begin <= token).to(gl.int32), 0) - 1
    return sequence, gl.sum(gl.where((r == sequence) & (token < end), keys - end + token + 1, 0), 0)


@gluon.jit
def _walk(values, scores, tops, blocks, ROWS: gl.constexpr, ACC: gl.constexpr):  # type: ignore[no-untyped-def]
    """The chain over blocks → (m[ROWS], l[ROWS], acc[W,ROWS]); blocks past the last change no bit."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    W: gl.constexpr = values.shape[2]
    ceiling = gl.full((ROWS,), NEG_INF, gl.float32, gl.SliceLayout(0, RIGHT))
    m = gl.full((ROWS,), NEG_INF, gl.float32, gl.SliceLayout(0, ACC))
    ones = gl.full((16, BLOCK), 1.0, gl.bfloat16, LEFT)
    l = gl.zeros((16, ROWS), gl.float32, ACC)
    acc = gl.zeros((W, ROWS), gl.float32, ACC)
    for first in range(0, blocks, UNROLL):
        weights = ()
        for u in gl.static_range(UNROLL):
            ceiling = gl.maximum(ceiling, tops.index(first + u).load(gl.SliceLayout(0, RIGHT)))
            p = gl.exp2(scores.index(first + u).permute((1, 0)).load(RIGHT) - ceiling[None, :])
            weights = weights + (p.to(gl.bfloat16),)
        for u in gl.static_range(UNROLL):
            top = gl.maximum(m, tops.index(first + u).load(gl.SliceLayout(0, ACC)))
            factor = gl.where(top == NEG_INF, 1.0, gl.exp2(m - top))[None, :]
            acc = mma_v2(values.index(first + u).permute((1, 0)).load(LEFT), weights[u], acc * factor)
            l = mma_v2(ones, weights[u], l * factor)
            m = top
    return m, gl.max(l, 0), acc


@gluon.jit
def _score(
    exchange, k_buffer, query, k, table, begin, first_key, visible, k_page, k_token, scale,
    GROUP: gl.constexpr, MINE: gl.constexpr, PARTIAL: gl.constexpr, PAGE: gl.constexpr, LINES: gl.constexpr,
    ACC: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """MINE blocks of scores into exchange[rows,PARTIAL]; the first keys are on their way to k_buffer."""
    D: gl.constexpr = k_buffer.shape[1]
    ROUND: gl.constexpr = k_buffer.shape[0] // BLOCK
    ROWS: gl.constexpr = query.shape[1]
    keys = k_buffer._reinterpret(gl.bfloat16, [ROUND, BLOCK, D], k_buffer.layout)
    row, column = gl.arange(0, BLOCK, gl.SliceLayout(1, ACC)), gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
    for first in gl.static_range(0, MINE, ROUND):
        async_copy.wait_group(1 if first == 0 else 0)
        gl.thread_barrier()
        for b in gl.static_range(ROUND):
            left = keys.index(b).load(gl.DotOperandLayout(0, ACC, 2))
            s = mma_v2(left, query, gl.zeros((BLOCK, ROWS), gl.float32, ACC)) * scale
            key = first_key + (first + b) * BLOCK + row
            s = gl.where((key < visible)[:, None], s, NEG_INF)
            at = exchange + (key - begin)[:, None] + column[None, :] * PARTIAL
            gl.store(at, s, mask=(column < GROUP)[None, :])
        if first + ROUND < MINE:
            gl.thread_barrier()
            _copy(k_buffer, k, table, first_key + (first + ROUND) * BLOCK, visible, k_page, k_token, PAGE, LINES)
    gl.thread_barrier()


@gluon.jit
def _gather(exchange, flag, GROUP: gl.constexpr, ROWS: gl.constexpr, PARTIAL: gl.constexpr, COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Everybody's scores [blocks,ROWS,64] and every block's maxima [blocks,ROWS], in shared memory."""
    BLOCKS: gl.constexpr = PARTIAL // BLOCK
    spread: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    scores = gl.allocate_shared_memory(gl.float32, [BLOCKS * ROWS, BLOCK], spread)
    tops = gl.allocate_shared_memory(gl.float32, [BLOCKS * ROWS], plain)
    row, key = gl.arange(0, BLOCKS * ROWS, gl.SliceLayout(1, L)), gl.arange(0, BLOCK, gl.SliceLayout(0, L))
    at = exchange + (row % ROWS * PARTIAL + row // ROWS * BLOCK)[:, None] + key[None, :]
    async_copy.async_copy_global_to_shared(scores, at, mask=(row % ROWS < GROUP)[:, None])
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()
    _count(flag, COUNT)
    tops.store(gl.max(scores.load(L), 1))
    gl.thread_barrier()
    scores = scores._reinterpret(gl.float32, [BLOCKS, ROWS, BLOCK], spread)
    return scores, tops._reinterpret(gl.float32, [BLOCKS, ROWS], plain)


@gluon.jit
def _store(
    out, m_out, l_out, acc_out, place, member, m, l, acc, GROUP: gl.constexpr, D: gl.constexpr, SINGLE: gl.constexpr
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The columns of this member: of the output, or of its partial."""
    ACC: gl.constexpr = acc.type.layout
    column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, ACC))
    d = member * acc.shape[0] + gl.arange(0, acc.shape[0], gl.SliceLayout(1, ACC))
    here = (column < GROUP)[None, :] & (d < D)[:, None]
    if SINGLE:
        # As merged with an empty partial.
        b = gl.exp2(m - gl.where(m == NEG_INF, 0.0, m))
        l, acc = 0.0 + l * b, 0.0 + acc * b[None, :]
        value = narrow(gl.div_rn(acc + 0.0, l[None, :] + gl.zeros_like(acc)))
        gl.store(out + place[None, :] * D + d[:, None], value, mask=here)
    else:
        gl.store(m_out + place, m, mask=(column < GROUP) & (member == 0))
        gl.store(l_out + place, l, mask=(column < GROUP) & (member == 0))
        gl.store(acc_out + place[None, :] * D + d[:, None], acc, mask=here)


@gluon.jit(do_not_specialize=["sequences", "tokens"], do_not_specialize_on_alignment=["flags"])
def shared_decode_kernel(
    out, m_out, l_out, acc_out, exchange, flags, q, k, v, table, cu_q, lens, sequences, tokens, table_width, q_token,
    k_page, k_token, v_page, v_token, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
    PARTIAL: gl.constexpr, PAGE: gl.constexpr, SINGLE: gl.constexpr, MEMBERS: gl.constexpr, ROUND: gl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The heads of one kv head, of one query, against one partial of its keys, by MEMBERS programs that run together.

    exchange: fp32, ROWS*PARTIAL a group of programs. flags: int32, two a group, 0 mod 8 before and after: four arrivals
    set bit 4, four departures clear it. SINGLE: there is but one partial.
    """
    GROUP: gl.constexpr = HEADS // KV_HEADS
    MINE: gl.constexpr = PARTIAL // BLOCK // MEMBERS
    W: gl.constexpr = D // MEMBERS
    COUNT: gl.constexpr = 2 if MEMBERS == 2 else 1
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    K_LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    V_LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (W // 8), W // 8], [4, 1], [1, 0])
    K_TILE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    # Rows of W values: those that a matrix instruction reads together lie in different banks.
    V_TILE: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // W, W // 8, [1, 0])
    await_before()
    announce()
    member, kv_head, token = gl.program_id(0), gl.program_id(1), gl.program_id(2) % tokens
    partial = gl.program_id(2) // tokens
    sequence, visible = _sequence(token, cu_q, lens, sequences, WIDTH)
    begin = partial * PARTIAL
    if begin >= visible:
        return
    table += sequence.to(gl.int64) * table_width
    k += kv_head * D
    v += kv_head * D + member * W
    first_key = begin + member * (MINE * BLOCK)
    k_buffer = gl.allocate_shared_memory(gl.bfloat16, [ROUND * BLOCK, D], K_TILE)
    v_buffer = gl.allocate_shared_memory(gl.bfloat16, [PARTIAL, W], V_TILE)
    _copy(k_buffer, k, table, first_key, visible, k_page, k_token, PAGE, K_LINES)
    _copy(v_buffer, v, table, begin, visible, v_page, v_token, PAGE, V_LINES)
    head, d = gl.arange(0, ROWS, gl.SliceLayout(0, RIGHT)), gl.arange(0, D, gl.SliceLayout(1, RIGHT))
    q_at = q + token.to(gl.int64) * q_token + (kv_head * GROUP + head)[None, :] * D + d[:, None]
    query = gl.load(q_at, mask=(head < GROUP)[None, :], other=0.0)
    group = gl.program_id(2) * KV_HEADS + kv_head
    exchange += group.to(gl.int64) * (ROWS * PARTIAL)
    _score(
        exchange, k_buffer, query, k, table, begin, first_key, visible, k_page, k_token, scale,
        GROUP, MINE, PARTIAL, PAGE, K_LINES, ACC,
    )  # fmt: skip
    flags += group * 2
    _count(flags + member // 4, COUNT)
    gluon_join.await_four(flags)
    if MEMBERS == 8:
        gluon_join.await_four(flags + 1)
    scores, tops = _gather(exchange, flags + member // 4, GROUP, ROWS, PARTIAL, COUNT)
    values = v_buffer._reinterpret(gl.bfloat16, [PARTIAL // BLOCK, BLOCK, W], V_TILE)
    m, l, acc = _walk(values, scores, tops, min(gl.cdiv(visible - begin, BLOCK), PARTIAL // BLOCK), ROWS, ACC)
    place = token.to(gl.int64) * HEADS + kv_head * GROUP + gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
    if not SINGLE:
        place += partial.to(gl.int64) * (tokens * HEADS)
    _store(out, m_out, l_out, acc_out, place, member, m, l, acc, GROUP, D, SINGLE)


def serves(tensors: tuple[torch.Tensor, ...], strides: tuple[int, ...]) -> bool:
    """Whether this kernel can copy the caches and has tiles for the heads. strides: as it takes them."""
    q, k_cache, v_cache = tensors[:3]
    aligned = all(s % 16 == 0 for s in strides[2:]) and (k_cache.data_ptr() | v_cache.data_ptr()) % 16 == 0
    return aligned and q.shape[2] in HEAD_DIMS and q.shape[1] // k_cache.shape[2] <= MAX_GROUP


def members_for(dim: int, groups: int, processors: int) -> int:
    """How many programs share one of `groups` partials: as many as run together on a multiprocessor each; 1 if none."""
    return next((n for n in ROUND if n * groups <= processors and n * 16 <= dim), 1)


def decode(
    out: torch.Tensor, m: torch.Tensor, l: torch.Tensor, acc: torch.Tensor, tensors: tuple[torch.Tensor, ...],
    seq_lens: torch.Tensor, strides: tuple[int, ...], scale: float, partials: int, width: int, members: int,
) -> None:  # fmt: skip
    """As `triton_decode.decode_kernel`, `members` programs for each of its own. width: of a vector of R."""
    q, k_cache = tensors[:2]
    (tokens, heads, dim), (_, page, kv_heads, _) = q.shape, k_cache.shape
    groups, rows = tokens * partials * kv_heads, max(8, power_of_two(heads // kv_heads))
    exchange = torch.empty((groups, rows, KV_PARTIAL), dtype=F32, device=q.device)
    flags = gluon_join.flags(q.device, groups, multiprocessors(q.get_device()))
    shared_decode_kernel[(members, kv_heads, tokens * partials)](
        out, m, l, acc, exchange, flags, *tensors, seq_lens, seq_lens.shape[0], tokens, *strides, scale,
        HEADS=heads, KV_HEADS=kv_heads, D=dim, ROWS=rows, WIDTH=width, PARTIAL=KV_PARTIAL, PAGE=page,
        SINGLE=partials == 1, MEMBERS=members, ROUND=ROUND[members], num_warps=4, enable_fp_fusion=False,
        **DEPENDENT,
    )  # fmt: skip
