"""The inputs of every law: shapes that cross each boundary of the contract, values that bite.

A case names a method of a subject and its arguments; running it on two subjects must give the same bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_kernel.reference.ops import widen
from rl_kernel.reference.rope_table import rope_table
from tests.contracts.draws import KINDS, bf16, fp32, offsets

EPS = 1e-5
_ROPE = rope_table(10000.0, 64, 300)


@dataclass(frozen=True)
class Case:
    """One call. `name` is what a failing test prints."""

    name: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def run(self, subject: Any) -> tuple[np.ndarray, ...]:
        """Call the subject and return its results as a tuple of arrays."""
        result = getattr(subject, self.method)(*self.args, **self.kwargs)
        return result if isinstance(result, tuple) else (result,)


def gemm_cases() -> Iterator[Case]:
    shapes = [
        (1, 1, 1),
        (1, 17, 33),
        (7, 64, 64),
        (8, 65, 16),
        (5, 48, 15),
        (13, 130, 257),
        (33, 200, 96),
        (2, 31, 512),
    ]
    for m, n, k in shapes:
        for kind in KINDS:
            x, w, dy = bf16(1, m, k, kind=kind), bf16(2, n, k, kind=kind), bf16(3, m, n, kind=kind)
            at = f"{m}x{n}x{k}-{kind}"
            yield Case(f"gemm-{at}", "gemm", (x, w))
            yield Case(f"gemm_fp32-{at}", "gemm_fp32", (x, w))
            yield Case(f"gemm_dx-{at}", "gemm_dx", (dy, w))
            yield Case(f"gemm_dw-{at}", "gemm_dw", (fp32(4, n, k), dy, x))
    for segments in (2, 4, 8):
        x, w, dy = bf16(1, 9, 96, kind="spread"), bf16(2, 64, 96, kind="spread"), bf16(3, 9, 64, kind="spread")
        for method, a in (("gemm", x), ("gemm_fp32", x), ("gemm_dx", dy), ("gemm_dx_fp32", dy)):
            yield Case(f"{method}-segments{segments}", method, (a, w), {"segments": segments})


def row_cases() -> Iterator[Case]:
    for rows, n in ((1, 1), (3, 64), (2, 127), (2, 128), (5, 129), (4, 576), (1, 4096)):
        for kind in KINDS:
            x, w, dy = bf16(1, rows, n, kind=kind), bf16(2, n), bf16(3, rows, n, kind=kind)
            at = f"{rows}x{n}-{kind}"
            yield Case(f"rms_norm-{at}", "rms_norm", (x, w, EPS))
            yield Case(f"rms_norm_backward-{at}", "rms_norm_backward", (dy, x, w, EPS, fp32(4, 1, n)))
            yield Case(f"residual_add-{at}", "residual_add", (x, dy))
            if n % 2 == 0:
                yield Case(f"swiglu-{at}", "swiglu", (bf16(5, rows, 2 * n, kind=kind),))
                yield Case(f"swiglu_backward-{at}", "swiglu_backward", (dy, bf16(5, rows, 2 * n, kind=kind)))
    yield Case("rms_norm-2048x576", "rms_norm", (bf16(1, 2048, 576), bf16(2, 576), EPS))
    heads_norm = (bf16(3, 12, 64), bf16(1, 12, 64), bf16(2, 64), EPS, fp32(4, 4, 64))
    yield Case("rms_norm_backward-per-head", "rms_norm_backward", heads_norm)
    for kind in KINDS:
        x, positions = bf16(1, 5, 3, 64, kind=kind), np.array([0, 1, 299, 7, 7])
        yield Case(f"rope-{kind}", "rope", (x, *_ROPE, positions))
        yield Case(f"rope-inverse-{kind}", "rope", (x, *_ROPE, positions), {"inverse": True})
        ids, table = np.array([4, 0, 4, 9]), bf16(1, 10, 33, kind=kind)
        yield Case(f"embedding-{kind}", "embedding", (ids, table))
        yield Case(f"embedding_dw-{kind}", "embedding_dw", (fp32(2, 10, 33), bf16(3, 4, 33, kind=kind), ids))
    many = bf16(6, 300, 16, 64)
    yield Case("rope-300x16", "rope", (many, *_ROPE, np.arange(300)))
    yield Case("embedding-minus-zero", "embedding", (np.array([1, 0]), np.full((2, 5), 0x8000, np.uint16)))
    for ranks in (1, 2, 3, 4, 8):
        yield Case(f"tree_sum-{ranks}", "tree_sum", (fp32(1, ranks, 5, 7, scale=1e3),))


def attention_cases() -> Iterator[Case]:
    # (query lengths, key lengths): one key, 64 ± 1, around kv_partial = 1024, several sequences, decode, a chunk.
    layouts = [
        ((1,), (1,)), ((3,), (3,)), ((64,), (64,)), ((65,), (65,)), ((1,), (63,)), ((2,), (1024,)), ((3,), (1025,)),
        ((1,), (2100,)), ((5, 1, 70), (5, 130, 70)), ((10, 4), (100, 68)),
    ]  # fmt: skip
    for queries, keys in layouts:
        for heads, kv_heads, dim in ((4, 2, 32), (3, 1, 64), (2, 2, 128)):
            q = bf16(1, sum(queries), heads, dim)
            k, v = (bf16(s, sum(keys), kv_heads, dim) for s in (2, 3))
            at = f"q{'+'.join(map(str, queries))}-k{'+'.join(map(str, keys))}-{heads}/{kv_heads}x{dim}"
            yield Case(f"attention-{at}", "attention", (q, k, v, offsets(*queries), offsets(*keys)))
    for kind in KINDS[1:]:
        q, k, v = (bf16(s, 70, 2, 32, kind=kind) for s in (1, 2, 3))
        yield Case(f"attention-{kind}", "attention", (q, k, v, offsets(70), offsets(70)))


def attention_backward_cases(reference: Any) -> Iterator[Case]:
    for lengths in ((1,), (64,), (65,), (7, 1, 130)):
        for heads, kv_heads, dim in ((4, 2, 32), (3, 1, 64), (8, 2, 128)):
            tokens, cu = sum(lengths), offsets(*lengths)
            q, dout = bf16(1, tokens, heads, dim), bf16(4, tokens, heads, dim)
            k, v = (bf16(s, tokens, kv_heads, dim) for s in (2, 3))
            out, m, l = reference.attention(q, k, v, cu, cu)
            name = f"attention_backward-{'+'.join(map(str, lengths))}-{heads}/{kv_heads}x{dim}"
            yield Case(name, "attention_backward", (dout, q, k, v, out, m, l, cu))


def logp_cases(reference: Any) -> Iterator[Case]:
    for tokens, vocab, rows, temperature in (
        (1, 1, 1, 1.0),
        (3, 63, 64, 0.7),
        (4, 64, 64, 1.0),
        (2, 331, 384, 1.5),
        (5, 1000, 1024, 0.6),
    ):
        for kind in ("normal", "spread", "special"):
            h, w = bf16(1, tokens, 48, kind=kind), bf16(2, rows, 48, kind=kind)
            target = np.arange(tokens) * 17 % vocab
            at, how = f"{tokens}x{vocab}/{rows}-T{temperature}-{kind}", {"temperature": temperature, "vocab": vocab}
            yield Case(f"linear_logp-{at}", "linear_logp", (h, w, target), how)
            lse = reference.linear_logp(h, w, target, **how)[1]
            args = (fp32(3, tokens), h, w, target, lse, fp32(4, rows, 48))
            yield Case(f"linear_logp_backward-{at}", "linear_logp_backward", args, {**how, "segments": 1})
            logits = reference.gemm_fp32(h, w)
            heat = np.linspace(0.5, 2.0, tokens).astype(np.float32)
            ids = np.stack([target, (target + 1) % vocab], axis=1)
            yield Case(f"logp_from_logits-{at}", "logp_from_logits", (logits, ids, heat), {"vocab": vocab})
    logits = fp32(5, 3, 256)
    logits[:, 64:192] = -np.inf  # two whole tiles that a sampler ruled out
    logits[1] = widen(bf16(6, 256, kind="special"))
    heat = np.ones(3, np.float32)
    yield Case(
        "logp_from_logits-ruled-out", "logp_from_logits", (logits, np.array([[0], [200], [70]]), heat), {"vocab": 250}
    )
    yield Case("vocab_stats-second-shard", "vocab_stats", (logits, heat), {"vocab_start": 256, "vocab": 400})


def all_cases(reference: Any) -> list[Case]:
    """Every case; `reference` supplies the forward results that gradients start from."""
    return [
        *gemm_cases(), *row_cases(), *attention_cases(), *attention_backward_cases(reference), *logp_cases(reference),
    ]  # fmt: skip
