"""Deliberately wrong backends. A law that accepts its mutant proves nothing, so each must be rejected."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rl_kernel.compare import compare_bits
from rl_kernel.contracts import model_contract
from rl_kernel.ops import strict_plan
from rl_kernel.reference.ops import F32, I32, Bits, narrow, widen
from tests.contracts import laws
from tests.contracts.cases import Case, all_cases
from tests.contracts.draws import offsets
from tests.contracts.subjects import BackendSubject, ReferenceSubject


class Mutant(ReferenceSubject):
    """The reference with one op broken."""

    @property
    def name(self) -> str:
        return type(self).__name__


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
    """RMSNorm that skips the rounding to bf16 before the weight."""

    def rms_norm(self, x: Bits, w: Bits, eps: float) -> Bits:
        ones = np.full_like(w, 0x3F80)
        return narrow(
            (widen(x) / (widen(x) / np.where(x == 0, 1, widen(self.law.rms_norm(x, ones, eps)))))
            * widen(w)
            * np.float32(1.0001)
        )


class MaskedMaximum(Mutant):
    """The running maximum sees keys that the mask hides: attention over the whole sequence's blocks."""

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        out, m, l = self.law.attention(q, k, v, cu_q, cu_k)
        hidden_nan = (k == 0x7FC0).any()
        return (np.full_like(out, 0x7FC0) if hidden_nan else out), m, l


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
