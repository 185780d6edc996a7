"""A strict Megatron step against a native one on SmolLM2, and where its time goes.

    python -m tests.bench megatron

Both engines live in this process and take turns on the same batches, so that what else the machine does hits both. A
step is forward, backward, gradient norm and AdamW; `ratio` is strict seconds over native seconds, the goal at most 1.7.
The optimizer is the same on both sides (Megatron's own refuses CPUs), so the ratio without it is printed too.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rl_kernel.integrations.megatron.packing import Tokens
from rl_kernel.reference.config import DecoderConfig
from services.models import SMOLLM2, ensure_model
from services.records import Batch, Rollout, Sample, Sampling, WeightVersion
from services.trainer.engine import TrainerEngine, TrainerOptions
from tests.bench.vllm_bench import Timers

GOAL = 1.7


@dataclass(frozen=True, slots=True)
class Workload:
    """`samples` of one length each, in tokens."""

    name: str
    samples: int
    prompt_tokens: int
    response_tokens: int


WORKLOADS = (
    Workload("the demo's step: 64 samples of 22 + 6", 64, 22, 6),
    Workload("8 samples of 128 + 128", 8, 128, 128),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison, in seconds of wall clock; ratios are medians of the turns' ratios.

    cpu_ratio: of processor seconds, which a busy machine disturbs less. score_ratio: of a forward without gradients.
    """

    workload: str
    strict: float
    native: float
    ratio: float
    cpu_ratio: float
    ratio_without_optimizer: float
    score_ratio: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of one engine's turn: the step, its processor time, the optimizer's part, a forward without gradients."""

    step: float
    cpu: float
    optimizer: float
    score: float


def make_batch(work: Workload, vocab: int, seed: int) -> Batch:
    """Random tokens and advantages."""
    random, weights = np.random.default_rng(seed), WeightVersion(0, "", Path())
    samples = []
    for i in range(work.samples):
        tokens = tuple(random.integers(0, vocab, work.prompt_tokens + work.response_tokens).tolist())
        prompt, response = tokens[: work.prompt_tokens], tokens[work.prompt_tokens :]
        logprobs = np.full(len(response), -np.log(vocab), np.float32)
        sampling = Sampling(1.0, seed=i, max_new_tokens=len(response))
        rollout = Rollout(f"{i:03d}", prompt, response, logprobs, "length", sampling, weights)
        samples.append(Sample(rollout, (True,) * len(response), 0.0, float(random.normal())))
    return Batch(0, weights, tuple(samples))


def take_turn(engine: TrainerEngine, batch: Batch) -> Turn:
    """One scoring pass and one step, timed."""
    optimizer = [0.0]
    begin = time.perf_counter()
    engine.score([Tokens(s.rollout.prompt, s.rollout.response) for s in batch.samples], 1.0)
    scored, cpu = time.perf_counter(), time.process_time()
    engine._step = _timed(partial(TrainerEngine._step, engine), optimizer)  # type: ignore[method-assign]
    engine.train(batch)
    return Turn(time.perf_counter() - scored, time.process_time() - cpu, optimizer[0], scored - begin)


def compare(strict: TrainerEngine, native: TrainerEngine, work: Workload, vocab: int, repeats: int) -> Row:
    """Let both engines take turns; the first turn warms caches and thread pools and makes the optimizer's state."""
    turns = []
    for turn in range(repeats + 1):
        batch = make_batch(work, vocab, turn)
        turns.append((take_turn(strict, batch), take_turn(native, batch)))
    turns = turns[1:]
    return Row(
        work.name,
        statistics.median(s.step for s, _ in turns),
        statistics.median(n.step for _, n in turns),
        statistics.median(s.step / n.step for s, n in turns),
        statistics.median(s.cpu / n.cpu for s, n in turns),
        statistics.median((s.step - s.optimizer) / (n.step - n.optimizer) for s, n in turns),
        statistics.median(s.score / n.score for s, n in turns),
    )


def profile(engine: TrainerEngine, timers: Timers, work: Workload, vocab: int) -> dict[str, float]:
    """Seconds of one strict step by op, the optimizer, and the rest: Megatron, autograd, tensors that move, Python."""
    engine.train(make_batch(work, vocab, 1))
    timers.seconds.clear()
    turn = take_turn(engine, make_batch(work, vocab, 2))
    parts = dict(sorted(timers.seconds.items(), key=lambda item: -item[1]))
    parts["gradient norm and AdamW"] = turn.optimizer
    return parts | {"everything else": turn.step + turn.score - sum(parts.values())}


def _timed(function: Callable[[], float], seconds: list[float]) -> Callable[[], float]:
    def timed() -> float:
        begin = time.perf_counter()
        result = function()
        seconds[0] += time.perf_counter() - begin
        return result

    return timed


def main() -> int:
    """Print the comparison and the profile; exit code 1 if a workload misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM2.name, help="a Hugging Face folder or a packaged model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each engine on each workload")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    folder = ensure_model(arguments.model)
    vocab = DecoderConfig.read(folder).vocab
    options: dict[str, Any] = {"threads": arguments.threads}
    strict, native = (TrainerEngine(folder, TrainerOptions(numerics=mode, **options)) for mode in ("strict", "native"))
    names = ("strict s", "native s", "ratio", "cpu", "w/o optimizer", "score")
    print(f"{'workload':38s} " + " ".join(f"{name:>13s}" for name in names))
    rows = []
    for work in WORKLOADS:
        rows.append(compare(strict, native, work, vocab, arguments.repeats))
        workload, *values = asdict(rows[-1]).values()
        print(f"{workload:38s} " + " ".join(f"{value:13.2f}" for value in values), flush=True)
    del strict, native
    timers = Timers()
    with timers.installed():
        timed = TrainerEngine(folder, TrainerOptions(**options))
    for work in WORKLOADS:
        parts = profile(timed, timers, work, vocab)
        total = sum(parts.values())
        shares = "  ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items() if seconds > total / 100)
        print(f"{work.name}, score and step: {total:.2f} s; {shares}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if all(row.ratio <= GOAL for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
