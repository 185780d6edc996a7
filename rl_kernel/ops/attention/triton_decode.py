"""Attention of few queries over a paged cache: decode steps, where programs are few and how soon each is done counts.

One program holds one partial of one query, for all heads that share a kv head. The scores of `SUPER` neighbouring
blocks are computed before any of their sums, so that one maximum over the warps serves them all and their products
overlap; the chain over blocks stays what `triton_blocks.attend` has. Keys past the query are zeros with a score of
-inf, worth +0: they move no sum. Partials merge left to right in `merge_kernel`, or at once where there is but one.
On Hopper several programs share a partial where the device has room for all of them (`gluon_decode`).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rl_kernel.contracts.v1 import KV_PARTIAL
from rl_kernel.ops.accelerator import EX2, F32, multiprocessors
from rl_kernel.ops.attention import gluon_decode
from rl_kernel.ops.attention.triton_blocks import BLOCK, merge, width_for
from rl_kernel.ops.dependent_launch import DEPENDENT, announce, await_before
from rl_kernel.ops.triton_scalar import NEG_INF, exp2, narrow

MAX_TOKENS = 1024  # of a call
UNROLL = 8  # partials that a merging program reads at once


@triton.jit
def _tile(cache, table, key, inside, page_stride, token_stride, column, D: tl.constexpr, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys or values of one block, [64,D], zeros where not `inside`."""
    page = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
    at = page * page_stride + key % PAGE * token_stride
    return tl.load(cache + at[:, None] + (column + tl.arange(0, D))[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _maxima(scores, SUPER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each block's scores [R,64] the maximum of every row, by one reduction for all blocks."""
    if SUPER == 1:
        return (tl.max(scores[0], 1),)
    elif SUPER == 2:
        return tl.split(tl.max(tl.join(scores[0], scores[1]), 1))
    else:
        pairs = tl.join(tl.join(scores[0], scores[1]), tl.join(scores[2], scores[3]))
        low, high = tl.split(tl.max(pairs, 1))
        m0, m1 = tl.split(low)
        m2, m3 = tl.split(high)
        return m0, m1, m2, m3


@triton.jit
def sequence_of(token, cu_q, sequences, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """(the sequence that a query belongs to, where the sequence's queries end)."""
    r = tl.arange(0, WIDTH)
    begin = tl.load(cu_q + r, mask=r < sequences, other=2147483647)
    sequence = tl.sum((begin <= token).to(tl.int32)) - 1
    return sequence, tl.load(cu_q + sequence + 1)


@triton.jit(do_not_specialize=["sequences", "total_rows"])
def decode_kernel(
    out, m_out, l_out, acc_out, q, k, v, table, cu_q, lens, sequences, total_rows, table_width, q_token,
    k_page, k_token, v_page, v_token, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PARTIAL: tl.constexpr, PAGE: tl.constexpr, SINGLE: tl.constexpr, SUPER: tl.constexpr, EX2: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """The heads of one kv head, of one query, against one partial of its keys; SINGLE: there is no other.

    ROWS: no fewer than heads that share a kv head.
    """
    if EX2:  # Hopper
        await_before()
        announce()
    token = tl.program_id(1)
    sequence, stop = sequence_of(token, cu_q, sequences, WIDTH)
    if token >= stop:
        return
    visible = tl.load(lens + sequence) - (stop - token) + 1
    begin = tl.program_id(2) * (PARTIAL // BLOCK)
    end = min(tl.cdiv(visible, BLOCK), begin + PARTIAL // BLOCK)
    if begin >= end:
        return
    table += sequence.to(tl.int64) * table_width
    row = tl.arange(0, ROWS)
    here = row < HEADS // KV_HEADS
    head = tl.program_id(0) * (HEADS // KV_HEADS) + row
    column = tl.program_id(0) * D
    d = tl.arange(0, D)
    q_at = token.to(tl.int64) * q_token + head * D
    query = tl.load(q + q_at[:, None] + d[None, :], mask=here[:, None], other=0.0)
    # More columns of ones than rows, and Triton gives the columns of every product to the warps; with 16 of each it
    # gives them the rows, of which there is one tile, and every warp computes all of it. All columns hold l.
    ones = tl.full((BLOCK, 2 * ROWS), 1.0, tl.bfloat16)
    m = tl.full((ROWS,), NEG_INF, tl.float32)
    l = tl.zeros((ROWS, 2 * ROWS), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for first in range(begin, end, SUPER):
        scores = ()
        for j in tl.static_range(SUPER):
            key = (first + j) * BLOCK + tl.arange(0, BLOCK)
            inside = key < visible
            keys = _tile(k, table, key, inside, k_page, k_token, column, D, PAGE)
            s = tl.dot(query, tl.trans(keys)) * scale
            scores = scores + (tl.where(inside[None, :], s, NEG_INF),)
        tops = _maxima(scores, SUPER)
        for j in tl.static_range(SUPER):
            key = (first + j) * BLOCK + tl.arange(0, BLOCK)
            top = tl.maximum(m, tops[j])
            p = exp2(scores[j] - top[:, None], EX2)
            alpha = tl.where(top == NEG_INF, 1.0, exp2(m - top, EX2))
            weights = p.to(tl.bfloat16)
            values = _tile(v, table, key, key < visible, v_page, v_token, column, D, PAGE)
            acc = tl.dot(weights, values, acc * alpha[:, None])
            l = tl.dot(weights, ones, l * alpha[:, None])
            m = top
    place = token.to(tl.int64) * HEADS + head
    if SINGLE:
        m, l, acc = merge(m * 0.0 + NEG_INF, tl.zeros_like(l), tl.zeros_like(acc), m, l, acc, EX2)
        value = narrow(tl.div_rn(acc + 0.0, tl.max(l, 1)[:, None] + tl.zeros_like(acc)))
        tl.store(out + place[:, None] * D + d[None, :], value, mask=here[:, None])
    else:
        place += tl.program_id(2).to(tl.int64) * total_rows
        tl.store(m_out + place, m, mask=here)
        tl.store(l_out + place, tl.max(l, 1), mask=here)
        tl.store(acc_out + place[:, None] * D + d[None, :], acc, mask=here[:, None])


@triton.jit(do_not_specialize=["sequences", "total_rows"])
def merge_kernel(
    out, m_in, l_in, acc_in, cu_q, lens, sequences, total_rows,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PARTIAL: tl.constexpr, EX2: tl.constexpr,
    UNROLL: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """One program merges the partials of one query of one head, left to right; UNROLL of them are read at once."""
    if EX2:  # Hopper
        announce()
        await_before()
    token = tl.program_id(0)
    sequence, stop = sequence_of(token, cu_q, sequences, WIDTH)
    if token >= stop:
        return
    visible = tl.load(lens + sequence) - (stop - token) + 1
    count = tl.cdiv(visible, PARTIAL)
    place = token.to(tl.int64) * HEADS + tl.program_id(1)
    d = tl.arange(0, D)
    m = tl.full((1,), NEG_INF, tl.float32)
    l = tl.zeros((1, 1), tl.float32)
    acc = tl.zeros((1, D), tl.float32)
    for first in range(0, count, UNROLL):
        m2, l2, acc2 = (), (), ()
        for j in tl.static_range(UNROLL):
            at, there = place + (first + j) * total_rows.to(tl.int64), first + j < count
            m2 = m2 + (tl.load(m_in + at + tl.zeros((1,), tl.int32), mask=there, other=NEG_INF),)
            l2 = l2 + (tl.load(l_in + at + tl.zeros((1, 1), tl.int32), mask=there, other=0.0),)
            acc2 = acc2 + (tl.load(acc_in + at * D + d[None, :], mask=there, other=0.0),)
        for j in tl.static_range(UNROLL):
            m, l, acc = merge(m, l, acc, m2[j], l2[j], acc2[j], EX2)
    at = place * D + d[None, :]
    tl.store(out + at, narrow(tl.div_rn(acc + 0.0, l + tl.zeros_like(acc))))


@dataclass(frozen=True, slots=True)
class Launch:
    """Warps, stages, blocks of keys at once (1, 2 or 4), whether programs may share a partial. No bit depends on it."""

    warps: int
    stages: int
    blocks: int
    shared: bool = False


def launch_for(tokens: int, sequences: int, group: int, dim: int, keys: int) -> Launch | None:
    """The static launch table; None where queries are too many. keys: the most that a sequence of the call can have."""
    if tokens * group > 16 * sequences or tokens > MAX_TOKENS:
        return None
    # Few programs: what counts is how soon each is done; many: how many fit beside each other.
    few = sequences * triton.cdiv(keys, KV_PARTIAL) <= 16
    if dim > 128:
        return Launch(4, 4, 1)
    return Launch(8, 5, 2, shared=EX2) if few else Launch(2, 6, 1)


def paged_attention(
    out: torch.Tensor, tensors: tuple[torch.Tensor, ...], seq_lens: torch.Tensor, strides: tuple[int, ...],
    scale: float, most: int, shape: Launch,
) -> None:  # fmt: skip
    """As `triton_kernel.paged_attention`, whose checks it relies on; most: keys that the block table can hold."""
    q, k_cache, _, _, cu_q = tensors
    (tokens, heads, dim), (_, page, kv_heads, _), sequences = q.shape, k_cache.shape, seq_lens.shape[0]
    partials, width = triton.cdiv(most, KV_PARTIAL), width_for(sequences)
    single = partials == 1
    m = l = acc = out
    if not single:
        m, l = (torch.empty((partials, tokens, heads), dtype=F32, device=q.device) for _ in range(2))
        acc = torch.empty((partials, tokens, heads, dim), dtype=F32, device=q.device)
    members = 1
    if shape.shared and gluon_decode.serves(tensors, strides):
        members = gluon_decode.members_for(dim, tokens * partials * kv_heads, multiprocessors(q.get_device()))
    if members > 1:
        gluon_decode.decode(out, m, l, acc, tensors, seq_lens, strides, scale, partials, width, members)
    else:
        decode_kernel[(kv_heads, tokens, partials)](
            out, m, l, acc, *tensors, seq_lens, sequences, tokens * heads, *strides, scale,
            HEADS=heads, KV_HEADS=kv_heads, D=dim, ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
            WIDTH=width, PARTIAL=KV_PARTIAL, PAGE=page, SINGLE=single, SUPER=shape.blocks, EX2=EX2,
            num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False, **DEPENDENT,
        )  # fmt: skip
    if not single:
        merge_kernel[(tokens, heads)](
            out, m, l, acc, cu_q, seq_lens, sequences, tokens * heads,
            HEADS=heads, D=dim, WIDTH=width, PARTIAL=KV_PARTIAL, EX2=EX2, UNROLL=UNROLL,
            num_warps=1, enable_fp_fusion=False, **DEPENDENT,
        )  # fmt: skip
