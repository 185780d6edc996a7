"""What has no contract is refused with one line, before vLLM is started where that is possible."""

import json

import pytest

from rl_kernel.errors import ModelError, PlanError, ShapeError
from rl_kernel.integrations.vllm import engine_arguments, register
from services.records import Sampling
from tests.models import LLAMA, write_tiny_model

# What vLLM itself needs for a tiny model without a tokenizer.
PLAIN = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**24, "max_model_len": 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True has no contract"),
        ({"mlp_bias": True}, "mlp_bias=True has no contract"),
        ({"use_sliding_window": True}, "use_sliding_window=True has no contract"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' has no contract"),
        ({"model_type": "gemma2"}, "architecture 'gemma2' has no contract"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.* has no contract"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling type 'yarn' has no contract"),
    ],
)
def test_a_model_without_a_contract_is_refused(make_engine, tmp_path, change, message):
    folder = write_tiny_model(tmp_path / "model", LLAMA)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message) as caught:
        make_engine(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 3, "segments": 1}, "tp_size 3 does not divide the model's 4 attention heads"),
        ({"tp_size": 4, "segments": 4}, "tp_size 4 does not divide the model's 2 kv heads"),
        ({"tp_size": 2, "segments": 1}, "tp_size 2 does not divide segments 1"),
        ({"segments": 64}, "segments 64 does not divide the model's MLP width 224"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(make_engine, models, options, message):
    with pytest.raises(ModelError, match=message):
        make_engine(models["llama"], **options)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"enable_lora": True}, "LoRA = .* has no contract"),
        ({"kv_cache_dtype": "fp8"}, "KV cache dtype = 'fp8' has no contract"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode = 'raw_logprobs' has no contract"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds = True has no contract"),
        ({"hf_overrides": {"rms_norm_eps": 0.1}}, "hf_overrides = {'rms_norm_eps': 0.1} has no contract"),
        ({"logits_processors": None}, r"logits_processors = None has no contract; strict mode needs \['rl_kernel\."),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            "speculative decoding = .* has no contract",
        ),
    ],
)
def test_a_vllm_feature_without_a_contract_is_refused(models, monkeypatch, argument, message):
    from vllm import LLM

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    register()
    arguments = PLAIN | engine_arguments() | argument
    with pytest.raises(PlanError, match=message):
        LLM(str(models["llama"]), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"attention_bias": True}, "attention_bias=True has no contract"), ({"rope_theta": None}, "has no 'rope_theta'")],
)
def test_a_plain_vllm_refuses_a_model_without_a_contract_too(tmp_path, monkeypatch, change, message):
    from vllm import LLM

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    register()
    folder = write_tiny_model(tmp_path / "model", LLAMA)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        LLM(str(folder), **PLAIN, **engine_arguments())


@pytest.mark.parametrize(
    ("change", "message"),
    [({}, ""), ({"attention_bias": True}, "the config of org/tiny: attention_bias=True has no contract")],
)
def test_a_model_from_a_hub_is_held_to_the_config_that_vllm_has_read_of_it(tmp_path, change, message):
    from vllm.engine.arg_utils import EngineArgs

    from rl_kernel.integrations.vllm.build import check_engine

    register()
    folder = write_tiny_model(tmp_path / "model", LLAMA)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    config = EngineArgs(str(folder), **PLAIN, **engine_arguments()).create_engine_config()
    config.model_config.model = "org/tiny"  # no folder of this machine
    if not message:
        check_engine(config)
    else:
        with pytest.raises(ModelError, match=message):
            check_engine(config)


def test_a_bad_request_is_that_requests_error_and_the_engine_goes_on(models, monkeypatch):
    """From the sampler the same refusal would end the engine, and in one process the next call would never return."""
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    register()
    engine = LLM(str(models["llama"]), **PLAIN, **engine_arguments())

    def ask(**more):
        params = SamplingParams(seed=1, max_tokens=2, logprobs=0, detokenize=False, **more)
        (output,) = engine.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
        return output.outputs[0].token_ids, output.outputs[0].logprobs

    before = ask()
    for bad in ({"top_p": 0.9}, {"prompt_logprobs": 1}, {"repetition_penalty": 1.1}, {"logit_bias": {3: 1.0}}):
        with pytest.raises(VLLMValidationError, match=rf"^{next(iter(bad))} "):
            ask(**bad)
        assert ask() == before


@pytest.mark.parametrize(
    ("prompt", "how", "message"),
    [
        ((), Sampling(1.0, 0, 4), "prompt 0 is empty"),
        ((1,) * 300, Sampling(1.0, 0, 4), "prompt 0 has 300 tokens and asks for 4 more; max_model_len 256"),
        ((331,), Sampling(1.0, 0, 4), "prompt 0 has ids outside the vocabulary of 331"),
        ((1,), Sampling(0.005, 0, 4), "temperature 0.005 is below 0.01, to which vLLM would raise it silently"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(make_engine, models, prompt, how, message):
    engine = make_engine(models["llama"])
    with pytest.raises(ShapeError, match=message):
        engine.generate([prompt], [how])
    assert len(engine.generate([(1, 2)], [Sampling(0.0, 0, 2)])[0].tokens) == 2
