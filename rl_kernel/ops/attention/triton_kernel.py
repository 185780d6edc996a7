"""Attention on GPUs: causal, GQA, varlen or paged, prefill, chunked prefill and decode, all with the same bits.

T tokens, H query heads, G kv heads, D head_dim, R sequences, P keys a partial. A program holds a tile of rows; a row is
one query of one head, and `PACK` heads that share a kv head may stand in one tile. Partials of P keys merge left to
right: in a prefill inside the loop, in a decode by `merge_kernel` after they ran side by side. The row sum l is p times
a column of ones, so that its order is the matrix instruction's and no thread layout's.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_kernel.contracts.v1 import KV_BLOCK, KV_PARTIAL
from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import BF16, EX2, F32, I32, require, require_rows
from rl_kernel.ops.attention import gluon_kernel
from rl_kernel.ops.attention.triton_backward import HEAD_DIMS, attention_backward
from rl_kernel.ops.triton_scalar import NEG_INF, canonical, exp2, narrow
from rl_kernel.reference.ops import attention_scale

__all__ = ["attention", "attention_backward", "paged_attention"]

ONES = tl.constexpr(16)  # columns of ones; all hold l
BLOCK = tl.constexpr(KV_BLOCK)


@triton.jit
def find_sequence(cu_q, sequences, tile, QUERIES: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tile number → (sequence, its first query row, its number of queries, first query of the tile).

    Sequence r owns the tiles from cu_q[r] // QUERIES + r on: never fewer than it needs, so the grid follows from
    T and R alone and no length is read back to the host.
    """
    r = tl.arange(0, WIDTH)
    begin = tl.load(cu_q + r, mask=r < sequences, other=0)
    mine = (begin // QUERIES + r <= tile) & (r < sequences)
    sequence = tl.sum(mine.to(tl.int32)) - 1
    start = tl.load(cu_q + sequence)
    return sequence, start, tl.load(cu_q + sequence + 1) - start, (tile - start // QUERIES - sequence) * QUERIES


@triton.jit
def not_finite(p, seen, wide, odd):  # type: ignore[no-untyped-def]
    """What the infinities and NaNs among the values of one block add to each row that sees them: 0, ±inf or NaN.

    They are counted by a product of small powers of two, which is without error: 1 for +inf, 2^8 for -inf, 2^16 for
    NaN and for infinity times zero.
    """
    code = tl.where(wide == float("inf"), 1.0, tl.where(wide == NEG_INF, 256.0, tl.where(odd, 65536.0, 0.0)))
    some = tl.where(seen & (p > 0.0), 1.0, 0.0).to(tl.bfloat16)
    none = tl.where(seen & (p == 0.0), 1.0, 0.0).to(tl.bfloat16)
    count = tl.dot(some, code.to(tl.bfloat16))
    count = tl.dot(none, tl.where(odd, 65536.0, 0.0).to(tl.bfloat16), count).to(tl.int32)
    plus, minus = (count & 255) > 0, ((count >> 8) & 255) > 0
    infinite = tl.where(plus, float("inf"), tl.where(minus, NEG_INF, 0.0))
    return tl.where((count > 65535) | (plus & minus), float("nan"), infinite)


@triton.jit
def merge(m1, l1, acc1, m2, l2, acc2, EX2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two neighbouring partials into one; an empty one (m = -inf, l = 0, acc = 0) changes no bit of the other."""
    m = tl.maximum(m1, m2)
    shift = tl.where(m == NEG_INF, 0.0, m)
    a, b = exp2(m1 - shift, EX2), exp2(m2 - shift, EX2)
    return m, l1 * a[:, None] + l2 * b[:, None], acc1 * a[:, None] + acc2 * b[:, None]


@triton.jit
def attend(
    m, l, acc, m_all, l_all, acc_all, query, k, v, table, begin, end, keys, last, scale, start, column,
    k_page, k_token, v_page, v_token,
    MASKED: tl.constexpr, D: tl.constexpr, PARTIAL: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    TMA: tl.constexpr, EX2: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Blocks begin .. end of 64 keys. m, l, acc: the open partial; m_all, l_all, acc_all: those before it, merged.

    keys: of the sequence; last[rows]: the last key that each row sees.
    """
    columns = column + tl.arange(0, D)
    for block in range(begin, end):
        key = block * BLOCK + tl.arange(0, BLOCK)
        if TMA:
            keys_in = k.load([start + block * BLOCK, column])
        else:
            if PAGE:
                page = tl.load(table + key // PAGE, mask=key < keys, other=0).to(tl.int64)
                k_at, v_at = page * k_page + key % PAGE * k_token, page * v_page + key % PAGE * v_token
            else:
                k_at, v_at = key.to(tl.int64) * k_token, key.to(tl.int64) * v_token
            k_from, v_from = k + k_at[:, None] + columns[None, :], v + v_at[:, None] + columns[None, :]
            if MASKED:
                keys_in = tl.load(k_from, mask=(key < keys)[:, None], other=0.0)
            else:
                keys_in = tl.load(k_from)
        s = tl.dot(query, tl.trans(keys_in)) * scale
        if MASKED:
            seen = key[None, :] <= last[:, None]
            s = tl.where(seen, s, NEG_INF)
        opens = block % (PARTIAL // BLOCK) == 0
        before = m if SPLIT else tl.where(opens, NEG_INF, m)
        top = tl.maximum(before, tl.max(s, 1))
        p = exp2(s - top[:, None], EX2)
        if MASKED:
            p = tl.where(seen, p, 0.0)
        # A row that has seen no key of this partial yet keeps its zeros; -inf - -inf would be NaN.
        alpha = tl.where(top == NEG_INF, 1.0, exp2(before - top, EX2))
        weights = p.to(tl.bfloat16)
        if TMA:
            values = v.load([start + block * BLOCK, column])
        elif MASKED:
            values = tl.load(v_from, mask=(key < keys)[:, None], other=0.0)
        else:
            values = tl.load(v_from)
        # Here, and not where the partial opens: until here the product of the block before may still be running.
        if not SPLIT:
            if opens & (block > 0):
                m_all, l_all, acc_all = merge(m_all, l_all, acc_all, m, l, acc, EX2)
                l = tl.zeros_like(l)
                acc = tl.zeros_like(acc)
        m = top
        acc = acc * alpha[:, None]
        if MASKED:
            # 0 * inf would be NaN: what a row does not see must not reach it, so such values take a way of their own.
            wide = values.to(tl.float32)
            odd = (wide - wide) != 0.0
            if tl.max(odd.to(tl.int32)) > 0:
                acc += not_finite(p, seen, wide, odd)
                values = tl.where(odd, 0.0, wide).to(tl.bfloat16)
        acc = tl.dot(weights, values, acc)
        l = tl.dot(weights, tl.full((BLOCK, ONES), 1.0, tl.bfloat16), l * alpha[:, None])
    return m, l, acc, m_all, l_all, acc_all


@triton.jit
def attention_kernel(
    out, m_out, l_out, acc_out, q, k, v, table, cu_q, cu_k, lens, sequences, total_rows, table_width, q_token,
    k_page, k_token, v_page, v_token, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PARTIAL: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr,
    EX2: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """ROWS rows of one head (or of the PACK heads of one kv head) against all their keys, or SPLIT: one partial.

    PAGE: keys a page of the cache, 0 where k and v are [T',G,D] with offsets cu_k. TMA: k and v are descriptors.
    """
    queries: tl.constexpr = ROWS // PACK
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    sequence, start, length, first_query = find_sequence(cu_q, sequences, tile, queries, WIDTH)
    if first_query >= length:
        return
    head = tl.program_id(0) * PACK
    kv_head = head // (HEADS // KV_HEADS)
    key_start = 0
    if PAGE:
        keys = tl.load(lens + sequence)
        table += sequence.to(tl.int64) * table_width
    else:
        key_start = tl.load(cu_k + sequence)
        keys = tl.load(cu_k + sequence + 1) - key_start
        if not TMA:
            k += key_start.to(tl.int64) * k_token
            v += key_start.to(tl.int64) * v_token
    row = tl.arange(0, ROWS)
    query_index = first_query + row // PACK
    here = (query_index < length) & (row < queries * PACK)
    last = keys - length + query_index
    place = (start + query_index).to(tl.int64) * HEADS + head + row % PACK
    q_at = (start + query_index).to(tl.int64) * q_token + (head + row % PACK) * D
    query = tl.load(q + q_at[:, None] + tl.arange(0, D)[None, :], mask=here[:, None], other=0.0)

    # Blocks that every row sees in full, then those that need a mask.
    visible = min(keys, keys - length + first_query + queries)
    full = (keys - length + first_query + 1) // BLOCK
    begin, end = 0, tl.cdiv(visible, BLOCK)
    if SPLIT:
        begin = tl.program_id(2) * (PARTIAL // BLOCK)
        end = min(end, begin + PARTIAL // BLOCK)
        full = min(full, end)
        if begin >= end:
            return
    m = tl.full((ROWS,), NEG_INF, tl.float32)
    l = tl.zeros((ROWS, ONES), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    m_all, l_all, acc_all = m, l, acc
    m, l, acc, m_all, l_all, acc_all = attend(
        m, l, acc, m_all, l_all, acc_all, query, k, v, table, begin, full, keys, last, scale, key_start,
        kv_head * D, k_page, k_token, v_page, v_token, False, D, PARTIAL, PAGE, SPLIT, TMA, EX2,
    )  # fmt: skip
    m, l, acc, m_all, l_all, acc_all = attend(
        m, l, acc, m_all, l_all, acc_all, query, k, v, table, max(begin, full), end, keys, last, scale, key_start,
        kv_head * D, k_page, k_token, v_page, v_token, True, D, PARTIAL, PAGE, SPLIT, TMA, EX2,
    )  # fmt: skip
    if SPLIT:
        place += tl.program_id(2).to(tl.int64) * total_rows
        tl.store(m_out + place, m, mask=here)
        tl.store(l_out + place, tl.max(l, 1), mask=here)
        tl.store(acc_out + place[:, None] * D + tl.arange(0, D)[None, :], acc, mask=here[:, None])
    else:
        m, l, acc = merge(m_all, l_all, acc_all, m, l, acc, EX2)
        row_sum = tl.max(l, 1)
        value = narrow(tl.div_rn(acc + 0.0, row_sum[:, None] + tl.zeros_like(acc)))
        tl.store(out + place[:, None] * D + tl.arange(0, D)[None, :], value, mask=here[:, None])
        tl.store(m_out + place, canonical(m), mask=here)
        tl.store(l_out + place, canonical(row_sum), mask=here)


@triton.jit
def merge_kernel(
    out, m_in, l_in, acc_in, cu_q, lens, sequences, total_rows,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PARTIAL: tl.constexpr, EX2: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One program merges the partials of one query of one head, left to right."""
    token = tl.program_id(0)
    r = tl.arange(0, WIDTH)
    begin = tl.load(cu_q + r, mask=r < sequences, other=2147483647)
    sequence = tl.sum((begin <= token).to(tl.int32)) - 1
    stop = tl.load(cu_q + sequence + 1)
    if token >= stop:
        return
    visible = tl.load(lens + sequence) - (stop - token) + 1
    place = token.to(tl.int64) * HEADS + tl.program_id(1)
    d = tl.arange(0, D)
    m = tl.full((1,), NEG_INF, tl.float32)
    l = tl.zeros((1, 1), tl.float32)
    acc = tl.zeros((1, D), tl.float32)
    for _ in range(tl.cdiv(visible, PARTIAL)):
        m2 = tl.load(m_in + place + tl.zeros((1,), tl.int32))
        l2 = tl.load(l_in + place + tl.zeros((1, 1), tl.int32))
        acc2 = tl.load(acc_in + place * D + d[None, :])
        m, l, acc = merge(m, l, acc, m2, l2, acc2, EX2)
        place += total_rows
    at = (token.to(tl.int64) * HEADS + tl.program_id(1)) * D + d[None, :]
    tl.store(out + at, narrow(tl.div_rn(acc + 0.0, l + tl.zeros_like(acc))))


@dataclass(frozen=True, slots=True)
class Launch:
    """Rows of a tile, heads that share it, warps, stages, partials side by side or not. No bit depends on it."""

    rows: int
    pack: int
    warps: int
    stages: int
    split: bool


def launch_for(tokens: int, sequences: int, group: int, dim: int, keys: int, paged: bool) -> Launch:
    """The static launch table. keys: the most that a sequence of this call can have."""
    few = tokens * group <= 16 * sequences
    if paged and few and tokens <= 1024:
        # Few programs: what counts is how soon each is done; many: how many fit beside each other.
        warps = 4 if sequences * triton.cdiv(keys, KV_PARTIAL) <= 16 else 2
        return Launch(max(16, triton.next_power_of_2(group)), group, warps, 5 if dim <= 128 else 2, keys > KV_PARTIAL)
    return Launch(128, 1, 8, 2 if dim > 128 else 3, False)


def _check(op: str, q: torch.Tensor, heads_kv: int, dim: int) -> int:
    stride = require_rows(op, "q", q, None, None, dim)
    if dim not in HEAD_DIMS:
        nearest = min(HEAD_DIMS, key=lambda d: abs(d - dim))
        raise ShapeError(f"{op}: head_dim {dim}; the kernels have {', '.join(map(str, HEAD_DIMS))}, nearest {nearest}")
    if not heads_kv or q.shape[1] % heads_kv:
        raise ShapeError(f"{op}: {q.shape[1]} query heads are no multiple of {heads_kv} kv heads")
    return stride


def _offsets(op: str, name: str, cu: torch.Tensor) -> int:
    require(op, name, cu, I32, None)
    if not cu.shape[0]:
        raise ShapeError(f"{op}: {name} is empty; it must hold one offset more than there are sequences")
    return int(cu.shape[0]) - 1


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
    *, launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """q[T,H,D], k and v[T',G,D] bf16, offsets cu_q and cu_k[R+1] int32 → out[T,H,D], m[T,H] fp32, l[T,H] fp32.

    Tokens of q, k and v may lie apart; head_dim is one of HEAD_DIMS.
    """
    k_token = require_rows("attention", "k", k, None, None, None)
    q_token = _check("attention", q, k.shape[1], k.shape[2])
    v_token = require_rows("attention", "v", v, *k.shape)
    sequences = _offsets("attention", "cu_q", cu_q)
    require("attention", "cu_k", cu_k, I32, sequences + 1)
    tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=BF16, device=q.device)
    m, l = (torch.empty((tokens, heads), dtype=F32, device=q.device) for _ in range(2))
    if not q.numel() or not sequences:
        return out, m, l
    aligned = (q_token | k_token | v_token) % 8 == 0 and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0
    if launch is None and EX2 and aligned and dim in gluon_kernel.HEAD_DIMS and k.numel():
        scale = float(attention_scale(dim))
        gluon_kernel.attention(out, m, l, q, k, v, cu_q, cu_k, (q_token, k_token, v_token), scale)
        return out, m, l
    shape = launch or launch_for(tokens, sequences, heads // k.shape[1], dim, k.shape[0], False)
    grid = (heads // shape.pack, tokens // (shape.rows // shape.pack) + sequences, 1)
    tma = aligned and k.shape[0] > 0
    keys_in, values = (_descriptor(x, stride) if tma else x for x, stride in ((k, k_token), (v, v_token)))
    attention_kernel[grid](
        out, m, l, m, q, keys_in, values, cu_q, cu_q, cu_k, cu_q, sequences, 0, 0, q_token, 0, k_token, 0, v_token,
        float(attention_scale(dim)),
        HEADS=heads, KV_HEADS=k.shape[1], D=dim, PACK=shape.pack, ROWS=shape.rows,
        WIDTH=triton.next_power_of_2(sequences), PARTIAL=KV_PARTIAL, PAGE=0, SPLIT=False, TMA=tma, EX2=EX2,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out, m, l


def _descriptor(x: torch.Tensor, stride: int) -> TensorDescriptor:
    """x[T,G,D] as a matrix [T,G*D] that the bulk copy engine reads in blocks of 64 keys of one head."""
    keys, heads, dim = x.shape
    return TensorDescriptor(x, [keys, heads * dim], [stride, 1], [KV_BLOCK, dim])


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
    cu_q: torch.Tensor, seq_lens: torch.Tensor, *, launch: Launch | None = None,
) -> torch.Tensor:  # fmt: skip
    """q[T,H,D], caches[B,page,G,D] bf16, block_table[>=R,width], cu_q[R+1], seq_lens[R] int32 → out[T,H,D] bf16.

    Sequence r has seq_lens[r] keys, its queries are the last of them. The first two dimensions of a cache may have any
    stride. Rows of q past cu_q[R] (padding of a CUDA graph) are not written.
    """
    op = "paged_attention"
    (k_page, k_token), (v_page, v_token) = _cache(op, "k_cache", k_cache), _cache(op, "v_cache", v_cache)
    if k_cache.shape != v_cache.shape:
        raise ShapeError(f"{op}: k_cache is {list(k_cache.shape)}, v_cache {list(v_cache.shape)}")
    _, page, kv_heads, dim = k_cache.shape
    q_token = _check(op, q, kv_heads, dim)
    sequences = _offsets(op, "cu_q", cu_q)
    require(op, "seq_lens", seq_lens, I32, sequences)
    if block_table.dtype is not I32 or block_table.dim() != 2 or block_table.shape[0] < sequences:
        raise ShapeError(
            f"{op}: block_table is {block_table.dtype} {list(block_table.shape)}, not int32 [{sequences},…]"
        )
    tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=BF16, device=q.device)
    if not q.numel() or not sequences:
        return out
    most = block_table.shape[1] * page
    shape = launch or launch_for(tokens, sequences, heads // kv_heads, dim, most, True)
    partials = triton.cdiv(most, KV_PARTIAL) if shape.split else 1
    m, l = (torch.empty((partials, tokens, heads), dtype=F32, device=q.device) for _ in range(2))
    acc = torch.empty((partials, tokens, heads, dim), dtype=F32, device=q.device) if shape.split else m
    width = triton.next_power_of_2(sequences)
    grid = (heads // shape.pack, tokens // (shape.rows // shape.pack) + sequences, partials)
    attention_kernel[grid](
        out, m, l, acc, q, k_cache, v_cache, block_table, cu_q, cu_q, seq_lens, sequences, tokens * heads,
        block_table.stride(0), q_token, k_page, k_token, v_page, v_token, float(attention_scale(dim)),
        HEADS=heads, KV_HEADS=kv_heads, D=dim, PACK=shape.pack, ROWS=shape.rows, WIDTH=width, PARTIAL=KV_PARTIAL,
        PAGE=page, SPLIT=shape.split, TMA=False, EX2=EX2,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if shape.split:
        merge_kernel[(tokens, heads)](
            out, m, l, acc, cu_q, seq_lens, sequences, tokens * heads,
            HEADS=heads, D=dim, WIDTH=width, PARTIAL=KV_PARTIAL, EX2=EX2, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _cache(op: str, name: str, cache: torch.Tensor) -> tuple[int, int]:
    """Return the strides of a page and of a token in it."""
    if cache.dim() == 4 and cache.numel():
        require_rows(op, name, cache[0], None, None, None)
        return cache.stride(0), cache.stride(1)
    raise ShapeError(f"{op}: {name} has shape {list(cache.shape)}; it must be [pages, page size, kv heads, head_dim]")
