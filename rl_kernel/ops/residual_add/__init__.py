"""Sum of the residual stream: residual_add(a, b) -> bf16 of one shape. Its gradient is the identity on both sides."""

from rl_kernel.plan import COMPILED_ONLY, Backend

BACKENDS = (
    Backend(
        op="residual_add",
        name="cpu",
        module="rl_kernel.ops.residual_add.cpu",
        device="cpu",
        mma=frozenset(),
        backward=True,
    ),
    Backend(
        op="residual_add",
        name="triton",
        module="rl_kernel.ops.residual_add.triton_kernel",
        device="cuda",
        mma=frozenset(),
        backward=True,
    ),
    Backend(
        op="residual_add",
        name="triton",
        module="rl_kernel.ops.residual_add.triton_kernel",
        device="rocm",
        mma=frozenset(),
        backward=True,
        unproved=COMPILED_ONLY,
    ),
)
