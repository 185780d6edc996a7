"""exp2 model `sm90_ex2`: its table, its domain, and that no libm can change it."""

from fractions import Fraction
from math import isqrt
from pathlib import Path

import numpy as np
import pytest

from rl_kernel.compare import compare_bits
from rl_kernel.contract import EXP2_MODELS
from rl_kernel.contracts import model_contract
from rl_kernel.errors import ContractError
from rl_kernel.reference.exp2_table import TABLE, read_table
from rl_kernel.reference.ops import Reference

SM90 = Reference.of(model_contract("sm90"))
_ONE = 1 << 23
_EVERY = np.arange(_ONE, dtype=np.float64)
_POWERS = np.exp2((_EVERY - _ONE) / _ONE)  # 2^(f/2^23 - 1) for every fraction f


def test_every_fraction_is_within_minus_2_and_plus_1_units_of_the_rounded_power() -> None:
    # For x = -(2^23 - f)/2^23: n = -1, so the result is T[f] itself, in [1/2, 1).
    x = ((_EVERY - _ONE) / _ONE).astype(np.float32)
    deviation = SM90.exp2(x).view(np.int32) - _POWERS.astype(np.float32).view(np.int32)
    counts = {int(d): int(n) for d, n in zip(*np.unique(deviation, return_counts=True), strict=True)}
    assert counts == {-2: 86537, -1: 4959061, 0: 3342935, 1: 75}


def test_no_power_lies_so_near_a_tie_that_a_libm_could_turn_the_rounding() -> None:
    # Distance to the nearest tie between two fp32 numbers, in units of the last place of double (of [1/2, 1)).
    bits = _POWERS.view(np.uint64) & np.uint64((1 << 29) - 1)  # what fp32 drops
    distance = np.abs(bits.astype(np.int64) - (1 << 28))
    assert distance[1:].min() >= 8


def test_the_power_nearest_to_a_tie_is_on_the_right_side_of_it() -> None:
    bits = (_POWERS.view(np.uint64) & np.uint64((1 << 29) - 1)).astype(np.int64)
    for f in np.argsort(np.abs(bits - (1 << 28)))[:20]:
        # 2^(f/2^23 - 1) > tie  <=>  2^f > (2 tie)^(2^23), by repeated squaring of an interval.
        tie = Fraction(float(_POWERS[f])) + Fraction(int((1 << 28) - bits[f]), 1 << 53)
        assert (_POWERS[f] > float(tie)) == _power_exceeds(int(f), tie)


def _power_exceeds(f: int, value: Fraction, bits: int = 160) -> bool:
    """2^(f/2^23 - 1) > value, decided with intervals of `bits` fractional bits around the 23 square roots of 2."""
    low = high = 1 << bits  # 1 as fixed point
    root_low, root_high = 2 << bits, 2 << bits
    for i in range(22, -1, -1):
        root_low, root_high = _sqrt(root_low, bits), _sqrt(root_high, bits) + 1
        if f >> i & 1:
            low, high = low * root_low >> bits, (high * root_high >> bits) + 1
    assert (Fraction(low, 2 << bits) > value) == (Fraction(high, 2 << bits) > value), "more bits are needed"
    return Fraction(low, 2 << bits) > value


def _sqrt(x: int, bits: int) -> int:
    return isqrt(x << bits)


def test_zero_gives_one_and_powers_of_two_are_exact() -> None:
    x = np.array([0.0, -0.0, -1e-45, -1.0, -2.0, -126.0], np.float32)
    assert SM90.exp2(x).tolist() == [1, 1, 1, 0.5, 0.25, 2.0**-126]


def test_arguments_are_cut_to_multiples_of_two_to_the_minus_23() -> None:
    step = np.float32(2.0**-23)
    x = -np.array([0.25, 1, 1.9990234375], np.float32) * step
    assert compare_bits(SM90.exp2(x), SM90.exp2(-np.array([0, 1, 1], np.float32) * step)).equal


def test_results_below_the_smallest_normal_number_are_zero() -> None:
    x = np.array([-126.0, -126.00001, -127.5, -1e30, -np.inf], np.float32)
    assert SM90.exp2(x).tolist() == [2.0**-126, 0, 0, 0, 0]
    assert not np.signbit(SM90.exp2(x)).any()


def test_whole_parts_only_move_the_exponent() -> None:
    x = -np.random.default_rng(0).integers(0, _ONE, 1000).astype(np.float32) / np.float32(_ONE)
    for n in (1, 2, 7):
        whole = (x - np.float32(n)).astype(np.float32)
        exact = whole + np.float32(n) == x
        assert compare_bits(SM90.exp2(whole[exact]), SM90.exp2(x[exact]) * np.float32(2.0**-n)).equal


def test_a_positive_argument_has_no_known_bits_and_gives_nan() -> None:
    x = np.array([1e-30, 1.0, np.inf, np.nan], np.float32)
    assert SM90.exp2(x).view(np.uint32).tolist() == [0x7FC00000] * 4


def test_the_shipped_table_is_the_one_that_the_contract_names() -> None:
    assert read_table(TABLE).shape == (_ONE // 4,)
    assert EXP2_MODELS["sm90_ex2"].table_sha256 is not None


def test_another_table_is_refused_by_name(tmp_path: Path) -> None:
    table = read_table(TABLE).copy()
    table[12345] ^= 1
    path = tmp_path / "changed.npz"
    np.savez(path, delta2bit=table)
    with pytest.raises(ContractError, match=r"changed\.npz: sha256 of the table is .*, the contract of sm90_ex2 names"):
        read_table(path)
    with pytest.raises(ContractError, match=r"missing\.npz is not the table of exp2 model sm90_ex2"):
        read_table(tmp_path / "missing.npz")


def test_models_of_exp2_agree_to_four_units_and_differ_in_bits() -> None:
    x = -np.random.default_rng(1).random(10_000).astype(np.float32) * 100
    difference = compare_bits(SM90.exp2(x), Reference.of(model_contract("portable")).exp2(x))
    assert difference.differing > 0
    assert difference.max_ulp <= 4
