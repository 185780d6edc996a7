"""How far two sides are apart, in the words of the frameworks that ask. docs/metrics.md says who uses which name.

With d = trainer − rollout and r = eᵈ over active tokens whose two values are finite. Everything is kept as sums that
add up over samples (`DriftSums`), so a step's statistics do not depend on how its samples were batched, but for the
rounding of float64 additions.
A token that is not finite on either side is counted apart and enters no mean; with nothing compared every statistic
is None, never zero.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

CLIP_BAND: Final = (0.8, 1.2)
_MAX_EXPONENT: Final = 300.0
_MAXIMA = frozenset({"max_abs", "max_prob_diff", "max_ratio"})
_MINIMA = frozenset({"min_ratio"})


@dataclass(frozen=True, slots=True)
class DriftSums:
    """Sums over tokens (and, where named so, over sequences) that every statistic is made from.

    Maxima start at 0 or −inf and minima at +inf, which is what they are of nothing.
    """

    tokens: int = 0
    nonfinite: int = 0
    sequences: int = 0
    d: float = 0.0
    abs_d: float = 0.0
    d_squared: float = 0.0
    max_abs: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    max_ratio: float = -math.inf
    min_ratio: float = math.inf
    outside_clip: int = 0
    exp_abs_d: float = 0.0
    prob_diff: float = 0.0
    prob_diff_squared: float = 0.0
    max_prob_diff: float = 0.0
    rollout: float = 0.0
    trainer: float = 0.0
    rollout_squared: float = 0.0
    trainer_squared: float = 0.0
    product: float = 0.0
    seq_ratio: float = 0.0
    seq_ratio_squared: float = 0.0
    seq_ppl_ratio: float = 0.0

    def __add__(self, other: "DriftSums") -> "DriftSums":
        return self.of((self, other))

    @classmethod
    def of(cls, parts: Iterable["DriftSums"]) -> "DriftSums":
        """The sums of several parts together."""
        some = [part for part in parts if part is not NOTHING]
        if len(some) < 2:
            return some[0] if some else NOTHING
        # Column by column: there is one part a sample, and an attribute at a time in Python costs more than its bits.
        columns = zip(*map(_ALL, some), strict=True)
        return cls(*[how(column) for how, column in zip(_HOW, columns, strict=True)])

    def to_json(self) -> dict[str, float | int | None]:
        """As JSON values; an infinite extremum becomes None."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "DriftSums":
        """The inverse of `to_json`."""
        known = {field.name for field in fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in known and v is not None})


NOTHING: Final = DriftSums()
_NAMES: Final = tuple(field.name for field in fields(DriftSums))
_ALL: Final = attrgetter(*_NAMES)
_HOW: Final[tuple[Callable[[tuple[Any, ...]], Any], ...]] = tuple(
    max if name in _MAXIMA else min if name in _MINIMA else sum for name in _NAMES
)


@dataclass(frozen=True, slots=True)
class DriftStatistics:
    """What the sums say. None: there is nothing to say it from. Names and users: docs/metrics.md."""

    tokens: int
    nonfinite: int
    mean_abs_diff: float | None
    max_abs_diff: float | None
    std_diff: float | None
    k1: float | None
    k3: float | None
    prob_diff_mean: float | None
    prob_diff_max: float | None
    prob_diff_std: float | None
    pearson: float | None
    ratio_mean: float | None
    ratio_max: float | None
    ratio_min: float | None
    outside_clip_share: float | None
    ess_ratio: float | None
    chi2_token: float | None
    chi2_seq: float | None
    ppl_ratio: float | None
    token_mult_prob_error: float | None


def drift_sums(
    rollout: npt.NDArray[np.float32], trainer: npt.NDArray[np.float32], active: npt.NDArray[np.bool_]
) -> DriftSums:
    """Sums of one sample. rollout, trainer: float32 [R]; active: bool [R]."""
    old, new = rollout[active].astype(np.float64), trainer[active].astype(np.float64)
    finite = np.isfinite(old) & np.isfinite(new)
    nonfinite = int(finite.size - finite.sum())
    old, new = old[finite], new[finite]
    if old.size == 0:
        return DriftSums(nonfinite=nonfinite)
    d = new - old
    # Beyond e^300 squares and their sums would overflow; a ratio of that size says all that there is to say.
    ratio = np.exp(np.minimum(d, _MAX_EXPONENT))
    prob_diff = np.abs(np.exp(np.minimum(new, 0.0)) - np.exp(np.minimum(old, 0.0)))
    abs_d = np.abs(d)
    seq = math.exp(min(float(d.sum()), _MAX_EXPONENT))
    return DriftSums(
        tokens=d.size,
        nonfinite=nonfinite,
        sequences=1,
        d=float(d.sum()),
        abs_d=float(abs_d.sum()),
        d_squared=float((d * d).sum()),
        max_abs=float(abs_d.max()),
        ratio=float(ratio.sum()),
        ratio_squared=float((ratio * ratio).sum()),
        max_ratio=float(ratio.max()),
        min_ratio=float(ratio.min()),
        outside_clip=int(((ratio < CLIP_BAND[0]) | (ratio > CLIP_BAND[1])).sum()),
        exp_abs_d=float(np.exp(np.minimum(abs_d, _MAX_EXPONENT)).sum()),
        prob_diff=float(prob_diff.sum()),
        prob_diff_squared=float((prob_diff * prob_diff).sum()),
        max_prob_diff=float(prob_diff.max()),
        rollout=float(old.sum()),
        trainer=float(new.sum()),
        rollout_squared=float((old * old).sum()),
        trainer_squared=float((new * new).sum()),
        product=float((old * new).sum()),
        seq_ratio=seq,
        seq_ratio_squared=seq * seq,
        seq_ppl_ratio=math.exp(min(-float(d.mean()), _MAX_EXPONENT)),
    )


