"""Every dialect against values worked out by hand; every blind spot of shipped metrics as something not done here."""

import math
from dataclasses import asdict, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.drift import DriftStatistics, DriftSums, drift_sums, statistics
from tests.auditor.processes import REPOSITORY


def of(rollout: list[float], trainer: list[float], active: list[bool] | None = None) -> DriftStatistics:
    return statistics(sums(rollout, trainer, active))


def sums(rollout: list[float], trainer: list[float], active: list[bool] | None = None) -> DriftSums:
    mask = np.array([True] * len(rollout) if active is None else active, np.bool_)
    return drift_sums(np.array(rollout, np.float32), np.array(trainer, np.float32), mask)


# Two tokens with probabilities 1/2 → 1/4 and 1/4 → 1/2, so d = −ln 2, +ln 2 and r = 1/2, 2.
LN2 = float(np.float32(math.log(2)))
LN4 = float(np.float32(math.log(4)))
HAND = {
    "tokens": 2,
    "nonfinite": 0,
    "mean_abs_diff": math.log(2),
    "max_abs_diff": math.log(2),
    "std_diff": math.log(2),
    "k1": 0.0,  # the errors cancel: mean(−d)
    "k3": (0.5 - 1 + math.log(2) + 2 - 1 - math.log(2)) / 2,  # mean(r − 1 − d) = 1/4
    "prob_diff_mean": 0.25,
    "prob_diff_max": 0.25,
    "prob_diff_std": 0.0,
    "pearson": -1.0,
    "ratio_mean": 1.25,
    "ratio_max": 2.0,
    "ratio_min": 0.5,
    "outside_clip_share": 1.0,
    "ess_ratio": 2.5**2 / (2 * 4.25),
    "chi2_token": 4.25 / 2 - 1,
    "chi2_seq": 0.0,  # the sequence's ratio is 1/2 · 2 = 1
    "ppl_ratio": 1.0,
    "token_mult_prob_error": 2.0,
}


@pytest.mark.parametrize("name", [field.name for field in fields(DriftStatistics)])
def test_each_statistic_has_the_value_worked_out_by_hand(name: str) -> None:
    found = asdict(of([-LN2, -LN4], [-LN4, -LN2]))[name]
    # The hand's ln 2 is float64 and the record's is float32; they agree to about 2⁻²⁵.
    assert abs(found - HAND[name]) < 1e-6


def test_sequences_are_weighed_as_sequences() -> None:
    """Two sequences of one token each, r = 2 and r = 1/2: the token ratio and the sequence ratio are the same thing."""
    one, other = sums([-LN4], [-LN2]), sums([-LN2], [-LN4])
    found = statistics(one + other)
    assert found.chi2_seq is not None
    assert abs(found.chi2_seq - (4.25 / 2 - 1)) < 1e-6
    assert found.ppl_ratio is not None
    assert abs(found.ppl_ratio - 1.25) < 1e-6


samples = st.lists(
    st.lists(st.tuples(st.floats(-20, 0, width=32), st.floats(-20, 0, width=32)), min_size=1, max_size=8),
    min_size=1,
    max_size=6,
)


@given(samples, st.randoms())
def test_sums_add_up_however_samples_are_batched(drawn: list[list[tuple[float, float]]], random: object) -> None:
    parts = [sums([a for a, _ in s], [b for _, b in s]) for s in drawn]
    counted = parts[0]
    for part in parts[1:]:
        counted = counted + part
    assert counted.tokens == sum(len(s) for s in drawn)
    assert counted.sequences == len(drawn)
    assert counted.max_abs == max(part.max_abs for part in parts)
    assert counted.min_ratio == min(part.min_ratio for part in parts)
    assert DriftSums.from_json(counted.to_json()) == counted


def test_nothing_compared_is_none_and_never_zero() -> None:
    """Blind spot: 0.0 logged where nothing was compared."""
    for nothing in (of([], []), of([-1.0], [-2.0], [False]), statistics(DriftSums())):
        values = asdict(nothing)
        assert values.pop("tokens") == 0
        assert values.pop("nonfinite") == 0
        assert set(values.values()) == {None}


@pytest.mark.parametrize("n", [2, 3, 19, 100, 5000])
def test_a_constant_side_has_no_correlation_whatever_its_sums_round_to(n: int) -> None:
    varying = [-0.001 * i for i in range(n)]
    for tenth in range(1, 100):
        constant = [-tenth / 10] * n
        parts = [sums(constant[at : at + 7], varying[at : at + 7]) for at in range(0, n, 7)]
        for counted in (sums(constant, varying), DriftSums.of(parts)):
            assert statistics(counted).pearson is None, (constant[0], n)
            assert counted == DriftSums.from_json(counted.to_json())


def test_a_side_that_varies_by_a_millionth_has_a_correlation() -> None:
    assert of([-0.300001, -0.3] * 500, [-1.0, -2.0] * 500).pearson == pytest.approx(-1.0, abs=1e-3)


def test_nemo_rls_gen_kl_error_stands_beside_what_it_is() -> None:
    """calculate_kl(generation, prev) of its default type, which is k3 of prev − generation."""
    (row,) = (line for line in (REPOSITORY / "docs/metrics.md").read_text().splitlines() if "`gen_kl_error`" in line)
    assert row.startswith("| `k3` | mean of r − 1 − d |")


def test_a_nan_is_counted_and_enters_no_mean() -> None:
    """Blind spot: NaN mapped to 0 before the mean, so that a broken token looks like a perfect one."""
    found = of([-1.0, math.nan, -1.0, -1.0], [-1.5, -1.0, math.nan, -math.inf])
    assert (found.tokens, found.nonfinite, found.mean_abs_diff) == (1, 3, 0.5)


def test_a_masked_token_enters_no_extremum() -> None:
    """Blind spot: a minimum that is 0 whenever something is masked, because masked values are multiplied by 0."""
    found = of([-1.0, -2.0], [-0.5, -2.0], [True, False])
    assert found.ratio_min == found.ratio_max == pytest.approx(math.exp(0.5))


def test_errors_of_opposite_sign_do_not_cancel() -> None:
    """Blind spot: abs forgotten."""
    found = of([-1.0, -1.0], [-2.0, -0.0])
    assert found.k1 == 0.0
    assert found.mean_abs_diff == 1.0


def test_a_missing_value_is_no_value() -> None:
    """Blind spot: missing logprobs padded with 0.0 (probability one) or with the other side's own value."""
    found = of([-1.0, math.nan], [-1.0, -3.0])
    assert found.tokens == 1
    assert found.nonfinite == 1


def test_a_correlation_with_a_constant_is_undefined() -> None:
    assert of([-1.0, -1.0], [-1.0, -2.0]).pearson is None
    assert of([-1.0, -3.0], [-1.0, -3.0]).pearson == 1.0


def test_an_absurd_ratio_stays_a_number() -> None:
    found = of([-3e38, -1.0], [-0.0, -1.0])
    assert all(v is None or math.isfinite(v) for v in asdict(found).values())
    assert found.ess_ratio is not None
    assert found.ess_ratio < 0.6
