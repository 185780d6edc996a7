"""Evidence that nothing foreign computes: every module is one of ours or a container, and every call was counted."""

from dataclasses import dataclass
from typing import Final

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from rl_kernel.errors import EvidenceError
from rl_kernel.integrations.added_code import added_code
from rl_kernel.integrations.megatron.attention import StrictCoreAttention, StrictSelfAttention
from rl_kernel.integrations.megatron.linear import StrictColumnParallelLinear, StrictRowParallelLinear
from rl_kernel.integrations.megatron.model_shape import Layout
from rl_kernel.integrations.megatron.pointwise import (
    StrictResidualAdd,
    StrictRmsNorm,
    StrictRopeTable,
    StrictSwiGlu,
)
from rl_kernel.integrations.megatron.vocabulary import StrictEmbedding, StrictOutputLayer

_OURS: Final = frozenset(
    {
        StrictColumnParallelLinear,
        StrictCoreAttention,
        StrictEmbedding,
        StrictOutputLayer,
        StrictResidualAdd,
        StrictRmsNorm,
        StrictRopeTable,
        StrictRowParallelLinear,
        StrictSelfAttention,
        StrictSwiGlu,
    }
)
# Megatron's and torch's modules that only call others, or pass a tensor on.
_CONTAINERS: Final = frozenset(
    {
        IdentityFuncOp,
        IdentityOp,
        LanguageModelEmbedding,
        MLP,
        TransformerBlock,
        TransformerLayer,
        torch.nn.ModuleList,
    }
)


def refuse_foreign_modules(model: torch.nn.Module) -> None:
    """Raise EvidenceError unless every module below `model` is strict, a container, or a dropout that drops nothing.

    The exact class counts: a subclass may compute anything. So may a hook or a patched forward.
    """
    for path, module in model.named_modules():
        kind = type(module)
        idle = kind is torch.nn.Dropout and module.p == 0
        if path and kind not in _OURS and kind not in _CONTAINERS and not idle:
            raise EvidenceError(f"megatron: {path} is a {kind.__module__}.{kind.__name__}, which has no contract")
        if added := added_code(module):
            raise EvidenceError(f"megatron: {path or 'the model'} has {added}, which may compute anything")


@dataclass(slots=True)
class Passes:
    """What a model was asked for since it was built: forwards, backwards, finished steps."""

    forward: int = 0
    backward: int = 0
    steps: int = 0

    def expected_calls(self, layout: Layout) -> dict[str, int]:
        """Function name, qualified by its op → calls that these passes imply on one rank."""
        forward, backward, layers = self.forward, self.backward, layout.decoder.layers
        head_norms = 2 * layers if layout.decoder.qk_norm else 0
        norms = 2 * layers + 1 + head_norms
        expected = {
            "embedding.embedding": forward,
            "embedding.embedding_dw_": backward,
            "gemm.gemm": 4 * layers * forward,
            "gemm.gemm_dx": 4 * layers * backward,
            "gemm.gemm_dw_": 4 * layers * backward,
            "rms_norm.rms_norm": norms * forward,
            "rms_norm.rms_norm_backward": norms * backward,
            "rope.rope": 2 * layers * forward,
            "rope.rope_backward": 2 * layers * backward,
            "attention.attention": layers * forward,
            "attention.attention_backward": layers * backward,
            "swiglu.swiglu": layers * forward,
            "swiglu.swiglu_backward": layers * backward,
            "residual_add.residual_add": 2 * layers * forward,
            "tree_all_reduce.tree_sum": head_norms * self.steps,
            "linear_logp.linear_logp_backward": backward,
        }
        if layout.tp_size == 1:
            return expected | {"linear_logp.linear_logp": forward}
        # Sums over ranks: two a layer in each direction, the embedding, dh of the output layer.
        return expected | {
            "linear_logp.linear_vocab_stats": forward,
            "linear_logp.merge_vocab_stats": forward,
            "tree_all_reduce.tree_all_reduce": (2 * layers + 1) * (forward + backward),
        }
