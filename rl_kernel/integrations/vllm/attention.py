"""Attention over vLLM's paged cache: prefill, chunked prefill, decode and prefix-cache hits are one call.

Shape suffixes: T tokens of the step, R sequences, B cache blocks, S tokens of a block, H query heads, G kv heads,
D head_dim. A block's page holds its keys [S,G,D] and then its values [S,G,D]; seen as 2·B half pages, block b keeps
keys in half page 2·b and values in 2·b+1, so that one table addresses both.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from rl_kernel.errors import PlanError
from rl_kernel.integrations.vllm.runtime import current_runtime


@dataclass(frozen=True, slots=True)
class StrictMetadata(AttentionMetadata):
    """Of one step, shared by all layers.

    cu_q[R+1] int32: where each sequence's queries begin. seq_lens[R] int32: visible keys of each sequence's last
    query. half_pages[R,blocks] int32: half page of each block's keys. key_rows, value_rows[T] int64: where the step's
    keys and values go, in rows of the cache.
    """

    tokens: int
    cu_q: torch.Tensor
    seq_lens: torch.Tensor
    half_pages: torch.Tensor
    key_rows: torch.Tensor
    value_rows: torch.Tensor


class StrictMetadataBuilder(AttentionMetadataBuilder[StrictMetadata]):
    """Turns vLLM's view of a step into ours, once a step."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._block_size = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StrictMetadata:
        """common_prefix_len is ignored: cascade attention would change the order of sums."""
        common, size = common_attn_metadata, self._block_size
        tokens = common.num_actual_tokens
        slots = common.slot_mapping[:tokens].long()
        key_rows = slots + slots.div(size, rounding_mode="floor") * size
        return StrictMetadata(
            tokens=tokens,
            cu_q=common.query_start_loc,
            seq_lens=common.seq_lens,
            half_pages=common.block_table_tensor * 2,
            key_rows=key_rows,
            value_rows=key_rows + size,
        )


class StrictAttentionImpl(AttentionImpl[StrictMetadata]):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        for name, value, allowed in (
            ("alibi_slopes", alibi_slopes, (None,)),
            ("sliding_window", sliding_window, (None,)),
            ("kv_cache_dtype", kv_cache_dtype, ("auto", "bfloat16")),
            ("logits_soft_cap", logits_soft_cap, (None, 0.0)),
            ("attn_type", attn_type, (AttentionType.DECODER,)),
            ("kv_sharing_target_layer_name", kv_sharing_target_layer_name, (None,)),
            ("scale", scale, (head_size**-0.5,)),
        ):
            if value not in allowed:
                raise PlanError(f"attention with {name}={value!r} has no contract; it must be {allowed[0]!r}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self._attention = current_runtime().plan.function("attention", "paged_attention")
        self._cache: tuple[int, tuple[torch.Tensor, ...]] = (0, ())

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StrictMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query[T,H,D], key and value[T,G,D] → output[T,H,D], after writing key and value to the cache."""
        assert output_scale is None, "quantised outputs are refused with the model"
        assert output_block_scale is None
        if attn_metadata is None:  # vLLM's profiling run: shapes only
            return output
        rows, keys, values = self._views(kv_cache)
        n = attn_metadata.tokens
        rows.index_copy_(0, attn_metadata.key_rows, key[:n])
        rows.index_copy_(0, attn_metadata.value_rows, value[:n])
        output[:n] = self._attention(
            query[:n], keys, values, attn_metadata.half_pages, attn_metadata.cu_q, attn_metadata.seq_lens
        )
        return output

    def _views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of the cache as rows [2·B·S,G,D], key half pages and value half pages [·,S,G,D]."""
        if self._cache[0] != kv_cache.data_ptr():
            blocks, heads, size, width = kv_cache.shape
            assert kv_cache.is_contiguous(), "the cache layout is ours (see supported_kv_cache_layouts)"
            pages = kv_cache.view(2 * blocks, size, heads, width // 2)
            self._cache = (kv_cache.data_ptr(), (pages.view(-1, heads, width // 2), pages[:-1], pages[1:]))
        return self._cache[1]


class StrictAttentionBackend(AttentionBackend):
    """What vLLM's registry holds for CPU attention while a strict model is built."""

    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """The registered name that this backend stands in for."""
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[StrictAttentionImpl]:
        """Per layer."""
        return StrictAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[StrictMetadataBuilder]:
        """Per step."""
        return StrictMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any block size: key blocks of the contract sit at absolute positions, wherever a page ends."""
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Each block of a layer is one contiguous page, whose inside is ours."""
        return (KVCacheLayout.LBHNC,)
