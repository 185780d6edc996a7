"""Causal attention with grouped query heads; the queries are the last positions of their sequence.

    attention(q[T,H,D], k[U,G,D], v[U,G,D], cu_q[R+1] int32, cu_k[R+1] int32) -> (out[T,H,D], m[T,H] fp32, l[T,H] fp32)
    paged_attention(q, k_cache[B,bs,G,D], v_cache, block_table[R,maxb] int32, cu_q[R+1], seq_lens[R] int32) -> out
    attention_backward(dout, q, k, v, out, m, l, cu[R+1]) -> (dq, dk, dv), as many queries as keys

Any split of a sequence's queries over calls gives the same bits. Tensors are bf16 unless said; tokens may lie apart.
"""

from rl_kernel.plan import COMPILED_ONLY, Backend

BACKENDS = (
    Backend(
        op="attention",
        name="cpu",
        module="rl_kernel.ops.attention.cpu",
        device="cpu",
        mma=frozenset({"fma32"}),
        backward=True,
    ),
    Backend(
        op="attention",
        name="triton",
        module="rl_kernel.ops.attention.triton_kernel",
        device="cuda",
        mma=frozenset({"sm90"}),
        backward=True,
        exp2=frozenset({"sm90_ex2"}),
    ),
    Backend(
        op="attention",
        name="triton",
        module="rl_kernel.ops.attention.triton_kernel",
        device="rocm",
        mma=frozenset({"cdna3"}),
        backward=True,
        unproved=COMPILED_ONLY,
    ),
)
