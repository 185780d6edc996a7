"""The ops that a stock vLLM runs on a CPU (V1, bf16, enforce_eager, one rank), in the shape of the reference.

They call vLLM's own kernels, outside of its engine: a prompt read at once, then a token a step. Of what a pass holds
besides this sequence only one thing moves bits here: how many rows it has, since oneDNN multiplies a single row in
another order where K is large, and vLLM's small matrices on a CPU with AMX have another kernel for up to four rows. So
there are two kinds, `together` and `alone`.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rl_kernel.integrations.replay import NativeOps, as_bf16, as_bits, as_floats, as_tensor, settings_of
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import F32, I32, I64, Bits

_BLOCK: Final = 128  # tokens a block of the cache, vLLM's default on a CPU


class VllmOps(NativeOps):
    """One sample. What is kept between calls: the last residual sum before it was rounded, packed weights."""

    __slots__ = ("_alone", "_cache", "_packed", "_prompt_len", "_sum")

    _alone: bool
    _cache: Tensor
    _packed: dict[int, tuple[Bits, Any]]
    _prompt_len: int
    _sum: tuple[Bits, Tensor] | None

    def gemm(self, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
        """As an unquantised linear layer on oneDNN; x[M,K], w[N,K] → bf16 [M,N]."""
        return as_bits(self._product(as_bf16(x), w, self._prompt_len))

    def gemm_fp32(self, x: Bits, w: Bits, *, segments: int = 1) -> F32:
        """The output layer: bf16 logits, widened."""
        return as_floats(self._product(as_bf16(x), w, 0).float())

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        """Native form, in fp32; of the residual's sum as it was before it was rounded, where x is that sum."""
        wide = self._sum[1] if self._sum is not None and self._sum[0] is x else as_bf16(x).float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
        return as_bits(scaled.to(torch.bfloat16) * as_bf16(w))

    def residual_add(self, a: Bits, b: Bits) -> Bits:
        """The first half of fused_add_rms_norm."""
        total = as_bf16(a).float() + as_bf16(b).float()
        rounded = as_bits(total.to(torch.bfloat16))
        object.__setattr__(self, "_sum", (rounded, total))
        return rounded

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        """The rotary kernel with vLLM's own table, which is made in fp32 and kept in bf16."""
        assert not inverse, "a replay has no gradients"
        turned = as_bf16(x)
        flat = turned.view(len(x), -1)
        torch.ops._C.rotary_embedding(as_tensor(positions), flat, None, x.shape[2], self._cache, True)
        return as_bits(turned)

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """The paged kernel: one request that reads the prompt, then one a token, on one cache of keys and values."""
        assert len(cu_q) == 2, "one sequence a call"
        from vllm import _custom_ops as ops  # noqa: PLC0415 - where its kernels are loaded from
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

        query, key, value = as_bf16(q), as_bf16(k), as_bf16(v)
        tokens, heads, dim = query.shape
        groups = key.shape[1]
        blocks = math.ceil(tokens / _BLOCK)
        cache = torch.zeros(blocks, groups, 2 * _BLOCK, dim, dtype=torch.bfloat16)
        keys, values = cache.chunk(2, dim=2)
        isa = _get_attn_isa(torch.bfloat16, _BLOCK, dim)  # this machine's: one with AMX adds in another order
        ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.arange(tokens), isa)
        out = torch.empty_like(query)
        table = torch.arange(blocks, dtype=torch.int32)[None]
        for first, last in [(0, self._prompt_len), *((i, i + 1) for i in range(self._prompt_len, tokens))]:
            start = torch.tensor([0, last - first], dtype=torch.int32)
            lengths = torch.tensor([last], dtype=torch.int32)
            plan = ops.cpu_attn_get_scheduler_metadata(
                1, heads, groups, dim, lengths, torch.bfloat16, start, True, -1, isa, True
            )
            ops.cpu_attention_with_kv_cache(
                query[first:last], keys, values, out[first:last], start, lengths, dim**-0.5, True, None, -1, table, 0.0,
                plan, None,
            )  # fmt: skip
        empty = np.zeros(q.shape[:2], np.float32)
        return as_bits(out), empty, empty

    def _product(self, x: Tensor, w: Bits, first: int) -> Tensor:
        """x[M,K], w[N,K] → bf16 [M,N]; rows from `first` on are those of single tokens."""
        if id(w) not in self._packed:
            self._packed[id(w)] = (w, _linear(w))
        product = self._packed[id(w)][1]
        if not self._alone:
            return product(x)
        passes = [x[:first], *x[first:].split(1)]
        return torch.cat([product(rows) for rows in passes if len(rows)])


def together(decoder: Decoder, prompt_len: int) -> VllmOps:
    """For one sample that was generated beside at least four others; ImportError where there is no vLLM for CPUs."""
    return _stock(decoder, prompt_len, alone=False)


def alone(decoder: Decoder, prompt_len: int) -> VllmOps:
    """For one sample that was generated with no other beside it, or, where the CPU has AMX, with up to three."""
    return _stock(decoder, prompt_len, alone=True)


def _stock(decoder: Decoder, prompt_len: int, alone: bool) -> VllmOps:
    import vllm._custom_ops  # noqa: F401, PLC0415

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # as vLLM's worker does; without it the first tile is an illegal instruction
    ops = VllmOps(**settings_of(decoder.reference))
    dim = decoder.config.head_dim
    frequency = 1.0 / (decoder.config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    angle = torch.arange(decoder.config.max_position, dtype=torch.float)[:, None] * frequency[None, :]
    kept = {
        "_cache": torch.cat((angle.cos(), angle.sin()), dim=-1).to(torch.bfloat16),
        "_alone": alone,
        "_packed": {},
        "_prompt_len": prompt_len,
        "_sum": None,
    }
    for name, value in kept.items():
        object.__setattr__(ops, name, value)
    return ops


def _linear(w: Bits) -> Callable[[Tensor], Tensor]:
    """The product with w[N,K] by the kernel that vLLM chooses for it on this machine; one with AMX has a second."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: PLC0415

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(as_bf16(w), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return lambda x: layer.cpu_linear(x, layer.weight, None)
