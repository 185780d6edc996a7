"""CPU backend against torch on the same threads: `python -m tests.bench ops [--threads N] [--sections …] [--json F]`.

Both sides take turns inside one run and each number is a median. With one thread a time is CPU time of this thread, so
that what else the machine does counts little; with more it is wall time. `ratio` is torch time over ours: above 1 the
strict op is faster. Weights rotate through more memory than the caches hold. Exit code 1 if a GEMM misses its goal.
"""

# ruff: noqa: B023  (every closure is called, and forgotten, inside the iteration that made it)

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from rl_kernel.ops.attention import cpu as attention
from rl_kernel.ops.embedding import cpu as embedding
from rl_kernel.ops.gemm import cpu as gemm
from rl_kernel.ops.linear_logp import cpu as linear_logp
from rl_kernel.ops.rms_norm import cpu as rms_norm
from rl_kernel.ops.rope import cpu as rope
from rl_kernel.ops.swiglu import cpu as swiglu
from rl_kernel.ops.tensors import extension

LAYERS, HIDDEN, INTER, HEADS, KV_HEADS, DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
SMOLLM2 = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (VOCAB, 576)}
QWEN3_8B = {"qkv": (6144, 4096), "down": (4096, 12288)}
GOALS = {1: 0.8, 8: 0.6, 64: 0.6, 256: 0.6}  # rows of x -> least ratio against torch fp32
ROTATE = 96 << 20  # bytes
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison; microseconds a call. `note` says what else the number means."""

    section: str
    name: str
    ours_us: float
    torch_us: float | None
    note: str = ""
    goal: float | None = None

    @property
    def ratio(self) -> float | None:
        """Torch's time over ours, or None where torch has no such call."""
        return None if self.torch_us is None else self.torch_us / self.ours_us

    @property
    def missed(self) -> bool:
        """Whether there is a goal and the ratio is below it."""
        return self.goal is not None and self.ratio is not None and self.ratio < self.goal


def measure(*sides: Call, seconds: float = 0.3) -> list[float]:
    """Median microseconds of each side; the sides take turns until each has had `seconds` or 5 turns."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in sides]
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds * len(sides) or len(times[0]) < 6:
        for side, found in zip(sides, times, strict=True):
            start = clock()
            side()
            found.append(clock() - start)
    return [statistics.median(found[1:]) * 1e6 for found in times]


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Draw N(0, scale²) as bf16."""
    return (torch.randn(*shape) * scale).bfloat16()


