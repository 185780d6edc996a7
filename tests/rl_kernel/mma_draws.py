"""Operands that bite a matrix instruction: spread, cancellation, zeros beside huge values, specials, underflow.

Bit patterns of bf16 or fp16 and fp32 accumulators, a function of the seed. NumPy alone: the GPU probe draws them too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]

_FINITE = {
    "bf16": (0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x0080, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x1000, 0x9000),
    "fp16": (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x1000, 0x9000),
}
_SPECIAL = {"bf16": (0x7F80, 0xFF80, 0x7FC0, 0xFFC1), "fp16": (0x7C00, 0xFC00, 0x7E00, 0xFE01)}
_ACC = (0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000)
_WIDE = {"bf16": 20, "fp16": 7}  # powers of two that operands spread over


@dataclass(frozen=True)
class Draw:
    """One product: c[M,N] fp32 <- chains over a[M,K]·b[K,N]. form: `bf16` or `fp16`."""

    name: str
    form: str
    a: Bits
    b: Bits
    c: npt.NDArray[np.float32]


def draws(m: int, n: int, depths: tuple[int, ...], seed: int = 0) -> Iterator[Draw]:
    """Every kind of draw for both operand types and each depth K, then underflow at K = 16."""
    rng = np.random.default_rng(seed)
    for form in ("bf16", "fp16"):
        for k in depths:
            for name, a, b, c in _of_depth(rng, form, m, n, k):
                yield Draw(f"{form}-{name}-k{k}", form, a, b, c.astype(np.float32))
    yield from _underflow(rng, m, n)
    for form in ("bf16", "fp16"):
        yield _masked(rng, form, m, n)


def _of_depth(
    rng: np.random.Generator, form: str, m: int, n: int, k: int
) -> Iterator[tuple[str, Bits, Bits, npt.NDArray[np.floating]]]:
    shapes = (m, k), (k, n)
    for spread in (0, _WIDE[form]):
        a, b = (encode(_normal(rng, shape, spread), form) for shape in shapes)
        yield f"spread{spread}", a, b, _normal(rng, (m, n), spread)
    a, b = (encode(_normal(rng, shape, 0), form) for shape in shapes)
    even = k // 2 * 2
    a[:, 1:even:2], b[1:even:2] = a[:, :even:2], b[:even:2] ^ np.uint16(0x8000)
    yield "cancelling", a, b, _normal(rng, (m, n), 10).astype(np.float32) * np.float32(1e-4)
    for name, pool, share in (
        ("finite", _FINITE[form], 1.0),
        ("special", _FINITE[form] + _SPECIAL[form], 0.02),
        ("zeros", _FINITE[form], 0.6),
    ):
        chosen = np.array(pool, np.uint16)
        a, b = (
            np.where(rng.random(shape) < share, rng.choice(chosen, shape), encode(_normal(rng, shape, 0), form))
            for shape in shapes
        )
        acc = np.where(rng.random((m, n)) < 0.5, rng.choice(np.array(_ACC, np.uint32), (m, n)), 0)
        yield name, a, b, acc.astype(np.uint32).view(np.float32)


def _underflow(rng: np.random.Generator, m: int, n: int) -> Iterator[Draw]:
    """bf16 products around and below the smallest fp32, where the alignment exponent has its floor."""
    for low in (-60, -68, -72, -76, -80, -84):
        for zeros in (0.0, 0.5):
            for acc, scale in (("zero", 0.0), ("subnormal", 2.0**-140), ("tiny", 2.0**-148)):
                a, b = (_normal(rng, shape, 4) * 2.0**low for shape in ((m, 16), (16, n)))
                a, b = (np.where(rng.random(x.shape) < zeros, 0, x) for x in (a, b))
                c = (scale * _normal(rng, (m, n), 2)).astype(np.float32)
                name = f"bf16-underflow{2 * low}-zeros{zeros}-acc_{acc}"
                yield Draw(name, "bf16", encode(a, "bf16"), encode(b, "bf16"), c)


def _masked(rng: np.random.Generator, form: str, m: int, n: int) -> Draw:
    """Zeros beside the largest operands, small products beside them: does a zero raise the alignment exponent?"""
    a, b = (encode(_normal(rng, shape, 2) / 64, form) for shape in ((m, 32), (32, n)))
    masked = rng.random(32) < 0.5
    a[:, masked], b[masked] = 0, 0x7F7F if form == "bf16" else 0x7BFF
    return Draw(f"{form}-masked", form, a, b, np.zeros((m, n), np.float32))


def encode(x: npt.NDArray[np.float64], form: str) -> Bits:
    """Round to bf16 or fp16 bit patterns."""
    if form == "fp16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], spread: int) -> npt.NDArray[np.float64]:
    """N(0, 1) · 2^U(−spread, spread)."""
    return rng.standard_normal(shape) * np.exp2(rng.integers(-spread, spread + 1, shape).astype(np.float64))