def drift_sums_of_equal(values: npt.NDArray[np.float32]) -> DriftSums:
    """Sums of a sample whose two sides are the same float32 [active tokens], bit by bit: as `drift_sums` gives them."""
    numbers = np.isfinite(values)
    finite = (values if numbers.all() else values[numbers]).astype(np.float64)
    count = finite.size
    if count == 0:
        return DriftSums(nonfinite=values.size)
    total, squared = float(finite.sum()), float((finite * finite).sum())
    return DriftSums(
        tokens=count,
        nonfinite=values.size - count,
        sequences=1,
        ratio=float(count),
        ratio_squared=float(count),
        max_ratio=1.0,
        min_ratio=1.0,
        exp_abs_d=float(count),
        rollout=total,
        trainer=total,
        rollout_squared=squared,
        trainer_squared=squared,
        product=squared,
        seq_ratio=1.0,
        seq_ratio_squared=1.0,
        seq_ppl_ratio=1.0,
    )


def statistics(sums: DriftSums) -> DriftStatistics:
    """The statistics of a sample, a step or a run."""
    n, s = sums.tokens, sums.sequences
    if n == 0:
        return DriftStatistics(0, sums.nonfinite, *[None] * 18)
    mean = sums.d / n
    prob_mean = sums.prob_diff / n
    return DriftStatistics(
        tokens=n,
        nonfinite=sums.nonfinite,
        mean_abs_diff=sums.abs_d / n,
        max_abs_diff=sums.max_abs,
        std_diff=_root(sums.d_squared / n - mean * mean),
        k1=-mean,
        k3=(sums.ratio - n - sums.d) / n,
        prob_diff_mean=prob_mean,
        prob_diff_max=sums.max_prob_diff,
        prob_diff_std=_root(sums.prob_diff_squared / n - prob_mean * prob_mean),
        pearson=_pearson(sums),
        ratio_mean=sums.ratio / n,
        ratio_max=sums.max_ratio,
        ratio_min=sums.min_ratio,
        outside_clip_share=sums.outside_clip / n,
        ess_ratio=sums.ratio * sums.ratio / (n * sums.ratio_squared) if sums.ratio_squared else None,
        chi2_token=sums.ratio_squared / n - 1.0,
        chi2_seq=sums.seq_ratio_squared / s - 1.0,
        ppl_ratio=sums.seq_ppl_ratio / s,
        token_mult_prob_error=sums.exp_abs_d / n,
    )


def _pearson(sums: DriftSums) -> float | None:
    """None where a side does not vary: a correlation with a constant is not zero, it is undefined."""
    n = sums.tokens
    rollout = _spread(sums.rollout, sums.rollout_squared, n)
    trainer = _spread(sums.trainer, sums.trainer_squared, n)
    if rollout is None or trainer is None:
        return None
    covariance = sums.product - sums.rollout * sums.trainer / n
    return max(-1.0, min(1.0, covariance / math.sqrt(rollout * trainer)))


def _spread(total: float, squared: float, n: int) -> float | None:
    """The variance of n values, times n, by their sum and that of their squares; None where rounding may be all of it.

    For n values c, in whatever order they were added, with u = 2⁻⁵³ and γ = (n−1)u to first order: squares of fp32 are
    exact in float64, so squared = nc²(1+a) with |a| ≤ γ, and total = nc(1+b) with |b| ≤ γ, so total²/n as computed is
    nc²(1+b)²(1+2u). They are apart by (3γ + 2u) nc² ≤ 3nu nc² at most; 4nu has room for what is not of first order.
    """
    spread = squared - total * total / n
    return spread if spread > 4.0 * n * 2.0**-53 * squared else None


def _root(variance: float) -> float:
    """Square root of a variance that rounding may have left just below zero."""
    return math.sqrt(max(variance, 0.0))
