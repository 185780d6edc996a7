"""The prompts of a job that is broken: a long common beginning, as a system prompt is, and an end of their own."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from services.records import Prompt

COMMON: Final = 64  # tokens: two blocks of vLLM's cache
OWN: Final = 24


@dataclass(frozen=True, slots=True)
class CommonBeginning:
    """Random ids; the reward is the share of response ids below half the vocabulary."""

    vocab_size: int
    seed: int
    stop_token_ids: tuple[int, ...] = ()

    def prompts(self, step: int, count: int) -> tuple[Prompt, ...]:
        """`count` prompts from (seed, step)."""
        common = np.random.default_rng(self.seed).integers(0, self.vocab_size, COMMON).tolist()
        random = np.random.default_rng((self.seed, step))
        return tuple(Prompt((*common, *random.integers(0, self.vocab_size, OWN).tolist()), "") for _ in range(count))

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that there can be."""
        return COMMON + OWN

    def largest_id(self) -> int:
        """The largest token id that a prompt can have."""
        return self.vocab_size - 1

    def reward(self, prompt: Prompt, response: tuple[int, ...]) -> float:
        """Share of low ids; 0.0 for an empty response."""
        return sum(2 * token < self.vocab_size for token in response) / max(len(response), 1)
