"""The reference against exact rational arithmetic, and its vector loops against its plain ones."""

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_kernel.compare import compare_bits
from rl_kernel.reference import _reference
from rl_kernel.reference.ops import canonical, ln, narrow, tree_sum, widen
from tests.contracts import plain
from tests.contracts.cases import Case, all_cases, gemm_cases
from tests.contracts.draws import bf16
from tests.contracts.subjects import ReferenceSubject

REFERENCE = ReferenceSubject()


@pytest.fixture
def plain_loops() -> Iterator[None]:
    _reference.force_plain_mma(True)
    yield
    _reference.force_plain_mma(False)


@pytest.mark.parametrize("kind", ["normal", "spread", "cancelling"])
@pytest.mark.parametrize("segments", [1, 2, 4])
def test_gemm_is_a_chain_of_correctly_rounded_fmas(kind: str, segments: int) -> None:
    x, w = bf16(1, 2, 20, kind=kind), bf16(2, 3, 20, kind=kind)
    expected = plain.gemm_fp32(x, w, segments)
    assert compare_bits(REFERENCE.gemm_fp32(x, w, segments=segments), expected).equal
    assert compare_bits(REFERENCE.gemm(x, w, segments=segments), narrow(expected)).equal


def test_a_negative_product_that_underflows_leaves_minus_zero_in_the_chain() -> None:
    x, w = np.array([[0x0001]], np.uint16), np.array([[0x8001]], np.uint16)
    assert REFERENCE.gemm_fp32(x, w).view(np.uint32)[0, 0] == 0x80000000
    assert compare_bits(plain.gemm_fp32(x, w), REFERENCE.gemm_fp32(x, w)).equal


@pytest.mark.parametrize("n", [1, 100, 128, 300])
def test_rms_norm_sums_lanes_and_then_a_tree(n: int) -> None:
    x, w, eps = bf16(1, 1, n, kind="normal"), bf16(2, n), np.float32(1e-5)
    values = widen(x)[0]
    mean = np.float32(plain.lane_dot(values, values) / np.float32(n))
    t = values * (np.float32(1) / np.sqrt(mean + eps))
    assert compare_bits(REFERENCE.rms_norm(x, w, 1e-5)[0], narrow(widen(narrow(t)) * widen(w))).equal


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100),
        min_size=1,
        max_size=9,
    )
)
def test_the_tree_pairs_neighbours(values: list[float]) -> None:
    parts = np.array(values, np.float32)[:, None]
    expected = np.array([plain.tree([np.float32(v) for v in values])], np.float32)
    assert compare_bits(tree_sum(parts), expected).equal


@settings(max_examples=300)
@given(st.integers(0, 0xFFFFFFFF))
def test_rounding_to_bf16_is_to_nearest_even(pattern: int) -> None:
    value = np.array([pattern], np.uint32).view(np.float32)
    if np.isnan(value[0]):
        assert narrow(value)[0] == 0x7FC0
    elif np.isfinite(value[0]):
        low, high = pattern & 0xFFFF0000, (pattern & 0xFFFF0000) + 0x10000
        neighbours = (
            [Fraction(float(np.array([p], np.uint32).view(np.float32)[0])) for p in (low, high)]
            if (high & 0x7F800000) != 0x7F800000
            else None
        )
        if neighbours:
            exact = Fraction(float(value[0]))
            down, up = abs(exact - neighbours[0]), abs(neighbours[1] - exact)
            nearer = low if down < up or (down == up and not (low >> 16) & 1) else high
            assert narrow(value)[0] == nearer >> 16


def test_exp2_of_zero_is_one_and_a_masked_score_weighs_nothing() -> None:
    x = np.array([0.0, -0.0, -1.0, -126.0, -126.00001, -np.inf, np.nan], np.float32)
    expected = np.array([1, 1, 0.5, 2.0**-126, 0, 0, np.nan], np.float32)
    assert compare_bits(REFERENCE.exp2(x), canonical(expected)).equal


def test_exp2_and_ln_are_within_two_units_in_the_last_place() -> None:
    x = -np.abs(np.random.default_rng(0).standard_normal(100_000) * 30).astype(np.float32)
    found, best = REFERENCE.exp2(x), np.exp2(x.astype(np.float64)).astype(np.float32)
    inside = x >= -126
    assert compare_bits(found[inside], best[inside]).max_ulp <= 2
    y = np.exp(np.random.default_rng(1).uniform(0, 40, 100_000)).astype(np.float32)
    assert compare_bits(ln(y), np.log(y.astype(np.float64)).astype(np.float32)).max_ulp <= 2


def test_ln_of_one_is_plus_zero_and_never_negative_above() -> None:
    x = np.array([1.0], np.float32).view(np.uint32) + np.arange(100_000, dtype=np.uint32)
    y = ln(x.view(np.float32))
    assert y.view(np.uint32)[0] == 0
    assert (y >= 0).all()


_MMA_CASES = [*gemm_cases(), *(c for c in all_cases(REFERENCE) if c.method.startswith(("attention", "linear_logp")))]


@pytest.mark.parametrize("case", _MMA_CASES, ids=lambda c: c.name)
def test_vector_loops_have_the_bits_of_the_plain_ones(case: Case, request: pytest.FixtureRequest) -> None:
    vector = case.run(REFERENCE)
    request.getfixturevalue("plain_loops")
    for a, b in zip(vector, case.run(REFERENCE), strict=True):
        assert compare_bits(a, b).equal
