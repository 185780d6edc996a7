"""The one number that a hypothesis leaves open, found by what fits best."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def climbed(
    best: T,
    near: Callable[[T, int], Iterable[T]],
    error: Callable[[T], float],
    step: int,
    prepare: Callable[[Sequence[T]], object] = len,
) -> T:
    """What is reached from `best` by steps to whatever is near it, ever smaller ones, as long as the error shrinks.

    prepare: gets all whose errors are asked for next, which may be computed together.
    """
    while step and error(best) > 0.0:
        around = list(near(best, step))
        prepare(around)
        closer = min(around, key=error)
        if error(closer) < error(best):
            best = closer
        else:
            step //= 2
    return best


def best_fit(
    error: Callable[[float], float],
    low: float,
    high: float,
    grid: int = 25,
    steps: int = 24,
    hopeless: float = np.inf,
) -> float | None:
    """Where `error` is smallest between two positive numbers: a grid in the logarithm, then golden-section search.

    hopeless: None is returned where no error on the grid is below it, and nothing more is computed.
    """
    points = np.linspace(np.log(low), np.log(high), grid)
    errors = [error(float(np.exp(x))) for x in points]
    at = int(np.argmin(errors))
    if not errors[at] < hopeless:
        return None
    left_end, right_end = float(points[max(at - 1, 0)]), float(points[min(at + 1, grid - 1)])
    shrink = (np.sqrt(5.0) - 1.0) / 2.0
    for _ in range(steps):
        left = right_end - shrink * (right_end - left_end)
        right = left_end + shrink * (right_end - left_end)
        if error(float(np.exp(left))) < error(float(np.exp(right))):
            right_end = right
        else:
            left_end = left
    return float(np.exp((left_end + right_end) / 2.0))


def few_digits(value: float) -> list[float]:
    """What somebody may have set of any size: the value in one digit, in two, in three, then as it is."""
    return list(dict.fromkeys([*(float(f"{value:.{digits}g}") for digits in (1, 2, 3)), value]))


def roundings(value: float) -> list[float]:
    """What somebody may have set: the value with few digits first, then as it is."""
    return list(dict.fromkeys([*(round(value, digits) for digits in (0, 1, 2, 3)), value]))
