"""Values that bite: what inputs the laws are checked on. Every draw is a function of its seed."""

import numpy as np

from rl_kernel.reference.ops import F32, Bits, narrow

KINDS = ("normal", "spread", "cancelling", "special")
_SPECIAL = (
    0x0000,
    0x8000,
    0x0001,
    0x8001,
    0x007F,
    0x807F,
    0x0080,
    0x3F80,
    0xBF80,
    0x7F7F,
    0xFF7F,
    0x7F80,
    0xFF80,
    0x7FC0,
)


def bf16(seed: int, *shape: int, kind: str = "normal") -> Bits:
    """Draw bf16 bit patterns.

    normal: N(0, 1). spread: N(0, 1) · 2^U(−40, 40). cancelling: pairs x, −x with a small rest, so that sums lose
    their leading bits. special: normal with one value in eight a zero, subnormal, extreme, infinity or NaN.
    """
    rng = np.random.default_rng([seed, len(shape)])
    x = rng.standard_normal(shape)
    if kind == "spread":
        x = x * np.exp2(rng.integers(-40, 41, shape))
    if kind == "cancelling":
        flat = x.reshape(-1)
        half = flat.size // 2
        flat[half : 2 * half] = -flat[:half] * (1 + 2.0**-7 * (rng.random(half) < 0.1))
    bits = narrow(x.astype(np.float32))
    if kind == "special":
        where = rng.random(shape) < 1 / 8
        bits = np.where(where, rng.choice(np.array(_SPECIAL, np.uint16), shape), bits)
    return bits


def fp32(seed: int, *shape: int, scale: float = 1.0) -> F32:
    """Draw fp32 values N(0, scale²)."""
    return (np.random.default_rng([seed, 7]).standard_normal(shape) * scale).astype(np.float32)


def offsets(*lengths: int) -> np.ndarray:
    """Offsets of sequences laid one after another, int32 [R + 1]."""
    return np.cumsum([0, *lengths]).astype(np.int32)
