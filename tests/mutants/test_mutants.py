"""Deliberately wrong backends. A law that accepts its mutant proves nothing, so each must be rejected."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rl_kernel.compare import compare_bits
from rl_kernel.contracts import model_contract
from rl_kernel.ops import strict_plan
from rl_kernel.reference.ops import F32, I32, I64, Bits, narrow, widen
from tests.contracts import laws
from tests.contracts.cases import Case, all_cases
from tests.contracts.draws import offsets
from tests.contracts.plain import lane_dot
from tests.contracts.subjects import BackendSubject, ReferenceSubject


class Mutant(ReferenceSubject):
    """The reference with one op broken."""

    def __init__(self) -> None:
        super().__init__()
        self.name = type(self).__name__


class SplitKForFewRows(Mutant):
    """Two chains instead of one where M is small, as cuBLAS does."""

    def gemm_fp32(self, x: Bits, w: Bits, *, segments: int = 1) -> F32:
        return self.law.gemm_fp32(x, w, segments=2 if len(x) < 8 and x.shape[1] % 2 == 0 else segments)


class Bf16Accumulator(Mutant):
    """Partial sums rounded to bf16."""

    def gemm_fp32(self, x: Bits, w: Bits, *, segments: int = 1) -> F32:
        half = x.shape[1] // 2
        parts = [self.law.gemm(x[:, s].copy(), w[:, s].copy()) for s in (slice(0, half), slice(half, None))]
        return widen(self.law.residual_add(*parts))


class NoFusedMultiplyAdd(Mutant):
    """A product rounded before it is added: FMA contraction lost."""

    def gemm_fp32(self, x: Bits, w: Bits, *, segments: int = 1) -> F32:
        acc = np.zeros((len(x), len(w)), np.float32)
        for k in range(x.shape[1]):
            acc = acc + widen(x[:, k])[:, None] * widen(w[:, k])[None]
        return acc


class LibraryMatmul(Mutant):
    """fp32 BLAS, whatever its order."""

    def gemm_fp32(self, x: Bits, w: Bits, *, segments: int = 1) -> F32:
        return (widen(x) @ widen(w).T).astype(np.float32)


class RingAllReduce(Mutant):
    """Ranks added left to right instead of in the tree."""

    def tree_sum(self, parts: F32) -> F32:
        return laws.left_to_right(parts)


class SequentialNormSum(Mutant):
    """RMSNorm with one chain from left to right instead of 128 lanes and a tree."""

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        values = widen(x)
        total = np.cumsum(values * values, axis=-1, dtype=np.float32)[..., -1:]
        r = np.float32(1) / np.sqrt(total / np.float32(x.shape[-1]) + np.float32(eps))
        return narrow(widen(narrow(values * r)) * widen(w))


class UnroundedNorm(Mutant):
    """RMSNorm that skips the rounding to bf16 before the weight; everything else as the contract has it."""

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        values, weight = widen(x), widen(w)
        rows = []
        for row in values:
            mean = np.float32(lane_dot(row, row) / np.float32(len(row)))
            rows.append(row * (np.float32(1) / np.sqrt(mean + np.float32(eps))) * weight)
        return narrow(np.array(rows))


class MaskedMaximum(Mutant):
    """Keys that the causal mask hides take part in the running maximum and in the sums, with a weight of zero."""

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        out, m, l = self.law.attention(q, k, v, cu_q, cu_k)
        for i in range(len(q)):
            hidden = slice(len(k) - len(q) + i + 1, None)
            with np.errstate(invalid="ignore"):  # the hidden value's NaN or infinity, times nothing
                touched = (widen(v[hidden]) * np.float32(0)).sum() + (widen(k[hidden]) * np.float32(0)).sum()
            out[i] = narrow(widen(out[i]) + touched)
        return out, m, l


class StaleLastBlock(Mutant):
    """Decode reads the last cache block one key short."""

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        if len(q) == 1 and len(k) > 1:
            return self.law.attention(q, k[:-1].copy(), v[:-1].copy(), cu_q, cu_k - np.array([0, 1], np.int32))
        return self.law.attention(q, k, v, cu_q, cu_k)


class SplitKvByChunk(Mutant):
    """Key blocks that start where the chunk of queries does, not at absolute positions: two halves, merged by lse."""

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        if len(cu_q) != 2 or len(q) == len(k) or len(k) < 80:
            return self.law.attention(q, k, v, cu_q, cu_k)
        results = []
        for i in range(len(q)):
            n = len(k) - len(q) + i + 1
            halves = [slice(0, 37), slice(37, n)]
            outs = [
                self.law.attention(q[i : i + 1], k[s].copy(), v[s].copy(), offsets(1), offsets(len(k[s])))
                for s in halves
            ]
            top = np.maximum(outs[0][1], outs[1][1])
            weight = [o[2] * np.exp2(o[1] - top) for o in outs]
            total = sum(widen(o[0]) * w[..., None] for o, w in zip(outs, weight, strict=True))
            results.append(narrow((total / (weight[0] + weight[1])[..., None]).astype(np.float32)))
        return np.concatenate(results), None, None


class UnfusedRotation(Mutant):
    """RoPE whose products are all rounded before they are added."""

    def rope(self, x: Bits, cos: F32, sin: F32, positions: I64, *, inverse: bool = False) -> Bits:
        c, s = cos[positions][:, None], (-sin if inverse else sin)[positions][:, None]
        x1, x2 = np.split(widen(x), 2, axis=-1)
        return narrow(np.concatenate([x1 * c - x2 * s, x2 * c + x1 * s], axis=-1))


class ActivationRoundedFirst(Mutant):
    """SwiGLU that rounds silu(g) to bf16 before it meets u, as two kernels in a row would."""

    def swiglu(self, x: Bits) -> Bits:
        ones = np.full_like(x[:, : x.shape[1] // 2], 0x3F80)
        silu = self.law.swiglu(np.concatenate([x[:, : x.shape[1] // 2], ones], axis=1))
        return narrow(widen(silu) * widen(x[:, x.shape[1] // 2 :]))


class TruncatedResidual(Mutant):
    """The residual sum cut to bf16 instead of rounded."""

    def residual_add(self, a: Bits, b: Bits) -> Bits:
        return ((widen(a) + widen(b)).view(np.uint32) >> 16).astype(np.uint16)


class SignedZeroEmbedding(Mutant):
    """The table's -0 passes through."""

    def embedding(self, ids: I64, w: Bits) -> Bits:
        return w[ids]


