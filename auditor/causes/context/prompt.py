"""A prompt in which one token is another, one stands in front of all, or a part sees itself only.

Which token it is shows in what its absence does: where another one stands in its place, values move much as they do
where nothing sees it. Then every token that may stand there is tried, on the first wrong rows.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations, pairwise
from typing import Final

import numpy as np

from auditor.causes.context.seen import Part, seeing, slices, without
from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import HINT, Evidence, Suggestion
from auditor.causes.fit import climbed
from auditor.causes.oracle import F64, I64, Oracle
from auditor.causes.search import Candidate, nearest, resemblance
from auditor.compare import Logprobs
from rl_kernel.reference.model import Decoder

_LEAST: Final = 12
_ROWS: Final = 4  # wrong rows on which parts of the prompt are told apart
_EXACT: Final = 2
_PIECES: Final = 24  # that are hidden one by one,
_KEPT: Final = 2  # of which the likeliest are hidden
_PARTS: Final = 3  # piece by piece
_TOGETHER: Final = 8
_EDGES: Final = 8
_SIZES: Final = 16
_ALIKE: Final = 0.5  # cosine of two differences
_PERHAPS: Final = 0.42  # the same, where it is worth while to look on
_STANDS_OUT: Final = 0.05
_SINGLE: Final = 512  # tokens that are all tried in one place
_SPECIAL: Final = 8
_BEYOND: Final = 0.05  # a median difference that another token makes
_BLOCK: Final = 16
_STARTS: Final = 3  # parts of the prompt from which better ones are looked for
_PROMISING: Final = 0.7  # of the difference

Span = tuple[int, int]


def alone(first: int, last: int) -> Callable[[int], list[Part]]:
    """Rows first..last see no key in front of them."""

    def parts(count: int) -> list[Part]:
        end = min(last, count)
        rows = [(0, first, np.arange(first)), (first, end, np.arange(first, end)), (end, count, np.arange(count))]
        return [part for part in rows if part[0] < part[1]]

    return parts


def behind_a_prefix(first: int, last: int) -> Iterator[tuple[str, Callable[[int], list[Part]]]]:
    """What rows first..last see where a mask is made as if nothing was cached in front of them; rows by themselves."""

    def of(keys: Callable[[int], I64]) -> Callable[[int], list[Part]]:
        def parts(count: int) -> list[Part]:
            end = min(last, count)
            rows = [(0, first, np.arange(first)), *((i, i + 1, keys(i)) for i in range(first, end))]
            return rows + ([(end, count, np.arange(count))] if end < count else [])

        return parts

    yield (
        "each see as many tokens fewer, as under a mask laid from its top left",
        of(lambda i: np.arange(i + 1 - first)),
    )
    yield "see what is in front of them all and themselves", of(lambda i: np.r_[0:first, i])
    yield "see all of each other", of(lambda i: np.arange(last))


def chunk_of_the_prompt(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """A part of the prompt that was computed by itself, or every chunk of it."""
    if evidence.begins is None and (best := nearest(evidence, oracle, _chunks(evidence, oracle))):
        yield best


def _chunks(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    rows, prompt = _wrong(evidence, oracle)[:_ROWS], oracle.prompt_len
    if rows.size < _ROWS or prompt < _EDGES:
        return
    found = evidence.found[oracle.window][rows].astype(np.float64)
    before = float(np.abs(found - evidence.truth[oracle.window][rows]).mean())
    errors: dict[Span, float] = {}

    def error(span: Span) -> float:
        if span not in errors:
            out = not 0 < span[0] < span[1] <= prompt
            trial = np.full(rows.size, np.inf) if out else oracle.logprobs_of_rows(_alone(oracle, span), rows)
            errors[span] = float(np.abs(trial - found).mean())
        return errors[span]

    block = _BLOCK if prompt > _EDGES * _BLOCK else _BLOCK // 4
    cuts = {*np.linspace(0, prompt, _EDGES + 1).round().astype(int).tolist(), *range(block, prompt, block)} - {0}
    for start in sorted(combinations(sorted(cuts), 2), key=error)[:_STARTS]:
        span = climbed(start, _beside, error, max(1, prompt // _EDGES // 2))
        name = f"an attention in which tokens {span[0]} to {span[1] - 1} see themselves only"
        if error(span) < _PROMISING * before:
            yield "kv_boundary", name, oracle.logprobs(_alone(oracle, span))
    yield from _behind_prefixes(oracle, cuts, rows[:_EXACT], found[:_EXACT])
    for size in range(2, min(_SIZES, prompt - 1) + 1):
        decoder = edited(oracle.decoder, Edit("attention", seeing(_in_chunks(size, prompt))))
        if (oracle.logprobs_of_rows(decoder, rows[:_EXACT]) == found[:_EXACT]).all():
            name = f"an attention in which each chunk of {size} tokens of the prompt sees itself only"
            yield "kv_boundary", name, oracle.logprobs(decoder)


def _behind_prefixes(oracle: Oracle, cuts: set[int], rows: I64, found: F64) -> Iterator[Candidate]:
    """Tokens of the prompt behind a cached prefix, whose mask does not know of it."""
    for first in sorted(cuts - {oracle.prompt_len}):
        for said, mask in behind_a_prefix(first, oracle.prompt_len):
            decoder = edited(oracle.decoder, Edit("attention", seeing(mask)))
            if (oracle.logprobs_of_rows(decoder, rows) == found).all():
                name = f"an attention in which tokens {first} to {oracle.prompt_len - 1} {said}"
                yield "attention_mask", name, oracle.logprobs(decoder)


def _beside(span: Span, step: int) -> Iterator[Span]:
    first, last = span
    yield from ((first + step, last), (first - step, last), (first, last + step), (first, last - step))


def _alone(oracle: Oracle, span: Span) -> Decoder:
    return edited(oracle.decoder, Edit("attention", seeing(alone(*span))))


def _in_chunks(size: int, prompt: int) -> Callable[[int], list[Part]]:
    def parts(count: int) -> list[Part]:
        end = min(prompt, count)
        rest = [(end, count, np.arange(count))] if end < count else []
        return slices(list(range(size, end, size)))(end) + rest

    return parts


def other_prompt(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """One token, or a part, that is something else; or another start."""
    wrong = _wrong(evidence, oracle)
    if not _may_be_the_prompt(evidence, oracle, wrong):
        return
    (first, last), alike, apart = _standing_out(evidence, oracle, wrong)
    if seems := alike > _ALIKE and apart > _STANDS_OUT:
        which = f"token {first} of the prompt is" if last - first == 1 else f"tokens {first} to {last - 1} are"
        yield Suggestion(
            "other_context", HINT, f"values move as they do where nothing sees it: {which} something else, it seems"
        )
    tokens = _tokens(oracle) if last - first == 1 and alike > _PERHAPS else []
    if best := nearest(evidence, oracle, _in_place(evidence, oracle, first, tokens)):
        yield best
        return
    if seems:
        return
    special = _tokens(oracle)[:_SPECIAL]
    start = chain(_in_place(evidence, oracle, 0, special), _in_front(evidence, oracle, special))
    if best := nearest(evidence, oracle, start):
        yield best


def one_more_token(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Any one token in front of all."""
    if not _may_be_the_prompt(evidence, oracle, _wrong(evidence, oracle)):
        return
    if best := nearest(evidence, oracle, _in_front(evidence, oracle, _tokens(oracle)[_SPECIAL:])):
        yield best


