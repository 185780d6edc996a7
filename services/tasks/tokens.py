"""A task for models without a tokenizer: random prompts, and a reward for tokens of the vocabulary's lower half."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl_kernel.reference.config import DecoderConfig
from services.records import Prompt

_SHORTEST, _LONGEST = 3, 20  # tokens of a prompt


@dataclass(frozen=True, slots=True)
class LowTokens:
    """Prompts are random ids of 3 to 20 tokens; the reward is the share of response ids below half the vocabulary."""

    vocab_size: int
    seed: int
    stop_token_ids: tuple[int, ...] = ()

    @classmethod
    def of_model(cls, model: Path, seed: int) -> "LowTokens":
        """Read the vocabulary's size from a model folder; ModelError if that is none."""
        return cls(DecoderConfig.read(model).vocab, seed)

    def prompts(self, step: int, count: int) -> tuple[Prompt, ...]:
        """`count` prompts from (seed, step)."""
        random = np.random.default_rng((self.seed, step))
        lengths = random.integers(_SHORTEST, _LONGEST + 1, count)
        return tuple(Prompt(tuple(random.integers(0, self.vocab_size, n).tolist()), "") for n in lengths)

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that there can be."""
        return _LONGEST

    def largest_id(self) -> int:
        """The largest token id that a prompt can have."""
        return self.vocab_size - 1

    def reward(self, prompt: Prompt, response: tuple[int, ...]) -> float:
        """Share of low ids; 0.0 for an empty response."""
        return sum(2 * token < self.vocab_size for token in response) / max(len(response), 1)
