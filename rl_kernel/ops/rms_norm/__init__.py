"""RMSNorm, alone or after the residual sum; also the q-norm and k-norm of a head.

    rms_norm(x[...,n], w[n], eps) -> y
    add_rms_norm(x[T,n], residual[T,n], w[n], eps) -> (y, new residual)
    rms_norm_backward(dy, x, w, eps, dw[G,n] fp32) -> dx; row r adds to dw[r % G] in place

x may be [T,H,n] with tokens apart, as in a slice of a fused projection. Tensors are bf16 unless said.
"""

from rl_kernel.plan import COMPILED_ONLY, Backend

BACKENDS = (
    Backend(
        op="rms_norm",
        name="cpu",
        module="rl_kernel.ops.rms_norm.cpu",
        device="cpu",
        mma=frozenset(),
        backward=True,
    ),
    Backend(
        op="rms_norm",
        name="triton",
        module="rl_kernel.ops.rms_norm.triton_kernel",
        device="cuda",
        mma=frozenset(),
        backward=True,
    ),
    Backend(
        op="rms_norm",
        name="triton",
        module="rl_kernel.ops.rms_norm.triton_kernel",
        device="rocm",
        mma=frozenset(),
        backward=True,
        unproved=COMPILED_ONLY,
    ),
)
