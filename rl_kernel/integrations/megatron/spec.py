"""Layer specs: what Megatron-core's GPTModel builds at every place that computes. Ours, all of them."""

from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from rl_kernel.integrations.megatron.attention import StrictCoreAttention, StrictSelfAttention
from rl_kernel.integrations.megatron.linear import StrictColumnParallelLinear, StrictRowParallelLinear
from rl_kernel.integrations.megatron.model_shape import Layout
from rl_kernel.integrations.megatron.pointwise import StrictResidualAdd, StrictRmsNorm, StrictSwiGlu
from rl_kernel.torch_autograd import StrictOps


def strict_block_spec(layout: Layout, ops: StrictOps) -> TransformerBlockSubmodules:
    """Every layer of the decoder, and its last norm."""
    layer = strict_layer_spec(layout, ops)
    return TransformerBlockSubmodules(layer_specs=[layer] * layout.decoder.layers, layer_norm=_with(StrictRmsNorm, ops))


def strict_layer_spec(layout: Layout, ops: StrictOps) -> ModuleSpec:
    """One layer: Megatron's TransformerLayer and MLP around strict modules."""
    decoder, norm = layout.decoder, _with(StrictRmsNorm, ops)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=StrictSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal, "ops": ops},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=_with(StrictColumnParallelLinear, ops),
                    core_attention=_with(StrictCoreAttention, ops),
                    linear_proj=_with(StrictRowParallelLinear, ops),
                    q_layernorm=_head_norm(decoder.heads, layout, ops),
                    k_layernorm=_head_norm(decoder.kv_heads, layout, ops),
                ),
            ),
            self_attn_bda=_with(StrictResidualAdd, ops),
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=_with(StrictColumnParallelLinear, ops),
                    activation_func=_with(StrictSwiGlu, ops),
                    linear_fc2=_with(StrictRowParallelLinear, ops),
                ),
            ),
            mlp_bda=_with(StrictResidualAdd, ops),
        ),
    )


def _with(module: type, ops: StrictOps, **params: object) -> ModuleSpec:
    return ModuleSpec(module=module, params={"ops": ops, **params})


def _head_norm(heads: int, layout: Layout, ops: StrictOps) -> ModuleSpec | None:
    return _with(StrictRmsNorm, ops, heads=heads // layout.tp_size) if layout.decoder.qk_norm else None
