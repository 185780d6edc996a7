"""A side that saw another prompt: cut off in front, something more in front, a part of it left out or not seen."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np

from auditor.causes.context.seen import seeing, without
from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import STRONG, Evidence, Suggestion
from auditor.causes.fit import climbed
from auditor.causes.oracle import I64, Oracle
from auditor.causes.search import Candidate, nearest, promising_of
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
_ROWS: Final = 24  # wrong rows on which parts of a prompt are told apart
_PROMISING: Final = 0.97  # of the difference: what one piece must leave for its edges to be looked for

_TOGETHER: Final = 6  # sequences that are tried at once

Span = tuple[int, int]
Spans = Callable[[I64, Sequence[Span]], list[Logprobs]]  # rows of the window, parts of the sequence → values
T = TypeVar("T")


def cut_in_front(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """How many tokens were missing at the beginning."""
    if best := nearest(evidence, oracle, _without_the_first(evidence, oracle)):
        yield best


def _without_the_first(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    last = oracle.prompt_len - 1
    cuts = [last] + [cut for cut in _CUTS if cut < last] + [cut for cut in range(1, last) if last <= _SHORT]
    oracle.beyond_the_prompt = _is_beyond(evidence, oracle, lambda rows: _cut(oracle, [last], rows)[0])
    tried, every = [cut for cut in dict.fromkeys(cuts) if cut > 0], np.arange(len(oracle.rows))
    for at in range(0, len(tried), _TOGETHER):
        some = tried[at : at + _TOGETHER]
        for cut in _promising(evidence, oracle, some, partial(_cut, oracle, some)):
            yield "truncation", f"a sequence without its first {cut} tokens", _cut(oracle, [cut], every)[0]


def _promising(
    evidence: Evidence, oracle: Oracle, some: Sequence[T], values: Callable[[I64], Sequence[Logprobs]]
) -> Iterator[T]:
    """Those of which a few rows, computed together, are not ruled out."""
    hopes = promising_of(evidence, oracle, len(some), values)
    yield from (each for each, hope in zip(some, hopes, strict=True) if hope)


def _is_beyond(evidence: Evidence, oracle: Oracle, without_it: Callable[[I64], Logprobs]) -> bool:
    """Whether values are wrong by far more than they are without a prompt: then it is not something in it."""
    window = oracle.window
    rows = np.flatnonzero(evidence.differs[window] & np.isfinite(evidence.found[window]))[:_FIRST]
    truth = evidence.truth[window][rows].astype(np.float64)
    found, unseen = evidence.found[window][rows], without_it(rows)
    return bool(rows.size == _FIRST and np.abs(found - truth).mean() > _BEYOND * np.abs(unseen - truth).mean())


def _cut(oracle: Oracle, cuts: Sequence[int], rows: I64) -> list[Logprobs]:
    return oracle.of_sequences([oracle.tokens[cut:] for cut in cuts], [oracle.rows[rows] - cut for cut in cuts], rows)


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
    room, every = oracle.decoder.config.max_position - len(oracle.tokens), np.arange(len(oracle.rows))
    tried = [each for each in tried if len(each[0]) <= room]

    def values(some: Sequence[tuple[I64, str, str]], rows: I64) -> list[Logprobs]:
        longer = [np.concatenate([front, oracle.tokens]) for front, _, _ in some]
        return oracle.of_sequences(longer, [oracle.rows[rows] + len(front) for front, _, _ in some], rows)

    for at in range(0, len(tried), _TOGETHER):
        some = tried[at : at + _TOGETHER]
        for each in _promising(evidence, oracle, some, partial(values, some)):
            yield each[1], f"the sequence with {each[2]}", values([each], every)[0]


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
    behind, every = oracle.rows >= first, np.arange(len(oracle.rows))
    truth = evidence.truth[oracle.window]
    kinds: list[tuple[str, str, Spans]] = [("other_context", "without", partial(_without, oracle))]
    if not first:  # what some rows do not see is followed row by row
        kinds.append(("attention_mask", "in which nothing after them sees", partial(_unseen, oracle)))
    for cause, name, predict in kinds:
        if span := _best_span(evidence, oracle, predict, first or oracle.prompt_len - 1):
            what = "truncation" if first and not span[0] and cause == "other_context" else cause
            said = f"a sequence {name} its tokens {span[0]} to {span[1] - 1}{since}"
            # What somebody put into a response stands right in front; what changes far in front later on is a cache's.
            near[said] = "kv_boundary" if span[1] < first else "other_context"
            yield what, said, np.where(behind, predict(every, [span])[0], truth).astype(np.float32)


def _best_span(evidence: Evidence, oracle: Oracle, predict: Spans, last: int) -> Span | None:
    """The part of tokens 0..last without which least of the difference is left; None where none takes any away."""
    window = oracle.window
    wrong = evidence.differs[window] & np.isfinite(evidence.found[window]) & np.isfinite(evidence.truth[window])
    rows = np.flatnonzero(wrong)[:_ROWS]
    found, truth = (values[window][rows].astype(np.float64) for values in (evidence.found, evidence.truth))
    if last < _SHORTEST or not rows.size:
        return None
    errors: dict[Span, float] = {}

    def prepare(spans: Sequence[Span]) -> None:
        """What they leave of the difference, computed together."""
        new = [(a, b) for a, b in dict.fromkeys(spans) if 0 <= a < b <= last and b - a < last and (a, b) not in errors]
        for at in range(0, len(new), _TOGETHER):
            some = new[at : at + _TOGETHER]
            left = (float(np.abs(values - found).mean()) for values in predict(rows, some))
            errors.update(zip(some, left, strict=True))

    def error(span: Span) -> float:
        return errors.get(span, float("inf"))

    edges = np.unique(np.round(np.linspace(0, last, _BLOCKS + 1)).astype(int)).tolist()
    spans = [*pairwise(edges), (0, 1), (0, 2), (last - 1, last), (last - 2, last)]
    if evidence.begins is not None:  # what was taken out mostly stood right in front, or in front of all
        spans += [span for edge in edges[1:-1] for span in ((edge, last), (0, edge))]
    prepare(spans)
    span, *others = sorted(spans, key=error)[:_STARTS]
    if error(span) > _PROMISING * float(np.abs(truth - found).mean()):
        return None
    step = max(1, last // _BLOCKS)
    starts = (span, *others[: evidence.begins is not None])
    reached = [climbed(start, _beside, error, step, prepare) for start in starts]
    return min(reached, key=error)


def _beside(span: Span, step: int) -> Iterator[Span]:
    first, end = span
    yield from ((first - step, end), (first + step, end), (first, end - step), (first, end + step))
    yield from ((first - step, end - step), (first + step, end + step))


def _without(oracle: Oracle, rows: I64, spans: Sequence[Span]) -> list[Logprobs]:
    shorter = [np.delete(oracle.tokens, np.s_[first:last]) for first, last in spans]
    return oracle.of_sequences(shorter, [np.maximum(oracle.rows[rows] - (b - a), 0) for a, b in spans], rows)


def _unseen(oracle: Oracle, rows: I64, spans: Sequence[Span]) -> list[Logprobs]:
    masks = [edited(oracle.decoder, Edit("attention", seeing(without(*span)))) for span in spans]
    return oracle.of_each(masks, rows)
