"""The reference decoder: what it refuses, and that its numbers depend on nothing but the sequence."""

import json
from pathlib import Path

import numpy as np
import pytest

from rl_kernel.compare import compare_bits
from rl_kernel.contracts import model_contract
from rl_kernel.errors import ModelError, ShapeError, WeightDigestError
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.weights import check_weight_digest, weight_digest
from tests.models import LLAMA, LLAMA_TIED, QWEN3, TINY_MODELS, TinyModel, write_tiny_model

CONTRACT = model_contract()


def tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, LLAMA.vocab, length)


@pytest.mark.parametrize("spec", TINY_MODELS.values(), ids=TINY_MODELS)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(tmp_path: Path, spec: TinyModel) -> None:
    decoder = Decoder.open(write_tiny_model(tmp_path / "m", spec), CONTRACT)
    batch = [tokens(i, n) for i, n in enumerate((70, 3, 65, 130))]
    together = decoder.logprobs(batch, [60, 1, 5, 100], temperature=0.8)
    for ids, cut, found in zip(batch, [60, 1, 5, 100], together, strict=True):
        assert compare_bits(decoder.logprobs([ids], [cut], temperature=0.8)[0], found).equal
        assert len(found) == len(ids) - cut


def test_a_later_token_changes_nothing_before_it(tmp_path: Path) -> None:
    decoder = Decoder.open(write_tiny_model(tmp_path / "m", QWEN3), CONTRACT)
    ids = tokens(1, 90)
    long, short = decoder.logprobs([ids], [10])[0], decoder.logprobs([ids[:66]], [10])[0]
    assert compare_bits(long[: len(short)], short).equal


def test_probabilities_of_all_tokens_sum_to_one(tmp_path: Path) -> None:
    decoder = Decoder.open(write_tiny_model(tmp_path / "m", LLAMA_TIED), CONTRACT)
    prompt = tokens(2, 9)
    ids = [np.append(prompt, t) for t in range(LLAMA_TIED.vocab)]
    logp = np.concatenate(decoder.logprobs(ids, [9] * len(ids))).astype(np.float64)
    assert abs(np.exp(logp).sum() - 1) < LLAMA_TIED.vocab * 2.0**-20  # ulps of each term, added up


def test_the_observer_sees_every_op_in_order(tmp_path: Path) -> None:
    decoder = Decoder.open(write_tiny_model(tmp_path / "m", LLAMA), CONTRACT)
    seen: list[str] = []
    decoder.hidden([tokens(1, 5)], lambda name, value: seen.append(name))
    assert seen[0] == "embedding"
    assert seen[-1] == "norm"
    assert [s for s in seen if s.startswith("layers.1.")] == [
        f"layers.1.{op}"
        for op in (
            "input_norm",
            "qkv",
            "rope",
            "attention",
            "o_proj",
            "post_attention_norm",
            "gate_up",
            "swiglu",
            "down_proj",
        )
    ]


def test_the_digest_names_the_bytes_and_nothing_else(tmp_path: Path) -> None:
    first, again = write_tiny_model(tmp_path / "a", LLAMA), write_tiny_model(tmp_path / "b", LLAMA)
    other = write_tiny_model(tmp_path / "c", LLAMA, seed=1)
    assert weight_digest(first) == weight_digest(again) == Decoder.open(first, CONTRACT).weight_digest
    check_weight_digest(first, weight_digest(again))
    with pytest.raises(WeightDigestError, match="announced was"):
        check_weight_digest(other, weight_digest(first))


def test_one_flipped_bit_changes_the_digest(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "a", LLAMA)
    before, file = weight_digest(folder), folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert weight_digest(folder) != before


def _edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "architecture 'mixtral' has no contract; there is one for llama, qwen3"),
        ({"attention_bias": True}, "attention_bias=True has no contract"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling type 'yarn' has no contract"),
        ({"hidden_size": "absent"}, "config.json has no 'hidden_size'"),
        ({"intermediate_size": 99}, r"'model.layers.0.mlp.gate_proj.weight' is BF16\[224, 160\], the contract needs"),
        ({"num_hidden_layers": 3}, "tensor 'model.layers.2.input_layernorm.weight' is missing"),
    ],
)
def test_a_model_without_a_contract_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = write_tiny_model(tmp_path / "m", LLAMA)
    _edit_config(folder, **changes)
    with pytest.raises(ModelError, match=message) as error:
        Decoder.open(folder, CONTRACT)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 8, 400, -1])
def test_a_weight_file_that_is_cut_off_is_refused(tmp_path: Path, keep: int) -> None:
    file = write_tiny_model(tmp_path / "m", LLAMA) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"empty|cut off|malformed"):
        Decoder.open(file.parent, CONTRACT)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist; expected a Hugging Face model folder"):
        Decoder.open(tmp_path / "nowhere", CONTRACT)


def test_a_prompt_must_leave_a_response(tmp_path: Path) -> None:
    decoder = Decoder.open(write_tiny_model(tmp_path / "m", LLAMA), CONTRACT)
    for cut in (0, 5):
        with pytest.raises(ShapeError, match=f"prompt_len {cut} must be at least 1"):
            decoder.logprobs([tokens(1, 5)], [cut])
