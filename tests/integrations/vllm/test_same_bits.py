"""Strict vLLM gives one sequence the same bits whatever runs beside it and however it is cut; native vLLM does not."""

import numpy as np
import pytest
import torch

from tests.integrations.vllm.requests import TEMPERATURE, cached_tokens, prompts, reference_bits, run, sampling
from tests.models import TINY_MODELS

EVERY_MODEL = pytest.mark.parametrize("name", sorted(TINY_MODELS))


@EVERY_MODEL
def test_alone_among_7_or_among_64_a_sequence_has_the_reference_decoders_bits(make_engine, models, name):
    engine = make_engine(models[name], max_num_seqs=64, prefix_caching=False)
    asked = prompts(64, longest=40)
    among_64 = run(engine, asked, new_tokens=4)
    assert [logprobs for _, logprobs in among_64] == reference_bits(models[name], asked, among_64)
    assert run(engine, asked[:7], new_tokens=4) == among_64[:7]
    assert run(engine, asked[:1], new_tokens=4) == among_64[:1]


@pytest.mark.parametrize(
    ("name", "prefix_caching"), [("llama", False), ("llama", True), ("llama-tied", True), ("qwen3", True)]
)
def test_decoded_logprobs_are_those_of_a_prefill(make_engine, models, name, prefix_caching):
    engine = make_engine(models[name], prefix_caching=prefix_caching, block_size=16)
    asked = prompts(3)
    for prompt, response in zip(asked, engine.generate(asked, sampling(3)), strict=True):
        prefilled = engine.score(prompt + response.tokens, len(prompt), TEMPERATURE)
        assert prefilled.tobytes() == response.logprobs.tobytes()


@EVERY_MODEL
def test_a_prompt_in_chunks_has_the_reference_decoders_bits(make_engine, models, name):
    engine = make_engine(models[name], prefix_caching=False, max_num_batched_tokens=33)
    asked = prompts(5, longest=200, seed=3)
    responses = run(engine, asked)
    assert engine.evidence()[0].calls()["embedding.embedding"] > 6, "nothing was cut"
    assert [logprobs for _, logprobs in responses] == reference_bits(models[name], asked, responses)


def test_chunks_do_not_change_what_a_seed_draws(make_engine, models):
    asked = prompts(5, longest=200, seed=3)
    whole = run(make_engine(models["llama"], prefix_caching=False), asked)
    assert run(make_engine(models["llama"], prefix_caching=False, max_num_batched_tokens=33), asked) == whole


@EVERY_MODEL
def test_a_cached_prefix_changes_no_bit(make_engine, models, name):
    engine = make_engine(models[name], block_size=16)
    shared = prompts(1, longest=90, seed=5)[0] + prompts(1, seed=6)[0]
    asked = [shared + tail for tail in prompts(4, longest=9, seed=7)]
    cold = run(engine, asked)
    assert min(cached_tokens(engine, asked)) >= 16, "nothing was found in the cache"
    assert run(engine, asked) == cold
    assert [logprobs for _, logprobs in cold] == reference_bits(models[name], asked, cold)


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_the_size_of_a_cache_block_changes_no_bit(make_engine, models, block_size):
    asked = prompts(4, longest=200)
    assert run(make_engine(models["qwen3"], block_size=block_size), asked) == run(make_engine(models["qwen3"]), asked)


def test_a_sequence_that_was_preempted_has_the_bits_of_one_that_was_not(make_engine, models):
    """With room for a third of the tokens, vLLM drops sequences half-way and computes them again as prompts."""
    asked = prompts(32)
    roomy = run(make_engine(models["llama"]), asked, new_tokens=60)
    tight = make_engine(models["llama"], kv_cache_mb=1, prefix_caching=False)
    assert run(tight, asked, new_tokens=60) == roomy
    steps = tight.evidence()[0].calls()["embedding.embedding"]
    assert steps > 60, "nothing was preempted"


def test_the_top_logprobs_are_by_contract_too(make_engine, models):
    from vllm import SamplingParams

    engine, prompt = make_engine(models["qwen3"]), prompts(1)[0]
    asked = SamplingParams(temperature=TEMPERATURE, seed=0, max_tokens=1, logprobs=5, detokenize=False)
    (top,) = engine._run([prompt], [asked])[0].logprobs
    assert len(top) >= 5
    for token, found in top.items():
        scored = engine.score((*prompt, token), len(prompt), TEMPERATURE)
        assert np.float32(found.logprob).tobytes() == scored.tobytes()


def test_one_and_two_threads_give_the_same_bits(make_engine, models):
    asked = prompts(7)
    alone = make_engine(models["llama"], threads=1)
    one, threads = run(alone, asked), alone._llm.collective_rpc(_threads)
    pair = make_engine(models["llama"], threads=2)
    assert run(pair, asked) == one
    assert (threads, pair._llm.collective_rpc(_threads)) == ([1], [2])


def _threads(worker):
    return torch.get_num_threads()


def test_native_vllm_changes_bits_with_the_batch(make_engine, models):
    """The control: the comparison above can fail."""
    engine = make_engine(models["llama"], numerics="native", max_num_seqs=64, prefix_caching=False)
    asked = prompts(64, longest=40)
    assert [run(engine, [prompt], new_tokens=4)[0] for prompt in asked] != run(engine, asked, new_tokens=4)
