"""Training on two ranks gives the weights of training on one; a checkpoint goes from one to the other."""

from dataclasses import replace

import numpy as np
import pytest

from rl_kernel.integrations.megatron.parallel import leave_tensor_parallel
from rl_kernel.reference.weights import weight_digest
from services.trainer.optimizer import AdamWOptions
from tests.integrations.megatron.ranks import on_ranks
from tests.models import QWEN3, write_tiny_model
from tests.services.training import OPTIONS, layers_on_rank, train_on_rank

# Clipped by norm, and with decay, so that both are tried over ranks.
ONE = replace(OPTIONS, max_grad_norm=0.1, adamw=AdamWOptions(weight_decay=0.1))
TWO = replace(ONE, tp_size=2, micro_batch_tokens=40)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Steps 0 to 2 on one rank; 0 and 1 on two ranks; and step 2 from each one's checkpoint on the other."""
    root = tmp_path_factory.mktemp("runs")
    model = write_tiny_model(root / "model", QWEN3, seed=2)
    found = {"one": train_on_rank(0, "", model, [0, 1], ONE, None, root / "one")}
    found["one, then one"] = train_on_rank(0, "", model, [2], ONE, root / "one" / "checkpoint", root / "one-one")
    found["two"] = on_ranks(2, train_on_rank, model, [0, 1], TWO, None, root / "two")
    native = replace(TWO, numerics="native", micro_batch_tokens=4096)
    found["native two"] = on_ranks(2, train_on_rank, model, [0], native, None, root / "native")
    found["native one"] = train_on_rank(0, "", model, [0], replace(native, tp_size=1), None, root / "native-one")
    found["two, then one"] = train_on_rank(0, "", model, [2], ONE, root / "two" / "checkpoint", root / "two-one")
    leave_tensor_parallel()
    return root, found


def test_two_ranks_train_to_the_weights_of_one(runs):
    root, found = runs
    losses, logprobs, digest = found["one"]
    for rank_losses, rank_logprobs, rank_digest in found["two"]:
        assert rank_losses == losses
        assert rank_digest == digest
        assert np.array_equal(np.concatenate(rank_logprobs).view(np.uint32), np.concatenate(logprobs).view(np.uint32))
    assert weight_digest(root / "one" / "weights") == weight_digest(root / "two" / "weights") == digest


def test_a_checkpoint_of_two_ranks_goes_on_on_one(runs):
    _, found = runs
    assert found["two, then one"][0] == found["one, then one"][0]
    assert found["two, then one"][2] == found["one, then one"][2] != found["one"][2]


def test_checkpoints_of_one_and_two_ranks_are_the_same_bytes(runs):
    root, _ = runs
    for name in ("masters", "first_moments", "second_moments"):
        one, two = ((root / ranks / "checkpoint" / f"{name}.safetensors").read_bytes() for ranks in ("one", "two"))
        assert one == two


def test_native_ranks_agree_with_each_other_and_not_with_one_rank(runs):
    # The control group: the same batch, and the TP size shows in the bits.
    root, found = runs
    (losses, logprobs, digest), other = found["native two"]
    assert other[2] == digest == weight_digest(root / "native" / "weights")
    assert np.isfinite(losses).all()
    one = np.concatenate(found["native one"][1])
    assert (np.concatenate(logprobs).view(np.uint32) != one.view(np.uint32)).any()


def test_layers_have_the_digests_of_one_rank_on_two_and_the_first_of_them_reports(runs):
    root, _ = runs
    one = layers_on_rank(0, "", root / "model", ONE)
    leave_tensor_parallel()
    assert on_ranks(2, layers_on_rank, root / "model", TWO) == [one, ()]
    assert len(one[0]) == QWEN3.layers
