"""Self-attention over packed sequences: q/k-norm, RoPE by table, and the contract's attention."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from rl_kernel.torch_autograd import StrictOps, split_qkv


@dataclass
class PackedRows(PackedSeqParams):
    """Megatron's description of packed sequences, and what the strict modules need besides.

    positions: int64 [T], each token's position in its own sequence. rows: int64 [n], the rows whose next token is
    asked for. temperature: of the logprobs.
    """

    positions: Tensor | None = None
    rows: Tensor | None = None
    temperature: float = 1.0


class StrictCoreAttention(torch.nn.Module):
    """Causal softmax attention; deterministic in both directions."""

    def __init__(self, *, ops: StrictOps, **_: Any) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedRows) -> Tensor:
        """q[T,H,D], k and v[T,G,D] → [T,H,D]."""
        return self.ops.self_attention(q, k, v, packed.cu_seqlens_q)


class StrictSelfAttention(SelfAttention):
    """Megatron's self-attention with a straight path: no KV cache, no padding, no dropout."""

    def __init__(self, *args: Any, ops: StrictOps, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ops = ops

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: tuple[Tensor, Tensor],
        packed_seq_params: PackedRows,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states[T,1,K] → ([T,1,K], no bias). The mask is None: causal within each packed sequence."""
        qkv, _ = self.linear_qkv(hidden_states)
        q, k, v = split_qkv(qkv.squeeze(1), self.num_query_groups_per_partition, self.hidden_size_per_attention_head)
        if self.q_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        q, k = (self.ops.rotate(x, *rotary_pos_emb, packed_seq_params.positions) for x in (q, k))
        attended = self.core_attention(q, k, v, packed_seq_params)
        projected: tuple[Tensor, None] = self.linear_proj(attended.view(hidden_states.shape[0], 1, -1))
        return projected
