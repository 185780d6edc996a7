"""GRPO's advantage: how much better an answer is than the other answers to the same prompt."""

from collections.abc import Sequence

import numpy as np

_EPSILON = 1e-6


def advantages(rewards: Sequence[float], group_size: int) -> tuple[float, ...]:
    """(reward - mean) / (standard deviation + 1e-6) within each run of `group_size` rewards, in float64.

    A group whose rewards are all equal teaches nothing and gets zeros. Source: arXiv 2402.03300, section 4.1.
    """
    groups = np.asarray(rewards, np.float64).reshape(-1, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    return tuple((centred / (groups.std(axis=1, keepdims=True) + _EPSILON)).reshape(-1).tolist())
