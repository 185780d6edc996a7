"""Prompt sources with verifiable rewards. `make_task` chooses one by the config's name for it."""

from pathlib import Path
from typing import Protocol

from services.config import Config
from services.records import Prompt
from services.tasks.arithmetic import Arithmetic
from services.tasks.tokens import LowTokens


class Task(Protocol):
    """Where prompts come from, and what an answer is worth."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """A response ends after the first of these."""
        ...

    def prompts(self, step: int, count: int) -> tuple[Prompt, ...]:
        """The prompts of a step; the same step of the same seed always gives the same ones."""
        ...

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that there can be."""
        ...

    def largest_id(self) -> int:
        """The largest token id that a prompt can have."""
        ...

    def reward(self, prompt: Prompt, response: tuple[int, ...]) -> float:
        """What a response is worth, from 0 to 1."""
        ...


def make_task(config: Config, model: Path) -> Task:
    """Build the task that the config names; ConfigError if the model folder lacks what it needs."""
    if config.task.name == "tokens":
        return LowTokens.of_model(model, seed=config.run.seed)
    return Arithmetic.of_model(model, shots=config.task.shots, seed=config.run.seed)
