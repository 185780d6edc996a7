"""SwiGLU of a fused gate and up projection.

    swiglu(x[T,2I] = gate, up) -> [T,I]
    swiglu_backward(dy[T,I], x[T,2I]) -> dx[T,2I]

Tensors are bf16.
"""

from rl_kernel.plan import Backend

BACKENDS = (
    Backend(
        op="swiglu",
        name="cpu",
        module="rl_kernel.ops.swiglu.cpu",
        device="cpu",
        mma=frozenset(),
        backward=True,
    ),
    Backend(
        op="swiglu",
        name="triton",
        module="rl_kernel.ops.swiglu.triton_kernel",
        device="cuda",
        mma=frozenset(),
        backward=True,
        exp2=frozenset({"sm90_ex2"}),
    ),
)
