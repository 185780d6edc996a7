"""Finds whatever serves an op in a built model and is not ours, and says how often each op must have been called.

The model's containers (layer, attention, MLP) are vLLM's own classes and only pass tensors on; they are listed by
exact class, so that a subclass, a new kind of layer, a hook or a patched `forward` shows up as foreign.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers import activation, layernorm, linear, logits_processor, vocab_parallel_embedding
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import base as rotary_base
from vllm.model_executor.layers.rotary_embedding import common as rotary_common
from vllm.model_executor.models import llama, qwen2, qwen3

from rl_kernel.integrations.added_code import added_code
from rl_kernel.integrations.vllm.attention import StrictAttentionImpl
from rl_kernel.integrations.vllm.layers import (
    StrictRMSNorm,
    StrictRotaryEmbedding,
    StrictRowParallelLinear,
    StrictSiluAndMul,
    StrictVocabParallelEmbedding,
)
from rl_kernel.integrations.vllm.paged_attention import PagedAttentionImpl
from rl_kernel.integrations.vllm.quantization import StrictEmbeddingMethod, StrictLinearMethod

CONTAINERS = frozenset(
    {
        nn.ModuleList,
        llama.LlamaForCausalLM,
        llama.LlamaModel,
        llama.LlamaDecoderLayer,
        llama.LlamaAttention,
        llama.LlamaMLP,
        qwen3.Qwen3ForCausalLM,
        qwen3.Qwen3Model,
        qwen3.Qwen3DecoderLayer,
        qwen3.Qwen3Attention,
        qwen2.Qwen2MLP,
        rotary_common.ApplyRotaryEmb,  # a part of the rotary layer that only its native forward calls
    }
)
STRICT_LAYERS = frozenset({StrictRMSNorm, StrictSiluAndMul, StrictRotaryEmbedding})
LINEARS = frozenset({StrictRowParallelLinear, linear.QKVParallelLinear, linear.MergedColumnParallelLinear})
EMBEDDINGS = frozenset({StrictVocabParallelEmbedding, vocab_parallel_embedding.ParallelLMHead})

# vLLM layers that leave the arithmetic to a part of theirs: which attribute, and what it may be.
_PARTS: tuple[tuple[frozenset[type], str, frozenset[type]], ...] = (
    (LINEARS, "quant_method", frozenset({StrictLinearMethod})),
    (EMBEDDINGS, "quant_method", frozenset({StrictEmbeddingMethod})),
    (frozenset({Attention}), "impl", frozenset({StrictAttentionImpl, PagedAttentionImpl})),
)
# What a vLLM layer computes, most derived first; for the message.
_OPS: tuple[tuple[type, str], ...] = (
    (linear.LinearBase, "gemm"),
    (vocab_parallel_embedding.ParallelLMHead, "gemm"),
    (vocab_parallel_embedding.VocabParallelEmbedding, "embedding"),
    (layernorm.RMSNorm, "rms_norm"),
    (rotary_base.RotaryEmbeddingBase, "rope"),
    (activation.SiluAndMul, "swiglu"),
    (Attention, "attention"),
    (logits_processor.LogitsProcessor, "linear_logp"),
)


def foreign_sites(model: nn.Module, sampler: object, wanted: type) -> Iterator[tuple[str, str]]:
    """Yield (op, `path is class`) for every site of `model`, and the sampler if not `wanted`, that is not ours."""
    for path, module in model.named_modules():
        fault = _fault(module)
        if fault:
            yield _op(module), f"{path or 'model'} ({fault})"
    if type(sampler) is not wanted:
        yield "linear_logp", f"the sampler ({_name(sampler)})"
    elif isinstance(sampler, nn.Module) and (added := added_code(sampler)):
        yield "linear_logp", f"the sampler ({_name(sampler)} with {added})"


def expected_calls(
    config: Any, *, tp_size: int, steps: int, sampling_steps: int, opaque: bool = False
) -> dict[str, int]:
    """Calls of each function on one rank after `steps` forward passes, `sampling_steps` of which sampled with logprobs.

    config: of Hugging Face. opaque: the layers call operators.
    """
    layers, qk_norm = config.num_hidden_layers, config.model_type == "qwen3"
    return {
        "embedding.embedding": steps,
        "gemm.gemm": 4 * layers * steps + sampling_steps,
        "rms_norm.rms_norm": (1 + 2 * layers * qk_norm) * steps,
        "rms_norm.add_rms_norm": 2 * layers * steps,
        "rope.rope_pair": layers * steps if opaque else 0,
        # One call where queries and keys are seen to lie side by side.
        "rope.rope": 0 if opaque else (2 if qk_norm else 1) * layers * steps,
        "swiglu.swiglu": layers * steps,
        "attention.paged_attention": layers * steps,
        "linear_logp.logp_from_logits": sampling_steps,
        "tree_all_reduce.tree_all_reduce": (2 * layers + 1) * steps if tp_size > 1 else 0,
    }


def _fault(module: nn.Module) -> str | None:
    """Why `module` is foreign, or None."""
    kind = type(module)
    if added := added_code(module):
        return f"{_name(module)} with {added}"
    if kind in CONTAINERS or kind in STRICT_LAYERS:
        return None
    for kinds, part, ours in _PARTS:
        if kind in kinds:
            served_by = getattr(module, part)
            return None if type(served_by) in ours else _name(served_by)
    if kind is logits_processor.LogitsProcessor and _plain(module):
        return None
    return _name(module)


def _plain(module: nn.Module) -> bool:
    """Whether vLLM's logits processor only gathers shards and cuts the padding off."""
    return module.scale == 1.0 and module.soft_cap is None and module.head_dtype in (None, torch.bfloat16)


def _op(module: nn.Module) -> str:
    return next((op for kind, op in _OPS if isinstance(module, kind)), "an unknown op")


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