def kv_caches(blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make the caches of as many layers as it takes to leave the processor's caches cold."""
    layers = max(1, ROTATE // (blocks * 16 * KV_HEADS * DIM * 4))
    return [tuple(bf16(blocks, 16, KV_HEADS, DIM) for _ in range(2)) for _ in range(min(layers, LAYERS))]


def gemm_rows() -> Iterator[Row]:
    """The forward product with packed weights, against torch in fp32 (the goal) and in bf16 (what stock vLLM runs)."""
    for model, shapes in (("SmolLM2", SMOLLM2), ("Qwen3-8B", QWEN3_8B)):
        for name, (n, k) in shapes.items():
            wide = [torch.randn(n, k) for _ in range(max(1, ROTATE // (n * k * 4)))]
            narrow = [w.bfloat16() for w in wide]
            turns = itertools.cycle(zip([gemm.pack(w) for w in narrow], wide, narrow, strict=True))
            for m in (1, 8, 64, 256):
                x = torch.randn(m, k)
                x16 = x.bfloat16()
                ours, fp32, half = measure(
                    lambda: gemm.gemm(x16, next(turns)[0]),
                    lambda: torch.mm(x, next(turns)[1].t()),
                    lambda: torch.mm(x16, next(turns)[2].t()),
                )
                work = 2e-3 * n * k / ours
                note = f"{m * work:.0f} GFLOP/s, {work:.0f} GB/s, torch bf16 {half / ours:.2f}"
                yield Row("gemm", f"{model} {name} M={m}", ours, fp32, note, GOALS[m])


def gradient_rows() -> Iterator[Row]:
    """The two gradients of gate_up, unpacked as a trainer has its weights, and what segments cost."""
    n, k = SMOLLM2["gate_up"]
    w, main = bf16(n, k), torch.zeros(n, k)
    for tokens in (64, 1024):
        dy, x = bf16(tokens, n), bf16(tokens, k)
        dy32, x32, w32 = dy.float(), x.float(), w.float()
        yield Row("gemm", f"dx {tokens} tokens", *measure(lambda: gemm.gemm_dx(dy, w), lambda: dy32 @ w32))
        both = measure(lambda: gemm.gemm_dw_(main, dy, x), lambda: main.addmm_(dy32.t(), x32))
        yield Row("gemm", f"dw {tokens} tokens", *both)
        yield Row("gemm", f"unpacked {tokens} tokens", *measure(lambda: gemm.gemm(x, w), lambda: x32 @ w32.t()))
    packed, x = gemm.pack(w), bf16(64, k)
    one, *rest = measure(*(lambda s=s: gemm.gemm(x, packed, segments=s) for s in (1, 2, 4, 8)))
    for segments, us in zip((2, 4, 8), rest, strict=True):
        yield Row("gemm", f"segments={segments} M=64", us, None, f"{us / one:.2f} of segments=1")


def attention_rows() -> Iterator[Row]:
    """Decode from a paged cache, prefill, backward; torch's kernel is bf16 SDPA on contiguous keys."""
    for sequences, keys in ((1, 256), (32, 256), (64, 300), (8, 2000)):
        blocks = -(-keys // 16)
        layers = kv_caches(sequences * blocks)
        table = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
        cu, lengths = torch.arange(sequences + 1, dtype=torch.int32), torch.full((sequences,), keys, dtype=torch.int32)
        q = bf16(sequences, HEADS, DIM)
        dense = [
            [x.view(sequences, -1, KV_HEADS, DIM)[:, :keys].transpose(1, 2).contiguous() for x in kv] for kv in layers
        ]
        ours, native = itertools.cycle(layers), itertools.cycle(dense)
        both = measure(
            lambda: attention.paged_attention(q, *next(ours), table, cu, lengths),
            lambda: F.scaled_dot_product_attention(q.view(sequences, HEADS, 1, DIM), *next(native), enable_gqa=True),
        )
        yield Row("attention", f"decode {sequences} x {keys} keys", *both)
    for tokens in (64, 256, 1024):
        q, k, v, dout = (
            bf16(tokens, HEADS, DIM),
            *(bf16(tokens, KV_HEADS, DIM) for _ in range(2)),
            bf16(tokens, HEADS, DIM),
        )
        cu = torch.tensor([0, tokens], dtype=torch.int32)
        heads = [x.transpose(0, 1)[None].contiguous().requires_grad_() for x in (q, k, v)]
        native = lambda: F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)  # noqa: E731
        yield Row("attention", f"prefill {tokens}", *measure(lambda: attention.attention(q, k, v, cu, cu), native))
        out, m, l = attention.attention(q, k, v, cu, cu)
        loss, up = native(), dout.transpose(0, 1)[None].contiguous()
        both = measure(
            lambda: attention.attention_backward(dout, q, k, v, out, m, l, cu),
            lambda: torch.autograd.grad(loss, heads, up, retain_graph=True),
        )
        yield Row("attention", f"backward {tokens}", *both)


def head_rows() -> Iterator[Row]:
    """The vocabulary head: sampling's log-probabilities, and the trainer's fused forward and backward."""
    w = bf16(VOCAB, HIDDEN, scale=0.1)
    w32, packed, main = w.float(), gemm.pack(w), torch.zeros(VOCAB, HIDDEN)
    for tokens in (1, 64):
        logits, ids, heat = torch.randn(tokens, VOCAB), torch.randint(VOCAB, (tokens, 1)), torch.full((tokens,), 0.7)
        both = measure(
            lambda: linear_logp.logp_from_logits(logits, ids, heat, vocab=VOCAB),
            lambda: torch.log_softmax(logits / heat[:, None], -1).gather(1, ids),
        )
        yield Row("head", f"logp_from_logits {tokens} rows", *both)
    for tokens in (64, 512):
        h, target, dlogp = bf16(tokens, HIDDEN), torch.randint(VOCAB, (tokens,)), torch.randn(tokens)
        h32, how = h.float(), {"temperature": 1.0, "vocab": VOCAB}
        both = measure(
            lambda: linear_logp.linear_logp(h, packed, target, **how),
            lambda: torch.log_softmax(h32 @ w32.t(), -1).gather(1, target[:, None]),
        )
        yield Row("head", f"linear_logp {tokens} rows", *both)
        _, lse = linear_logp.linear_logp(h, packed, target, **how)
        (us,) = measure(lambda: linear_logp.linear_logp_backward(dlogp, h, w, target, lse, main_grad=main, **how))
        yield Row(
            "head", f"linear_logp_backward {tokens} rows", us, None, f"{6e-3 * tokens * w.numel() / us:.0f} GFLOP/s"
        )


def row_rows() -> Iterator[Row]:
    """Norms, rotation, activation, embedding: at one row they show what a call costs."""
    w, table = bf16(HIDDEN), bf16(VOCAB, HIDDEN)
    cos, sin = (torch.randn(2048, DIM // 2) for _ in range(2))
    for rows in (1, 64, 1024):
        x, residual, gate_up = bf16(rows, HIDDEN), bf16(rows, HIDDEN), bf16(rows, 2 * INTER)
        q, positions, ids = bf16(rows, HEADS, DIM), torch.arange(rows), torch.randint(VOCAB, (rows,))
        calls: dict[str, tuple[Call, ...]] = {
            "rms_norm": (lambda: rms_norm.rms_norm(x, w, 1e-5), lambda: F.rms_norm(x, (HIDDEN,), w, 1e-5)),
            "add_rms_norm": (
                lambda: rms_norm.add_rms_norm(x, residual, w, 1e-5),
                lambda: F.rms_norm(x + residual, (HIDDEN,), w, 1e-5),
            ),
            "rope": (lambda: rope.rope(q, cos, sin, positions),),
            "swiglu": (lambda: swiglu.swiglu(gate_up), lambda: F.silu(gate_up[:, :INTER]) * gate_up[:, INTER:]),
            "embedding": (lambda: embedding.embedding(ids, table), lambda: F.embedding(ids, table)),
        }
        for name, sides in calls.items():
            ours, *native = measure(*sides, seconds=0.1)
            yield Row("rows", f"{name} {rows} rows", ours, native[0] if native else None)


def decode_rows(sequences: int = 64, keys: int = 256) -> Iterator[Row]:
    """Where one SmolLM2 decode step goes: every op once, times the layers that call it."""
    x, hidden, inter = bf16(sequences, HIDDEN), bf16(sequences, 2 * INTER), bf16(sequences, INTER)
    weights = {
        name: itertools.cycle([gemm.pack(bf16(*shape)) for _ in range(1 if name == "head" else LAYERS)])
        for name, shape in SMOLLM2.items()
    }
    blocks = keys // 16
    layers = itertools.cycle(kv_caches(sequences * blocks))
    table = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    cu, lengths = torch.arange(sequences + 1, dtype=torch.int32), torch.full((sequences,), keys, dtype=torch.int32)
    q, w, logits = bf16(sequences, HEADS, DIM), bf16(HIDDEN), torch.randn(sequences, VOCAB)
    cos, sin = (torch.randn(2048, DIM // 2) for _ in range(2))
    ids, heat, positions = torch.zeros(sequences, 1, dtype=torch.int64), torch.ones(sequences), torch.arange(sequences)
    calls: dict[str, tuple[int, Call]] = {
        "qkv, o, gate_up": (LAYERS, lambda: [gemm.gemm(x, next(weights[name])) for name in ("qkv", "o", "gate_up")]),
        "down": (LAYERS, lambda: gemm.gemm(inter, next(weights["down"]))),
        "head": (1, lambda: gemm.gemm(x, next(weights["head"]), out_dtype=torch.float32)),
        "paged_attention": (LAYERS, lambda: attention.paged_attention(q, *next(layers), table, cu, lengths)),
        "add_rms_norm": (2 * LAYERS, lambda: rms_norm.add_rms_norm(x, x, w, 1e-5)),
        "rope": (2 * LAYERS, lambda: rope.rope(q, cos, sin, positions)),
        "swiglu": (LAYERS, lambda: swiglu.swiglu(hidden)),
        "logp_from_logits": (1, lambda: linear_logp.logp_from_logits(logits, ids, heat, vocab=VOCAB)),
    }
    totals = {name: times * measure(call)[0] for name, (times, call) in calls.items()}
    for name, us in totals.items():
        yield Row("decode step", f"{name}, {sequences} x {keys} keys", us, None, f"{us / sum(totals.values()):.1%}")


SECTIONS: dict[str, tuple[Callable[[], Iterator[Row]], ...]] = {
    "gemm": (gemm_rows, gradient_rows),
    "attention": (attention_rows,),
    "head": (head_rows,),
    "rows": (row_rows,),
    "decode": (decode_rows,),
}


def main(argv: list[str] | None = None) -> int:
    """Print the table as it is measured; exit code 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="tests.bench ops", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    print(f"instruction set {extension.isa()}, {arguments.threads} threads, torch {torch.__version__}")
    print(f"{'section':<12} {'what':<34} {'ours µs':>11} {'torch µs':>11} {'ratio':>6}  note")
    rows = []
    for make in itertools.chain.from_iterable(SECTIONS[name] for name in arguments.sections):
        for row in make():
            native = "" if row.torch_us is None else f"{row.torch_us:11.1f}"
            ratio = "" if row.ratio is None else f"{row.ratio:6.2f}"
            note = f"{row.note}{f'  MISSES {row.goal}' if row.missed else ''}"
            print(f"{row.section:<12} {row.name:<34} {row.ours_us:11.1f} {native:>11} {ratio:>6}  {note}", flush=True)
            rows.append(row)
    if arguments.json:
        found = [{**asdict(row), "ratio": row.ratio, "missed": row.missed} for row in rows]
        arguments.json.write_text(
            json.dumps({"threads": arguments.threads, "isa": extension.isa(), "rows": found}, indent=1)
        )
    return int(any(row.missed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
