"""The laws as functions of a subject, so that a mutant can be held to them as well as a backend.

Each returns nothing and raises AssertionError with what differed.
"""

from typing import Any

import numpy as np

from rl_kernel.compare import compare_bits
from rl_kernel.reference.ops import F32, Bits, narrow
from rl_kernel.reference.ops import tree_sum as reference_tree_sum
from tests.contracts.cases import EPS
from tests.contracts.draws import bf16, fp32, offsets


def same(a: np.ndarray, b: np.ndarray, what: str) -> None:
    """Assert that two arrays have the same bits and are not empty."""
    difference = compare_bits(a, b)
    assert difference.equal, f"{what}: {difference}"


def a_row_does_not_depend_on_its_batch(subject: Any) -> None:
    """A row alone, among 7 and among 64 has the same bits, for every op that works on rows."""
    x, w = bf16(1, 64, 96, kind="cancelling"), bf16(2, 80, 96, kind="spread")
    gate_up, head = bf16(3, 64, 64), narrow(fp32(4, 384, 96, scale=0.05))
    target = np.arange(64) * 5 % 331
    whole = {
        "gemm": subject.gemm_fp32(x, w),
        "rms_norm": subject.rms_norm(x, w[0], EPS),
        "swiglu": subject.swiglu(gate_up),
        "linear_logp": subject.linear_logp(x, head, target, temperature=0.9, vocab=331)[0],
    }
    for rows in ([5], list(range(3, 10)), [63, 0, 5]):
        part = {
            "gemm": subject.gemm_fp32(x[rows], w),
            "rms_norm": subject.rms_norm(x[rows], w[0], EPS),
            "swiglu": subject.swiglu(gate_up[rows]),
            "linear_logp": subject.linear_logp(x[rows], head, target[rows], temperature=0.9, vocab=331)[0],
        }
        for op, bits in part.items():
            same(bits, whole[op][rows], f"{op} on rows {rows}")


