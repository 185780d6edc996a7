"""The reference ops behind the torch API of the backends, so that a whole model can run on the law itself.

One module serves every op: `reference_plan` names it as the only backend. Slow; for tiny models.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_kernel.contract import ModelContract
from rl_kernel.contracts import model_contract
from rl_kernel.plan import Backend, Plan
from rl_kernel.reference import ops as law

REF = law.Reference.of(model_contract())


def reference_plan(contract: ModelContract) -> Plan:
    """The last contract asked for is the one whose arithmetic this module has."""
    global REF  # noqa: PLW0603
    REF = law.Reference.of(contract)
    mma, exp2 = frozenset({contract.profile.mma}), frozenset({contract.profile.exp2})
    tables = {c.op: (Backend(c.op, "reference", __name__, "cpu", mma, True, exp2),) for c in contract.ops}
    return Plan.build(contract, "cpu", tables)


def bits(x: Tensor) -> np.ndarray:
    x = x.detach().contiguous()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def bf16(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).view(torch.bfloat16)


def f32(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def gemm(x, w, *, segments=1, out_dtype=torch.bfloat16):
    if out_dtype == torch.float32:
        return f32(REF.gemm_fp32(bits(x), bits(w), segments=segments))
    return bf16(REF.gemm(bits(x), bits(w), segments=segments))


def gemm_dx(dy, w, *, segments=1, out_dtype=torch.bfloat16):
    if out_dtype == torch.float32:
        return f32(REF.gemm_dx_fp32(bits(dy), bits(w), segments=segments))
    return bf16(REF.gemm_dx(bits(dy), bits(w), segments=segments))


def gemm_dw_(main_grad, dy, x):
    main_grad.copy_(f32(REF.gemm_dw(bits(main_grad), bits(dy), bits(x))))


def rms_norm(x, w, eps):
    return bf16(REF.rms_norm(bits(x), bits(w), eps))


def rms_norm_backward(dy, x, w, eps, dw):
    dx, total = REF.rms_norm_backward(bits(dy), bits(x), bits(w), eps, bits(dw))
    dw.copy_(f32(total))
    return bf16(dx)


def rope(x, cos, sin, positions):
    return bf16(REF.rope(bits(x), bits(cos), bits(sin), bits(positions)))


def rope_backward(dout, cos, sin, positions):
    return bf16(REF.rope(bits(dout), bits(cos), bits(sin), bits(positions), inverse=True))


def swiglu(x):
    return bf16(REF.swiglu(bits(x)))


def swiglu_backward(dy, x):
    return bf16(REF.swiglu_backward(bits(dy), bits(x)))


def attention(q, k, v, cu_q, cu_k):
    out, m, l = REF.attention(bits(q), bits(k), bits(v), bits(cu_q), bits(cu_k))
    return bf16(out), f32(m), f32(l)


def attention_backward(dout, q, k, v, out, m, l, cu):
    return tuple(bf16(g) for g in REF.attention_backward(*(bits(t) for t in (dout, q, k, v, out, m, l, cu))))


def residual_add(a, b):
    return bf16(REF.residual_add(bits(a), bits(b)))


def embedding(ids, w):
    return bf16(law.embedding(bits(ids), bits(w)))


def embedding_dw_(main_grad, dy, ids):
    main_grad.copy_(f32(law.embedding_dw(bits(main_grad), bits(dy), bits(ids))))


def tree_sum(parts, out_dtype):
    total = law.tree_sum(bits(parts))
    return f32(total) if out_dtype == torch.float32 else bf16(law.narrow(total))


def tree_all_reduce(partial, group, out_dtype):
    parts = [torch.empty_like(partial) for _ in range(group.size())]
    dist.all_gather(parts, partial, group=group)
    return tree_sum(torch.stack(parts), out_dtype)


def linear_logp(h, w, target, *, temperature, vocab):
    logp, lse = REF.linear_logp(bits(h), bits(w), bits(target), temperature=temperature, vocab=vocab)
    return f32(logp), f32(lse)


def linear_logp_backward(
    dlogp, h, w, target, lse, *, temperature, vocab, main_grad, segments, vocab_start, out_dtype
):  # fmt: skip
    heat = np.full(h.shape[0], temperature, np.float32)
    d = np.empty((h.shape[0], w.shape[0]), np.uint16)
    law._reference.logit_gradient(
        d, REF.gemm_fp32(bits(h), bits(w)), bits(target), bits(lse), bits(dlogp), heat, vocab_start, vocab,
        REF.exp2_model,
    )  # fmt: skip
    gemm_dw_(main_grad, bf16(d), h)
    return gemm_dx(bf16(d), w, segments=segments, out_dtype=out_dtype)


def linear_vocab_stats(h, w, target, *, temperature, vocab_start, vocab):
    heat = np.full(h.shape[0], temperature, np.float32)
    logits = REF.gemm_fp32(bits(h), bits(w))
    m, s = REF.vocab_stats(logits, heat, vocab_start=vocab_start, vocab=vocab)
    own = bits(target) - vocab_start
    mine = (own >= 0) & (own < w.shape[0])
    z = np.full(h.shape[0], -np.inf, np.float32)
    z[mine] = logits[mine, own[mine]] / heat[mine]
    return f32(m), f32(s), f32(z)


def merge_vocab_stats(m, s):
    return f32(REF.merge_vocab_stats(bits(m), bits(s)))
