"""vLLM's layers with their arithmetic replaced: same constructor, same parameters, same place in the model.

Each is registered under the name of the layer that it replaces (`hooks`). Shape suffixes: T tokens, K features,
H query heads, G kv heads, D head_dim.
"""

from typing import Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rl_kernel.integrations.vllm.runtime import current_runtime
from rl_kernel.reference.rope_table import rope_table


class StrictRMSNorm(RMSNorm):
    """RMSNorm over the last axis, also per head; with a residual, the sum is rounded to bf16 first.

    seal: keyword of the operator that ends a piece of captured code, set on the model's last norm.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plan = current_runtime().plan
        self.seal: dict[str, bool] = {}
        self._norm = plan.function("rms_norm")
        self._add_norm = plan.function("rms_norm", "add_rms_norm")

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x[…,K] → y, or (y, new residual)."""
        weight = self.weight.data
        if residual is None:
            normed: torch.Tensor = self._norm(x, weight, self.variance_epsilon)
            return normed
        y, new_residual = self._add_norm(x, residual, weight, self.variance_epsilon, **self.seal)
        return y, new_residual


class StrictSiluAndMul(SiluAndMul):
    """SwiGLU of x[T,2K] = gate, up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._swiglu = current_runtime().plan.function("swiglu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x[T,2K] → y[T,K]."""
        result: torch.Tensor = self._swiglu(x)
        return result


class StrictRotaryEmbedding(RotaryEmbedding):
    """RoPE from the contract's fp32 table; vLLM's own table (rounded to bf16) is not computed."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        init_cache: bool = True,
    ) -> None:
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, init_cache=False)
        runtime = current_runtime()
        self._rope = runtime.plan.function("rope")
        self._rope_pair = runtime.plan.function("rope", "rope_pair") if runtime.opaque else None
        device = torch.empty(0).device  # where vLLM builds the model
        cos, sin = (torch.from_numpy(x).to(device) for x in rope_table(base, rotary_dim, max_position_embeddings))
        self.register_buffer("_cos", cos, persistent=False)
        self.register_buffer("_sin", sin, persistent=False)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """query[T,H·D], key[T,G·D], positions[T] int64 → both rotated; in one call where they lie side by side."""
        if key is None:
            return self._rotate(query, positions), None
        if self._rope_pair is not None:
            # A compiler knows no addresses. What comes next is attention, which ends the captured piece.
            q_THD = query.view(query.shape[0], -1, self.head_size)
            k_TGD = key.view(key.shape[0], -1, self.head_size)
            q_THD, k_TGD = self._rope_pair(q_THD, k_TGD, self._cos, self._sin, positions, seal=True)
            return q_THD.view(query.shape), k_TGD.view(key.shape)
        tokens, width = query.shape
        both = width + key.shape[1]
        if (
            key.data_ptr() == query.data_ptr() + 2 * width
            and query.stride() == key.stride()
            and query.stride(0) >= both
        ):
            rotated = self._rotate(query.as_strided((tokens, both), query.stride()), positions)
            return rotated[:, :width], rotated[:, width:]
        return self._rotate(query, positions), self._rotate(key, positions)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x_THD = x.view(x.shape[0], -1, self.head_size)
        rotated: torch.Tensor = self._rope(x_THD, self._cos, self._sin, positions)
        return rotated.view(x.shape)


class StrictRowParallelLinear(RowParallelLinear):
    """Row-parallel linear whose ranks' fp32 partial sums meet in the contract's tree."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        runtime = current_runtime()
        self._group = runtime.group
        self._tree_all_reduce = runtime.plan.function("tree_all_reduce")

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """input_[T,K of this rank] → (y[T,N], no bias)."""
        y = self.quant_method.apply(self, input_)
        if self.tp_size > 1:
            y = self._tree_all_reduce(y, self._group, torch.bfloat16)
        return y, None


class StrictVocabParallelEmbedding(VocabParallelEmbedding):
    """Embedding whose rows live on one rank each: the owner's row plus zeros is that row."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        runtime = current_runtime()
        self._group = runtime.group
        self._tree_all_reduce = runtime.plan.function("tree_all_reduce")

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """ids[T] → rows[T,K]."""
        if self.tp_size == 1:
            return self.quant_method.embedding(self, input_)
        ids = input_.long()
        shard = self.shard_indices
        local = ids - shard.org_vocab_start_index
        elsewhere = (local < 0) | (local >= shard.num_org_elements)
        rows = self.quant_method.embedding(self, local.masked_fill(elsewhere, 0)).float()
        rows.masked_fill_(elsewhere[:, None], 0)
        result: torch.Tensor = self._tree_all_reduce(rows, self._group, torch.bfloat16)
        return result
