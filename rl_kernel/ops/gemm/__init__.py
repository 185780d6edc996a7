"""Matrix products of a linear layer y = x wᵀ.

    pack(w[N,K]) -> PackedWeight
    gemm(x[M,K], w[N,K] or packed, *, segments=1, out_dtype=bf16) -> [M,N]
    gemm_dx(dy[M,N], w[N,K], *, segments=1, out_dtype=bf16) -> [M,K]
    gemm_dw_(main_grad[N,K] fp32, dy[T,N], x[T,K]) continues the chain over tokens, in place

`segments` cuts the summed index (K, and N for dx) into equal parts whose fp32 sums meet in a tree; out_dtype fp32
hands out a rank's partial sum, or logits. Tensors are bf16 unless said.
"""

from rl_kernel.plan import COMPILED_ONLY, Backend

BACKENDS = (
    Backend(
        op="gemm",
        name="cpu",
        module="rl_kernel.ops.gemm.cpu",
        device="cpu",
        mma=frozenset({"fma32"}),
        backward=True,
    ),
    # Its bits are the contract's but for those of a NaN: 0x7fff, which every op that follows stores as 0x7fc0.
    Backend(
        op="gemm",
        name="cublaslt",
        module="rl_kernel.ops.gemm.cublaslt",
        device="cuda",
        mma=frozenset({"sm90"}),
        backward=True,
    ),
    Backend(
        op="gemm",
        name="triton",
        module="rl_kernel.ops.gemm.triton_kernel",
        device="rocm",
        mma=frozenset({"cdna3"}),
        backward=True,
        unproved=COMPILED_ONLY,
    ),
)
