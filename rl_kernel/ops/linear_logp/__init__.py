"""Log-probabilities of tokens under the vocabulary head; no call stores the logits of all rows.

    linear_logp(h[T,K], w[V,K] or packed, target[T] int64, *, temperature, vocab) -> (logp[T], lse[T])
    linear_logp_backward(dlogp[T], h, w, target, lse, *, temperature, vocab, main_grad[V,K], segments=1) -> dh[T,K] bf16
    logp_from_logits(logits[T,V], ids[T,J] int64, temperature[T], *, vocab) -> (logp[T,J], lse[T])
    vocab_stats(logits[T,Vshard], temperature[T], *, vocab_start, vocab) -> (m[T,tiles], s[T,tiles])
    linear_vocab_stats(h, w shard, target, *, temperature, vocab_start, vocab) -> (m, s, z[T])
    merge_vocab_stats(m, s of all shards in order) -> lse[T]

`vocab` is the true vocabulary; ids at or above it are padding and never count. h and w are bf16, the rest fp32.
"""

from rl_kernel.plan import COMPILED_ONLY, Backend

BACKENDS = (
    Backend(
        op="linear_logp",
        name="cpu",
        module="rl_kernel.ops.linear_logp.cpu",
        device="cpu",
        mma=frozenset({"fma32"}),
        backward=True,
    ),
    Backend(
        op="linear_logp",
        name="triton",
        module="rl_kernel.ops.linear_logp.triton_kernel",
        device="cuda",
        mma=frozenset({"sm90"}),
        backward=True,
        exp2=frozenset({"sm90_ex2"}),
    ),
    Backend(
        op="linear_logp",
        name="triton",
        module="rl_kernel.ops.linear_logp.triton_kernel",
        device="rocm",
        mma=frozenset({"cdna3"}),
        backward=True,
        unproved=COMPILED_ONLY,
    ),
)
