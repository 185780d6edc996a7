"""Packing, and what is refused before any process group exists: each message names the thing and what is right."""

import pytest
import torch

from rl_kernel.contracts import model_contract
from rl_kernel.errors import ContractError, EvidenceError, ModelError, ShapeError
from rl_kernel.integrations.megatron.model import StrictModel
from rl_kernel.integrations.megatron.packing import Tokens, micro_batches, pack
from rl_kernel.integrations.megatron.parallel import join_tensor_parallel
from rl_kernel.ops import strict_plan
from tests.integrations.megatron.ranks import on_ranks

TWO = [Tokens((1, 2), (3, 4, 5)), Tokens((6,), (7,))]


def test_samples_follow_each_other_without_padding_and_without_their_last_token():
    packed = pack(TWO, vocab=10, max_position=8)
    assert packed.ids.tolist() == [1, 2, 3, 4, 6]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0]
    assert packed.offsets.tolist() == [0, 4, 5]
    assert packed.offsets.dtype == torch.int32


def test_every_response_token_is_asked_for_after_the_row_before_it():
    packed = pack(TWO, vocab=10, max_position=8)
    assert packed.rows.tolist() == [1, 2, 3, 4]
    assert packed.targets.tolist() == [3, 4, 5, 7]


def test_micro_batches_keep_the_order_and_the_budget():
    tokens = [Tokens((1,), (2,) * n) for n in (3, 4, 9, 1, 2)]
    assert list(micro_batches(tokens, 7)) == [range(0, 2), range(2, 3), range(3, 5)]
    assert list(micro_batches([], 7)) == []


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Tokens((), (1,)), "sample 1 has an empty prompt"),
        (Tokens((1,), ()), "sample 1 has an empty response"),
        (Tokens((1,) * 6, (1,) * 3), "sample 1 has 9 tokens; the model's positions end at 8"),
        (Tokens((1, 10), (1,)), "sample 1 has token id 10; ids run from 0 to 9"),
        (Tokens((1,), (-1,)), "sample 1 has token id -1"),
    ],
)
def test_a_sample_that_cannot_be_scored_is_named(sample, message):
    with pytest.raises(ShapeError, match=message):
        pack([TWO[0], sample], vocab=10, max_position=8)


def test_two_ranks_without_a_rendezvous_are_refused():
    with pytest.raises(ContractError, match="TP 2 needs a rendezvous"):
        join_tensor_parallel(2, 0)


def test_a_model_without_weights_scores_nothing_and_a_step_that_was_not_begun_has_no_backward(folders, tp):
    model = StrictModel(folders["llama"], strict_plan(model_contract(), "cpu"), tp)
    packed = pack(TWO, vocab=331, max_position=8)
    with pytest.raises(ModelError, match=r"the model has no weights yet; load\(\) a folder first"):
        model.logprobs(packed, 1.0)
    model.load(folders["llama"])
    logprobs = model.logprobs(packed, 1.0)
    with pytest.raises(EvidenceError, match=r"no main gradients to continue; clear_gradients\(\) begins a step"):
        model.backward(logprobs, torch.ones(len(logprobs)))


def join_what_somebody_cut(rank, rendezvous):
    """On one of two ranks that Megatron has already cut in other ways."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    said = []
    for how in ("pipeline_model_parallel_size", "context_parallel_size"):
        parallel_state.initialize_model_parallel(**{how: 2})
        try:
            join_tensor_parallel(2, rank, rendezvous)
        except ContractError as error:
            said.append(str(error))
        parallel_state.destroy_model_parallel()
    return said


@pytest.mark.slow
def test_ranks_that_megatron_has_cut_in_another_way_are_refused():
    words = "Megatron's tensor-parallel group here has 1 of 2 ranks; there is no contract for"
    for said in on_ranks(2, join_what_somebody_cut):
        assert [line.startswith(words) for line in said] == [True, True]
