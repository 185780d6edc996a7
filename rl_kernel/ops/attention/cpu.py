"""Causal attention on the CPU: contiguous, paged, and the gradients."""

import math

import torch

from rl_kernel.contracts.v1 import KV_PARTIAL
from rl_kernel.errors import ShapeError
from rl_kernel.ops.tensors import BF16, F32, I32, check, check_rows, extension, threads

_LOG2E = float.fromhex("0x1.71547652b82fep+0")


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend q[T,H,D] to k and v[U,G,D] (bf16); sequence r owns queries cu_q[r]:cu_q[r+1] and keys cu_k[r]:cu_k[r+1].

    Returns out[T,H,D] bf16, and fp32 [T,H]: the score maximum m (base 2) and the row sum l, for the backward.
    """
    q_token, tokens, heads, dim = _queries("attention", "q", q)
    k_token = check_rows("attention", "k", k, (None, None, dim))
    keys, kv_heads, _ = k.shape
    v_token = check_rows("attention", "v", v, (keys, kv_heads, dim))
    _check_heads("attention", heads, kv_heads)
    sequences = _offsets("attention", "cu_q", cu_q)
    check("attention", "cu_k", cu_k, I32, (sequences + 1,))
    out = torch.empty(tokens, heads, dim, dtype=BF16)
    m, l = torch.empty(tokens, heads, dtype=F32), torch.empty(tokens, heads, dtype=F32)
    extension.attention(
        out.data_ptr(), m.data_ptr(), l.data_ptr(), q.data_ptr(), q_token, k.data_ptr(), k_token, v.data_ptr(), v_token,
        cu_q.data_ptr(), cu_k.data_ptr(), sequences, tokens, keys, heads, kv_heads, dim, _LOG2E / math.sqrt(dim),
        KV_PARTIAL, threads(),
    )  # fmt: skip
    return out, m, l


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_q: torch.Tensor,
    seq_lens: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Attend q[T,H,D] to the caches k and v[B,bs,G,D] (bf16) -> out[T,H,D] bf16.

    Sequence r has seq_lens[r] keys, in the blocks block_table[r]; its queries are the last positions. The first two
    dimensions of a cache may have any stride.
    """
    q_token, tokens, heads, dim = _queries("paged_attention", "q", q)
    sequences = _offsets("paged_attention", "cu_q", cu_q)
    check("paged_attention", "seq_lens", seq_lens, I32, (sequences,))
    right = block_table.dtype is I32 and block_table.dim() == 2 and block_table.is_cpu
    if not right or block_table.stride(1) != 1 < block_table.shape[1]:
        raise ShapeError(
            f"paged_attention: block_table is {block_table.dtype} {list(block_table.shape)} on {block_table.device}, "
            f"strides {list(block_table.stride())}; it must be int32 [R, blocks] on cpu with contiguous rows"
        )
    if block_table.shape[0] < sequences:
        raise ShapeError(f"paged_attention: block_table has {block_table.shape[0]} rows for {sequences} sequences")
    k_block, k_token = _cache("k_cache", k_cache, dim)
    v_block, v_token = _cache("v_cache", v_cache, dim)
    if k_cache.shape != v_cache.shape:
        raise ShapeError(f"paged_attention: k_cache is {list(k_cache.shape)}, v_cache {list(v_cache.shape)}")
    blocks, block_size, kv_heads, _ = k_cache.shape
    _check_heads("paged_attention", heads, kv_heads)
    out = torch.empty(tokens, heads, dim, dtype=BF16)
    extension.paged_attention(
        out.data_ptr(), q.data_ptr(), q_token, k_cache.data_ptr(), v_cache.data_ptr(), k_block, k_token, v_block,
        v_token, blocks, block_size, block_table.data_ptr(), block_table.stride(0), block_table.shape[1],
        cu_q.data_ptr(), seq_lens.data_ptr(), sequences, tokens, heads, kv_heads, dim, _LOG2E / math.sqrt(dim),
        KV_PARTIAL, threads(),
    )  # fmt: skip
    return out


def attention_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, m: torch.Tensor,
    l: torch.Tensor, cu: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients (dq[T,H,D], dk[T,G,D], dv[T,G,D]) bf16 of self-attention; out, m, l as the forward returned them."""
    op = "attention_backward"
    q_token, tokens, heads, dim = _queries(op, "q", q)
    k_token = check_rows(op, "k", k, (tokens, None, dim))
    kv_heads = k.shape[1]
    v_token = check_rows(op, "v", v, (tokens, kv_heads, dim))
    dout_token = check_rows(op, "dout", dout, (tokens, heads, dim))
    out_token = check_rows(op, "out", out, (tokens, heads, dim))
    check(op, "m", m, F32, (tokens, heads))
    check(op, "l", l, F32, (tokens, heads))
    _check_heads(op, heads, kv_heads)
    sequences = _offsets(op, "cu", cu)
    dq = torch.empty(tokens, heads, dim, dtype=BF16)
    dk, dv = torch.empty(tokens, kv_heads, dim, dtype=BF16), torch.empty(tokens, kv_heads, dim, dtype=BF16)
    extension.attention_backward(
        dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), dout.data_ptr(), dout_token, q.data_ptr(), q_token, k.data_ptr(),
        k_token, v.data_ptr(), v_token, out.data_ptr(), out_token, m.data_ptr(), l.data_ptr(), cu.data_ptr(), sequences,
        tokens, heads, kv_heads, dim, _LOG2E / math.sqrt(dim), 1.0 / math.sqrt(dim), threads(),
    )  # fmt: skip
    return dq, dk, dv


def _queries(op: str, name: str, q: torch.Tensor) -> tuple[int, int, int, int]:
    token = check_rows(op, name, q, (None, None, None))
    tokens, heads, dim = q.shape
    return token, tokens, heads, dim


def _offsets(op: str, name: str, cu: torch.Tensor) -> int:
    check(op, name, cu, I32, (None,))
    if cu.shape[0] == 0:
        raise ShapeError(f"{op}: {name} is empty; it must hold one offset more than there are sequences")
    return int(cu.shape[0]) - 1


def _check_heads(op: str, heads: int, kv_heads: int) -> None:
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(f"{op}: {heads} query heads are not a multiple of {kv_heads} kv heads")


def _cache(name: str, cache: torch.Tensor, dim: int) -> tuple[int, int]:
    strides = cache.stride()
    right = cache.dtype is BF16 and cache.dim() == 4 and cache.is_cpu
    if not right or cache.shape[3] != dim or strides[3] != 1 or strides[2] != dim:
        raise ShapeError(
            f"paged_attention: {name} is {cache.dtype} {list(cache.shape)} on {cache.device}, strides {list(strides)}; "
            f"it must be bfloat16 [blocks, block size, kv heads, {dim}] on cpu with each token's heads contiguous"
        )
    return strides[0], strides[1]
