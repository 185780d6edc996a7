"""Hugging Face folders in and out of Megatron's fused, interleaved, padded parameters, without a bit lost."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_kernel.contracts import model_contract
from rl_kernel.errors import ModelError
from rl_kernel.integrations.megatron.model_shape import strict_layout
from rl_kernel.integrations.megatron.native import NativeModel
from rl_kernel.integrations.megatron.weights import own_digest, pieces
from rl_kernel.ops import strict_plan
from rl_kernel.reference.config import DecoderConfig
from rl_kernel.reference.model import expected_tensors
from rl_kernel.reference.weights import weight_digest
from rl_kernel.torch_autograd import TensorParallel
from tests.integrations.megatron.cases import build
from tests.models import TINY_MODELS


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_model_holds_the_digest_of_the_folder_it_loaded(name, segments, folders, tp):
    model = build(folders[name], strict_plan(model_contract(segments=segments), "cpu"), tp)
    assert own_digest(model.layout, model.parameters, tp) == weight_digest(folders[name])


def test_the_native_model_does_too(folders, tp):
    model = NativeModel(folders["qwen3"], tp)
    model.load(folders["qwen3"])
    assert own_digest(model.layout, model.parameters, tp) == weight_digest(folders["qwen3"])


def test_one_changed_bit_changes_the_digest(folders, tp):
    model = build(folders["llama"], strict_plan(model_contract(), "cpu"), tp)
    model.parameters["decoder.layers.1.mlp.linear_fc1.weight"].data.view(torch.int16)[3, 5] ^= 1
    assert own_digest(model.layout, model.parameters, tp) != weight_digest(folders["llama"])


@pytest.mark.parametrize("name", TINY_MODELS)
def test_pieces_cover_every_tensor_and_every_element_once(name, folders, tp):
    model = build(folders[name], strict_plan(model_contract(segments=2), "cpu"), tp)
    touched = {n: torch.zeros(p.shape) for n, p in model.parameters.items()}
    found = list(pieces(model.layout, touched))
    assert {p.name: p.shape for p in found} == dict(expected_tensors(model.layout.decoder))
    for piece in found:
        piece.local.add_(1)
    assert all((t == 1).all() for t in touched.values())


def test_two_ranks_hold_neighbouring_parts_and_zeros_where_the_vocabulary_is_padded(folders):
    decoder = DecoderConfig.read(folders["llama"])
    whole = torch.arange(decoder.vocab * decoder.hidden, dtype=torch.float32).view(decoder.vocab, decoder.hidden) + 1
    parts = []
    for rank in (0, 1):
        layout = strict_layout(decoder, segments=2, vocab_tile=64, tp_size=2, rank=rank)
        rows = layout.padded_vocab // 2
        local = {n: torch.full(s, -1.0) for n, s in shapes(decoder, rows).items()}
        embedding = next(p for p in pieces(layout, local) if p.name == "model.embed_tokens.weight")
        embedding.fill(whole, TensorParallel(rank, 2))
        parts.append(embedding.local)
    joined = torch.cat(parts)
    assert joined.shape[0] == 384
    assert torch.equal(joined[: decoder.vocab], whole)
    assert not joined[decoder.vocab :].any()


def shapes(decoder, vocab_rows):
    """Local shapes of the parameters on one of two ranks."""
    found = {"embedding.word_embeddings.weight": (vocab_rows, decoder.hidden)}
    found |= {"output_layer.weight": (vocab_rows, decoder.hidden), "decoder.final_layernorm.weight": (decoder.hidden,)}
    for layer in range(decoder.layers):
        at, width = f"decoder.layers.{layer}.", decoder.heads * decoder.head_dim
        found[f"{at}input_layernorm.weight"] = found[f"{at}pre_mlp_layernorm.weight"] = (decoder.hidden,)
        found[f"{at}self_attention.linear_qkv.weight"] = (
            (width + 2 * decoder.kv_heads * decoder.head_dim) // 2,
            decoder.hidden,
        )
        found[f"{at}self_attention.linear_proj.weight"] = (decoder.hidden, width // 2)
        found[f"{at}mlp.linear_fc1.weight"] = (decoder.intermediate, decoder.hidden)
        found[f"{at}mlp.linear_fc2.weight"] = (decoder.hidden, decoder.intermediate // 2)
    return found


def edited(folders, tmp_path, edit, model="llama"):
    """A copy of the model's folder whose tensors went through `edit`."""
    folder = tmp_path / "edited"
    shutil.copytree(folders[model], folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder, tp):
    build(folder, strict_plan(model_contract(), "cpu"), tp)


NORM = "model.layers.0.input_layernorm.weight"


def test_a_missing_tensor_is_named(folders, tmp_path, tp):
    folder = edited(folders, tmp_path, lambda tensors: tensors.pop(NORM))
    with pytest.raises(ModelError, match=r"tensor 'model\.layers\.0\.input_layernorm\.weight' is missing"):
        load(folder, tp)


def test_a_tensor_without_a_place_is_named(folders, tmp_path, tp):
    folder = edited(folders, tmp_path, lambda tensors: tensors.update({"model.bias": torch.ones(2)}))
    with pytest.raises(
        ModelError, match=r"tensor 'model\.bias' is not of the llama decoder of 2 layers that config.json describes"
    ):
        load(folder, tp)


def test_a_tensor_of_another_dtype_is_named(folders, tmp_path, tp):
    folder = edited(folders, tmp_path, lambda tensors: tensors.update({NORM: tensors[NORM].float()}))
    with pytest.raises(ModelError, match=r"input_layernorm.weight' is F32\[160\], the model needs BF16\[160\]"):
        load(folder, tp)


def test_a_tensor_of_another_shape_is_named(folders, tmp_path, tp):
    folder = edited(folders, tmp_path, lambda tensors: tensors.update({NORM: tensors[NORM][:8].clone()}))
    with pytest.raises(ModelError, match=r"is BF16\[8\], the model needs BF16\[160\]"):
        load(folder, tp)


def test_a_head_of_its_own_in_a_tied_model_is_named(folders, tmp_path, tp):
    def repeat(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def differ(tensors):
        repeat(tensors)
        tensors["lm_head.weight"].view(torch.int16)[7, 7] ^= 1

    load(edited(folders, tmp_path / "same", repeat, "llama-tied"), tp)
    with pytest.raises(ModelError, match=r"'lm_head\.weight' is not the embedding, but tie_word_embeddings is true"):
        load(edited(folders, tmp_path / "other", differ, "llama-tied"), tp)


def test_another_architecture_is_named(folders, tmp_path, tp):
    folder = edited(folders, tmp_path, lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(ModelError, match="architecture 'gpt2' has no contract; there is one for llama, qwen3"):
        load(folder, tp)


def test_a_missing_folder_is_named(tmp_path, tp):
    with pytest.raises(ModelError, match=r"nowhere/config\.json does not exist"):
        load(tmp_path / "nowhere", tp)


def test_the_bits_that_leave_are_those_that_came(folders, tp):
    model = build(folders["llama-tied"], strict_plan(model_contract(segments=2), "cpu"), tp)
    source = load_file(folders["llama-tied"] / "model.safetensors")
    for piece in pieces(model.layout, model.parameters):
        left = piece.whole(tp).contiguous().view(torch.int16).numpy()
        assert np.array_equal(left, source[piece.name].view(torch.int16).numpy())
