"""A side that saw another prompt: cut off in front, something more in front, a part of it left out or not seen."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from auditor.causes.context.seen import seeing, without
from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import STRONG, Evidence, Suggestion
from auditor.causes.fit import climbed
from auditor.causes.oracle import I64, Oracle
from auditor.causes.search import Candidate, nearest, promising
from auditor.compare import Logprobs

_CUTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_PADS: Final = (1, 2, 4, 8, 16, 32, 64)
_BLOCKS: Final = 8  # pieces of the prompt that are left out one by one before edges are looked for
_NEAR: Final = 0.95  # of a strong score
_FIRST: Final = 12  # wrong rows that say how much a prompt does
_BEYOND: Final = 1.2  # times that: a part of it does hardly more than all of it
_STARTS: Final = 2  # parts from which better ones are looked for, where values are right up to some token
_SHORTEST: Final = 4
_SHORT: Final = 64  # tokens of a prompt of which any number may be cut off
_PROMISING: Final = 0.97  # of the difference: what one piece must leave for its edges to be looked for

Span = Callable[[int, int], Logprobs]


def cut_in_front(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """How many tokens were missing at the beginning."""
    if best := nearest(evidence, oracle, _without_the_first(evidence, oracle)):
        yield best


def _without_the_first(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    last = oracle.prompt_len - 1
    cuts = [last] + [cut for cut in _CUTS if cut < last] + [cut for cut in range(1, last) if last <= _SHORT]
    for cut in dict.fromkeys(cuts):
        values = partial(_cut, oracle, cut)
        if cut == last:
            oracle.beyond_the_prompt = _is_beyond(evidence, oracle, values)
        if cut > 0 and promising(evidence, oracle, values):
            yield "truncation", f"a sequence without its first {cut} tokens", values(np.arange(len(oracle.rows)))


def _is_beyond(evidence: Evidence, oracle: Oracle, without_it: Callable[[I64], Logprobs]) -> bool:
    """Whether values are wrong by far more than they are without a prompt: then it is not something in it."""
    window = oracle.window
    rows = np.flatnonzero(evidence.differs[window] & np.isfinite(evidence.found[window]))[:_FIRST]
    truth = evidence.truth[window][rows].astype(np.float64)
    found, unseen = evidence.found[window][rows], without_it(rows)
    return bool(rows.size == _FIRST and np.abs(found - truth).mean() > _BEYOND * np.abs(unseen - truth).mean())


def _cut(oracle: Oracle, cut: int, rows: I64) -> Logprobs:
    at = oracle.rows[rows] - cut
    hidden = oracle.hidden(oracle.decoder, oracle.tokens[cut : cut + int(at.max()) + 1])
    return oracle.from_logits(oracle.head(oracle.decoder, hidden[at]), targets=oracle.targets[rows])


def more_in_front(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The first token twice, or padding that was seen."""
    if best := nearest(evidence, oracle, _with_more(evidence, oracle)):
        yield best


def _with_more(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    last = oracle.decoder.config.vocab - 1
    prompt = oracle.tokens[: oracle.prompt_len]
    tried = [(prompt[:1], "other_context", "its first token twice"), (prompt, "other_context", "its prompt twice")]
    tried += [
        (np.full(count, pad), "attention_mask", f"{count} tokens {pad} in front of it, as padding that is seen")
        for pad in dict.fromkeys((0, last, 1, 2))
        for count in _PADS
    ]
    for front, cause, name in tried:
        longer, count = np.concatenate([front, oracle.tokens]), len(front)
        if len(longer) > oracle.decoder.config.max_position:
            continue

        def values(rows: I64, longer: I64 = longer, count: int = count) -> Logprobs:
            at = oracle.rows[rows] + count
            hidden = oracle.hidden(oracle.decoder, longer[: int(at.max()) + 1])
            return oracle.from_logits(oracle.head(oracle.decoder, hidden[at]), targets=oracle.targets[rows])

        if promising(evidence, oracle, values):
            yield cause, f"the sequence with {name}", values(np.arange(len(oracle.rows)))


def part_of_the_prompt(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Tokens in the middle that the side did not have, or had and did not see; from the first wrong row on."""
    near: dict[str, str] = {}
    best = nearest(evidence, oracle, _in_part(evidence, oracle, near))
    if best is not None and best.score <= _NEAR * STRONG:
        # Near and not it: what stands there is neither gone nor unseen, it is something else.
        best = replace(best, cause=next(cause for name, cause in near.items() if name in best.evidence))
    if best is not None:
        yield best


def _in_part(evidence: Evidence, oracle: Oracle, near: dict[str, str]) -> Iterator[Candidate]:
    """near: by name, what it is where a candidate is near and not it."""
    first = 0 if evidence.begins is None else evidence.begins
    since = f", from token {first} on" if first else ""
    behind = oracle.rows >= first
    truth = evidence.truth[oracle.window]

    def without_them(a: int, b: int) -> Logprobs:
        return np.where(behind, _without(oracle, a, b), truth).astype(np.float32)

    kinds: list[tuple[str, str, Span]] = [("other_context", "without", without_them)]
    if not first:  # what some rows do not see is followed row by row
        kinds.append(("attention_mask", "in which nothing after them sees", lambda a, b: _unseen(oracle, a, b)))
    for cause, name, predict in kinds:
        if span := _best_span(evidence, oracle, predict, first or oracle.prompt_len - 1):
            what = "truncation" if first and not span[0] and cause == "other_context" else cause
            said = f"a sequence {name} its tokens {span[0]} to {span[1] - 1}{since}"
            # What somebody put into a response stands right in front; what changes far in front later on is a cache's.
            near[said] = "kv_boundary" if span[1] < first else "other_context"
            yield what, said, predict(*span)


def _best_span(evidence: Evidence, oracle: Oracle, predict: Span, last: int) -> tuple[int, int] | None:
    """The part of tokens 0..last without which least of the difference is left; None where none takes any away."""
    window = oracle.window
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
    ends = [(0, 1), (0, 2), (last - 1, last), (last - 2, last)]
    if evidence.begins is not None:  # what was taken out mostly stood right in front, or in front of all
        ends += [span for edge in edges[1:-1] for span in ((edge, last), (0, edge))]
    span, *others = sorted((*pairwise(edges), *ends), key=error)[:_STARTS]
    before = float(np.abs(truth[usable].astype(np.float64) - found[usable]).mean())
    if error(span) > _PROMISING * before:
        return None
    step = max(1, last // _BLOCKS)
    reached = [climbed(start, _beside, error, step) for start in (span, *others[: evidence.begins is not None])]
    return min(reached, key=error)


def _beside(span: tuple[int, int], step: int) -> Iterator[tuple[int, int]]:
    first, end = span
    yield from ((first - step, end), (first + step, end), (first, end - step), (first, end + step))
    yield from ((first - step, end - step), (first + step, end + step))


def _without(oracle: Oracle, first: int, last: int) -> Logprobs:
    hidden = oracle.hidden(oracle.decoder, np.delete(oracle.tokens, np.s_[first:last]))
    return oracle.from_logits(oracle.head(oracle.decoder, hidden[np.maximum(oracle.rows - (last - first), 0)]))


def _unseen(oracle: Oracle, first: int, last: int) -> Logprobs:
    return oracle.logprobs(edited(oracle.decoder, Edit("attention", seeing(without(first, last)))))
