"""Few-shot one-digit addition: a prompt of worked examples and one open sum; right or wrong, nothing between."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from services.errors import ConfigError
from services.records import Prompt


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Prompts such as `2 + 3 = 5\\n4 + 4 = 8\\n7 + 1 =`, whose right answer is ` 8` and then a new line.

    shots: worked examples in front of the question.
    stop_token_ids: every token that begins with a new line.
    """

    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    shots: int
    seed: int

    @classmethod
    def of_model(cls, model: Path, shots: int, seed: int) -> "Arithmetic":
        """Read the tokenizer of a model folder; ConfigError if it has none."""
        file = model / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"task.name = 'arithmetic' needs {file}; a model without a tokenizer can do 'tokens'")
        tokenizer = Tokenizer.from_file(str(file))
        stops = (i for i in range(tokenizer.get_vocab_size()) if tokenizer.decode([i]).startswith("\n"))
        return cls(tokenizer, tuple(stops), shots, seed)

    def prompts(self, step: int, count: int) -> tuple[Prompt, ...]:
        """`count` prompts, each with its own examples, from (seed, step)."""
        random = np.random.default_rng((self.seed, step))
        return tuple(self._prompt(random.integers(0, 10, (self.shots + 1, 2))) for _ in range(count))

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt: all its sums have two digits."""
        return len(self._prompt(np.full((self.shots + 1, 2), 9)).tokens)

    def reward(self, prompt: Prompt, response: tuple[int, ...]) -> float:
        """1.0 if the response's first line is the sum, else 0.0."""
        line, _, _ = self.tokenizer.decode(list(response)).partition("\n")
        return float(line.strip() == prompt.answer)

    def _prompt(self, terms: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> Prompt:
        *examples, (a, b) = terms.tolist()
        text = "".join(f"{x} + {y} = {x + y}\n" for x, y in examples) + f"{a} + {b} ="
        return Prompt(tuple(self.tokenizer.encode(text, add_special_tokens=False).ids), str(a + b))