class UnorderedEmbeddingGradient(Mutant):
    """Rows of one id are summed among themselves first."""

    def embedding_dw(self, main_grad: F32, dy: Bits, ids: I64) -> F32:
        total = np.zeros_like(main_grad)
        np.add.at(total, ids, widen(dy))
        return main_grad + total


class GradientsInBf16(Mutant):
    """The main gradient is kept in bf16."""

    def gemm_dw(self, main_grad: F32, dy: Bits, x: Bits) -> F32:
        return widen(narrow(self.law.gemm_dw(main_grad, dy, x)))

    def linear_logp_backward(self, *args: Any, **kwargs: Any) -> Any:
        dh, grad = self.law.linear_logp_backward(*args, **kwargs)
        return dh, widen(narrow(grad))


class SplitInputGradient(Mutant):
    """dx in two chains."""

    def gemm_dx(self, dy: Bits, w: Bits, *, segments: int = 1) -> Bits:
        return self.law.gemm_dx(dy, w, segments=segments if dy.shape[1] % (2 * segments) else 2 * segments)


class NormGradientWithoutMean(Mutant):
    """RMSNorm's dx without the term that comes from the norm itself."""

    def rms_norm_backward(self, dy: Bits, x: Bits, w: Bits, eps: float, dw: F32) -> tuple[Bits, F32]:
        _, dw = self.law.rms_norm_backward(dy, x, w, eps, dw)
        return self.law.rms_norm(narrow(widen(dy) * widen(w)), w, eps), dw


class SigmoidSlope(Mutant):
    """SwiGLU's gradient takes the slope of sigmoid for that of silu."""

    def swiglu_backward(self, dy: Bits, x: Bits) -> Bits:
        dx = self.law.swiglu_backward(dy, x)
        half = x.shape[1] // 2
        dx[:, :half] = self.law.swiglu_backward(dy, np.concatenate([x[:, :half] & 0x7FFF, x[:, half:]], axis=1))[
            :, :half
        ]
        return dx


class HeadsInSequence(Mutant):
    """dk and dv of a kv head's query heads added left to right; here: the heads' order reversed."""

    def attention_backward(self, dout: Bits, q: Bits, k: Bits, v: Bits, out: Bits, m: F32, l: F32, cu: I32) -> Any:
        group = q.shape[1] // k.shape[1]
        order = np.arange(q.shape[1]).reshape(-1, group)
        order = np.concatenate([order[:, :1], order[:, :0:-1]], axis=1).reshape(-1)
        swapped = [np.ascontiguousarray(a[:, order]) for a in (dout, q, out, m, l)]
        dq, dk, dv = self.law.attention_backward(swapped[0], swapped[1], k, v, *swapped[2:], cu)
        return np.ascontiguousarray(dq[:, np.argsort(order)]), dk, dv


class PadsCount(Mutant):
    """The padded vocabulary takes part in the sum."""

    def logp_from_logits(self, logits: F32, ids: Any, temperature: F32, *, vocab: int) -> Any:
        return self.law.logp_from_logits(logits, ids, temperature, vocab=logits.shape[1])


