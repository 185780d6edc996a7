"""A strict engine under torch.compile: the same operators, counts and bits; what a compiler replaces is refused."""

import pytest
import torch
from vllm import LLM, SamplingParams

from rl_kernel.errors import EvidenceError
from rl_kernel.integrations.evidence import Evidence
from rl_kernel.integrations.vllm import engine_arguments, layers, register
from rl_kernel.reference.weights import weight_digest
from tests.integrations.vllm.requests import TEMPERATURE, prompts, reference_bits


@pytest.fixture
def compiled(monkeypatch, models):
    """Build engines whose model vLLM compiles; `backend` does not change what dynamo must understand."""
    engines = []

    def make(name: str, backend: str = "eager", tp_size: int = 1) -> LLM:
        from vllm import envs

        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if tp_size == 1 else "1")
        if tp_size > 1:
            monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(["0"] * tp_size))
        monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
        monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # no warm-up: vLLM would sample with top_p, which is refused
        monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
        envs.disable_envs_cache()
        register()
        arguments = engine_arguments(segments=tp_size) | {
            "enforce_eager": False,
            "compilation_config": {"backend": backend},
            "tensor_parallel_size": tp_size,
            "distributed_executor_backend": "mp" if tp_size > 1 else None,
        }
        engines.append(
            LLM(
                str(models[name]),
                skip_tokenizer_init=True,
                kv_cache_memory_bytes=2**26,
                max_model_len=256,
                generation_config="vllm",
                **arguments,
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.llm_engine.engine_core.shutdown()
    torch._dynamo.reset()


def generate(engine: LLM, asked, new_tokens: int = 6):  # type: ignore[no-untyped-def]
    how = [
        SamplingParams(temperature=TEMPERATURE, seed=i, max_tokens=new_tokens, ignore_eos=True, logprobs=0,
                       flat_logprobs=True, detokenize=False)
        for i in range(len(asked))
    ]  # fmt: skip
    found = engine.generate([{"prompt_token_ids": list(p)} for p in asked], how, use_tqdm=False)
    answers = [output.outputs[0] for output in found]
    return [
        (tuple(a.token_ids), b"".join(_bits(a.logprobs.logprobs[i]) for i in a.logprobs.start_indices)) for a in answers
    ]


def _bits(logprob: float) -> bytes:
    return torch.tensor(logprob, dtype=torch.float32).numpy().tobytes()


@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_a_compiled_engine_has_the_reference_decoders_bits_and_counts_every_op(compiled, models, name):
    engine, asked = compiled(name), prompts(5)
    generate(engine, asked)
    assert engine.llm_engine.model_executor.driver_worker.worker.get_model().model.compiled
    engine.reset_prefix_cache()
    engine.collective_rpc("reset_evidence")
    responses = generate(engine, asked)
    assert [logprobs for _, logprobs in responses] == reference_bits(models[name], asked, responses)
    evidence = Evidence.of(engine.collective_rpc("evidence")[0])
    evidence.require(engine.collective_rpc("expected_evidence", args=(6,))[0])


@pytest.mark.slow
def test_two_compiled_ranks_have_the_reference_decoders_bits_and_count_every_op(compiled, models):
    engine, asked = compiled("qwen3-tied", tp_size=2), prompts(5)
    responses = generate(engine, asked)
    assert [logprobs for _, logprobs in responses] == reference_bits(models["qwen3-tied"], asked, responses, segments=2)
    assert list(engine.collective_rpc("confirm_weights")[0]) == [weight_digest(models["qwen3-tied"]), None]
    engine.reset_prefix_cache()
    engine.collective_rpc("reset_evidence")
    generate(engine, asked)
    seen = [Evidence.of(fields) for fields in engine.collective_rpc("evidence")]
    passes = seen[0].calls()["embedding.embedding"]  # the engine's own process may begin before it has all prompts
    expected = engine.collective_rpc("expected_evidence", args=(passes,))
    for evidence, wanted in zip(seen, expected, strict=True):
        evidence.require(wanted)


def test_an_op_that_a_layer_computes_by_other_means_is_refused_after_compilation_too(compiled, monkeypatch):
    monkeypatch.setattr(
        layers.StrictSiluAndMul, "forward", lambda self, x: torch.nn.functional.silu(x[:, :224]) * x[:, 224:]
    )
    engine, asked = compiled("llama"), prompts(3)
    engine.collective_rpc("reset_evidence")
    generate(engine, asked, new_tokens=4)
    evidence = Evidence.of(engine.collective_rpc("evidence")[0])
    with pytest.raises(EvidenceError, match=r"swiglu\.swiglu was called 0 times, the model implies 8"):
        evidence.require(engine.collective_rpc("expected_evidence", args=(4,))[0])
