"""GRPO's loss: PPO's clipped surrogate, a mean over the tokens of the whole step, and its gradient in closed form.

Everything is float64 and elementwise, and sums are `math.fsum`, which rounds once: the result depends neither on how
the step was cut into micro-batches nor on threads.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.errors import TrainingError

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Of each token: its share of the loss, d loss / d logprob (fp32), and whether the clip took its gradient."""

    loss: F64
    gradient: F32
    clipped: Bools


def token_loss(
    new: F32,
    old: F32,
    advantage: F64,
    active: Bools,
    *,
    active_in_step: int,
    clip_low: float,
    clip_high: float,
    place: Callable[[int], str] = "token {}".format,
) -> TokenLoss:
    """Loss of n tokens: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) / active_in_step, r = exp(new - old).

    new, old: logprobs under the policy that learns and the one that sampled. active: tokens that count; the others
    get zeros, whatever their logprobs. Source: arXiv 1707.06347, equation 7, with the token-level mean of arXiv
    2503.14476. Raises TrainingError where a logprob that counts is not finite; `place` names the i-th token in it.
    """
    for side, values in (("trainer's", new), ("rollout's", old)):
        if not np.isfinite(values[active]).all():
            where = int(np.flatnonzero(active & ~np.isfinite(values))[0])
            raise TrainingError(f"the {side} logprob of {place(where)} is {values[where]}; a loss needs finite ones")
    difference = np.where(active, new.astype(np.float64) - old.astype(np.float64), 0.0)
    ratio = np.exp(difference)
    unclipped = ratio * advantage
    bounded = np.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage
    clipped = active & (bounded < unclipped)
    weight = np.where(active, 1.0 / active_in_step, 0.0)
    loss = -np.minimum(unclipped, bounded) * weight
    gradient = np.where(clipped, 0.0, -unclipped * weight)
    return TokenLoss(loss, gradient.astype(np.float32), clipped)


def token_place(step: int, responses: Sequence[tuple[str, tuple[int, ...]]], i: int) -> str:
    """The i-th token of responses (sample id, token ids) that stand one after another, as a person would look it up."""
    for sample, tokens in responses:
        if i < len(tokens):
            return f"token {i} (id {tokens[i]}) of the response of sample {sample} in step {step}"
        i -= len(tokens)
    raise IndexError(f"step {step} has no token {i} past its {len(responses)} responses")


def total(parts: Sequence[npt.NDArray[Any]]) -> float:
    """Sum of all values of all parts, rounded once."""
    return math.fsum(value for part in parts for value in part.tolist())
