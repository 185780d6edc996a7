"""Rotary position embedding, halves rotated (x1 = x[:D/2], x2 = x[D/2:]).

    rope(x[T,H,D], cos[P,D/2] fp32, sin[P,D/2] fp32, positions[T] int64) -> [T,H,D]
    rope_pair(q[T,H,D], k[T,G,D], cos, sin, positions) -> (rope of q, rope of k)
    rope_backward(dout, cos, sin, positions) -> dx

The tables come from rl_kernel.reference.rope_table. Tensors are bf16 unless said; tokens of x may lie apart.
"""

from rl_kernel.plan import COMPILED_ONLY, Backend

BACKENDS = (
    Backend(
        op="rope",
        name="cpu",
        module="rl_kernel.ops.rope.cpu",
        device="cpu",
        mma=frozenset(),
        backward=True,
    ),
    Backend(
        op="rope",
        name="triton",
        module="rl_kernel.ops.rope.triton_kernel",
        device="cuda",
        mma=frozenset(),
        backward=True,
    ),
    Backend(
        op="rope",
        name="triton",
        module="rl_kernel.ops.rope.triton_kernel",
        device="rocm",
        mma=frozenset(),
        backward=True,
        unproved=COMPILED_ONLY,
    ),
)
