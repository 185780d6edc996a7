"""A proven engine stays proven: what changes later ends the next call. With several processes: `test_two_ranks`."""

import pytest
import torch
from vllm.model_executor.models import llama

from rl_kernel.errors import EvidenceError
from rl_kernel.integrations.vllm import layers
from tests.integrations.vllm.requests import prompts, run


def _other_silu(layer, x):
    width = x.shape[-1] // 2
    return torch.nn.functional.silu(x[:, :width]) * x[:, width:]


def test_an_op_that_something_else_serves_from_now_on_ends_the_next_call(make_engine, models, monkeypatch):
    engine = make_engine(models["llama"])
    asked = prompts(3)
    run(engine, asked)
    monkeypatch.setattr(layers.StrictSiluAndMul, "forward", _other_silu)
    with pytest.raises(EvidenceError, match=r"swiglu\.swiglu was called \d+ times, the model implies \d+"):
        run(engine, asked)


def test_a_scoring_call_is_looked_at_too(make_engine, models, monkeypatch):
    engine = make_engine(models["llama"])
    monkeypatch.setattr(layers.StrictSiluAndMul, "forward", _other_silu)
    with pytest.raises(EvidenceError, match=r"swiglu\.swiglu was called 0 times"):
        engine.score((1, 2, 3, 4), 2, 1.0)


def test_a_forward_patched_from_now_on_ends_the_next_call_and_all_after_it(make_engine, models):
    engine = make_engine(models["llama"])
    asked = prompts(3)
    run(engine, asked)

    def patch(worker):
        norm = worker.get_model().model.norm
        theirs = norm.forward
        norm.forward = lambda x, residual: tuple(y * 1.01 for y in theirs(x, residual))

    def mend(worker):
        del worker.get_model().model.norm.forward

    engine._llm.collective_rpc(patch)
    with pytest.raises(EvidenceError, match=r"model\.norm \(.*StrictRMSNorm with a patched forward\) serves rms_norm"):
        run(engine, asked)
    engine._llm.collective_rpc(mend)
    with pytest.raises(EvidenceError, match=r"with a patched forward\) serves rms_norm"):
        run(engine, asked)


def test_tokens_that_no_pass_computed_end_the_call(make_engine, models, monkeypatch):
    engine = make_engine(models["llama"])
    monkeypatch.setattr(
        llama.LlamaForCausalLM,
        "forward",
        lambda self, input_ids, *_, **__: torch.ones(len(input_ids), self.config.hidden_size, dtype=torch.bfloat16),
    )
    with pytest.raises(EvidenceError, match=r"was called 0 times, the model implies"):
        run(engine, prompts(1))
