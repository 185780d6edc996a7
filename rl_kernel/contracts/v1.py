"""Version 1 of every op's contract, as data.

Vocabulary of the rules: `chain` is the MMA model's accumulation from +0 over ascending index, in groups of the
model's g terms from the first on, the last group padded with +0*+0; `fma`, `/`, `sqrt` are IEEE 754 fp32, correctly
rounded; every other `+ - *` is one fp32 operation, rounded; `bf16()` rounds to nearest even. `tree` is the
neighbour-pair binary tree ((v0+v1)+(v2+v3))+…, an odd last value moving up.
`lane_dot(a, b)`: lane j of 128 takes i = j, j+128, … ascending by fma from +0, then tree over the lanes.
An output that is NaN is stored as the one quiet NaN (bf16 0x7fc0, fp32 0x7fc00000).
"""

from typing import Final

from rl_kernel.contract import OpContract, Profile

LANES: Final = 128
KV_BLOCK: Final = 64
KV_PARTIAL: Final = 1024
VOCAB_TILE: Final = 64

GEMM = (
    "y[m,n] = chain over k of x[m,k]*w[n,k]; fp32 accumulator",
    "segments S: k is cut into S equal parts, each its own chain from +0; y = tree of the S fp32 partials",
    "a rank of TP degree t owns S/t neighbouring parts, hands out their fp32 subtree; the tree over ranks ends it",
    "output bf16(y), or y itself where the output is fp32",
    "dx[m,k] = chain over n of dy[m,n]*w[n,k], segments as above along n; output bf16",
    "dw[n,k] <- chain over rows t, starting from the fp32 main gradient, of dy[t,n]*x[t,k]; rows in logical order",
    "every chain takes groups of the MMA model's g terms from its first term on (dw: from the first row of each call),"
    " the last group padded with +0*+0; so calls of dw whose rows are multiples of g add up to one call",
)
RMS_NORM = (
    "s = lane_dot(x, x); r = 1 / sqrt(s / n + eps); t = x * r",
    "y = bf16(bf16(t) * w)",
    "with a residual: x = bf16(x + residual) first, and that x is the new residual",
    "backward: g = dy * w; c = lane_dot(g, t) / n; dx = bf16(r * fma(-t, c, g))",
    "dw[i] <- fma(dy[i], bf16(t[i]), dw[i]), rows in order; q-norm and k-norm keep one dw a head, tree over heads",
)
ROPE = (
    "cos, sin of position / theta^(2i/d) computed in float64 on the host, rounded to fp32, shipped as a table",
    "x1 = x[:d/2], x2 = x[d/2:]",
    "o1 = bf16(fma(x1, cos, -(x2*sin))); o2 = bf16(fma(x2, cos, x1*sin))",
    "backward: the same with -sin",
)
SWIGLU = (
    "e = exp2(-|g| * fp32(log2 e)); sigmoid = g >= 0 ? 1/(1+e) : e/(1+e); silu = g * sigmoid",
    "y = bf16(silu * u)",
    "backward: du = bf16(dy * silu); dg = bf16((dy*u) * (sigmoid * fma(g, 1 - sigmoid, 1)))",
)
ATTENTION = (
    "s = chain over head_dim of q*k, times fp32(log2(e)/sqrt(d)); keys in blocks of kv_block at absolute positions",
    "m' = maxNum(m, s of the block's visible keys); a = exp2(m - m'); p = exp2(s - m'), +0 where masked, v = +0 there",
    "acc = chain from acc*a of bf16(p)*v; l = chain from l*a of bf16(p)*1",
    "every kv_partial keys a new partial starts from m = -inf, l = 0, acc = 0",
    "partials merge left to right: m = max; a = exp2(m1-m), b = exp2(m2-m); l = l1*a + l2*b; acc = acc1*a + acc2*b",
    "out = bf16((acc + 0) / l)",
    "backward: r = 1/l; p = exp2(s - m) * r; delta = lane_dot(dout, out); dp = chain over head_dim of dout*v",
    "ds = bf16(p * (dp - delta)); dq = bf16((chain over keys of ds*k + 0) * fp32(1/sqrt(d)))",
    "per query head: dv = chain over queries of bf16(p)*dout; dk = chain over queries of ds*q",
    "a chain over keys or queries takes groups of g at absolute positions, where masked terms are +0*+0",
    "over the query heads of a kv head: tree; dv = bf16(tree + 0), dk = bf16((tree + 0) * fp32(1/sqrt(d)))",
)
LINEAR_LOGP = (
    "logit = GEMM with fp32 output; z = logit / temperature",
    "vocabulary in tiles of vocab_tile at absolute token ids; ids at or above the true vocabulary never count",
    "per tile: m = maxNum of z; s = tree over the tile's vocab_tile ids of exp2((z - m) * fp32(log2 e)), absent ids +0",
    "a maximum of -inf counts as 0 inside an exponent, so a tile that a sampler set to -inf has s = +0",
    "tiles merge in ascending order: m' = max; a = exp2((m1-m')*log2e), b = exp2((m2-m')*log2e); s = s1*a + s2*b",
    "lse = m + ln(s); logp = z[target] - lse",
    "backward: c = dlogp / temperature; p = exp2((z - lse) * fp32(log2 e)); dlogit = bf16((onehot - p) * c)",
    "dh and dw follow GEMM, dh with segments along the vocabulary",
)
TREE_ALL_REDUCE = ("y = tree over ranks, by logical index, of fp32 partials; output bf16(y) or fp32",)
EMBEDDING = ("y = w[id] + 0 (so that -0 becomes +0)", "backward: dw[id] <- dw[id] + dy, rows in logical order, fp32")
RESIDUAL_ADD = ("y = bf16(a + b)",)


def ops(profile: Profile) -> tuple[OpContract, ...]:
    """Return the contract of every op under `profile`."""
    mma, exp2 = profile.mma, profile.exp2
    return (
        OpContract("embedding", 1, None, None, EMBEDDING),
        OpContract("gemm", 1, mma, None, GEMM),
        OpContract("residual_add", 1, None, None, RESIDUAL_ADD),
        OpContract("rms_norm", 1, None, None, RMS_NORM, (("lanes", LANES),)),
        OpContract("rope", 1, None, None, ROPE),
        OpContract("swiglu", 1, None, exp2, SWIGLU),
        OpContract("attention", 1, mma, exp2, ATTENTION, (("kv_block", KV_BLOCK), ("kv_partial", KV_PARTIAL))),
        OpContract("linear_logp", 1, mma, exp2, LINEAR_LOGP, (("vocab_tile", VOCAB_TILE),)),
        OpContract("tree_all_reduce", 1, None, None, TREE_ALL_REDUCE),
    )
