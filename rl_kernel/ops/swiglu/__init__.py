"""SwiGLU of a fused gate and up projection.

    swiglu(x[T,2I] = gate, up) -> [T,I]
    swiglu_backward(dy[T,I], x[T,2I]) -> dx[T,2I]

Tensors are bf16.
"""

from rl_kernel.plan import COMPILED_ONLY, Backend

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
    Backend(
        op="swiglu",
        name="triton",
        module="rl_kernel.ops.swiglu.triton_kernel",
        device="rocm",
        mma=frozenset(),
        backward=True,
        unproved=COMPILED_ONLY,
    ),
)
