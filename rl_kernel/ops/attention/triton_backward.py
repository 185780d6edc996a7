"""Gradients of causal self-attention on GPUs: every sum is a chain in ascending order, so no atomics and no semaphores.

T tokens, H query heads, G kv heads, D head_dim, R sequences. One kernel walks the keys for dq, another the queries for
dk and dv of each query head; the tree over the query heads of a kv head comes last. On Hopper, for head_dim 64 and 128
and rows that its copy engine can read, `gluon_backward` walks, with the same bits at twice the speed.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import BF16, EX2, F32, I32, require, require_rows
from rl_kernel.ops.attention import gluon_backward
from rl_kernel.ops.triton_scalar import exp2, narrow, tree, tree_of
from rl_kernel.reference.ops import attention_scale

HEAD_DIMS = (16, 32, 64, 128, 256)
LANES = tl.constexpr(128)


@triton.jit
def find_tile(cu, sequences, tile, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tile number → (first token of its sequence, tokens of the sequence, first row of the tile in the sequence)."""
    r = tl.arange(0, WIDTH)
    begin = tl.load(cu + r, mask=r < sequences, other=0)
    mine = (begin // ROWS + r <= tile) & (r < sequences)
    sequence = tl.sum(mine.to(tl.int32)) - 1
    start = tl.load(cu + sequence)
    return start, tl.load(cu + sequence + 1) - start, (tile - start // ROWS - sequence) * ROWS


@triton.jit(do_not_specialize=["tokens"])
def row_terms_kernel(
    terms, dout, out, m, l, tokens, dout_token, out_token, HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):  # type: ignore[no-untyped-def]  # fmt: skip
    """terms[3,H,T]: m, 1/l and delta = lane_dot(dout, out) of every row; a program has ROWS tokens of one head."""
    head = tl.program_id(0) % HEADS
    row = tl.program_id(0) // HEADS * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    lanes = tl.zeros((ROWS, LANES), tl.float32)
    for c in tl.static_range((D + 127) // 128):
        here = (row < tokens)[:, None] & (c * LANES + lane < D)[None, :]
        token, inner = row.to(tl.int64)[:, None], head * D + c * LANES + lane[None, :]
        left = tl.load(dout + token * dout_token + inner, mask=here, other=0.0).to(tl.float32)
        right = tl.load(out + token * out_token + inner, mask=here, other=0.0).to(tl.float32)
        lanes = tl.where(here, tl.fma(left, right, lanes), lanes)
    at = row.to(tl.int64) * HEADS + head
    top = tl.load(m + at, mask=row < tokens, other=0.0)
    total = tl.load(l + at, mask=row < tokens, other=1.0)
    at, plane = _terms_at(head, row, tokens, HEADS)
    tl.store(terms + at, top, mask=row < tokens)
    tl.store(terms + at + plane, tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), total), mask=row < tokens)
    tl.store(terms + at + 2 * plane, tree(lanes, 7), mask=row < tokens)


@triton.jit
def _terms_at(head, token, tokens, HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where in terms[3,H,T] the first term of a token lies, and how far the next is."""
    return head.to(tl.int64) * tokens + token, tokens.to(tl.int64) * HEADS


@triton.jit(do_not_specialize=["tokens"])
def dq_kernel(
    dq, dout, q, k, v, terms, cu, sequences, tokens, dout_token, q_token, k_token, v_token,
    score_scale, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, EX2: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """ROWS queries of one head; the chain runs over the keys."""
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    start, length, first = find_tile(cu, sequences, tile, ROWS, WIDTH)
    if first >= length:
        return
    head = tl.program_id(0)
    kv_head = head // (HEADS // KV_HEADS)
    query = first + tl.arange(0, ROWS)
    here = query < length
    d = tl.arange(0, D)
    place = (start + query).to(tl.int64) * HEADS + head
    token = (start + query).to(tl.int64)[:, None]
    q_in = tl.load(q + token * q_token + head * D + d[None, :], mask=here[:, None], other=0.0)
    do = tl.load(dout + token * dout_token + head * D + d[None, :], mask=here[:, None], other=0.0)
    rows, plane = _terms_at(head, start + query, tokens, HEADS)
    top = tl.load(terms + rows, mask=here, other=0.0)[:, None]
    r = tl.load(terms + rows + plane, mask=here, other=0.0)[:, None]
    shift = tl.load(terms + rows + 2 * plane, mask=here, other=0.0)[:, None]
    acc = tl.zeros((ROWS, D), tl.float32)
    for block in range(tl.cdiv(min(first + ROWS, length), KEYS)):
        key = block * KEYS + tl.arange(0, KEYS)
        at, column = (start + key).to(tl.int64)[:, None], kv_head * D + d[None, :]
        keys_in = tl.load(k + at * k_token + column, mask=(key < length)[:, None], other=0.0)
        values = tl.load(v + at * v_token + column, mask=(key < length)[:, None], other=0.0)
        p = exp2(tl.dot(q_in, tl.trans(keys_in)) * score_scale - top, EX2) * r
        ds = p * (tl.dot(do, tl.trans(values)) - shift)
        ds = tl.where(key[None, :] <= query[:, None], ds, 0.0)
        acc = tl.dot(ds.to(tl.bfloat16), keys_in, acc)
    tl.store(dq + place[:, None] * D + d[None, :], narrow((acc + 0.0) * scale), mask=here[:, None])


@triton.jit(do_not_specialize=["tokens"])
def dkdv_kernel(
    dk, dv, dout, q, k, v, terms, cu, sequences, tokens, dout_token, q_token, k_token, v_token,
    score_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, EX2: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """KEYS keys for one query head; the chains run over the queries. dk, dv: [T,H,D] fp32, unscaled."""
    start, length, first = find_tile(cu, sequences, tl.program_id(1), KEYS, WIDTH)
    if first >= length:
        return
    head = tl.program_id(0)
    kv_head = head // (HEADS // KV_HEADS)
    key = first + tl.arange(0, KEYS)
    d = tl.arange(0, D)
    at, column = (start + key).to(tl.int64)[:, None], kv_head * D + d[None, :]
    keys_in = tl.load(k + at * k_token + column, mask=(key < length)[:, None], other=0.0)
    values = tl.load(v + at * v_token + column, mask=(key < length)[:, None], other=0.0)
    dk_acc = tl.zeros((KEYS, D), tl.float32)
    dv_acc = tl.zeros((KEYS, D), tl.float32)
    # The first block may start before the tile's first key: its masked queries add +0 to chains that are still +0.
    for block in range(first // ROWS, tl.cdiv(length, ROWS)):
        query = block * ROWS + tl.arange(0, ROWS)
        here = query < length
        token = (start + query).to(tl.int64)[:, None]
        q_in = tl.load(q + token * q_token + head * D + d[None, :], mask=here[:, None], other=0.0)
        do = tl.load(dout + token * dout_token + head * D + d[None, :], mask=here[:, None], other=0.0)
        rows, plane = _terms_at(head, start + query, tokens, HEADS)
        top = tl.load(terms + rows, mask=here, other=0.0)[None, :]
        r = tl.load(terms + rows + plane, mask=here, other=0.0)[None, :]
        shift = tl.load(terms + rows + 2 * plane, mask=here, other=0.0)[None, :]
        seen = (key[:, None] <= query[None, :]) & here[None, :]
        p = tl.where(seen, exp2(tl.dot(keys_in, tl.trans(q_in)) * score_scale - top, EX2) * r, 0.0)
        dv_acc = tl.dot(p.to(tl.bfloat16), do, dv_acc)
        ds = tl.where(seen, p * (tl.dot(values, tl.trans(do)) - shift), 0.0)
        dk_acc = tl.dot(ds.to(tl.bfloat16), q_in, dk_acc)
    out_at = ((start + key).to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
    tl.store(dk + out_at, dk_acc, mask=(key < length)[:, None])
    tl.store(dv + out_at, dv_acc, mask=(key < length)[:, None])


@triton.jit
def head_tree_kernel(
    y, parts, rows, scale, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):  # type: ignore[no-untyped-def]  # fmt: skip
    """y[rows,D] = bf16((tree over GROUP of parts[rows,GROUP,D] + 0) * scale), rows = T*G."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    here = (row < rows)[:, None]
    at = row.to(tl.int64)[:, None] * (GROUP * D) + d[None, :]
    values = ()
    for h in tl.static_range(GROUP):
        values = values + (tl.load(parts + at + h * D, mask=here, other=0.0),)
    total = (tree_of(values) + 0.0) * scale
    tl.store(y + row.to(tl.int64)[:, None] * D + d[None, :], narrow(total), mask=here)


@dataclass(frozen=True, slots=True)
class Launch:
    """Tile rows and columns, warps and stages of the two walks. No bit depends on it."""

    dq_rows: int
    dq_keys: int
    kv_keys: int
    kv_rows: int
    warps: int
    stages: int


def launch_for(dim: int) -> Launch:
    """The static launch table."""
    return Launch(64, 64, 64, 64, 4, 2) if dim <= 128 else Launch(64, 32, 64, 32, 8, 1)


def _walk(
    dq: torch.Tensor, parts: torch.Tensor, inputs: gluon_backward.Inputs, terms: torch.Tensor, cu: torch.Tensor,
    score_scale: float, scale: float, shape: Launch,
) -> None:  # fmt: skip
    """As `gluon_backward.walk`, of any tensors with head_dim in HEAD_DIMS."""
    tokens, heads, dim = inputs[1].shape
    sequences, strides = cu.shape[0] - 1, [x.stride(0) for x in inputs]
    common = {
        "HEADS": heads, "KV_HEADS": inputs[2].shape[1], "D": dim, "WIDTH": triton.next_power_of_2(sequences),
        "EX2": EX2, "num_warps": shape.warps, "num_stages": shape.stages, "enable_fp_fusion": False,
    }  # fmt: skip
    dq_kernel[(heads, tokens // shape.dq_rows + sequences)](
        dq, *inputs, terms, cu, sequences, tokens, *strides, score_scale, scale,
        ROWS=shape.dq_rows, KEYS=shape.dq_keys, **common,
    )  # fmt: skip
    dkdv_kernel[(heads, tokens // shape.kv_keys + sequences)](
        parts[0], parts[1], *inputs, terms, cu, sequences, tokens, *strides, score_scale,
        KEYS=shape.kv_keys, ROWS=shape.kv_rows, **common,
    )  # fmt: skip


def check_heads(op: str, heads: int, kv_heads: int, dim: int) -> None:
    """Raise ShapeError, with the nearest that works, unless the kernels have this head_dim and these heads."""
    if dim not in HEAD_DIMS:
        nearest = min(HEAD_DIMS, key=lambda d: abs(d - dim))
        raise ShapeError(f"{op}: head_dim {dim}; the kernels have {', '.join(map(str, HEAD_DIMS))}, nearest {nearest}")
    if not kv_heads or heads % kv_heads:
        raise ShapeError(f"{op}: {heads} query heads are no multiple of {kv_heads} kv heads")


def attention_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    m: torch.Tensor, l: torch.Tensor, cu: torch.Tensor, *, launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dout, q, out[T,H,D], k, v[T,G,D] bf16, m, l[T,H] fp32, cu[R+1] int32 → dq[T,H,D], dk, dv[T,G,D] bf16."""
    op = "attention_backward"
    require_rows(op, "k", k, None, None, None)
    tokens, kv_heads, dim = k.shape
    require_rows(op, "q", q, tokens, None, dim)
    heads = q.shape[1]
    require_rows(op, "v", v, tokens, kv_heads, dim)
    dout_token = require_rows(op, "dout", dout, tokens, heads, dim)
    out_token = require_rows(op, "out", out, tokens, heads, dim)
    for name, tensor in (("m", m), ("l", l)):
        require(op, name, tensor, F32, tokens, heads)
    require(op, "cu", cu, I32, None)
    check_heads(op, heads, kv_heads, dim)
    dq, dk, dv = (torch.empty(x.shape, dtype=BF16, device=q.device) for x in (q, k, v))
    if not q.numel():
        return dq, dk, dv
    terms, parts = m.new_empty((3, heads, tokens)), m.new_empty((2, tokens, heads, dim))
    row_terms_kernel[(triton.cdiv(tokens, 8) * heads,)](
        terms, dout, out, m, l, tokens, dout_token, out_token, HEADS=heads, D=dim, ROWS=8, num_warps=2,
        enable_fp_fusion=False,
    )  # fmt: skip
    inputs = (dout, q, k, v)
    score_scale, scale = float(attention_scale(dim)), float(np.float32(1.0 / np.sqrt(np.float64(dim))))
    if launch is None and EX2 and gluon_backward.serves(inputs):
        gluon_backward.walk(dq, parts[0], parts[1], inputs, terms, cu, score_scale, scale)
    else:
        _walk(dq, parts, inputs, terms, cu, score_scale, scale, launch or launch_for(dim))
    for y, part, factor in ((dk, parts[0], scale), (dv, parts[1], 1.0)):
        head_tree_kernel[(triton.cdiv(tokens * kv_heads, 4),)](
            y, part, tokens * kv_heads, factor, GROUP=heads // kv_heads, D=dim, ROWS=4,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return dq, dk, dv
