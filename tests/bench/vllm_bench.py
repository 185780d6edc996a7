"""Strict vLLM against native vLLM on SmolLM2, and where a strict step's time goes: `python -m tests.bench vllm`.

Both engines live in this process and take turns on the same requests, so that what else the machine does hits both.
`ratio` is strict tokens/s over native tokens/s; the goal is at least 0.6, and the exit code is 1 where tokens are
generated and it is missed. Prefill alone is measured against the same goal and does not decide the exit code: there
native vLLM multiplies in bf16, two products an instruction, which no fp32 chain can match.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_kernel.integrations.evidence import CountingPlan
from services.models import SMOLLM2, ensure_model
from services.records import Sampling
from services.rollout.engine import EngineOptions, RolloutEngine

GOAL = 0.6


@dataclass(frozen=True, slots=True)
class Workload:
    """`sequences` at once, `prompts` of them different, each `prompt_tokens` long and continued by `new_tokens`."""

    name: str
    sequences: int
    prompts: int
    prompt_tokens: int
    new_tokens: int

    @property
    def generates(self) -> bool:
        """Whether the goal holds for it."""
        return self.new_tokens > 1


WORKLOADS = (
    Workload("decode, 1 sequence", 1, 1, 8, 48),
    Workload("decode, 8 sequences", 8, 8, 8, 32),
    Workload("decode, 32 sequences", 32, 32, 8, 16),
    Workload("prefill, 4 x 256 tokens", 4, 4, 256, 1),
    Workload("the demo's step: 8 prompts x 8 answers", 64, 8, 22, 6),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison, tokens per second (new ones; those of the prompts for a workload that only prefills)."""

    workload: str
    strict: float
    native: float
    ratio: float


class Timers:
    """Seconds spent in each function of the plan."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Engines that are built inside are timed: every function of the plan, around the call that counts."""
        original = CountingPlan.function

        def timed_function(plan: CountingPlan, op: str, name: str | None = None) -> Callable[..., Any]:
            function, key = original(plan, op, name), f"{op}.{name or op}"

            def timed(*args: Any, **kwargs: Any) -> Any:
                begin = time.perf_counter()
                result = function(*args, **kwargs)
                self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - begin
                return result

            return timed

        CountingPlan.function = timed_function  # type: ignore[method-assign]
        try:
            yield
        finally:
            CountingPlan.function = original  # type: ignore[method-assign]


def run(engine: RolloutEngine, work: Workload, vocab: int, seed: int) -> tuple[float, float]:
    """Serve `work` once with fresh prompts; return tokens per second and the seconds it took."""
    random = np.random.default_rng(seed)
    different = [tuple(random.integers(0, vocab, work.prompt_tokens).tolist()) for _ in range(work.prompts)]
    asked = [different[i * work.prompts // work.sequences] for i in range(work.sequences)]
    sampling = [Sampling(1.0, seed=i, max_new_tokens=work.new_tokens) for i in range(work.sequences)]
    begin = time.perf_counter()
    engine.generate(asked, sampling)
    seconds = time.perf_counter() - begin
    per_sequence = work.new_tokens if work.generates else work.prompt_tokens
    return work.sequences * per_sequence / seconds, seconds


def compare(strict: RolloutEngine, native: RolloutEngine, work: Workload, vocab: int, repeats: int) -> Row:
    """Let both engines take turns; the medians of each, and of the ratio of each turn."""
    turns = []
    for turn in range(repeats + 1):
        turns.append((run(strict, work, vocab, turn)[0], run(native, work, vocab, turn)[0]))
    turns = turns[1:]  # the first warms caches and thread pools
    ratio = statistics.median(s / n for s, n in turns)
    return Row(work.name, statistics.median(s for s, _ in turns), statistics.median(n for _, n in turns), ratio)


def profile(engine: RolloutEngine, timers: Timers, work: Workload, vocab: int) -> dict[str, float]:
    """Seconds of one run of `work` by op, and the rest: vLLM's scheduler, tensors that move, Python."""
    run(engine, work, vocab, 1)
    timers.seconds.clear()
    _, seconds = run(engine, work, vocab, 2)
    parts = dict(sorted(timers.seconds.items(), key=lambda item: -item[1]))
    return parts | {"everything else": seconds - sum(parts.values())}


def main() -> int:
    """Print the comparison and the profile; exit code 1 if a workload misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM2.name, help="a Hugging Face folder or a packaged model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each engine on each workload")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    folder = ensure_model(arguments.model)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    options: dict[str, Any] = {"threads": arguments.threads, "max_model_len": 512, "kv_cache_mb": 256}
    strict, native = (RolloutEngine(folder, EngineOptions(numerics=mode, **options)) for mode in ("strict", "native"))
    rows = [compare(strict, native, work, vocab, arguments.repeats) for work in WORKLOADS]
    print(f"{'workload':42s} {'strict tok/s':>12s} {'native tok/s':>12s} {'ratio':>6s}")
    for row in rows:
        missed = "" if row.ratio >= GOAL else "  MISSED"
        print(f"{row.workload:42s} {row.strict:12.1f} {row.native:12.1f} {row.ratio:6.2f}{missed}", flush=True)
    timers = Timers()
    with timers.installed():
        timed = RolloutEngine(folder, EngineOptions(**options))
    for work in WORKLOADS:
        parts = profile(timed, timers, work, vocab)
        total = sum(parts.values())
        shares = "  ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items() if seconds > total / 100)
        print(f"{work.name}: {total * 1e3:.0f} ms; {shares}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    judged = [row for row, work in zip(rows, WORKLOADS, strict=True) if work.generates]
    return 0 if all(row.ratio >= GOAL for row in judged) else 1


if __name__ == "__main__":
    raise SystemExit(main())
