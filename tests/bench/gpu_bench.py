"""Strict ops against the native peers on one GPU: `python -m tests.bench.gpu_bench [section …] [--json FILE]`.

Every number is the median of CUDA-graph replays. Inputs rotate through more memory than the L2 holds, but for two: the
head, whose weight alone is larger, and attention forward and backward, which have one set of them; at 2048 tokens it
fits into the L2, for ours and for the peer. `ratio` is peer time over ours: above 1 the strict op is faster. `floor` is
bytes over the copy bandwidth measured here with 1 GB; `plain` is the fastest plain kernel that moves the same bytes,
measured in turn with the op. Log and JSON begin with what `provenance` says of the run.
"""

# ruff: noqa: B023  (every closure is called, and forgotten, inside the iteration that made it)

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.bench.graph_times import Op, compared, eager, measure
from tests.bench.native_peers import flash_attention_3, heads, liger, products
from tests.bench.provenance import provenance

HIDDEN, FFN, HEADS, KV_HEADS, DIM, VOCAB = 4096, 12288, 32, 8, 128, 151936
LINEARS = {"qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)}
ROWS = (1, 8, 64, 256, 2048, 8192)
ROTATE = 256 << 20  # bytes that the inputs of one measurement rotate through; the L2 holds 50 MB


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. Times in microseconds."""

    section: str
    name: str
    strict_us: float
    peer: str
    peer_us: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """Peer time over strict time."""
        return self.peer_us / self.strict_us


def copies(size: int) -> int:
    """How many input sets of `size` bytes are needed to leave the L2."""
    return max(1, min(128, -(-ROTATE // max(size, 1))))


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def gemm(segments: int) -> Iterator[Row]:
    from rl_kernel.ops.gemm.cublaslt import gemm as strict

    for name, (n, k) in LINEARS.items():
        weights = [randn(n, k, scale=0.02) for _ in range(copies(2 * n * k))]
        for m in ROWS:
            x = randn(m, k)
            section, point = f"gemm segments={segments}", f"{name} M={m}"
            mine, others = compared(
                f"{section} {point}",
                [lambda w=w: strict(x, w, segments=segments) for w in weights],
                {peer: [lambda w=w, op=op: op(w) for w in weights] for peer, op in products(x).items()},
            )
            note = f"{2 * m * n * k / mine / 1e6:.0f} TFLOP/s"
            for peer, other in others.items():
                yield Row(section, point, mine, peer, other, note)


def gemm_dx(segments: int) -> Iterator[Row]:
    """Gradients to the inputs of the layers that are cut by columns, whose sums over the ranks the segments are."""
    from rl_kernel.ops.gemm.cublaslt import gemm_dx as strict

    for name in ("qkv", "gate_up"):
        n, k = LINEARS[name]
        weights = [randn(n, k, scale=0.02) for _ in range(copies(2 * n * k))]
        for m in ROWS:
            dy = randn(m, n)
            mine, peer = measure(
                [lambda w=w: strict(dy, w, segments=segments) for w in weights],
                [lambda w=w: torch.mm(dy, w) for w in weights],
            )
            note = f"{2 * m * n * k / mine / 1e6:.0f} TFLOP/s"
            yield Row(f"gemm dx segments={segments}", f"{name} M={m}", mine, "cuBLAS default", peer, note)


def attention_forward() -> Iterator[Row]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for length in (2048, 4096, 8192, 16384):
        q, k, v = randn(length, HEADS, DIM), randn(length, KV_HEADS, DIM), randn(length, KV_HEADS, DIM)
        cu = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        dense = [x.transpose(0, 1)[None] for x in (q, k, v)]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        for peer, backend in (("SDPA flash", SDPBackend.FLASH_ATTENTION), ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION)):
            with sdpa_kernel(backend):
                yield from _forward(
                    length, (q, k, v, cu, cu), peer, lambda: sdpa(*dense, is_causal=True, enable_gqa=True)
                )
        fa3 = flash_attention_3()
        if fa3 is not None:
            how = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": length, "max_seqlen_k": length}
            how |= {"causal": True, "fa_version": 3, "num_splits": 1}
            yield from _forward(
                length, (q, k, v, cu, cu), "FA3 in vLLM", lambda: fa3.flash_attn_varlen_func(q, k, v, **how)
            )


def _forward(length: int, inputs: tuple[torch.Tensor, ...], peer: str, call: Op) -> Iterator[Row]:
    from rl_kernel.ops.attention.triton_kernel import attention

    section, point = "attention forward", f"S={length}"
    mine, others = compared(f"{section} {point}", [lambda: attention(*inputs)], {peer: [call]})
    note = f"{2 * length * length * HEADS * DIM / mine / 1e6:.0f} TFLOP/s"
    for name, other in others.items():
        yield Row(section, point, mine, name, other, note)


def attention_backward() -> Iterator[Row]:
    from rl_kernel.ops.attention.triton_kernel import attention
    from rl_kernel.ops.attention.triton_kernel import attention_backward as strict

    for length in (2048, 8192):
        q, k, v = randn(length, HEADS, DIM), randn(length, KV_HEADS, DIM), randn(length, KV_HEADS, DIM)
        cu, dout = torch.tensor([0, length], dtype=torch.int32, device="cuda"), randn(length, HEADS, DIM)
        out, m, l = attention(q, k, v, cu, cu)
        flash = _flash_backward(dout, q, k, v)
        mine, others = compared(
            f"attention backward S={length}",
            [lambda: strict(dout, q, k, v, out, m, l, cu)],
            {"SDPA flash, deterministic": [lambda: flash(True)], "SDPA flash, any order": [lambda: flash(False)]},
        )
        note = f"{5 * length * length * HEADS * DIM / mine / 1e6:.0f} TFLOP/s"
        for peer, other in others.items():
            yield Row("attention backward", f"S={length}", mine, peer, other, note)


def _flash_backward(dout: torch.Tensor, *qkv: torch.Tensor) -> Op:
    """Flash's backward as SDPA calls it. It has no GQA: the kv heads are repeated, which is not timed.

    With `warn_only` torch would warn and take the kernel that adds in any order.
    """
    grad, q, k, v = (
        x.transpose(0, 1)[None].repeat_interleave(HEADS // x.shape[1], 1).contiguous() for x in (dout, *qkv)
    )
    out, lse, cu_q, cu_k, most_q, most_k, seed, offset, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, True
    )

    def call(deterministic: bool) -> object:
        before = torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # no part of the peer
        try:
            return torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, lse, cu_q, cu_k, most_q, most_k, 0.0, True, seed, offset
            )
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = before

    return call


def decode() -> Iterator[Row]:
    from rl_kernel.ops.attention.triton_kernel import paged_attention

    bandwidth, fa3 = copy_bandwidth(), flash_attention_3()
    for batch in (1, 16, 64, 256):
        for context in (1024, 8192, 32768):
            name, pages = f"batch={batch} context={context}", batch * context // 16
            size = pages * 16 * KV_HEADS * DIM * 4
            free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            if size > 0.9 * free:
                print(f"paged decode {name}: not measured, {size >> 30} GiB of keys and values, {free >> 30} GiB free")
                continue
            cache = (pages, 16, KV_HEADS, DIM)
            sets = [(randn(batch, HEADS, DIM), _drawn(*cache), _drawn(*cache)) for _ in range(copies(size))]
            table = torch.randperm(pages, device="cuda").int().reshape(batch, -1)
            cu = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
            lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
            peers = {}
            if fa3 is not None:
                call = _fa3_decode(fa3, table, cu, lens, context)
                peers["FA3 in vLLM"] = [lambda s=s: call(*s) for s in sets]
            calls = [lambda s=s: paged_attention(*s, table, cu, lens) for s in sets]
            mine, others = compared(f"paged decode {name}", calls, peers)
            note = f"{size / mine / 1e6:.2f} TB/s"
            yield Row("paged decode", name, mine, "floor: KV bytes", size / bandwidth, note)
            for peer, other in others.items():
                yield Row("paged decode", name, mine, peer, other, f"{size / other / 1e6:.2f} TB/s")


def _drawn(*shape: int) -> torch.Tensor:
    """As `randn`, in place: an fp32 copy of a large cache has no room beside it."""
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def _fa3_decode(fa3: Any, table: torch.Tensor, cu: torch.Tensor, lens: torch.Tensor, context: int) -> Op:
    """FlashAttention 3 as vLLM calls it in a CUDA graph: the schedule made once for all layers, up to 32 splits."""
    schedule = fa3.get_scheduler_metadata(
        batch_size=len(lens), max_seqlen_q=1, max_seqlen_k=context, num_heads_q=HEADS, num_heads_kv=KV_HEADS,
        headdim=DIM, cache_seqlens=lens, cu_seqlens_q=cu, page_size=16, causal=True, num_splits=32,
    )  # fmt: skip
    return lambda q, k, v: fa3.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu, max_seqlen_q=1, seqused_k=lens, max_seqlen_k=context, causal=True,
        block_table=table, scheduler_metadata=schedule, num_splits=32, fa_version=3,
    )  # fmt: skip


def copy_bandwidth() -> float:
    """Bytes a microsecond, read plus written, of the plainest kernel there is: b = -a."""
    a = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda")
    b = torch.empty_like(a)
    return 4 * a.numel() / measure([lambda: torch.neg(a, out=b)])[0]


def rows() -> Iterator[Row]:
    from rl_kernel.ops.rms_norm.triton_kernel import add_rms_norm, rms_norm
    from rl_kernel.ops.rope.triton_kernel import rope, rope_pair
    from rl_kernel.ops.swiglu.triton_kernel import swiglu
    from tests.bench import native_rows
    from tests.bench.plain_rows import Streams, plain

    torch._dynamo.config.recompile_limit = 64
    bandwidth = copy_bandwidth()
    gain, head_gain = randn(HIDDEN), randn(DIM)
    cos, sin = (torch.randn((8192, DIM // 2), device="cuda") for _ in range(2))
    for tokens in (1, 64, 2048, 8192):
        positions = torch.arange(tokens, device="cuda")

        def compare(
            name: str, shapes: list[tuple[int, ...]], streams: Streams, mine: Op, peers: dict[str, Op]
        ) -> Iterator[Row]:
            sets = [[randn(*s) for s in shapes] for _ in range(copies(streams.moved))]
            flat = [[randn(streams.reads, streams.count)] for _ in sets]
            sides = [(peer, op, sets) for peer, op in peers.items()]
            sides += [(f"plain {i}", op, flat) for i, op in enumerate(plain(streams))]
            strict, others = compared(
                f"rows {name} T={tokens}",
                [lambda s=s: mine(*s) for s in sets],
                {peer: [lambda s=s, op=op: op(*s) for s in inputs] for peer, op, inputs in sides},
            )
            note = f"{streams.moved / strict / 1e6:.2f} TB/s"
            found = {"floor: bytes": streams.moved / bandwidth}
            found["plain kernel, same bytes"] = min(time for peer, time in others.items() if peer not in peers)
            for peer, other in (found | {peer: time for peer, time in others.items() if peer in peers}).items():
                yield Row("rows", f"{name} T={tokens}", strict, peer, other, note)

        hidden, heads = tokens * HIDDEN, tokens * HEADS * DIM
        yield from compare(
            "rms_norm", [(tokens, HIDDEN)], Streams(1, 1, hidden), lambda x: rms_norm(x, gain, 1e-6),
            native_rows.rms_norm(gain),
        )  # fmt: skip
        yield from compare(
            "add_rms_norm", [(tokens, HIDDEN)] * 2, Streams(2, 2, hidden), lambda x, r: add_rms_norm(x, r, gain, 1e-6),
            native_rows.add_rms_norm(gain),
        )  # fmt: skip
        yield from compare(
            "q_norm", [(tokens, HEADS, DIM)], Streams(1, 1, heads),
            lambda x: rms_norm(x, head_gain, 1e-6), native_rows.rms_norm(head_gain),
        )  # fmt: skip
        rotations = native_rows.rope(cos, sin, positions)
        yield from compare(
            "rope", [(tokens, HEADS, DIM)], Streams(1, 1, heads), lambda x: rope(x, cos, sin, positions), rotations
        )
        yield from compare(
            "rope q and k", [(tokens, HEADS, DIM), (tokens, KV_HEADS, DIM)],
            Streams(1, 1, heads + heads * KV_HEADS // HEADS),
            lambda q, k: rope_pair(q, k, cos, sin, positions), rotations,
        )  # fmt: skip
        yield from compare("swiglu", [(tokens, 2 * FFN)], Streams(2, 1, tokens * FFN), swiglu, native_rows.swiglu())


def logp() -> Iterator[Row]:
    from rl_kernel.ops.linear_logp.triton_kernel import linear_logp

    w = randn(VOCAB, HIDDEN, scale=0.02)
    for tokens in (1, 16, 64, 128, 256, 2048, 8192):
        h, target = randn(tokens, HIDDEN), torch.arange(tokens, device="cuda") * 7919 % VOCAB
        mine, others = compared(
            f"linear logp T={tokens}",
            [lambda: linear_logp(h, w, target, temperature=1.0, vocab=VOCAB)],
            {peer: [op] for peer, op in heads(h, w, target).items()}, replays=7,
        )  # fmt: skip
        note = f"{2 * tokens * VOCAB * HIDDEN / mine / 1e6:.0f} TFLOP/s"
        for peer, other in others.items():
            yield Row("linear logp", f"T={tokens}", mine, peer, other, note)
        # Where a launch from Python is a small part of it: ours was measured in a graph.
        if tokens >= 2048 and (call := liger(h, w, target)) is not None:
            peer = "Liger, forward, no graph"
            if (other := eager(f"linear logp T={tokens}: {peer}", call)) is not None:
                yield Row("linear logp", f"T={tokens}", mine, peer, other, note)


def all_reduce() -> Iterator[Row]:
    from tests.bench import gpu_bench_ranks

    yield from gpu_bench_ranks.all_reduce()


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "gemm": lambda: gemm(1),
    "segments": lambda: gemm(8),
    "dx": lambda: gemm_dx(8),
    "attention": attention_forward,
    "backward": attention_backward,
    "decode": decode,
    "rows": rows,
    "logp": logp,
    "all_reduce": all_reduce,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", help="all of them by default")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    facts, found = provenance("tests.bench.gpu_bench"), []
    print("\n".join(f"# {name}: {fact}" for name, fact in facts.items()), flush=True)
    for section in arguments.sections or SECTIONS:
        for row in SECTIONS[section]():
            found.append({**asdict(row), "ratio": row.ratio})
            print(
                f"{row.section:20} {row.name:26} {row.strict_us:10.1f} us  {row.peer:26} {row.peer_us:10.1f} us"
                f"  x{row.ratio:5.2f}  {row.note}",
                flush=True,
            )
            if arguments.json:
                arguments.json.write_text(json.dumps({**facts, "rows": found}, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
