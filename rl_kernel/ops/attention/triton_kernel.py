"""Attention on GPUs: causal, GQA, varlen or paged, prefill, chunked prefill and decode, all with the same bits.

T tokens, H query heads, G kv heads, D head_dim, R sequences, P keys a partial. A program holds a tile of rows; a row is
one query of one head. Partials of P keys merge left to right: inside the loop of a prefill, in a decode after they ran
side by side (`triton_decode`). The row sum l is p times a column of ones, so that its order is the matrix instruction's
and no thread layout's.
"""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from rl_kernel.contracts.v1 import KV_BLOCK
from rl_kernel.errors import ShapeError
from rl_kernel.ops.accelerator import BF16, EX2, F32, I32, require, require_rows
from rl_kernel.ops.attention import gluon_kernel, triton_decode
from rl_kernel.ops.attention.gluon_again import again
from rl_kernel.ops.attention.triton_backward import attention_backward, check_heads
from rl_kernel.ops.attention.triton_decode import Launch as Decode
from rl_kernel.ops.attention.triton_prefill import Launch, launch_for, prefill
from rl_kernel.reference.ops import attention_scale

__all__ = ["attention", "attention_backward", "paged_attention"]


def _check(op: str, q: torch.Tensor, heads_kv: int, dim: int) -> int:
    stride = require_rows(op, "q", q, None, None, dim)
    check_heads(op, q.shape[1], heads_kv, dim)
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

    Tokens of q, k and v may lie apart; head_dim is one of `triton_backward.HEAD_DIMS`.
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
    of, apart = (q, k, v), (q_token, k_token, v_token)
    aligned = _aligned(of, apart) and _apart(of, apart)
    scale, outputs, places = float(attention_scale(dim)), (out, m, l), (cu_q, cu_q, cu_k, cu_q)
    tma, strides = aligned and k.shape[0] > 0, (0, q_token, 0, k_token, 0, v_token)
    if launch is None and EX2 and tma and dim in gluon_kernel.HEAD_DIMS:
        redo = gluon_kernel.attention(out, m, l, q, k, v, cu_q, cu_k, (q_token, k_token, v_token), scale)
        again(redo, outputs, (q, k, v), places, strides, k.shape[1], 0, scale)
    else:
        keys, values = (_descriptor(x, stride) if tma else x for x, stride in ((k, k_token), (v, v_token)))
        prefill(outputs, (q, keys, values), places, strides, k.shape[1], 0, scale, launch or launch_for(dim))
    return outputs


def _aligned(tensors: tuple[torch.Tensor, ...], strides: tuple[int, ...]) -> bool:
    """Whether the bulk copy engine can read them: 16 bytes from row to row, and from the beginning."""
    return all(stride % 8 == 0 for stride in strides) and all(x.data_ptr() % 16 == 0 for x in tensors)


def _apart(tensors: tuple[torch.Tensor, ...], strides: tuple[int, ...]) -> bool:
    """Whether no token lies over another, as in an expanded tensor, of which the bulk copy engine makes no matrix."""
    return all(stride >= x.shape[-2] * x.shape[-1] for x, stride in zip(tensors, strides, strict=True))


def _descriptor(x: torch.Tensor, stride: int) -> TensorDescriptor:
    """x[T,G,D] as a matrix [T,G*D] that the bulk copy engine reads in blocks of 64 keys of one head."""
    keys, heads, dim = x.shape
    return TensorDescriptor(x, [keys, heads * dim], [stride, 1], [KV_BLOCK, dim])


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
    cu_q: torch.Tensor, seq_lens: torch.Tensor, *, out: torch.Tensor | None = None, decode: Decode | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:  # fmt: skip
    """q[T,H,D], caches[B,page,G,D] bf16, block_table[>=R,width], cu_q[R+1], seq_lens[R] int32 → out[T,H,D] bf16.

    Sequence r has seq_lens[r] keys, its queries are the last of them. The first two dimensions of a cache may have any
    stride. Rows of q past cu_q[R] (padding of a CUDA graph) are not written. out: where to, contiguous; a new tensor by
    default. decode: how, where queries are few; launch: how, where they are many.
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
    scale = float(attention_scale(dim))
    most = block_table.shape[1] * page
    if launch is None and decode is None:
        decode = triton_decode.launch_for(tokens, sequences, heads // kv_heads, dim, most)
    if decode is not None:
        of = (q, k_cache, v_cache, block_table, cu_q)
        triton_decode.paged_attention(out, of, seq_lens, strides, scale, most, decode)
        return out
    m, l = (torch.empty((tokens, heads), dtype=F32, device=q.device) for _ in range(2))
    outputs, tensors, places = (out, m, l), (q, k_cache, v_cache), (block_table, cu_q, cu_q, seq_lens)
    fit = _aligned(tensors, strides[1:]) and _apart(tensors, (q_token, k_token, v_token))
    fit = fit and gluon_kernel.serves_pages(page, strides[2:])
    if launch is None and EX2 and fit and dim in gluon_kernel.HEAD_DIMS:
        tokens_apart = (q_token, k_token, v_token)
        redo = gluon_kernel.paged_attention(*outputs, *tensors, block_table, cu_q, seq_lens, tokens_apart, scale)
        again(redo, outputs, tensors, places, strides, kv_heads, page, scale)
    else:
        prefill(outputs, tensors, places, strides, kv_heads, page, scale, launch or launch_for(dim))
    return out


def _cache(op: str, name: str, cache: torch.Tensor) -> tuple[int, int]:
    """Return the strides of a page and of a token in it."""
    if cache.dim() == 4 and cache.numel():
        require_rows(op, name, cache[0], None, None, None)
        return cache.stride(0), cache.stride(1)
    raise ShapeError(f"{op}: {name} has shape {list(cache.shape)}; it must be [pages, page size, kv heads, head_dim]")
