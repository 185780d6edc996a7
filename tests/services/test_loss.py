"""PPO's clipped, token-level loss: values worked out by hand, and a gradient that autograd confirms."""

import math

import numpy as np
import pytest
import torch

from services.errors import TrainingError
from services.trainer.loss import token_loss, token_place, total


def loss(new, old, advantage, active=None, **changes):
    values = {"active_in_step": len(new), "clip_low": 0.2, "clip_high": 0.2} | changes
    return token_loss(
        np.array(new, np.float32),
        np.array(old, np.float32),
        np.array(advantage, np.float64),
        np.array(active if active is not None else [True] * len(new)),
        **values,
    )


def test_on_policy_the_loss_is_minus_the_mean_advantage_and_so_is_its_gradient():
    found = loss([-1.0, -2.0], [-1.0, -2.0], [3.0, -1.0])
    assert found.loss.tolist() == [-1.5, 0.5]
    assert found.gradient.tolist() == [-1.5, 0.5]
    assert not found.clipped.any()


def test_a_ratio_of_two_is_clipped_for_a_good_token_and_not_for_a_bad_one():
    ln2 = float(np.float32(math.log(2)))
    found = loss([ln2, ln2], [0.0, 0.0], [1.0, -1.0], active_in_step=1)
    assert found.loss.tolist() == [-1.2, math.exp(ln2)]
    assert found.gradient.tolist() == [0.0, 2.0]
    assert found.clipped.tolist() == [True, False]


def test_a_ratio_of_one_half_is_clipped_for_a_bad_token_and_not_for_a_good_one():
    ln2 = float(np.float32(math.log(2)))
    found = loss([-ln2, -ln2], [0.0, 0.0], [1.0, -1.0], active_in_step=1)
    assert found.loss.tolist() == [-math.exp(-ln2), 0.8]
    assert found.gradient.tolist() == [-0.5, 0.0]
    assert found.clipped.tolist() == [False, True]


def test_the_two_bounds_of_the_clip_are_separate():
    new = [float(np.float32(math.log(1.25)))]
    assert loss(new, [0.0], [1.0], clip_high=0.2).clipped.all()
    assert not loss(new, [0.0], [1.0], clip_high=0.28).clipped.any()


def test_a_token_that_is_not_active_counts_for_nothing_whatever_it_holds():
    found = loss([-1.0, np.nan], [-1.0, np.inf], [3.0, 5.0], active=[True, False], active_in_step=1)
    assert found.loss.tolist() == [-3.0, 0.0]
    assert found.gradient.tolist() == [-3.0, 0.0]


def test_the_mean_is_over_the_whole_step_so_a_cut_changes_no_bit():
    draw = np.random.default_rng(3)
    new, old, advantage = draw.normal(-2, 1, 101), draw.normal(-2, 1, 101), draw.normal(0, 1, 101)
    whole = loss(new, old, advantage, active_in_step=101)
    parts = [
        loss(new[c], old[c], advantage[c], active_in_step=101) for c in (slice(0, 7), slice(7, 64), slice(64, 101))
    ]
    assert np.array_equal(whole.gradient.view(np.uint32), np.concatenate([p.gradient for p in parts]).view(np.uint32))
    assert total([whole.loss]) == total([p.loss for p in parts])


def test_the_gradient_is_what_float64_autograd_gives_rounded_once():
    draw = np.random.default_rng(4)
    old, advantage = draw.normal(-2, 1, 200).astype(np.float32), draw.normal(0, 1, 200)
    new = (old + draw.normal(0, 0.3, 200)).astype(np.float32)
    leaf = torch.from_numpy(new.astype(np.float64)).requires_grad_()
    ratio = torch.exp(leaf - torch.from_numpy(old.astype(np.float64)))
    a = torch.from_numpy(advantage)
    (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / 200).backward()
    found = loss(new, old, advantage)
    assert found.clipped.any()
    # Two float64 formulas of one value differ by a few 2^-53, which moves a rounding to fp32 by one unit at most.
    distance = found.gradient.view(np.int32).astype(np.int64) - leaf.grad.numpy().astype(np.float32).view(np.int32)
    assert np.abs(distance).max() <= 1


@pytest.mark.parametrize("side", ["trainer's", "rollout's"])
def test_a_logprob_that_is_not_finite_is_refused_with_its_place(side):
    good, bad = [-1.0, -1.0], [-1.0, np.nan]
    new, old = (bad, good) if side == "trainer's" else (good, bad)
    with pytest.raises(TrainingError, match=f"the {side} logprob of token 1 is nan"):
        loss(new, old, [1.0, 1.0])


def test_the_place_of_a_token_is_one_that_a_person_can_look_up():
    responses = [("000-00", (7, 8)), ("000-01", ()), ("001-00", (9,))]
    assert [token_place(3, responses, i) for i in range(3)] == [
        "token 0 (id 7) of the response of sample 000-00 in step 3",
        "token 1 (id 8) of the response of sample 000-00 in step 3",
        "token 0 (id 9) of the response of sample 001-00 in step 3",
    ]
    with pytest.raises(
        TrainingError, match=r"the trainer's logprob of token 0 \(id 9\) of the response of sample 001-00"
    ):
        loss([-1.0, -1.0, np.nan], [-1.0] * 3, [1.0] * 3, place=lambda i: token_place(3, responses, i))
