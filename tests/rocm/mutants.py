"""Small kernels for the readers of ISA: right as written, wrong when compiled or written in another way."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from rl_kernel.ops.triton_hopper import begin


@triton.jit
def multiply_then_add(y, a, b):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 64)
    tl.store(y + i, tl.load(a + i) * tl.load(b + i) + tl.load(y + i))


@triton.jit
def approximate_exp2(y, a):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 64)
    tl.store(y + i, tl.math.exp2(tl.load(a + i)))


@triton.jit
def plain_division(y, a, b):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 64)
    tl.store(y + i, tl.load(a + i) / tl.load(b + i))


@triton.jit
def fast_division(y, a, b):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 64)
    tl.store(y + i, libdevice.fast_dividef(tl.load(a + i), tl.load(b + i)))


@triton.jit
def exact_division_and_root(y, a, b):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 64)
    tl.store(y + i, tl.sqrt_rn(tl.div_rn(tl.load(a + i), tl.load(b + i))))


@triton.jit
def product(c, a, b, side: tl.constexpr, depth: tl.constexpr):  # type: ignore[no-untyped-def]
    i, p = tl.arange(0, side), tl.arange(0, depth)
    x = tl.load(a + i[:, None] * depth + p[None, :])
    y = tl.load(b + p[:, None] * side + i[None, :])
    tl.store(c + i[:, None] * side + i[None, :], tl.dot(x, y))


@triton.jit
def load_then_wait(y, a):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 64)
    x = tl.load(a + i)
    begin(True)
    tl.store(y + i, x)


@triton.jit
def wait_then_load(y, a):  # type: ignore[no-untyped-def]
    begin(True)
    i = tl.arange(0, 64)
    tl.store(y + i, tl.load(a + i))


@triton.jit
def never_wait(y, a):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 64)
    tl.store(y + i, tl.load(a + i))
