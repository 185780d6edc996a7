"""vLLM cut over two GPUs, compiled and in CUDA graphs: the bits of one GPU, of Megatron on two and of the reference."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl_kernel.contracts import model_contract
from rl_kernel.ops import strict_plan
from rl_kernel.reference.weights import weight_digest
from tests.gpu.engines import CAPTURE, NEW_TOKENS, needs, prompts, reference, run_engine
from tests.models import TINY_MODELS, write_tiny_model

pytestmark = [pytest.mark.gpu, needs("vllm", "megatron.core"), pytest.mark.xdist_group("two gpus")]
SEGMENTS = 2


def megatron_scores(rank, rendezvous, folder, asked, answers):
    """Logprobs of all answers, as hexadecimal bytes, by Megatron-core on two GPUs."""
    from rl_kernel.integrations.megatron.packing import Tokens
    from rl_kernel.integrations.megatron.parallel import join_tensor_parallel
    from tests.integrations.megatron.cases import build, score

    tp = join_tensor_parallel(2, rank, rendezvous, device="cuda")
    model = build(folder, strict_plan(model_contract("sm90", segments=SEGMENTS), "cuda"), tp)
    samples = [Tokens(tuple(p), tuple(response)) for p, response in zip(asked, answers, strict=True)]
    return score(model, samples).tobytes().hex()


@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_two_gpus_give_the_bits_of_one_of_megatron_and_of_the_reference_decoder(name, tmp_path):
    from tests.integrations.megatron.ranks import on_ranks

    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; here {torch.cuda.device_count()}")
    folder, other = (write_tiny_model(tmp_path / f"{name}-{s}", TINY_MODELS[name], seed=s) for s in (0, 1))
    asked = prompts(331)
    jobs = [
        ["facts", "facts", {}],
        ["loaded", "confirm", {}],
        ["batch", "generate", {"prompts": asked, "new_tokens": NEW_TOKENS}],
        ["again", "generate", {"prompts": asked, "new_tokens": NEW_TOKENS}],
        ["prefill", "score", {"prompts": asked[:3], "responses_of": "batch"}],
        ["kernels", "kernels", {}],
        ["proof", "proof", {"prompts": [p[:40] for p in asked[:5]], "steps": 7}],
        ["reloaded", "reload", {"folder": str(other)}],
        ["other", "generate", {"prompts": asked, "new_tokens": NEW_TOKENS}],
    ]
    with ThreadPoolExecutor(2) as both:
        two, one = both.map(lambda tp: run_engine(folder, jobs, segments=SEGMENTS, tp=tp), (2, 1))
    assert "error" not in two, two["error"]
    assert "FULL_AND_PIECEWISE" in two["facts"]["cudagraph_mode"]
    assert two["batch"] == two["again"] == one["batch"]
    assert two["loaded"] == [weight_digest(folder), None]
    assert two["reloaded"] == [weight_digest(other), None]
    answers, logprobs = ([answer[part] for answer in two["batch"]] for part in (0, 1))
    assert logprobs == reference(folder, asked, answers, segments=SEGMENTS)
    assert two["prefill"] == logprobs[:3]
    assert two["other"] == one["other"] != two["batch"]
    calls, layers = two["proof"], 2
    assert sum(graph.get("one_shot_kernel") == 2 * layers + 1 for graph in two["kernels"]) >= len(CAPTURE)
    assert calls["tree_all_reduce.tree_all_reduce"] == (2 * layers + 1) * calls["embedding.embedding"] > 0
    assert on_ranks(2, megatron_scores, folder, asked, answers) == ["".join(logprobs)] * 2
