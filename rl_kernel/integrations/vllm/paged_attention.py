"""Attention over vLLM's paged cache on GPUs, capturable: nothing about a step is derived on the host.

Pages are laid out as on CPU (see `attention`): keys [S,G,D], then values [S,G,D]. What a CUDA graph reads of a step
lies in vLLM's own buffers, which are refilled before each replay; rows past the last sequence are padding, are not
attended to and not stored.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from rl_kernel.integrations.vllm.attention import StrictAttentionBackend, StrictAttentionImpl

NAME = "CUSTOM"  # the name that vLLM's registry keeps for backends from outside


@dataclass(frozen=True, slots=True)
class PagedMetadata(AttentionMetadata):
    """Of one step, shared by all layers.

    cu_q[R+1] int32: where each sequence's queries begin. seq_lens[R] int32: visible keys of its last query.
    block_table[R,blocks] int32. slots[T] int64: the cache slot of each token, negative for padding.
    """

    tokens: int
    cu_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Passes vLLM's buffers on."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """common_prefix_len is ignored: cascade attention would change the order of sums."""
        common = common_attn_metadata
        return PagedMetadata(
            tokens=common.num_actual_tokens,
            cu_q=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slots=common.slot_mapping,
        )


class PagedAttentionImpl(StrictAttentionImpl):
    """One layer's attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from rl_kernel.integrations.vllm.cache_write import cache_write  # noqa: PLC0415 (needs Triton)

        super().__init__(*args, **kwargs)
        self._cache_write = cache_write

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query[T,H,D], key and value[T,G,D] → output[T,H,D], after writing key and value to the cache."""
        assert output_scale is None, "quantised outputs are refused with the model"
        assert output_block_scale is None
        if attn_metadata is None:  # vLLM's profiling run: shapes only
            return output
        step: PagedMetadata = attn_metadata
        n = step.tokens
        keys, values = _halves(kv_cache)
        self._cache_write(key[:n], value[:n], keys, values, step.slots[:n])
        self._attention(query[:n], keys, values, step.block_table, step.cu_q, step.seq_lens, out=output[:n])
        return output


def _halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the cache: keys and values, each [B,S,G,D] with a stride of a whole page."""
    blocks, heads, size, width = kv_cache.shape
    assert kv_cache.is_contiguous(), "the cache layout is ours (see supported_kv_cache_layouts)"
    pages = kv_cache.view(blocks, 2, size, heads, width // 2)
    return pages[:, 0], pages[:, 1]


class PagedAttentionBackend(StrictAttentionBackend):
    """What vLLM's registry holds under CUSTOM; only a strict engine asks for that name."""

    @staticmethod
    def get_name() -> str:
        """The registered name."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        """Per layer."""
        return PagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> Any:
        """Per step."""
        return PagedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any size of whole 16 tokens; key blocks of the contract sit at absolute positions, wherever a page ends."""
        return [MultipleOf(16)]
