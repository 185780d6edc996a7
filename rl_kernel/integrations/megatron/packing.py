"""Samples of different lengths as one row of tokens: nothing is padded, and no sample sees another."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_kernel.errors import ShapeError

# Shown the number of a layer and its output, bf16 [T,E], in the order of `Packed.ids`.
SeeLayer = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One sample: prompt and response, token ids."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """R samples one after another. A sample's last token is left out: nothing asks for what comes after it.

    ids, positions: int64 [T]. offsets: int32 [R+1], where each sample begins. rows, targets: int64 [n], for every
    response token the row before it, and the token.
    """

    ids: Tensor
    positions: Tensor
    offsets: Tensor
    rows: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> "Packed":
        """The same on `device`."""
        parts = (self.ids, self.positions, self.offsets, self.rows, self.targets)
        return Packed(*(part.to(device) for part in parts))


def pack(samples: Sequence[Tokens], *, vocab: int, max_position: int) -> Packed:
    """Pack `samples` in their order. Raises ShapeError: an empty prompt or response, a length or an id out of range."""
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    offsets = [0]
    for i, sample in enumerate(samples):
        _check(i, sample, vocab, max_position)
        start, length = offsets[-1], len(sample.prompt) + len(sample.response) - 1
        ids.extend((sample.prompt + sample.response)[:-1])
        positions.extend(range(length))
        rows.extend(range(start + len(sample.prompt) - 1, start + length))
        targets.extend(sample.response)
        offsets.append(start + length)
    as_int64 = (torch.tensor(values, dtype=torch.int64) for values in (ids, positions, rows, targets))
    ids_T, positions_T, rows_n, targets_n = as_int64
    return Packed(ids_T, positions_T, torch.tensor(offsets, dtype=torch.int32), rows_n, targets_n)


def micro_batches(samples: Sequence[Tokens], budget: int) -> Iterator[range]:
    """Cut the samples, in order, into runs of at most `budget` tokens; a longer sample is a run of its own."""
    first, tokens = 0, 0
    for i, sample in enumerate(samples):
        length = len(sample.prompt) + len(sample.response) - 1
        if i > first and tokens + length > budget:
            yield range(first, i)
            first, tokens = i, 0
        tokens += length
    if samples:
        yield range(first, len(samples))


def _check(index: int, sample: Tokens, vocab: int, max_position: int) -> None:
    if not sample.prompt or not sample.response:
        what = "prompt" if not sample.prompt else "response"
        raise ShapeError(f"sample {index} has an empty {what}; a logprob needs a token before it and one to score")
    length = len(sample.prompt) + len(sample.response)
    if length > max_position:
        raise ShapeError(f"sample {index} has {length} tokens; the model's positions end at {max_position}")
    for token in sample.prompt + sample.response:
        if not 0 <= token < vocab:
            raise ShapeError(f"sample {index} has token id {token}; ids run from 0 to {vocab - 1}")
