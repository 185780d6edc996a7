"""Token embedding.

    embedding(ids[T] int64, w[V,K]) -> [T,K]
    embedding_dw_(main_grad[V,K] fp32, dy[T,K], ids[T]) adds rows in logical order, in place

Tensors are bf16 unless said.
"""

from rl_kernel.plan import COMPILED_ONLY, Backend

BACKENDS = (
    Backend(
        op="embedding",
        name="cpu",
        module="rl_kernel.ops.embedding.cpu",
        device="cpu",
        mma=frozenset(),
        backward=True,
    ),
    Backend(
        op="embedding",
        name="triton",
        module="rl_kernel.ops.embedding.triton_kernel",
        device="cuda",
        mma=frozenset(),
        backward=True,
    ),
    Backend(
        op="embedding",
        name="triton",
        module="rl_kernel.ops.embedding.triton_kernel",
        device="rocm",
        mma=frozenset(),
        backward=True,
        unproved=COMPILED_ONLY,
    ),
)
