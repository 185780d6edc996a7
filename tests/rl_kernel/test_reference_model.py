"""The reference decoder: what it refuses, and that its numbers depend on nothing but the sequence."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from rl_kernel.compare import compare_bits
from rl_kernel.contracts import model_contract
from rl_kernel.errors import ModelError, ShapeError, WeightDigestError
from rl_kernel.reference.config import DecoderConfig
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.weights import check_weight_digest, map_weights, weight_digest
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
        ({"intermediate_size": 99}, r"'model.layers.0.mlp.gate_proj.weight' is BF16\[224, 160\], the model needs"),
        ({"model_type": ["llama"]}, r"architecture \['llama'\] has no contract"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"it must be \['LlamaForCausalLM'\]"),
        ({"vocab_size": None}, f"config.json: vocab_size=None must be a whole number from 1 to {2**31 - 1}"),
        ({"num_attention_heads": "4"}, "num_attention_heads='4' must be a whole number"),
        ({"num_attention_heads": True}, "num_attention_heads=True must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole number from 1"),
        ({"num_hidden_layers": 2.0}, r"num_hidden_layers=2\.0 must be a whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"head_dim": 33}, "head_dim=33 has no contract; .* must be even"),
        ({"head_dim": None, "hidden_size": 3}, "head_dim=0 has no contract"),
        (
            {"max_position_embeddings": 2**40},
            f"max_position_embeddings={2**40} must be a whole number from 1 to {2**22}",
        ),
        ({"rope_theta": "a"}, "rope_theta='a' must be a number above 0"),
        ({"rope_theta": 0}, "rope_theta=0 must be a number above 0"),
        ({"rope_theta": -1.0}, r"rope_theta=-1\.0 must be a number above 0"),
        ({"rope_theta": 10**400}, "rope_theta=1000.* must be a number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta=inf must be a number above 0"),
        ({"rope_theta": None}, "config.json has no 'rope_theta'"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta contradicts itself: 10000 in the config, 5 in rope_par"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            r"partial_rotary_factor=0\.5 has no contract; it must be 1",
        ),
        ({"rope_parameters": {"mrope_section": [1]}}, "rope_parameters has 'mrope_section', which has no contract"),
        (
            {"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": {"type": "default"}},
            "rope_parameters type 'yarn'",
        ),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\] must be an object, or null"),
        ({"rope_scaling": {"rope_type": "default", "type": "yarn"}}, "rope_scaling type 'yarn' has no contract"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5 has no contract; it must be 1"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "it must be 'full_attention' for each of the 2 layers",
        ),
        ({"layer_types": ["full_attention"]}, "it must be 'full_attention' for each of the 2 layers"),
        ({"sliding_window": 64}, "sliding_window=64 has no contract; it must be None"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window=True has no contract"),
        ({"qkv_bias": True}, "qkv_bias=True has no contract; it must be False"),
        ({"bias": True}, "bias=True has no contract; it must be False"),
        ({"is_causal": False}, "is_causal=False has no contract; it must be True"),
        (
            {"dual_chunk_attention_config": {"chunk_size": 8}},
            "dual_chunk_attention_config={'chunk_size': 8} has no cont",
        ),
        ({"logit_scale": 0.5}, r"logit_scale=0\.5 has no contract; it must be 1"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x' must be a number above 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a number above 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or false"),
        ({"hidden_act": "x" * 9999}, "hidden_act='xxx.* has no contract; it must be 'silu'"),
        ({"num_hidden_layers": 3}, "tensor 'model.layers.2.input_layernorm.weight' is missing"),
        ({"num_hidden_layers": 1}, r"tensor 'model\.layers\.1\..*' is not of the llama decoder of 1 layers"),
        ({"tie_word_embeddings": True}, "'lm_head.weight' is not the embedding, but tie_word_embeddings is true"),
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
    assert len(str(error.value)) < 300 + len(str(folder))


@pytest.mark.parametrize("kinds", [None, ["full_attention"]])
def test_a_config_of_very_many_layers_costs_no_memory(tmp_path: Path, kinds: list[str] | None) -> None:
    folder = write_tiny_model(tmp_path / "m", LLAMA)
    _edit_config(folder, num_hidden_layers=300_000, **({"layer_types": kinds} if kinds else {}))
    tracemalloc.start()
    with pytest.raises(ModelError, match="300000 layers" if kinds else r"'model\.layers\.2\..*' is missing"):
        Decoder.open(folder, CONTRACT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20, "bytes; a name or a kind for each layer would be more"


def test_what_a_later_transformers_writes_of_the_same_decoder_changes_nothing(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", LLAMA)
    before = DecoderConfig.read(folder)
    rope = {"rope_theta": LLAMA.rope_theta, "rope_type": "default", "partial_rotary_factor": 1.0}
    same = {"rope_theta": "absent", "rope_parameters": rope, "layer_types": ["full_attention"] * 2}
    same |= {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}  # as Qwen3's is written
    _edit_config(folder, **same, num_key_value_heads=LLAMA.kv_heads, rope_scaling=None, architectures="absent")
    assert DecoderConfig.read(folder) == before
    _edit_config(folder, rope_theta=LLAMA.rope_theta, rms_norm_eps=LLAMA.eps, rope_scaling={})
    assert DecoderConfig.read(folder) == before


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"vocab_size": ' + "1" * 5000 + "}"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (write_tiny_model(tmp_path / "m", LLAMA) / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"m/config\.json (is not readable JSON|must hold a JSON object)"):
        DecoderConfig.read(tmp_path / "m")


@pytest.mark.parametrize("keep", [0, 5, 8, 400, -1])
def test_a_weight_file_that_is_cut_off_is_refused(tmp_path: Path, keep: int) -> None:
    file = write_tiny_model(tmp_path / "m", LLAMA) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"empty|cut off|malformed"):
        Decoder.open(file.parent, CONTRACT)


def _write_tensors(file: Path, header: object, size: int) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))


def _entry(first: object, last: object, *shape: object) -> dict[str, object]:
    return {"dtype": "BF16", "shape": list(shape), "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": _entry(0, 8, 4), "b": _entry(4, 12, 4)}, 12, "tensor 'b' begins at byte 4, inside tensor 'a'"),
        ({"a": _entry(0, 8, 4), "b": _entry(0, 8, 4)}, 8, "tensor 'b' begins at byte 0, inside tensor 'a'"),
        ({"a": _entry(0, 8, 4), "b": _entry(10, 18, 4)}, 18, "bytes 8 to 10, before tensor 'b', are of no tensor"),
        ({"a": _entry(0, 8, 4)}, 11, "3 bytes after the last tensor are of no tensor"),
        ({"a": _entry(0, 8, -2, -2)}, 8, "malformed at tensor 'a': its shape and offsets must be whole numbers from 0"),
        ({"a": _entry(0, 8, "4")}, 8, "malformed at tensor 'a': its shape and offsets must be whole numbers from 0"),
        ({"a": _entry(0, 0, 2**32, 2**32)}, 0, "malformed at tensor 'a'"),
        ({"a": _entry(0, 8, 5)}, 8, "cut off or malformed at tensor 'a'"),
        ('{"a": 1, "a": 2}', 0, "malformed safetensors header: 'a' is there twice"),
        ("[" * 100_000, 0, "malformed safetensors header"),
        ("[]", 0, "malformed safetensors header"),
    ],
)
def test_a_weight_file_with_bytes_of_two_tensors_or_of_none_is_refused(
    tmp_path: Path, header: object, size: int, message: str
) -> None:
    _write_tensors(tmp_path / "model.safetensors", header, size)
    with pytest.raises(ModelError, match=message) as error:
        map_weights(tmp_path)
    assert "\n" not in str(error.value)


def test_a_tensor_without_elements_lies_between_two_others(tmp_path: Path) -> None:
    _write_tensors(
        tmp_path / "model.safetensors", {"b": _entry(8, 16, 4), "none": _entry(8, 8, 0), "a": _entry(0, 8, 4)}, 16
    )
    assert sorted(map_weights(tmp_path)) == ["a", "b", "none"]


def test_a_weight_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: Is a directory"):
        map_weights(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist; expected a Hugging Face model folder"):
        Decoder.open(tmp_path / "nowhere", CONTRACT)


@pytest.mark.parametrize(
    ("tokens", "cuts", "temperature", "said"),
    [
        ([[1, 2, 3]], [1], 0.0, "temperature is 0.0"),
        ([[1, 2, 3]], [1], float("nan"), "temperature is nan"),
        ([[1, 2, 3]], [1, 1], 1.0, "1 sequences have 2 prompt lengths"),
        ([[1, 2, LLAMA.vocab]], [1], 1.0, "token ids lie in 1.."),
        ([[1, 2, -1]], [1], 1.0, "token ids lie in -1..2"),
        ([[1.0, 2.0]], [1], 1.0, r"tokens are float64 \[2\]"),
    ],
)
def test_what_has_no_log_probability_is_refused(
    tmp_path: Path, tokens: list[list[int]], cuts: list[int], temperature: float, said: str
) -> None:
    decoder = Decoder.open(write_tiny_model(tmp_path / "m", LLAMA), CONTRACT)
    with pytest.raises(ShapeError, match=said):
        decoder.logprobs([np.array(ids) for ids in tokens], cuts, temperature)


def test_a_prompt_must_leave_a_response(tmp_path: Path) -> None:
    decoder = Decoder.open(write_tiny_model(tmp_path / "m", LLAMA), CONTRACT)
    for cut in (0, 5):
        with pytest.raises(ShapeError, match=f"prompt_len {cut} must be at least 1"):
            decoder.logprobs([tokens(1, 5)], [cut])
