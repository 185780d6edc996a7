"""The MMA models once more, in exact rational arithmetic, sentence by sentence: what the C++ is checked against.

Nothing is shared with `rl_kernel/csrc`. A `Rule` has knobs, so that a wrong hardware (a mutant) is one changed knob.
Operands are bit patterns of bf16 or fp16; accumulators and results are fp32 bit patterns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor, inf, isnan, nan, trunc

import numpy as np

_NAN = 0x7FFFFFFF


@dataclass(frozen=True)
class Format:
    """Layout of a binary floating-point format: widths in bits."""

    exponent_bits: int
    fraction_bits: int

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def min_exponent(self) -> int:
        return 1 - self.bias


BF16, FP16, FP32 = Format(8, 7), Format(5, 10), Format(8, 23)


@dataclass(frozen=True)
class Number:
    """A decoded value: finite (significand · 2^exponent), or special (±inf, NaN as a float)."""

    significand: Fraction
    exponent: int
    special: float | None = None


def decode(bits: int, form: Format) -> Number:
    sign = -1 if bits >> (form.exponent_bits + form.fraction_bits) else 1
    biased = (bits >> form.fraction_bits) & ((1 << form.exponent_bits) - 1)
    fraction = bits & ((1 << form.fraction_bits) - 1)
    if biased == (1 << form.exponent_bits) - 1:
        return Number(Fraction(0), 0, nan if fraction else sign * inf)
    unit = Fraction(1, 1 << form.fraction_bits)
    if biased == 0:
        return Number(sign * fraction * unit, form.min_exponent)
    return Number(sign * (1 + fraction * unit), biased - form.bias)


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


@dataclass(frozen=True)
class Rule:
    """How one step adds up.

    lowest: the smallest exponent that products and acc are aligned to together.
    zero_raises: a zero product counts in the maximum (a mutant; the published simulator before 2.1 did this).
    nearest: the sum rounds to nearest even instead of being cut (a mutant of the truncating models).
    """

    group: int
    fraction_bits: int
    lowest: int
    two_stage: bool = False
    zero_raises: bool = False
    nearest: bool = False

    def chain(self, acc: int, a: Sequence[int], b: Sequence[int], form: Format) -> int:
        """acc and the result: fp32 bits; a, b: operand bits of one row and one column."""
        for p in range(0, len(a), self.group):
            acc = self.step(acc, a[p : p + self.group], b[p : p + self.group], form)
        return acc

    def step(self, acc: int, a: Sequence[int], b: Sequence[int], form: Format) -> int:
        start = decode(acc, FP32)
        pairs = [(decode(x, form), decode(y, form)) for x, y in zip(a, b, strict=True)]
        products = [multiply(x, y, self.two_stage) for x, y in pairs]
        special = [t.special for t in (start, *products) if t.special is not None]
        if special:
            total = sum(special)
            return _NAN if isnan(total) else 0xFF800000 if total < 0 else 0x7F800000
        return self._two_stages(start, products) if self.two_stage else self._one_stage(start, products)

    def _one_stage(self, start: Number, products: list[Number]) -> int:
        """Align all to the largest exponent, cut each toward zero, add, cut to fp32."""
        terms = [start, *products]
        exponents = [t.exponent for t in terms if t.significand != 0 or (self.zero_raises and t is not start)]
        unit = power(max([*exponents, self.lowest]) - self.fraction_bits)
        total = sum(trunc(t.significand * power(t.exponent) / unit) for t in terms) * unit
        return to_fp32(total, nearest=self.nearest)

    def _two_stages(self, start: Number, products: list[Number]) -> int:
        """Products among themselves, then with acc, rounding down; 31 fractional bits of the sum; nearest even."""
        nonzero = [t.exponent for t in products if t.significand != 0]
        top = max(nonzero, default=-(10**6))
        unit = power(top - self.fraction_bits) if nonzero else Fraction(1)
        dot = sum(trunc(t.significand * power(t.exponent) / unit) for t in products) * unit
        both = max(top, start.exponent, self.lowest)
        total = floor(dot / power(both - 32)) * power(both - 32)
        total += floor(start.significand * power(start.exponent - both + self.fraction_bits)) * power(
            both - self.fraction_bits
        )
        last = power(max(binary_exponent(total), -126) - 31)
        bits = to_fp32(floor(total / last) * last, nearest=True)
        return bits | 0x80000000 if total < 0 else bits


def multiply(x: Number, y: Number, overflows: bool) -> Number:
    """The product, not renormalised. `overflows`: past the fp32 range it becomes ±inf."""
    if x.special is not None or y.special is not None:
        left = x.special if x.special is not None else float(np.sign(x.significand))
        right = y.special if y.special is not None else float(np.sign(y.significand))
        return Number(Fraction(0), 0, left * right)
    significand, exponent = x.significand * y.significand, x.exponent + y.exponent
    if overflows and abs(significand) * power(exponent) >= power(128):
        return Number(Fraction(0), 0, inf if significand > 0 else -inf)
    return Number(significand, exponent)


def binary_exponent(value: Fraction) -> int:
    """floor(log2 |value|); very small for 0."""
    if value == 0:
        return -(10**6)
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    return exponent - 1 if abs(value) < power(exponent) else exponent


def to_fp32(value: Fraction, *, nearest: bool) -> int:
    """fp32 bits of `value`, cut toward zero or to nearest even; nothing left is +0, past the range is ±inf."""
    exponent = max(binary_exponent(value), -126)
    steps = abs(value) / power(exponent - 23)
    kept = round(steps) if nearest else trunc(steps)
    if kept == 0:
        return 0
    magnitude = kept * power(exponent - 23)
    bits = 0x7F800000 if magnitude >= power(128) else int(np.float32(float(magnitude)).view(np.uint32))
    return bits | (0x80000000 if value < 0 else 0)


RULES = {
    "sm90": Rule(16, 25, -133),
    "sm100": Rule(16, 25, -133),
    "sm80": Rule(8, 24, -132),
    "cdna3": Rule(8, 24, -126, two_stage=True),
}
MUTANTS = {
    "sm90 with 24 fractional bits": ("sm90", replace(RULES["sm90"], fraction_bits=24)),
    "sm90 with 26 fractional bits": ("sm90", replace(RULES["sm90"], fraction_bits=26)),
    "sm90 without a smallest exponent": ("sm90", replace(RULES["sm90"], lowest=-1000)),
    "sm90 in groups of 8": ("sm90", replace(RULES["sm90"], group=8)),
    "sm90 in groups of 32": ("sm90", replace(RULES["sm90"], group=32)),
    "sm90 where a zero raises the exponent": ("sm90", replace(RULES["sm90"], zero_raises=True)),
    "sm90 that rounds to nearest": ("sm90", replace(RULES["sm90"], nearest=True)),
    "sm80 with 25 fractional bits": ("sm80", replace(RULES["sm80"], fraction_bits=25)),
    "sm80 in groups of 16": ("sm80", replace(RULES["sm80"], group=16)),
    "cdna3 in one stage": ("cdna3", replace(RULES["cdna3"], two_stage=False, nearest=True)),
    "cdna3 in groups of 4": ("cdna3", replace(RULES["cdna3"], group=4)),
}


def product_matrix(rule: Rule, c: np.ndarray, a: np.ndarray, b: np.ndarray, form: Format) -> np.ndarray:
    """c[M,N] fp32 and operand bits a[M,K], b[K,N] → the chains' results, fp32."""
    bits, rows, columns = c.view(np.uint32), a.tolist(), b.T.tolist()
    result = [
        [rule.chain(int(bits[i, j]), row, column, form) for j, column in enumerate(columns)]
        for i, row in enumerate(rows)
    ]
    return np.array(result, np.uint32).reshape(c.shape).view(np.float32)
