"""Puts the strict layers where vLLM looks layers up, for as long as one model is being built, and no longer.

vLLM keeps process-wide tables from layer name to class. A native engine in the same process must not meet ours, so
they are taken out again, and what vLLM cached meanwhile (RoPE modules, the chosen attention backend) is forgotten.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import rotary_embedding
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from rl_kernel.errors import PlanError
from rl_kernel.integrations.vllm.attention import StrictAttentionBackend
from rl_kernel.integrations.vllm.layers import (
    StrictRMSNorm,
    StrictRotaryEmbedding,
    StrictRowParallelLinear,
    StrictSiluAndMul,
    StrictVocabParallelEmbedding,
)
from rl_kernel.integrations.vllm.paged_attention import PagedAttentionBackend
from rl_kernel.integrations.vllm.runtime import StrictRuntime, building_with

LAYERS: Final[dict[str, type[torch.nn.Module]]] = {
    "RMSNorm": StrictRMSNorm,
    "SiluAndMul": StrictSiluAndMul,
    "RotaryEmbedding": StrictRotaryEmbedding,
    "RowParallelLinear": StrictRowParallelLinear,
    "VocabParallelEmbedding": StrictVocabParallelEmbedding,
}
ATTENTION: Final[dict[AttentionBackendEnum, type[StrictAttentionBackend]]] = {
    AttentionBackendEnum.CPU_ATTN: StrictAttentionBackend,
    AttentionBackendEnum.CUSTOM: PagedAttentionBackend,
}


@contextmanager
def strict_layers(runtime: StrictRuntime) -> Iterator[None]:
    """Let vLLM build a model out of strict layers inside this context."""
    taken = (LAYERS.keys() & op_registry_oot.keys()) | {name.name for name in ATTENTION if name.is_overridden()}
    if taken:
        names = ", ".join(sorted(taken))
        raise PlanError(f"another vLLM plugin already replaces {names}; strict mode must replace them itself")
    _forget()
    try:
        op_registry_oot.update(LAYERS)
        for name, backend in ATTENTION.items():
            register_backend(name, f"{backend.__module__}.{backend.__qualname__}")
        with building_with(runtime):
            yield
    finally:
        for layer in LAYERS:
            op_registry_oot.pop(layer, None)
        for name in ATTENTION:
            name.clear_override()
        _forget()


def _forget() -> None:
    rotary_embedding._ROPE_DICT.clear()
    selector._cached_get_attn_backend.cache_clear()
