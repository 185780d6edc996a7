"""Ops under observation: what went into each call and what came out, as digests.

T tokens, W response tokens. Digests first: tensors are kept only of the call that is asked for.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from auditor.compare import Logprobs
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import Bits, Reference

OPS: Final = ("gemm", "rms_norm", "rope", "attention", "residual_add", "swiglu", "linear_logp")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op. name: where in the model, as the decoder calls it. inputs, output: sha256."""

    op: str
    name: str
    inputs: str
    output: str


@dataclass(frozen=True, slots=True)
class Tensors:
    """What one call took and gave, as NumPy arrays."""

    inputs: tuple[Any, ...]
    output: Any


class Watched:
    """Any object with the reference's op methods, observed. keep: index of the call whose tensors are kept."""

    def __init__(self, ops: Any, keep: int | None = None) -> None:
        self._ops = ops
        self._keep = keep
        self._unnamed = 0
        self.calls: list[Call] = []
        self.kept: Tensors | None = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        return self._observed(name, value) if name in OPS else value

    def named(self, name: str, _: Bits) -> None:
        """The decoder's observer: gives the calls since the last one their name."""
        for at in range(self._unnamed, len(self.calls)):
            self.calls[at] = replace(self.calls[at], name=name)
        self._unnamed = len(self.calls)

    def _observed(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            given = (*arguments, *(options[key] for key in sorted(options)))
            if self._keep == len(self.calls):
                given_copy = tuple(np.array(a) if isinstance(a, np.ndarray) else a for a in given)
            result = function(*arguments, **options)
            output = result[0] if isinstance(result, tuple) else result
            if self._keep == len(self.calls):
                self.kept = Tensors(given_copy, np.array(output))
            self.calls.append(Call(op, "", _digest(given), _digest((output,))))
            return result

        return call


class Mixed:
    """One side's ops with some of them swapped for the reference's."""

    def __init__(self, ops: Any, reference: Reference, swapped: frozenset[str]) -> None:
        self._ops, self._reference, self._swapped = ops, reference, swapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reference if name in self._swapped else self._ops, name)


def run(
    decoder: Decoder, ops: Any, tokens: npt.NDArray[np.int64], prompt_len: int, temperature: float
) -> tuple[Logprobs, Watched]:
    """The response's log-probabilities, float32 [W], with the model on `ops`, and what was observed."""
    watched = ops if isinstance(ops, Watched) else Watched(ops)
    model = replace(decoder, reference=cast(Reference, watched))
    hidden = model.hidden([tokens], watched.named)
    rows = hidden[prompt_len - 1 : len(tokens) - 1]
    head = decoder.weights["model.embed_tokens.weight" if decoder.config.tied else "lm_head.weight"]
    logprobs, _ = watched.linear_logp(
        rows, head, tokens[prompt_len:].astype(np.int64), temperature=temperature, vocab=decoder.config.vocab
    )
    watched.named("linear_logp", hidden)
    return logprobs, watched


def first_difference(ours: list[Call], theirs: list[Call]) -> int | None:
    """Index of the first call with equal inputs and another output; None where there is none."""
    for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one.inputs == other.inputs and one.output != other.output:
            return at
    return None


def _digest(values: tuple[Any, ...]) -> str:
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()
