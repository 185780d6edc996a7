"""From a Hugging Face config to Megatron's, and what a TP degree and a number of segments ask of a model."""

from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from rl_kernel.errors import ContractError, ModelError
from rl_kernel.reference.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """How the weights of one model lie on `tp_size` ranks.

    blocks: linear_fc1 interleaves gate and up in that many blocks over all ranks. Strict takes the contract's segments,
    so that the rows' order, and with it the chain of dx, does not depend on the TP size; Megatron itself has tp_size.
    padded_vocab: rows of the embedding and the output layer over all ranks.
    """

    decoder: DecoderConfig
    tp_size: int
    rank: int
    blocks: int
    padded_vocab: int

    @property
    def vocab_start(self) -> int:
        """First token id of this rank."""
        return self.padded_vocab // self.tp_size * self.rank


def strict_layout(decoder: DecoderConfig, *, segments: int, vocab_tile: int, tp_size: int, rank: int) -> Layout:
    """Layout in which every TP size that divides `segments` gives the same bits.

    Raises ContractError where a dimension cannot be cut, ModelError where the TP size does not divide the heads.
    """
    if segments % tp_size:
        raise ContractError(f"TP {tp_size} does not divide segments = {segments}; set segments to a multiple of it")
    _check_heads(decoder, tp_size)
    for name, width in (
        ("intermediate size", decoder.intermediate),
        ("heads x head_dim", decoder.heads * decoder.head_dim),
        ("rows of q, k and v", (decoder.heads + 2 * decoder.kv_heads) * decoder.head_dim),
    ):
        if width % segments:
            raise ContractError(f"segments = {segments} does not divide the {name}, {width}")
    return Layout(decoder, tp_size, rank, segments, _round_up(decoder.vocab, vocab_tile * segments))


def native_layout(decoder: DecoderConfig, *, vocab_tile: int, tp_size: int, rank: int) -> Layout:
    """Megatron's own layout."""
    _check_heads(decoder, tp_size)
    return Layout(decoder, tp_size, rank, tp_size, _round_up(decoder.vocab, vocab_tile * tp_size))


def transformer_config(layout: Layout, *, activation_module: bool) -> TransformerConfig:
    """Megatron's config of a bf16 decoder: no bias, no dropout, no fusion, weights left uninitialised.

    activation_module: build the spec's activation module instead of calling a function.
    """
    decoder = layout.decoder
    return TransformerConfig(
        num_layers=decoder.layers,
        hidden_size=decoder.hidden,
        num_attention_heads=decoder.heads,
        num_query_groups=decoder.kv_heads,
        kv_channels=decoder.head_dim,
        ffn_hidden_size=decoder.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=decoder.rms_norm_eps,
        qk_layernorm=decoder.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_te_activation_func=activation_module,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp_size,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=torch.bfloat16,
        bf16=True,
        attention_softmax_in_fp32=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def _check_heads(decoder: DecoderConfig, tp_size: int) -> None:
    if decoder.heads % tp_size or decoder.kv_heads % tp_size:
        good = [t for t in range(1, decoder.kv_heads + 1) if decoder.heads % t == 0 and decoder.kv_heads % t == 0]
        raise ModelError(
            f"TP {tp_size} does not divide {decoder.heads} query heads and {decoder.kv_heads} kv heads; "
            f"TP sizes that do: {', '.join(map(str, good))}"
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
