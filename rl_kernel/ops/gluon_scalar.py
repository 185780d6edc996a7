"""What `triton_scalar` says, for Gluon kernels, whose tensors carry their layout."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def narrow(x):  # type: ignore[no-untyped-def]
    """Round fp32 to bf16, to nearest even; NaN becomes 0x7fc0.

    The instruction rounds every NaN to 0x7fff: as a signed integer the only result over 0x7fc0.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b32 pair, most;
            cvt.rn.bf16x2.f32 pair, $2, $1;
            mov.b32 most, 0x7fc07fc0;
            min.s16x2 $0, pair, most;
        }
        """,
        "=r,r,r",
        [x],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def canonical(x):  # type: ignore[no-untyped-def]
    """Replace every NaN by 0x7fc00000."""
    nan = gl.full(x.shape, 0x7FC00000, gl.int32, layout=x.type.layout).to(gl.float32, bitcast=True)
    return gl.where(x == x, x, nan)


@gluon.jit
def stored(x, FP32: gl.constexpr):  # type: ignore[no-untyped-def]
    """The value as an op stores it: fp32 or bf16, with one kind of NaN."""
    if FP32:
        return canonical(x)
    else:
        return narrow(x)


@gluon.jit
def ln(x):  # type: ignore[no-untyped-def]
    """Natural logarithm of a positive normal number; NaN and +inf stay."""
    i = x.to(gl.int32, bitcast=True) - 0x3F3504F3
    e = (i >> 23).to(gl.float32)
    f = ((i & 0x7FFFFF) + 0x3F3504F3).to(gl.float32, bitcast=True) - 1.0
    s = f * f
    q = gl.fma(gl.full_like(x, 7.0376836292e-2), f, gl.full_like(x, -1.1514610310e-1))
    q = gl.fma(q, f, gl.full_like(x, 1.1676998740e-1))
    q = gl.fma(q, f, gl.full_like(x, -1.2420140846e-1))
    q = gl.fma(q, f, gl.full_like(x, 1.4249322787e-1))
    q = gl.fma(q, f, gl.full_like(x, -1.6668057665e-1))
    q = gl.fma(q, f, gl.full_like(x, 2.0000714765e-1))
    q = gl.fma(q, f, gl.full_like(x, -2.4999993993e-1))
    q = gl.fma(q, f, gl.full_like(x, 3.3333331174e-1))
    y = (f * s) * q
    y = gl.fma(e, gl.full_like(x, -2.12194440e-4), y)
    y = gl.fma(gl.full_like(x, -0.5), s, y)
    y = gl.fma(e, gl.full_like(x, 0.693359375), f + y)
    return gl.where((x == x) & (x < float("inf")), y, x)
