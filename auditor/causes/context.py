"""A side that saw another prompt: cut off in front, something more in front, a part of it left out or not seen."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Final

import numpy as np

from auditor.causes.evidence import CERTAIN, Candidate, Evidence, Suggestion, bits_hit, explained, nearest, worth_saying
from auditor.causes.oracle import Oracle
from auditor.compare import Logprobs
from rl_kernel.reference.ops import F32, I32, Bits, Reference

_CUTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_PADS: Final = (1, 2, 4, 8, 16, 32, 64)
_BLOCKS: Final = 8  # pieces of the prompt that are left out one by one before edges are looked for
_SHORTEST: Final = 4
_PROMISING: Final = 0.97  # of the difference: what one piece must leave for its edges to be looked for

Span = Callable[[int, int], Logprobs]


@dataclass(frozen=True, slots=True)
class Unseen(Reference):
    """The reference, in which no token from `last` on sees the keys first..last."""

    first: int = 0
    last: int = 0

    def attention(self, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> tuple[Bits, F32, F32]:
        """As the reference's, on one sequence: what comes before the end of the gap, then the rest without it."""
        gap, rest = slice(self.first, self.last), slice(self.last, None)
        early = np.array([0, self.last], np.int32)
        q_, k_, v_ = (a[: self.last].copy() for a in (q, k, v))
        head = Reference.attention(self, q_, k_, v_, early, early)
        keys, values = np.delete(k, gap, axis=0), np.delete(v, gap, axis=0)
        ends = np.array([0, len(q) - self.last], np.int32), np.array([0, len(keys)], np.int32)
        tail = Reference.attention(self, q[rest].copy(), keys, values, *ends)
        return (
            np.concatenate([head[0], tail[0]]), np.concatenate([head[1], tail[1]]), np.concatenate([head[2], tail[2]])
        )  # fmt: skip


def cut_in_front(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """How many tokens were missing at the beginning."""
    if best := nearest(evidence, oracle.window, _without_the_first(oracle)):
        yield best


def _without_the_first(oracle: Oracle) -> Iterator[Candidate]:
    cuts = [cut for cut in _CUTS if cut < oracle.prompt_len - 1] + [oracle.prompt_len - 1]
    for cut in dict.fromkeys(cuts):
        if cut > 0:
            yield "truncation", f"a sequence without its first {cut} tokens", _without(oracle, 0, cut)


def more_in_front(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The first token twice, or padding that was seen."""
    if best := nearest(evidence, oracle.window, _with_more(oracle)):
        yield best


def _with_more(oracle: Oracle) -> Iterator[Candidate]:
    first, last = int(oracle.tokens[0]), oracle.decoder.config.vocab - 1
    tried = [(first, 1, "other_context", "its first token twice")]
    tried += [
        (pad, count, "attention_mask", f"{count} tokens {pad} in front of it, as padding that is seen")
        for pad in dict.fromkeys((0, last))
        for count in _PADS
    ]
    for token, count, cause, name in tried:
        longer = np.concatenate([np.full(count, token), oracle.tokens])
        if len(longer) > oracle.decoder.config.max_position:
            continue
        hidden = oracle.hidden(oracle.decoder, longer)
        predicted = oracle.from_logits(oracle.head(oracle.decoder, hidden[oracle.rows + count]))
        yield cause, f"the sequence with {name}", predicted


def part_of_the_prompt(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Tokens in the middle that the side did not have, or had and did not see."""
    window = oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    kinds: tuple[tuple[str, str, Span], ...] = (
        ("other_context", "without", lambda a, b: _without(oracle, a, b)),
        ("attention_mask", "in which nothing after them sees", lambda a, b: _unseen(oracle, a, b)),
    )
    for cause, name, predict in kinds:
        span = _best_span(evidence, oracle, predict)
        if span is None:
            continue
        predicted = predict(*span)
        score = explained(found, truth, predicted, active)
        if worth_saying(score):
            hit = bits_hit(found, predicted, active)
            said = f"the values are those of a sequence {name} its tokens {span[0]} to {span[1] - 1}; {hit}"
            yield Suggestion(cause, score, said)
            if score >= CERTAIN:
                return


def _best_span(evidence: Evidence, oracle: Oracle, predict: Span) -> tuple[int, int] | None:
    """The part of the prompt that leaves least of the difference when it is gone; None where no part takes any away."""
    window, last = oracle.window, oracle.prompt_len - 1
    found, truth = evidence.found[window], evidence.truth[window]
    usable = evidence.active[window] & np.isfinite(found) & np.isfinite(truth)
    if last < _SHORTEST or not usable.any():
        return None
    errors: dict[tuple[int, int], float] = {}

    def error(span: tuple[int, int]) -> float:
        first, end = span
        if not 0 <= first < end <= last or (first == 0 and end >= last):
            return float("inf")
        if span not in errors:
            errors[span] = float(np.abs(predict(first, end)[usable].astype(np.float64) - found[usable]).mean())
        return errors[span]

    edges = np.unique(np.round(np.linspace(0, last, _BLOCKS + 1)).astype(int)).tolist()
    span = min(pairwise(edges), key=error)
    before = float(np.abs(truth[usable].astype(np.float64) - found[usable]).mean())
    if error(span) > _PROMISING * before:
        return None
    step = max(1, last // _BLOCKS)
    while step:
        first, end = span
        near = [(first - step, end), (first + step, end), (first, end - step), (first, end + step)]
        closer = min(near, key=error)
        if error(closer) < error(span):
            span = closer
        else:
            step //= 2
        if error(span) == 0.0:
            break
    return span


def _without(oracle: Oracle, first: int, last: int) -> Logprobs:
    hidden = oracle.hidden(oracle.decoder, np.delete(oracle.tokens, np.s_[first:last]))
    return oracle.from_logits(oracle.head(oracle.decoder, hidden[oracle.rows - (last - first)]))


def _unseen(oracle: Oracle, first: int, last: int) -> Logprobs:
    settings: dict[str, Any] = {f.name: getattr(oracle.decoder.reference, f.name) for f in fields(Reference)}
    return oracle.logprobs(oracle.with_reference(Unseen(**settings, first=first, last=last)))
