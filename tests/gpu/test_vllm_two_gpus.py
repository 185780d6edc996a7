"""vLLM cut over two GPUs, compiled and in CUDA graphs: the bits of one GPU and of the reference decoder."""

import pytest
import torch

from rl_kernel.reference.weights import weight_digest
from tests.gpu.engines import NEW_TOKENS, needs, prompts, reference, run_engine
from tests.models import TINY_MODELS, write_tiny_model

pytestmark = [pytest.mark.gpu, needs("vllm"), pytest.mark.xdist_group("two gpus")]


@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_two_gpus_give_the_bits_of_one_and_of_the_reference_decoder(name, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; here {torch.cuda.device_count()}")
    folder = write_tiny_model(tmp_path / name, TINY_MODELS[name])
    asked = prompts(331)
    jobs = [
        ["loaded", "confirm", {}],
        ["batch", "generate", {"prompts": asked, "new_tokens": NEW_TOKENS}],
        ["again", "generate", {"prompts": asked, "new_tokens": NEW_TOKENS}],
        ["proof", "proof", {"prompts": [p[:40] for p in asked[:5]], "steps": 7}],
    ]
    two, one = (run_engine(folder, jobs, segments=2, tp=tp) for tp in (2, 1))
    assert "error" not in two, two["error"]
    assert two["batch"] == two["again"] == one["batch"]
    assert two["loaded"] == [weight_digest(folder), None]
    answers = [ids for ids, _ in two["batch"]]
    assert [logprobs for _, logprobs in two["batch"]] == reference(folder, asked, answers, segments=2)
    calls, layers = two["proof"], 2
    assert calls["tree_all_reduce.tree_all_reduce"] == (2 * layers + 1) * calls["embedding.embedding"] > 0
