"""Two tensor-parallel ranks, each in a process of its own, on one engine for each model: it takes 15 s to start."""

from collections.abc import Iterator

import pytest
import torch

from rl_kernel.errors import RlKernelError
from rl_kernel.integrations.evidence import Evidence
from rl_kernel.integrations.vllm import layers
from rl_kernel.reference.weights import weight_digest
from services.rollout.engine import EngineOptions, RolloutEngine
from tests.integrations.vllm.requests import prompts, reference_bits, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["llama", "qwen3-tied"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(models, name) -> Iterator[RolloutEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to send the cheat there; strict mode never does
        engine = RolloutEngine(models[name], EngineOptions(segments=2, tp_size=2))
        yield engine
        engine.close()


def test_they_give_the_bits_of_one(make_engine, models, name, ranks):
    asked = prompts(7)
    one = run(make_engine(models[name], segments=2), asked)
    assert run(ranks, asked) == one
    assert [logprobs for _, logprobs in one] == reference_bits(models[name], asked, one, segments=2)


def test_they_confirm_the_digest_of_the_whole(models, name, ranks):
    asked = prompts(5)
    before = run(ranks, asked)
    assert ranks.load(models[f"{name}-1"]) == weight_digest(models[f"{name}-1"])
    after = run(ranks, asked)
    assert [logprobs for _, logprobs in after] == reference_bits(models[f"{name}-1"], asked, after, segments=2)
    ranks.load(models[name])
    assert run(ranks, asked) == before


def test_the_one_that_cheats_is_named(ranks):
    """The last test of an engine: none that has cheated serves anybody again."""
    run(ranks, prompts(1))
    assert [e.rank for e in ranks.evidence()] == [0, 1]
    ranks._llm.collective_rpc(_leave_silu_to_torch)
    with pytest.raises(RlKernelError, match=r"rank 0: swiglu\.swiglu was called"):
        run(ranks, prompts(1))
    counts = [Evidence.calls(e)["swiglu.swiglu"] for e in ranks.evidence()]
    assert counts[0] == counts[1]


def _leave_silu_to_torch(worker):
    """Runs in the worker's own process."""
    layers.StrictSiluAndMul.forward = _other_silu


def _other_silu(layer, x):
    width = x.shape[-1] // 2
    return torch.nn.functional.silu(x[:, :width]) * x[:, width:]