class ShardsMergeBackwards(Mutant):
    """Tiles merged from the last to the first where there are several shards."""

    def vocab_stats(self, logits: F32, temperature: F32, *, vocab_start: int, vocab: int) -> Any:
        m, s = self.law.vocab_stats(logits, temperature, vocab_start=vocab_start, vocab=vocab)
        return (m[:, ::-1].copy(), s[:, ::-1].copy()) if logits.shape[1] < 1024 else (m, s)


class GradientPerMicroBatch(Mutant):
    """Each micro-batch sums on its own and is added afterwards."""

    def gemm_dw(self, main_grad: F32, dy: Bits, x: Bits) -> F32:
        return main_grad + self.law.gemm_dw(np.zeros_like(main_grad), dy, x)


class BatchSizeDependentLogp(Mutant):
    """A softmax by the library for large batches."""

    def linear_logp(self, h: Bits, w: Bits, target: Any, *, temperature: float, vocab: int) -> Any:
        logp, lse = self.law.linear_logp(h, w, target, temperature=temperature, vocab=vocab)
        if len(h) >= 8:
            z = self.law.gemm_fp32(h, w)[:, :vocab] / np.float32(temperature)
            logp = (z - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True)) - z.max(1, keepdims=True))[
                np.arange(len(h)), target
            ]
        return logp.astype(np.float32), lse


LAW_AND_MUTANT = [
    (laws.a_row_does_not_depend_on_its_batch, SplitKForFewRows),
    (laws.a_row_does_not_depend_on_its_batch, BatchSizeDependentLogp),
    (laws.tp_degree_changes_no_bit, RingAllReduce),
    (laws.tp_degree_changes_no_bit, NoFusedMultiplyAdd),
    (laws.tp_degree_changes_no_bit, Bf16Accumulator),
    (laws.vocabulary_shards_change_no_bit, ShardsMergeBackwards),
    (laws.pads_of_the_vocabulary_never_count, PadsCount),
    (laws.decode_is_prefill_is_chunked_prefill, StaleLastBlock),
    (laws.decode_is_prefill_is_chunked_prefill, SplitKvByChunk),
    (laws.keys_after_a_query_never_count, MaskedMaximum),
    (laws.micro_batches_change_no_gradient, GradientPerMicroBatch),
    (laws.the_tree_is_over_logical_ranks, RingAllReduce),
]


@pytest.mark.parametrize(("law", "mutant"), LAW_AND_MUTANT, ids=lambda x: x.__name__)
def test_law_rejects_its_mutant(law: Callable[[Any], None], mutant: type[Mutant]) -> None:
    law(ReferenceSubject())
    with pytest.raises(AssertionError):
        law(mutant())


class StaleBlockTable(BackendSubject):
    """The second cache block of each sequence is read from where the first one is."""

    def paged_attention(self, q: Bits, k_cache: Bits, v_cache: Bits, table: I32, cu_q: I32, lengths: I32) -> Bits:
        stale = table.copy()
        stale[:, 1] = np.where(lengths > k_cache.shape[1], table[:, 0], table[:, 1])
        return super().paged_attention(q, k_cache, v_cache, stale, cu_q, lengths)


def test_paging_law_rejects_a_stale_block_table() -> None:
    plan = strict_plan(model_contract(), "cpu")
    laws.paging_changes_no_bit(BackendSubject(plan))
    with pytest.raises(AssertionError):
        laws.paging_changes_no_bit(StaleBlockTable(plan))


def test_every_law_has_a_mutant() -> None:
    assert {law for law, _ in LAW_AND_MUTANT} | {laws.paging_changes_no_bit} == set(laws.LAWS)


EQUAL_BITS_MUTANTS = (
    SplitKForFewRows,
    Bf16Accumulator,
    NoFusedMultiplyAdd,
    LibraryMatmul,
    RingAllReduce,
    SequentialNormSum,
    UnroundedNorm,
    PadsCount,
    StaleLastBlock,
    UnfusedRotation,
    ActivationRoundedFirst,
    TruncatedResidual,
    SignedZeroEmbedding,
    UnorderedEmbeddingGradient,
    GradientsInBf16,
    SplitInputGradient,
    NormGradientWithoutMean,
    SigmoidSlope,
    HeadsInSequence,
)


@pytest.mark.parametrize("mutant", EQUAL_BITS_MUTANTS, ids=lambda m: m.__name__)
def test_equal_bits_rejects(mutant: type[Mutant]) -> None:
    reference, broken = ReferenceSubject(), mutant()
    own = {name for name in vars(mutant) if not name.startswith("__")}
    cases = [case for case in all_cases(reference) if case.method in own]
    assert cases, f"no case exercises {sorted(own)}"
    assert any(_differs(case, reference, broken) for case in cases)


def _differs(case: Case, reference: ReferenceSubject, broken: Mutant) -> bool:
    with np.errstate(all="ignore"):
        pairs = zip(case.run(reference), case.run(broken), strict=True)
        return any(not compare_bits(a, b).equal for a, b in pairs if b is not None)
