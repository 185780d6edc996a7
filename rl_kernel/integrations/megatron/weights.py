"""Hugging Face tensors and Megatron's parameters: the same numbers, fused, interleaved and cut over ranks.

Megatron keeps q, k and v as one matrix, kv group by kv group; gate and up as one, in `Layout.blocks` blocks of
(gate, up); the vocabulary padded. A `Piece` pairs one Hugging Face tensor with a view of the parameter (or of its
gradient, master or moment: anything of that shape), so that loading and exporting are copies through one table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_kernel.integrations.megatron.model_shape import Layout
from rl_kernel.reference.model import check_tensors
from rl_kernel.reference.weights import Array, digest_tensors, map_weights
from rl_kernel.torch_autograd import TensorParallel

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, slots=True)
class Piece:
    """One Hugging Face tensor and where it lies.

    shape: the tensor's own. local: this rank's part, a view in which ranks follow each other along `axis`
    (None: every rank holds all of it). padding: rows at the end over all ranks that the file does not have.
    """

    name: str
    shape: tuple[int, ...]
    local: Tensor
    axis: int | None
    padding: int = 0

    def fill(self, source: Tensor, tp: TensorParallel) -> None:
        """Copy this rank's part of the whole tensor `source` into place."""
        whole = list(self.local.shape)
        if self.axis is None:
            self.local.copy_(source.view(whole))
            return
        width = whole[self.axis]
        whole[self.axis] = width * tp.size - self.padding
        first = min(width * tp.rank, whole[self.axis])
        mine = source.view(whole).narrow(self.axis, first, min(width, whole[self.axis] - first))
        self.local.narrow(self.axis, 0, mine.shape[self.axis]).copy_(mine)
        self.local.narrow(self.axis, mine.shape[self.axis], width - mine.shape[self.axis]).zero_()

    def whole(self, tp: TensorParallel) -> Tensor:
        """The whole tensor, gathered from all ranks (each calls this, in one order); at TP 1 a view if it can be."""
        gathered = self.local
        if self.axis is not None and tp.size > 1:
            parts = [self.local.new_empty(self.local.shape) for _ in range(tp.size)]
            dist.all_gather(parts, self.local.contiguous(), group=tp.group)
            gathered = torch.cat(parts, dim=self.axis)
        if self.padding:
            gathered = gathered.narrow(0, 0, gathered.shape[0] - self.padding)
        return gathered.reshape(self.shape)


def pieces(layout: Layout, tensors: Mapping[str, Tensor]) -> Iterator[Piece]:
    """Cut `tensors` (Megatron parameter name → a tensor of the parameter's local shape) into Hugging Face tensors."""
    decoder = layout.decoder
    hidden, padding = decoder.hidden, layout.padded_vocab - decoder.vocab
    yield Piece("model.embed_tokens.weight", (decoder.vocab, hidden), tensors[_EMBEDDING], 0, padding)
    for layer in range(decoder.layers):
        yield from _attention(layout, layer, tensors)
        yield from _mlp(layout, layer, tensors)
    yield Piece("model.norm.weight", (hidden,), tensors["decoder.final_layernorm.weight"], None)
    if not decoder.tied:
        yield Piece("lm_head.weight", (decoder.vocab, hidden), tensors[_HEAD], 0, padding)


def _attention(layout: Layout, layer: int, tensors: Mapping[str, Tensor]) -> Iterator[Piece]:
    decoder, groups = layout.decoder, layout.decoder.kv_heads // layout.tp_size
    here, there = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    width, kv_width = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    yield Piece(f"{there}input_layernorm.weight", (decoder.hidden,), tensors[f"{here}input_layernorm.weight"], None)
    qkv = tensors[f"{here}self_attention.linear_qkv.weight"].view(groups, -1, decoder.head_dim, decoder.hidden)
    yield Piece(f"{there}self_attn.q_proj.weight", (width, decoder.hidden), qkv[:, :-2], 0)
    yield Piece(f"{there}self_attn.k_proj.weight", (kv_width, decoder.hidden), qkv[:, -2], 0)
    yield Piece(f"{there}self_attn.v_proj.weight", (kv_width, decoder.hidden), qkv[:, -1], 0)
    if decoder.qk_norm:
        for x in "qk":
            norm = tensors[f"{here}self_attention.{x}_layernorm.weight"]
            yield Piece(f"{there}self_attn.{x}_norm.weight", (decoder.head_dim,), norm, None)
    out = tensors[f"{here}self_attention.linear_proj.weight"]
    yield Piece(f"{there}self_attn.o_proj.weight", (decoder.hidden, width), out, 1)


def _mlp(layout: Layout, layer: int, tensors: Mapping[str, Tensor]) -> Iterator[Piece]:
    decoder, blocks = layout.decoder, layout.blocks // layout.tp_size
    here, there = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    norm = tensors[f"{here}pre_mlp_layernorm.weight"]
    yield Piece(f"{there}post_attention_layernorm.weight", (decoder.hidden,), norm, None)
    gate_up = tensors[f"{here}mlp.linear_fc1.weight"].view(blocks, 2, -1, decoder.hidden)
    for i, name in enumerate(("gate", "up")):
        shape = (decoder.intermediate, decoder.hidden)
        yield Piece(f"{there}mlp.{name}_proj.weight", shape, gate_up[:, i], 0)
    down = tensors[f"{here}mlp.linear_fc2.weight"]
    yield Piece(f"{there}mlp.down_proj.weight", (decoder.hidden, decoder.intermediate), down, 1)


def load_folder(folder: Path, layout: Layout, parameters: Mapping[str, Tensor], tp: TensorParallel) -> None:
    """Fill the parameters from a Hugging Face folder.

    Raises ModelError naming a tensor that is missing, unexpected, not bf16 or of another shape.
    """
    mapped = map_weights(folder)
    check_tensors(folder, layout.decoder, mapped)
    with torch.no_grad():
        for piece in pieces(layout, parameters):
            piece.fill(torch.from_numpy(np.array(mapped[piece.name][1])).view(torch.bfloat16), tp)


def own_digest(layout: Layout, parameters: Mapping[str, Tensor], tp: TensorParallel) -> str:
    """Weight digest of what this process computes with; every rank calls it, and all get the same."""
    named = ((p.name, "BF16", bf16_bits(p.whole(tp))) for p in pieces(layout, parameters))
    return digest_tensors(named, tied=layout.decoder.tied)


def bf16_bits(tensor: Tensor) -> Array:
    """The bit patterns of a bf16 tensor, uint16."""
    bits: Array = tensor.detach().contiguous().view(torch.uint16).cpu().numpy()
    return bits