def tp_degree_changes_no_bit(subject: Any) -> None:
    """TP = 1, 2, 4 with segments = 4: rank r owns neighbouring parts of the sum, the tree over ranks finishes it."""
    x, w, dy = bf16(1, 6, 128, kind="spread"), bf16(2, 64, 128, kind="cancelling"), bf16(3, 6, 64, kind="spread")
    forward, backward = subject.gemm_fp32(x, w, segments=4), subject.gemm_dx_fp32(dy, w, segments=4)
    for ranks in (2, 4):
        k, n = 128 // ranks, 64 // ranks
        partials = [
            subject.gemm_fp32(_part(x, r, k), _part(w, r, k), segments=4 // ranks) for r in range(ranks)
        ]  # fmt: skip
        same(subject.tree_sum(np.stack(partials)), forward, f"row-parallel forward, TP={ranks}")
        partials = [
            subject.gemm_dx_fp32(_part(dy, r, n), w[r * n : (r + 1) * n], segments=4 // ranks) for r in range(ranks)
        ]  # fmt: skip
        same(subject.tree_sum(np.stack(partials)), backward, f"column-parallel backward, TP={ranks}")


def vocabulary_shards_change_no_bit(subject: Any) -> None:
    """Logits in one piece, and in 2 and 4 shards whose tile statistics are merged in global order."""
    logits, heat = fp32(1, 5, 1024, scale=2.0), np.full(5, 0.8, np.float32)
    whole = subject.merge_vocab_stats(*subject.vocab_stats(logits, heat, vocab_start=0, vocab=1000))
    for shards in (2, 4):
        width = 1024 // shards
        stats = [
            subject.vocab_stats(_part(logits, r, width), heat, vocab_start=r * width, vocab=1000) for r in range(shards)
        ]
        merged = [np.concatenate(parts, axis=1) for parts in zip(*stats, strict=True)]
        same(subject.merge_vocab_stats(*merged), whole, f"{shards} vocabulary shards")


def pads_of_the_vocabulary_never_count(subject: Any) -> None:
    """What stands in the padded logits, NaN included, changes nothing."""
    logits, heat, ids = fp32(1, 3, 384), np.ones(3, np.float32), np.array([[0], [330], [7]])
    clean = subject.logp_from_logits(logits, ids, heat, vocab=331)[0]
    for junk in (np.nan, np.inf, 1e30):
        dirty = logits.copy()
        dirty[:, 331:] = junk
        same(subject.logp_from_logits(dirty, ids, heat, vocab=331)[0], clean, f"pads set to {junk}")


def decode_is_prefill_is_chunked_prefill(subject: Any) -> None:
    """Queries one by one, in uneven chunks and all at once; alone and beside another sequence."""
    total = 1100  # crosses kv_partial
    q, k, v = bf16(1, total, 2, 32), bf16(2, total, 1, 32), bf16(3, total, 1, 32)
    whole = subject.attention(q, k, v, offsets(total), offsets(total))[0]
    for first, last in ((0, 1), (63, 64), (64, 65), (100, 170), (1023, 1026), (1099, 1100)):
        chunk = subject.attention(q[first:last], k[:last], v[:last], offsets(last - first), offsets(last))[0]
        same(chunk, whole[first:last], f"queries {first}:{last}")
    neighbour = bf16(9, 77, 2, 32)
    queries = np.concatenate([neighbour, q[1000:1070]])
    keys, values = (np.concatenate([x[:90], x[:1070]]) for x in (k, v))
    both = subject.attention(queries, keys, values, offsets(77, 70), offsets(90, 1070))[0]
    same(both[77:], whole[1000:1070], "a chunk beside another sequence")


def keys_after_a_query_never_count(subject: Any) -> None:
    """NaN in keys and values that the causal mask hides changes nothing."""
    q, k, v = bf16(1, 70, 2, 32), bf16(2, 70, 1, 32), bf16(3, 70, 1, 32)
    clean = subject.attention(q, k, v, offsets(70), offsets(70))[0]
    for hidden in (40, 64, 69):
        dirty_k, dirty_v = k.copy(), v.copy()
        dirty_k[hidden:], dirty_v[hidden:] = 0x7FC0, 0x7F80
        dirty = subject.attention(q, dirty_k, dirty_v, offsets(70), offsets(70))[0]
        same(dirty[:hidden], clean[:hidden], f"keys from position {hidden} hidden")


def paging_changes_no_bit(subject: Any) -> None:
    """Keys and values in scattered cache blocks of 16 and 64, other sequences' and stale blocks between them."""
    lengths, queries = (1, 64, 130, 1090), (1, 3, 130, 2)
    q = bf16(1, sum(queries), 4, 32)
    k, v = bf16(2, sum(lengths), 2, 32), bf16(3, sum(lengths), 2, 32)
    expected = subject.attention(q, k, v, offsets(*queries), offsets(*lengths))[0]
    for block in (16, 64):
        k_cache, v_cache, table = paged(k, v, lengths, block)
        found = subject.paged_attention(q, k_cache, v_cache, table, offsets(*queries), np.array(lengths, np.int32))
        same(found, expected, f"paged attention, block size {block}")


def paged(k: Bits, v: Bits, lengths: tuple[int, ...], block: int) -> tuple[Bits, Bits, np.ndarray]:
    """Scatter k and v[T,G,D] into cache blocks in random order; what is not written is NaN."""
    counts = [-(-n // block) for n in lengths]
    order = np.random.default_rng(block).permutation(sum(counts) + 3)
    k_cache, v_cache = (np.full((len(order), block, *k.shape[1:]), 0x7FC0, np.uint16) for _ in range(2))
    table = np.zeros((len(lengths), max(counts)), np.int32)
    start = used = 0
    for i, n in enumerate(lengths):
        table[i, : counts[i]] = order[used : used + counts[i]]
        for j in range(n):
            k_cache[table[i, j // block], j % block] = k[start + j]
            v_cache[table[i, j // block], j % block] = v[start + j]
        start, used = start + n, used + counts[i]
    return k_cache, v_cache, table


def micro_batches_change_no_gradient(subject: Any) -> None:
    """The main gradient's chain goes on from call to call, so 64 rows at once equal 16 + 32 + 16."""
    dy, x, start = bf16(1, 64, 33, kind="spread"), bf16(2, 64, 40, kind="spread"), fp32(3, 33, 40)
    at_once, bit_by_bit = subject.gemm_dw(start, dy, x), start
    for first, last in ((0, 16), (16, 48), (48, 64)):
        bit_by_bit = subject.gemm_dw(bit_by_bit, dy[first:last], x[first:last])
    same(bit_by_bit, at_once, "weight gradient in three micro-batches")


def the_tree_is_over_logical_ranks(subject: Any) -> None:
    """Bits of the neighbour-pair tree, which differ from a left-to-right sum on this input."""
    parts = fp32(1, 8, 500) * np.exp2(np.arange(8, dtype=np.float32))[:, None]
    expected = reference_tree_sum(parts)
    assert not compare_bits(left_to_right(parts), expected).equal, "the input does not tell the orders apart"
    same(subject.tree_sum(parts), expected, "tree")


def left_to_right(parts: F32) -> F32:
    """The sum in the order of a ring."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


LAWS = (
    a_row_does_not_depend_on_its_batch,
    tp_degree_changes_no_bit,
    vocabulary_shards_change_no_bit,
    pads_of_the_vocabulary_never_count,
    decode_is_prefill_is_chunked_prefill,
    keys_after_a_query_never_count,
    paging_changes_no_bit,
    micro_batches_change_no_gradient,
    the_tree_is_over_logical_ranks,
)


def _part(x: np.ndarray, rank: int, width: int) -> np.ndarray:
    return np.ascontiguousarray(x[:, rank * width : (rank + 1) * width])
