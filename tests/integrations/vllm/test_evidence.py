"""The engine refuses to start when anything but the plan serves an op: hook by hook, and by counts and bits."""

from functools import partial

import pytest
import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models.llama import LlamaAttention
from vllm.v1.sample.sampler import Sampler

from rl_kernel.errors import EvidenceError, PlanError
from rl_kernel.integrations.vllm import (
    QUANTIZATION,
    engine_arguments,
    hooks,
    layers,
    quantization,
    register,
    sampler,
    worker,
)
from rl_kernel.ops.attention import cpu as attention
from rl_kernel.ops.gemm import cpu as gemm
from rl_kernel.ops.rope import cpu as rope
from tests.integrations.vllm.requests import prompts, run


@pytest.mark.parametrize(
    ("hook", "op"),
    [
        ("RMSNorm", "rms_norm"),
        ("SiluAndMul", "swiglu"),
        ("RotaryEmbedding", "rope"),
        ("RowParallelLinear", "gemm"),
        ("VocabParallelEmbedding", "embedding"),
    ],
)
def test_a_layer_left_to_vllm_is_refused(make_engine, models, monkeypatch, hook, op):
    monkeypatch.delitem(hooks.LAYERS, hook)
    with pytest.raises(EvidenceError, match=f"{hook}.* serves {op}.*; strict mode needs every op served by the plan"):
        make_engine(models["llama"])


def test_attention_left_to_vllm_is_refused(make_engine, models, monkeypatch):
    monkeypatch.setattr(hooks, "ATTENTION", {})
    with pytest.raises(EvidenceError, match=r"CPUAttentionBackendImpl\) serves attention"):
        make_engine(models["llama"])


def test_linears_left_to_vllm_are_refused(make_engine, models, monkeypatch):
    monkeypatch.setattr(quantization, "StrictLinearMethod", lambda *_, **__: UnquantizedLinearMethod())
    with pytest.raises(EvidenceError, match=r"UnquantizedLinearMethod\) serves gemm"):
        make_engine(models["llama"])


def test_a_sampler_left_to_vllm_is_refused(make_engine, models, monkeypatch):
    monkeypatch.setattr(worker, "StrictSampler", lambda *_: Sampler("processed_logprobs"))
    with pytest.raises(EvidenceError, match=r"the sampler .* serves linear_logp"):
        make_engine(models["llama"])


def test_a_patched_forward_is_refused(make_engine, models, monkeypatch):
    def build(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.forward = lambda *a, **k: type(self).forward(self, *a, **k)

    original = LlamaAttention.__init__
    monkeypatch.setattr(LlamaAttention, "__init__", build)
    with pytest.raises(EvidenceError, match="LlamaAttention with a patched forward"):
        make_engine(models["llama"])


def test_an_op_that_was_not_called_often_enough_is_refused(make_engine, models, monkeypatch):
    """A strict layer in the right place that computes by other means leaves a hole in the counts."""
    monkeypatch.setattr(
        layers.StrictSiluAndMul, "forward", lambda self, x: torch.nn.functional.silu(x[:, :224]) * x[:, 224:]
    )
    with pytest.raises(EvidenceError, match=r"swiglu\.swiglu was called 0 times, the model implies 24"):
        make_engine(models["llama"])


def test_a_backend_with_other_bits_is_refused(make_engine, models, monkeypatch):
    original = sampler.StrictSampler._logprobs

    def off_by_one_ulp(self, *args):
        found = original(self, *args)
        return found._replace(logprobs=found.logprobs.nextafter(torch.tensor(0.0)))

    monkeypatch.setattr(sampler.StrictSampler, "_logprobs", off_by_one_ulp)
    with pytest.raises(EvidenceError, match="12 of 12 logprobs differ from the reference decoder's"):
        make_engine(models["llama"])


@pytest.mark.parametrize(
    ("backend", "function", "other"),
    [
        (gemm, "gemm", lambda true, x, w, **how: true(x, w, **(how | {"segments": 2}))),
        (attention, "paged_attention", lambda true, *args: true(*args) * (1.0 if args[5].max() <= 64 else 1.01)),
        (rope, "rope", lambda true, x, cos, sin, at: true(x, cos, sin, at.clamp(max=63))),
    ],
)
def test_a_backend_that_cuts_a_sum_or_is_wrong_past_a_block_is_refused(
    make_engine, models, monkeypatch, backend, function, other
):
    monkeypatch.setattr(backend, function, partial(other, getattr(backend, function)))
    with pytest.raises(EvidenceError, match=r"\d+ of 12 logprobs differ from the reference decoder's"):
        make_engine(models["llama"])


def test_evidence_counts_every_op_of_every_step(make_engine, models):
    engine = make_engine(models["qwen3"], prefix_caching=False)
    run(engine, prompts(3), new_tokens=5)
    evidence = engine.evidence()[0]
    steps, depth = 5, 2
    assert evidence.calls() == {
        "embedding.embedding": steps,
        "gemm.gemm": (4 * depth + 1) * steps,
        "rms_norm.rms_norm": (1 + 2 * depth) * steps,
        "rms_norm.add_rms_norm": 2 * depth * steps,
        "rope.rope": 2 * depth * steps,
        "swiglu.swiglu": depth * steps,
        "attention.paged_attention": depth * steps,
        "linear_logp.logp_from_logits": steps,
    }
    assert evidence.contract == engine.facts().contract_digest
    assert all(op.fallbacks == 0 for op in evidence.ops)


def test_a_strict_engine_leaves_nothing_behind_for_a_native_one(make_engine, models):
    asked = prompts(7)
    before = run(make_engine(models["llama"], numerics="native"), asked)
    strict = run(make_engine(models["llama"]), asked)
    assert op_registry_oot.keys().isdisjoint(hooks.LAYERS)
    assert run(make_engine(models["llama"], numerics="native"), asked) == before
    assert strict != before


def test_a_plain_vllm_engine_refuses_by_itself(models, monkeypatch):
    from vllm import LLM

    register()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.delitem(hooks.LAYERS, "SiluAndMul")
    with pytest.raises(EvidenceError, match=r"SiluAndMul\) serves swiglu and 1 more"):
        LLM(str(models["llama"]), skip_tokenizer_init=True, kv_cache_memory_bytes=2**24, max_model_len=64,
            **engine_arguments())  # fmt: skip


@pytest.mark.parametrize("plugins", ["", "lora_filesystem_resolver"])
def test_a_vllm_that_would_not_load_the_plugin_is_refused(make_engine, models, monkeypatch, plugins):
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    with pytest.raises(EvidenceError, match=r"vLLM would not load rl_kernel: VLLM_PLUGINS='.*' does not name it"):
        make_engine(models["llama"])


def test_half_of_strict_mode_is_refused(models, monkeypatch):
    from vllm import LLM

    register()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(PlanError, match="is only the linear part of strict mode"):
        LLM(str(models["llama"]), quantization=QUANTIZATION, skip_tokenizer_init=True, enforce_eager=True,
            dtype="bfloat16", kv_cache_memory_bytes=2**24, max_model_len=64)  # fmt: skip
