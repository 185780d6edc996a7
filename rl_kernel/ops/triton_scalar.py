"""Scalar arithmetic of the contracts in Triton: one source for CUDA and ROCm, launched with `enable_fp_fusion=False`.

The rules are those of `csrc/reference/scalar.h`; an operation is fused only where `tl.fma` stands, and every division
and square root is the correctly rounded one. `EX2` chooses the exp2 model: False is `poly`, True Hopper's instruction.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(float.fromhex("0x1.715476p+0"))
NEG_LOG2E = tl.constexpr(-float.fromhex("0x1.715476p+0"))
NEG_INF = tl.constexpr(float("-inf"))

_E1 = tl.constexpr(float.fromhex("0x1.62e430p-1"))
_E2 = tl.constexpr(float.fromhex("0x1.ebfbdcp-3"))
_E3 = tl.constexpr(float.fromhex("0x1.c6aee8p-5"))
_E4 = tl.constexpr(float.fromhex("0x1.3b2d4cp-7"))
_E5 = tl.constexpr(float.fromhex("0x1.5f3e54p-10"))
_E6 = tl.constexpr(float.fromhex("0x1.41fbbcp-13"))


@triton.jit
def narrow(x):  # type: ignore[no-untyped-def]
    """Round fp32 to bf16, to nearest even; NaN becomes 0x7fc0 (the hardware's own would be 0x7fff)."""
    nan = tl.full(x.shape, 0x7FC0, tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.where(x == x, x.to(tl.bfloat16), nan)


@triton.jit
def canonical(x):  # type: ignore[no-untyped-def]
    """Replace every NaN by 0x7fc00000."""
    nan = tl.full(x.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(x == x, x, nan)


@triton.jit
def stored(x, FP32: tl.constexpr):  # type: ignore[no-untyped-def]
    """The value as an op stores it: fp32 or bf16, with one kind of NaN."""
    if FP32:
        return canonical(x)
    else:
        return narrow(x)


@triton.jit
def round_bf16(x):  # type: ignore[no-untyped-def]
    """The fp32 value of x rounded to bf16. A NaN stays some NaN."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def exp2(x, EX2: tl.constexpr):  # type: ignore[no-untyped-def]
    """2^x for x <= 0 under the exp2 model."""
    if EX2:
        return tl.math.exp2(x)
    else:
        n = (x + 12582912.0) - 12582912.0
        f = x - n
        p = tl.fma(tl.full(x.shape, _E6, tl.float32), f, tl.full(x.shape, _E5, tl.float32))
        p = tl.fma(p, f, tl.full(x.shape, _E4, tl.float32))
        p = tl.fma(p, f, tl.full(x.shape, _E3, tl.float32))
        p = tl.fma(p, f, tl.full(x.shape, _E2, tl.float32))
        p = tl.fma(p, f, tl.full(x.shape, _E1, tl.float32))
        p = tl.fma(p, f, tl.full(x.shape, 1.0, tl.float32))
        power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
        # Outside [-126, 0] the bits above mean nothing; a NaN falls through both comparisons and stays.
        return tl.where(x < -126.0, 0.0, tl.where(x == x, p * power, x))


@triton.jit
def ln(x):  # type: ignore[no-untyped-def]
    """Natural logarithm of a positive normal number; NaN and +inf stay."""
    i = x.to(tl.int32, bitcast=True) - 0x3F3504F3
    e = (i >> 23).to(tl.float32)
    f = ((i & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    s = f * f
    q = tl.fma(tl.full(x.shape, 7.0376836292e-2, tl.float32), f, tl.full(x.shape, -1.1514610310e-1, tl.float32))
    q = tl.fma(q, f, tl.full(x.shape, 1.1676998740e-1, tl.float32))
    q = tl.fma(q, f, tl.full(x.shape, -1.2420140846e-1, tl.float32))
    q = tl.fma(q, f, tl.full(x.shape, 1.4249322787e-1, tl.float32))
    q = tl.fma(q, f, tl.full(x.shape, -1.6668057665e-1, tl.float32))
    q = tl.fma(q, f, tl.full(x.shape, 2.0000714765e-1, tl.float32))
    q = tl.fma(q, f, tl.full(x.shape, -2.4999993993e-1, tl.float32))
    q = tl.fma(q, f, tl.full(x.shape, 3.3333331174e-1, tl.float32))
    y = (f * s) * q
    y = tl.fma(e, tl.full(x.shape, -2.12194440e-4, tl.float32), y)
    y = tl.fma(tl.full(x.shape, -0.5, tl.float32), s, y)
    y = tl.fma(e, tl.full(x.shape, 0.693359375, tl.float32), f + y)
    return tl.where((x == x) & (x < float("inf")), y, x)


@triton.jit
def tree(x, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """x[R, 2^LEVELS] → [R]: the neighbour-pair tree, a sum of two at a time.

    Over more than two `tl.sum` has an order of its own; over two there is but one.
    """
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def tree_of(values):  # type: ignore[no-untyped-def]
    """The neighbour-pair tree over a tuple of tensors; an odd last value moves up unchanged."""
    for _ in tl.static_range(7):
        if len(values) > 1:
            pairs = ()
            for p in tl.static_range(len(values) // 2):
                pairs = pairs + (values[2 * p] + values[2 * p + 1],)
            if len(values) % 2:
                pairs = pairs + (values[len(values) - 1],)
            values = pairs
    return values[0]


@triton.jit
def _shared_out(n, d, HOPPER: tl.constexpr):  # type: ignore[no-untyped-def]
    """n / d, correctly rounded, where d = 1 + e rounded and n is 1 or e, with e in {0} ∪ [2^-126, 1].

    Hopper's approximate reciprocal is within one unit in the last place, a step of Newton's rounds it as a division
    would, and the remainder of n * that corrects the quotient (Markstein, IBM J. Res. Dev. 34, 1990). The remainder
    is exact: where e < 2^-24, d and its reciprocal are 1; elsewhere it is a multiple of 2^-71.
    """
    if HOPPER:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [d], dtype=tl.float32, is_pure=True, pack=1)
        y = tl.fma(tl.fma(d * -1.0, y, tl.full(d.shape, 1.0, tl.float32)), y, y)
        q = n * y
        return tl.fma(tl.fma(d * -1.0, q, n), y, q)
    else:
        return tl.div_rn(n, d)


@triton.jit
def sigmoid(x, EX2: tl.constexpr, HOPPER: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / (1 + e^-x), by cases so that the exponent is never positive. HOPPER: no division, with its bits."""
    e = exp2(tl.abs(x) * NEG_LOG2E, EX2)
    return _shared_out(tl.where(x >= 0.0, 1.0, e), 1.0 + e, HOPPER)
