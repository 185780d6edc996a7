"""A strict GPTModel computes what the contract says, whatever it is batched with, forward and backward."""

import numpy as np
import pytest
import torch

from rl_kernel.contracts import model_contract
from rl_kernel.integrations.megatron.packing import Tokens
from rl_kernel.ops import strict_plan
from rl_kernel.reference.model import Decoder
from tests.integrations.megatron.cases import TEMPERATURE, build, differing, forward_backward, samples, score
from tests.integrations.megatron.reference_backend import reference_plan
from tests.models import TINY_MODELS


def strict(folder, tp, segments=1):
    return build(folder, strict_plan(model_contract(segments=segments), "cpu"), tp)


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_logprobs_have_the_bits_of_the_reference_decoder(name, segments, folders, tp):
    tokens = samples(TINY_MODELS[name].vocab)
    found = score(strict(folders[name], tp, segments), tokens)
    law = Decoder.open(folders[name], model_contract(segments=segments)).logprobs(
        [np.array(t.prompt + t.response) for t in tokens], [len(t.prompt) for t in tokens], TEMPERATURE
    )
    assert np.array_equal(found.view(np.uint32), np.concatenate(law).view(np.uint32))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_training_forward_and_every_gradient_have_the_bits_of_the_reference_ops(name, folders, tp):
    tokens = samples(TINY_MODELS[name].vocab)
    found = forward_backward(strict(folders[name], tp, 2), tokens)
    law = forward_backward(build(folders[name], reference_plan(model_contract(segments=2)), tp), tokens)
    assert np.array_equal(found[0].view(np.uint32), law[0].view(np.uint32))
    assert differing(found[1], law[1]) == []
    assert all(np.isfinite(g).all() and g.any() for g in found[1].values())


def test_scoring_and_the_training_forward_agree_to_the_bit(folders, tp):
    model = strict(folders["qwen3"], tp)
    tokens = samples(331)
    assert np.array_equal(score(model, tokens).view(np.uint32), forward_backward(model, tokens)[0].view(np.uint32))


def test_scoring_keeps_no_graph(folders, tp, monkeypatch):
    model, seen = strict(folders["llama-tied"], tp), []
    ops = model.module.decoder.layers[1].mlp.linear_fc2.ops
    before = ops.row_linear
    monkeypatch.setattr(ops, "row_linear", lambda x, w: seen.append(x.requires_grad) or before(x, w))
    score(model, samples(331))
    assert seen
    assert not any(seen)


def test_a_samples_logprobs_do_not_depend_on_its_company(folders, tp):
    model = strict(folders["qwen3-tied"], tp)
    tokens = samples(331)
    together = np.split(score(model, tokens), np.cumsum([len(t.response) for t in tokens])[:-1])
    alone = [score(model, [t]) for t in tokens]
    backwards = np.split(score(model, tokens[::-1]), np.cumsum([len(t.response) for t in tokens[::-1]])[:-1])[::-1]
    for a, b, c in zip(together, alone, backwards, strict=True):
        assert np.array_equal(a.view(np.uint32), b.view(np.uint32))
        assert np.array_equal(a.view(np.uint32), c.view(np.uint32))


def test_a_sample_longer_than_a_partial_of_keys_has_the_reference_decoders_bits(folders, tp):
    tokens = np.random.default_rng(8).integers(0, 331, 1100).tolist()
    found = score(strict(folders["llama"], tp), [Tokens(tuple(tokens[:1000]), tuple(tokens[1000:]))])
    law = Decoder.open(folders["llama"], model_contract()).logprobs([np.array(tokens)], [1000], TEMPERATURE)[0]
    assert np.array_equal(found.view(np.uint32), law.view(np.uint32))


@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_gradients_do_not_depend_on_the_cut_into_micro_batches(name, folders, tp):
    model = strict(folders[name], tp, 2)
    tokens = samples(331)
    whole = forward_backward(model, tokens)
    for cuts in ([1], [2, 3], [1, 2, 3]):
        assert differing(whole[1], forward_backward(model, tokens, cuts)[1]) == []


def test_gradients_depend_on_the_order_of_samples(folders, tp):
    # The order is part of the contract, so this shows that the test above could fail.
    model = strict(folders["llama"], tp)
    tokens = samples(331)
    assert differing(forward_backward(model, tokens)[1], forward_backward(model, tokens[::-1])[1]) != []


def test_one_thread_and_two_give_the_same_bits(folders, tp):
    model = strict(folders["qwen3"], tp)
    tokens, threads = samples(331), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = forward_backward(model, tokens)
        torch.set_num_threads(2)
        two = forward_backward(model, tokens)
    finally:
        torch.set_num_threads(threads)
    assert np.array_equal(one[0].view(np.uint32), two[0].view(np.uint32))
    assert differing(one[1], two[1]) == []
