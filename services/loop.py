"""The RL step: roll out, score, train, publish. Nothing else happens to the numbers between the two engines.

GRPO: several answers to each prompt, the advantage of an answer is how much better it is than its siblings, the
trainer takes PPO-clipped, token-level steps, and the new weights go to the rollout engine by version and digest. Each
engine reports to the auditor on its own (`audit_sink`); the loop neither sees nor touches those records.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.clock import Clock
from services.config import Config
from services.grpo import advantages
from services.records import Batch, Prompt, Request, Rollout, Sample, Sampling, TrainOutcome, WeightVersion
from services.tasks import Task
from services.weights import WeightStore, confirm


class RolloutSide(Protocol):
    """The rollout engine and its audit sink, wherever they run."""

    def load(self, weights: WeightVersion) -> str:
        """Load published weights and return the digest of what the engine then holds."""
        ...

    def generate(self, step: int, requests: Sequence[Request]) -> tuple[Rollout, ...]:
        """One response a request, in order; reported to the auditor."""
        ...


class TrainerSide(Protocol):
    """The trainer engine (all its ranks) and its audit sink, wherever they run."""

    def train(self, batch: Batch) -> TrainOutcome:
        """One step on `batch`; its first forward is reported to the auditor."""
        ...

    def publish(self, store: WeightStore, version: int) -> WeightVersion:
        """Write the weights as `version`, and count from now on as holding that version."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    task: Task
    rollout: RolloutSide
    trainer: TrainerSide
    store: WeightStore


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the job itself knows of a step. weights: those that the next step samples from. seconds: by phase."""

    step: int
    reward: float
    response_tokens: int
    outcome: TrainOutcome
    weights: WeightVersion
    seconds: dict[str, float]


def run_steps(config: Config, parts: Parts, first_step: int, weights: WeightVersion) -> Iterator[StepResult]:
    """Yield each step's result as it is done. weights: held by both engines before the first step."""
    for step in range(first_step, config.run.steps):
        result = rl_step(config, parts, step, weights)
        weights = result.weights
        yield result


def rl_step(config: Config, parts: Parts, step: int, weights: WeightVersion) -> StepResult:
    """One step of RL from `weights` to the next version, which both engines hold when this returns."""
    clock = Clock()
    with clock("rollout"):
        prompts = parts.task.prompts(step, config.task.prompts_per_step)
        rollouts = parts.rollout.generate(step, requests(config, parts.task, step, prompts))
    with clock("score"):
        batch = score(config, parts.task, step, weights, prompts, rollouts)
    with clock("train"):
        outcome = parts.trainer.train(batch)
    with clock("publish"):
        updated = parts.trainer.publish(parts.store, weights.version + 1)
        confirm(updated, "the rollout engine", parts.rollout.load(updated))
    return StepResult(step, batch.mean_reward, batch.response_tokens, outcome, updated, clock.seconds)


def requests(config: Config, task: Task, step: int, prompts: Sequence[Prompt]) -> tuple[Request, ...]:
    """Every prompt `samples_per_prompt` times, each with a seed of its own, from (run seed, step) alone."""
    each = config.task.samples_per_prompt
    seeds = np.random.default_rng((config.run.seed, step, 1)).integers(0, 2**31, len(prompts) * each).tolist()
    return tuple(
        Request(
            sample_id=f"{p:03d}-{k:02d}",
            prompt=prompt.tokens,
            sampling=Sampling(
                temperature=config.rollout.temperature,
                seed=seeds[p * each + k],
                max_new_tokens=config.rollout.max_new_tokens,
                stop_token_ids=task.stop_token_ids,
            ),
        )
        for p, prompt in enumerate(prompts)
        for k in range(each)
    )


def score(
    config: Config,
    task: Task,
    step: int,
    weights: WeightVersion,
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
) -> Batch:
    """Reward every response, compare it with its siblings, and make the batch."""
    each = config.task.samples_per_prompt
    rewards = [task.reward(prompts[i // each], rollout.response) for i, rollout in enumerate(rollouts)]
    samples = tuple(
        Sample(rollout, mask=(True,) * len(rollout.response), reward=reward, advantage=advantage)
        for rollout, reward, advantage in zip(rollouts, rewards, advantages(rewards, each), strict=True)
    )
    return Batch(step, weights, samples)
