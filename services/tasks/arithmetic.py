"""Few-shot one-digit addition: a prompt of worked examples and one open sum; right or wrong, nothing between."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from services.errors import ConfigError
from services.records import Prompt

_SUM = "9 + 9 ="


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
        """Read the tokenizer of a model folder; ConfigError if it has none, or none that can spell a sum."""
        file = model / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"task.name = 'arithmetic' needs {file}; a model without a tokenizer can do 'tokens'")
        try:
            tokenizer = Tokenizer.from_file(str(file))
            tokenizer.no_truncation()  # a prompt without room is refused, and never cut or filled up
            tokenizer.no_padding()
            ids = sorted(set(tokenizer.get_vocab().values()))
            stops = tuple(i for i in ids if tokenizer.decode([i]).startswith("\n"))
            spelt = tokenizer.encode(_SUM, add_special_tokens=False).ids
        except Exception as error:  # noqa: BLE001  the library raises nothing more precise
            raise ConfigError(f"{file} is no tokenizer that `tokenizers` can use: {_one_line(error)}") from None
        if not spelt:
            raise ConfigError(f"{file} makes no token of {_SUM!r}; task.name = 'arithmetic' needs digits and signs")
        return cls(tokenizer, stops, shots, seed)

    def prompts(self, step: int, count: int) -> tuple[Prompt, ...]:
        """`count` prompts, each with its own examples, from (seed, step)."""
        random = np.random.default_rng((self.seed, step))
        return tuple(self._prompt(random.integers(0, 10, (self.shots + 1, 2))) for _ in range(count))

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt: all its sums have two digits."""
        return len(self._prompt(np.full((self.shots + 1, 2), 9)).tokens)

    def largest_id(self) -> int:
        """The largest token id of the tokenizer, but for those that were added to it: no sum has one by necessity."""
        own = self.tokenizer.get_vocab(with_added_tokens=False).values()
        return max((*own, *self.tokenizer.encode(_SUM, add_special_tokens=False).ids))

    def reward(self, prompt: Prompt, response: tuple[int, ...]) -> float:
        """1.0 if the response's first line is the sum, else 0.0."""
        line, _, _ = self.tokenizer.decode(list(response)).partition("\n")
        return float(line.strip() == prompt.answer)

    def _prompt(self, terms: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> Prompt:
        *examples, (a, b) = terms.tolist()
        text = "".join(f"{x} + {y} = {x + y}\n" for x, y in examples) + f"{a} + {b} ="
        return Prompt(tuple(self.tokenizer.encode(text, add_special_tokens=False).ids), str(a + b))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
