"""One rank and two: the same bits in the forward, in every gradient, and in the weights that each says it holds."""

from itertools import product

import numpy as np
import pytest

from rl_kernel.contracts import model_contract
from rl_kernel.errors import ContractError, ModelError
from rl_kernel.integrations.megatron.model_shape import strict_layout
from rl_kernel.integrations.megatron.parallel import join_tensor_parallel
from rl_kernel.integrations.megatron.weights import own_digest
from rl_kernel.ops import strict_plan
from rl_kernel.reference.config import DecoderConfig
from rl_kernel.reference.weights import weight_digest
from tests.integrations.megatron.cases import build, differing, forward_backward, samples
from tests.integrations.megatron.ranks import on_ranks
from tests.models import TINY_MODELS

CASES = [*product(TINY_MODELS, [2]), ("qwen3", 4)]


def every_case(rank, rendezvous, folders, tp_size):
    """(model, segments) → logprobs, gradients, digest, as this rank has them."""
    tp = join_tensor_parallel(tp_size, rank, rendezvous)
    found = {}
    for name, segments in CASES:
        model = build(folders[name], strict_plan(model_contract(segments=segments), "cpu"), tp)
        # Cut into micro-batches on two ranks only: that must not matter either.
        logprobs, gradients = forward_backward(model, samples(331), [2] if tp_size > 1 else [])
        found[name, segments] = logprobs, gradients, own_digest(model.layout, model.parameters, tp)
    return found


@pytest.fixture(scope="module")
def one_rank(folders, tp):
    return every_case(0, "", folders, 1)


@pytest.fixture(scope="module")
def two_ranks(folders):
    return on_ranks(2, every_case, folders, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_give_the_logprobs_gradients_and_digest_of_one(rank, case, one_rank, two_ranks, folders):
    one, two = one_rank[case], two_ranks[rank][case]
    assert np.array_equal(one[0].view(np.uint32), two[0].view(np.uint32))
    assert differing(one[1], two[1]) == []
    assert one[2] == two[2] == weight_digest(folders[case[0]])


def test_without_segments_the_sums_would_have_other_bits(one_rank, folders, tp):
    # What the segments are for: the same model and samples on one chain.
    model = build(folders["llama"], strict_plan(model_contract(segments=1), "cpu"), tp)
    logprobs, gradients = forward_backward(model, samples(331))
    assert not np.array_equal(one_rank["llama", 2][0], logprobs)
    assert differing(one_rank["llama", 2][1], gradients) != []


def test_a_process_that_has_joined_one_rank_cannot_be_one_of_two(tp):
    with pytest.raises(ContractError, match="this process is one of 1 ranks; TP 2 needs new processes"):
        join_tensor_parallel(2, 0, "file:///nowhere/rendezvous")


def decoder(folders, name="llama"):
    return DecoderConfig.read(folders[name])


def test_a_tp_size_that_does_not_divide_the_heads_is_refused(folders):
    with pytest.raises(ModelError, match=r"TP 4 does not divide 4 query heads and 2 kv heads; TP sizes that do: 1, 2$"):
        strict_layout(decoder(folders), segments=4, vocab_tile=64, tp_size=4, rank=0)


def test_a_tp_size_that_does_not_divide_the_segments_is_refused(folders):
    with pytest.raises(ContractError, match="TP 2 does not divide segments = 1"):
        strict_layout(decoder(folders), segments=1, vocab_tile=64, tp_size=2, rank=0)


def test_segments_that_do_not_divide_a_dimension_are_refused(folders):
    with pytest.raises(ContractError, match="segments = 64 does not divide the intermediate size, 224"):
        strict_layout(decoder(folders), segments=64, vocab_tile=64, tp_size=1, rank=0)
