"""The contract once more, in exact rational arithmetic: what the reference itself is checked against.

Slow on purpose. Finite values only; a result that leaves the fp32 range is infinity.
"""

from fractions import Fraction

import numpy as np

from rl_kernel.reference.ops import F32, Bits, widen

_MIN_EXPONENT = -149  # of the smallest subnormal fp32


def round_fp32(value: Fraction, *, negative_zero: bool = False) -> np.float32:
    """Round to the nearest fp32, ties to even. A zero that came from underflow keeps its sign."""
    if value == 0:
        return np.float32(-0.0 if negative_zero else 0.0)
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - 23, _MIN_EXPONENT)
    steps, rest = divmod(magnitude, unit)
    if rest * 2 > unit or (rest * 2 == unit and steps % 2):
        steps += 1
    result = np.float32(np.inf) if steps * unit >= Fraction(2) ** 128 else np.float32(float(steps * unit))
    return -result if value < 0 else result


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """fp32 a·b + c with one rounding."""
    product, addend = Fraction(float(a)) * Fraction(float(b)), Fraction(float(c))
    product_negative = np.signbit(a) != np.signbit(b)
    both_negative = bool(product_negative and np.signbit(c) and product == 0 and addend == 0)
    return round_fp32(product + addend, negative_zero=both_negative)


def add(a: np.float32, b: np.float32) -> np.float32:
    """fp32 a + b, rounded once."""
    return fma(a, np.float32(1), b)


def tree(values: list[np.float32]) -> np.float32:
    """((v0+v1)+(v2+v3))+…, an odd last value moving up."""
    while len(values) > 1:
        pairs = [add(values[i], values[i + 1]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) - len(values) % 2 :]
    return values[0]


def gemm_fp32(x: Bits, w: Bits, segments: int = 1) -> F32:
    """x[M,K], w[N,K] → y[M,N] fp32 under the MMA model fma32."""
    (m, k), n = x.shape, w.shape[0]
    xs, ws = widen(x), widen(w)
    y = np.empty((m, n), np.float32)
    for i in range(m):
        for j in range(n):
            chains = []
            for part in np.split(np.arange(k), segments):
                acc = np.float32(0)
                for p in part:
                    acc = fma(xs[i, p], ws[j, p], acc)
                chains.append(acc)
            y[i, j] = tree(chains)
    return y


def lane_dot(a: F32, b: F32) -> np.float32:
    """128 lanes by fma, then the tree."""
    lanes = [np.float32(0)] * 128
    for i in range(len(a)):
        lanes[i % 128] = fma(a[i], b[i], lanes[i % 128])
    return tree(lanes)