def _may_be_the_prompt(evidence: Evidence, oracle: Oracle, wrong: I64) -> bool:
    """Whether values are wrong from the first one on, and by as much as another token makes."""
    if evidence.begins is not None or wrong.size < _LEAST or oracle.prompt_len < 2:
        return False
    return bool(np.median(np.abs(evidence.delta[oracle.window][wrong])) >= _BEYOND)


def _standing_out(evidence: Evidence, oracle: Oracle, rows: I64) -> tuple[Span, float, float]:
    """The part of the prompt whose absence has the effect most alike to the difference; how alike; above all others.

    Pieces of the prompt first, then pieces of the likeliest ones, and so on. rows: of the window, that tell.
    """
    window, last = oracle.window, oracle.prompt_len
    delta, truth = evidence.delta[window][rows], evidence.truth[window][rows]
    alike: dict[Span, float] = {}

    def prepare(spans: Sequence[Span]) -> None:
        new = [(a, b) for a, b in dict.fromkeys(spans) if 0 <= a < b <= last and b - a < last and (a, b) not in alike]
        for at in range(0, len(new), _TOGETHER):
            some = new[at : at + _TOGETHER]
            unseen = [edited(oracle.decoder, Edit("attention", seeing(without(*span)))) for span in some]
            for span, values in zip(some, oracle.of_each(unseen, rows), strict=True):
                effect = values.astype(np.float64) - truth
                alike[span] = resemblance(effect, delta)

    def unlike(span: Span) -> float:
        """Below 1; above where there is no such part."""
        return 1.0 - alike.get(span, -1.0)

    pieces = _pieces(0, last, _PIECES)
    prepare(pieces)
    while some := [p for p in sorted(pieces, key=unlike)[:_KEPT] if p[1] - p[0] > 1]:
        pieces = [part for first, end in some for part in _pieces(first, end, _PARTS)]
        prepare(pieces)
    likest = min(alike, key=unlike)
    best = climbed(likest, _beside, unlike, max(1, (likest[1] - likest[0]) // 2), prepare)
    second = max((how for piece, how in alike.items() if piece[1] < best[0] or piece[0] > best[1]), default=0.0)
    return best, alike[best], alike[best] - second


def _pieces(first: int, last: int, count: int) -> list[Span]:
    """About as many parts of first..last, of one size."""
    edges = np.unique(np.linspace(first, last, min(count, last - first) + 1).round().astype(int)).tolist()
    return list(pairwise(edges))


def _in_place(evidence: Evidence, oracle: Oracle, at: int, tokens: list[int]) -> Iterator[Candidate]:
    own = int(oracle.tokens[at])

    def placed(token: int) -> I64:
        return np.concatenate([oracle.tokens[:at], [token], oracle.tokens[at + 1 :]])

    for token in _right(evidence, oracle, tokens, placed, 0):
        name = f"the sequence with token {token} in the place of {own} at {at}"
        yield "other_context", name, _of_tokens(oracle, [placed(token)], np.arange(len(oracle.rows)), 0)[0]
        return


def _in_front(evidence: Evidence, oracle: Oracle, tokens: list[int]) -> Iterator[Candidate]:
    def placed(token: int) -> I64:
        return np.concatenate([[token], oracle.tokens])

    for token in _right(evidence, oracle, tokens, placed, 1):
        name = f"the sequence with token {token} in front of it"
        yield "other_context", name, _of_tokens(oracle, [placed(token)], np.arange(len(oracle.rows)), 1)[0]
        return


def _tokens(oracle: Oracle) -> list[int]:
    """What may stand somewhere: all tokens of a small vocabulary, or its first and last ones and the sample's."""
    vocab = oracle.decoder.config.vocab
    special = [*range(_SPECIAL // 2), *range(vocab - _SPECIAL // 2, vocab)]
    rest = range(vocab) if vocab <= _SINGLE else oracle.tokens[: oracle.prompt_len].tolist()[:_SINGLE]
    return list(dict.fromkeys((*special, *rest)))


def _right(
    evidence: Evidence, oracle: Oracle, tokens: list[int], placed: Callable[[int], I64], more: int
) -> Iterator[int]:
    """Those with which the first wrong rows have the values of the sequence that they are placed in."""
    rows = _wrong(evidence, oracle)[:_EXACT]
    for at in range(0, len(tokens), _TOGETHER):
        some = tokens[at : at + _TOGETHER]
        said = _of_tokens(oracle, [placed(token) for token in some], rows, more)
        found = evidence.found[oracle.window][rows]
        yield from (token for token, values in zip(some, said, strict=True) if (values == found).all())


def _of_tokens(oracle: Oracle, sequences: Sequence[I64], rows: I64, more: int) -> list[Logprobs]:
    return oracle.of_sequences(sequences, [oracle.rows[rows] + more] * len(sequences), rows)


def _wrong(evidence: Evidence, oracle: Oracle) -> I64:
    return np.flatnonzero(evidence.differs[oracle.window] & np.isfinite(evidence.found[oracle.window]))
