"""Batches for the trainer's tests, made without a rollout engine, and what two ranks do with them."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from services.records import Batch, Rollout, Sample, Sampling, WeightVersion
from services.trainer.engine import TrainerEngine, TrainerOptions
from services.trainer.optimizer import Schedule

VOCAB = 331
OPTIONS = TrainerOptions(segments=2, threads=1, schedule=Schedule(peak=1e-3), micro_batch_tokens=64)


def batch(step: int = 0, temperature: float = 0.8, samples: int = 6) -> Batch:
    """Random tokens and advantages; the rollout's logprobs are of no model, so ratios differ from 1."""
    draw = np.random.default_rng((7, step))
    return Batch(step, weights(), tuple(_sample(draw, i, temperature) for i in range(samples)))


def with_rollout_logprobs(of: Batch, logprobs: tuple[np.ndarray, ...]) -> Batch:
    """The same batch as if the rollout engine had given `logprobs`."""
    pairs = zip(of.samples, logprobs, strict=True)
    return replace(of, samples=tuple(replace(s, rollout=replace(s.rollout, logprobs=lp)) for s, lp in pairs))


def weights() -> WeightVersion:
    return WeightVersion(1, "0" * 64, Path("nowhere"))


def _sample(draw: np.random.Generator, i: int, temperature: float) -> Sample:
    prompt = tuple(draw.integers(0, VOCAB, draw.integers(1, 30)).tolist())
    response = tuple(draw.integers(0, VOCAB, draw.integers(1, 12)).tolist())
    rollout = Rollout(
        sample_id=f"{i:03d}",
        prompt=prompt,
        response=response,
        logprobs=draw.normal(-5.5, 0.3, len(response)).astype(np.float32),
        finish_reason="length",
        sampling=Sampling(temperature, seed=i, max_new_tokens=12),
        weights=weights(),
    )
    return Sample(rollout, (True,) * len(response), reward=0.0, advantage=float(draw.normal()))


def train_on_rank(
    rank: int, rendezvous: str, model: Path, steps: list[int], options: TrainerOptions, start: Path | None, out: Path
) -> tuple[list[tuple[float, float]], list[np.ndarray], str]:
    """Train on the batches `steps`, from the checkpoint `start` if there is one; export and save below `out`.

    Returns (loss, norm) a step, the last step's logprobs, and the digest of the exported weights.
    """
    engine = TrainerEngine(model, replace(options, rank=rank, rendezvous=rendezvous))
    if start:
        engine.load_checkpoint(start)
    outcomes = [engine.train(batch(step)) for step in steps]
    if rank == 0:
        (out / "weights").mkdir(parents=True)
        (out / "checkpoint").mkdir()
    digest = engine.export(out / "weights")
    engine.save_checkpoint(out / "checkpoint")
    return [(o.loss, o.grad_norm) for o in outcomes], list(outcomes[-1].logprobs), digest


def layers_on_rank(rank: int, rendezvous: str, model: Path, options: TrainerOptions) -> tuple[tuple[str, ...], ...]:
    """The digests of layers of the first step on one rank."""
    engine = TrainerEngine(model, replace(options, rank=rank, rendezvous=rendezvous, layer_digests=True))
    return engine.train(batch()).layer_digests
