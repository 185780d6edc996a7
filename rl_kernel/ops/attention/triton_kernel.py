"""Attention on GPUs: causal, GQA, varlen or paged, prefill, chunked prefill and decode, all with the same bits.

T tokens, H query heads, G kv heads, D head_dim, R sequences, P keys a partial. A program holds a tile of rows; a row is
one query of one head, and `PACK` heads that share a kv head may stand in one tile. Partials of P keys merge left to
right: here inside the loop, in a decode after they ran side by side (`triton_decode`). The row sum l is p times a
column of ones, so that its order is the matrix instruction's and no thread layout's.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_kernel.contracts.v1 import KV_BLOCK, KV_PARTIAL
from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import BF16, EX2, F32, I32, require, require_rows
from rl_kernel.ops.attention import gluon_kernel, triton_decode
from rl_kernel.ops.attention.triton_backward import HEAD_DIMS, attention_backward
from rl_kernel.ops.attention.triton_blocks import BLOCK, ONES, attend, find_sequence, merge, width_for
from rl_kernel.ops.attention.triton_decode import Launch as Decode
from rl_kernel.ops.triton_scalar import NEG_INF, canonical, narrow
from rl_kernel.reference.ops import attention_scale

__all__ = ["attention", "attention_backward", "paged_attention"]


@triton.jit(do_not_specialize=["sequences"])
def attention_kernel(
    out, m_out, l_out, q, k, v, table, cu_q, cu_k, lens, redo, sequences, table_width, q_token,
    k_page, k_token, v_page, v_token, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PARTIAL: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr, EX2: tl.constexpr,
    REDO: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """ROWS rows of one head (or of the PACK heads of one kv head) against all their keys.

    PAGE: keys a page of the cache, 0 where k and v are [T',G,D] with offsets cu_k. TMA: k and v are descriptors.
    REDO: only the tiles that `gluon_kernel` left to this one, by its flags redo[tiles,H,2].
    """
    queries: tl.constexpr = ROWS // PACK
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    sequence, start, length, first_query = find_sequence(cu_q, sequences, tile, queries, WIDTH)
    if first_query >= length:
        return
    head = tl.program_id(0) * PACK
    if REDO:
        redo += (tile * HEADS + head) * 2
        if tl.load(redo) + tl.load(redo + 1) == 0:
            return
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
    end = tl.cdiv(visible, BLOCK)
    m = tl.full((ROWS,), NEG_INF, tl.float32)
    l = tl.zeros((ROWS, ONES), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    m_all, l_all, acc_all = m, l, acc
    m, l, acc, m_all, l_all, acc_all = attend(
        m, l, acc, m_all, l_all, acc_all, query, k, v, table, 0, full, keys, last, scale, key_start,
        kv_head * D, k_page, k_token, v_page, v_token, False, D, PARTIAL, PAGE, TMA, EX2,
    )  # fmt: skip
    m, l, acc, m_all, l_all, acc_all = attend(
        m, l, acc, m_all, l_all, acc_all, query, k, v, table, max(0, full), end, keys, last, scale, key_start,
        kv_head * D, k_page, k_token, v_page, v_token, True, D, PARTIAL, PAGE, TMA, EX2,
    )  # fmt: skip
    m, l, acc = merge(m_all, l_all, acc_all, m, l, acc, EX2)
    row_sum = tl.max(l, 1)
    value = narrow(tl.div_rn(acc + 0.0, row_sum[:, None] + tl.zeros_like(acc)))
    tl.store(out + place[:, None] * D + tl.arange(0, D)[None, :], value, mask=here[:, None])
    tl.store(m_out + place, canonical(m), mask=here)
    tl.store(l_out + place, canonical(row_sum), mask=here)


@dataclass(frozen=True, slots=True)
class Launch:
    """Rows of a tile, heads that share it, warps, stages. No bit depends on it."""

    rows: int
    pack: int
    warps: int
    stages: int


def launch_for(dim: int) -> Launch:
    """The static launch table."""
    return Launch(128, 1, 8, 2 if dim > 128 else 3)


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
    scale, redo = float(attention_scale(dim)), None
    if launch is None and EX2 and aligned and dim in gluon_kernel.HEAD_DIMS and k.numel():
        redo = gluon_kernel.attention(out, m, l, q, k, v, cu_q, cu_k, (q_token, k_token, v_token), scale)
    shape = launch or launch_for(dim)
    grid = (heads // shape.pack, tokens // (shape.rows // shape.pack) + sequences)
    tma = aligned and k.shape[0] > 0
    keys_in, values = (_descriptor(x, stride) if tma else x for x, stride in ((k, k_token), (v, v_token)))
    attention_kernel[grid](
        out, m, l, q, keys_in, values, cu_q, cu_q, cu_k, cu_q, cu_q if redo is None else redo, sequences, 0,
        q_token, 0, k_token, 0, v_token, scale,
        HEADS=heads, KV_HEADS=k.shape[1], D=dim, PACK=shape.pack, ROWS=shape.rows,
        WIDTH=width_for(sequences), PARTIAL=KV_PARTIAL, PAGE=0, TMA=tma, EX2=EX2, REDO=redo is not None,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out, m, l


def _descriptor(x: torch.Tensor, stride: int) -> TensorDescriptor:
    """x[T,G,D] as a matrix [T,G*D] that the bulk copy engine reads in blocks of 64 keys of one head."""
    keys, heads, dim = x.shape
    return TensorDescriptor(x, [keys, heads * dim], [stride, 1], [KV_BLOCK, dim])


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
    cu_q: torch.Tensor, seq_lens: torch.Tensor, *, out: torch.Tensor | None = None, decode: Decode | None = None,
) -> torch.Tensor:  # fmt: skip
    """q[T,H,D], caches[B,page,G,D] bf16, block_table[>=R,width], cu_q[R+1], seq_lens[R] int32 → out[T,H,D] bf16.

    Sequence r has seq_lens[r] keys, its queries are the last of them. The first two dimensions of a cache may have any
    stride. Rows of q past cu_q[R] (padding of a CUDA graph) are not written. out: where to, contiguous; a new tensor by
    default. decode: how, where queries are few.
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
    out = torch.empty(q.shape, dtype=BF16, device=q.device) if out is None else out
    require(op, "out", out, BF16, *q.shape)
    if not q.numel() or not sequences:
        return out
    strides = (block_table.stride(0), q_token, k_page, k_token, v_page, v_token)
    tensors, scale = (q, k_cache, v_cache, block_table, cu_q), float(attention_scale(dim))
    most = block_table.shape[1] * page
    decode = decode or triton_decode.launch_for(tokens, sequences, heads // kv_heads, dim, most)
    if decode is not None:
        triton_decode.paged_attention(out, tensors, seq_lens, strides, scale, most, decode)
        return out
    shape = launch_for(dim)
    m, l = (torch.empty((tokens, heads), dtype=F32, device=q.device) for _ in range(2))
    attention_kernel[(heads // shape.pack, tokens // (shape.rows // shape.pack) + sequences)](
        out, m, l, *tensors, cu_q, seq_lens, cu_q, sequences, *strides, scale,
        HEADS=heads, KV_HEADS=kv_heads, D=dim, PACK=shape.pack, ROWS=shape.rows,
        WIDTH=width_for(sequences), PARTIAL=KV_PARTIAL, PAGE=page, TMA=False, EX2=EX2, REDO=False,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _cache(op: str, name: str, cache: torch.Tensor) -> tuple[int, int]:
    """Return the strides of a page and of a token in it."""
    if cache.dim() == 4 and cache.numel():
        require_rows(op, name, cache[0], None, None, None)
        return cache.stride(0), cache.stride(1)
    raise ShapeError(f"{op}: {name} has shape {list(cache.shape)}; it must be [pages, page size, kv heads, head_dim]")
