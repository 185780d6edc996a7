"""A response computed row by row on the keys and values of what stands in front, as an engine decodes it.

Where values are right up to some token, only what the next row sees, or where it stands, can be wrong. One row costs
little, so everything that may have happened to it is tried; what fits is kept, and the next row is tried upon it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, pairwise
from typing import Any, Final

import numpy as np

from auditor.causes.context.context_parallel import slicings
from auditor.causes.context.scalings import Scaling, scalings
from auditor.causes.context.slots import cached
from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import I64, Oracle
from auditor.causes.search import Candidate, nearest
from auditor.compare import Logprobs
from rl_kernel.reference.ops import F32, I32, Bits, Reference

_FARTHEST: Final = 256  # positions that a row is looked for away
_BESIDE: Final = 32  # the same, of a row of the prompt
_NEAR: Final = (1, -1, 2, -2)
_MOST_KEYS: Final = 96  # of which every span is tried
_EDGES: Final = 16
_SLICES: Final = 4
_ROWS: Final = 3  # that must follow before a whole response is computed
_LARGEST: Final = 1 << 27  # values of a cache that is kept
_TOKENS: Final = 1024  # that are all tried in a place
_TOGETHER: Final = 64  # rows that are computed at once
_KEYS: Final = 1 << 16  # that they may have together
_TOLD: Final = 8  # runs of rows that are told
_SMALLEST: Final = 8  # tokens of a block
_ASTRAY: Final = 2  # rows that nothing fits, behind which the rest is taken to go on as it was


@dataclass(frozen=True, slots=True)
class Row:
    """What a row may be.

    offset: of its position; hidden: keys first..last that it does not see; token: of its input; scaling: of its angles.
    """

    offset: int = 0
    hidden: tuple[int, int] = (0, 0)
    token: int | None = None
    scaling: Scaling | None = None


class Kept:
    """Keys (rotated) and values of every layer, right up to some row, and whatever was said of the rows behind it."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._layers = [(k.copy(), v.copy()) for _, k, v in cached(oracle, oracle.decoder)]

    def values(self, at: int, rows: Sequence[Row], target: int | None = None) -> Logprobs:
        """Log-probability of token at + 1 in what the row of token `at` may be, each for itself, float32 [len(rows)].

        target: another token.
        """
        targets = np.full(len(rows), self._oracle.tokens[at + 1] if target is None else target)
        return self._computed(np.full(len(rows), at), rows, targets, keep=False)

    def follow(self, at: int, rows: Sequence[Row]) -> Logprobs:
        """The same of the rows of tokens at, at + 1, … upon each other; their keys and values are kept."""
        where = np.arange(at, at + len(rows))
        return self._computed(where, rows, self._oracle.tokens[where + 1], keep=True)

    def _computed(self, where: I64, rows: Sequence[Row], targets: I64, keep: bool) -> Logprobs:
        oracle, layer, count = self._oracle, iter(self._layers), len(rows)
        places = list(zip(where.tolist(), rows, strict=True))
        scaled = [row.scaling.of(at) if row.scaling else (oracle.frequencies, 1.0) for at, row in places]
        angle = np.stack([(at + row.offset) * own for (at, row), (own, _) in zip(places, scaled, strict=True)])
        length = np.array([longer for _, longer in scaled])[:, None]
        cos, sin = ((length * part).astype(np.float32) for part in (np.cos(angle), np.sin(angle)))
        own = where if keep else len(oracle.tokens) + np.arange(count)
        seen = [np.r_[0 : row.hidden[0], row.hidden[1] : at, o] for (at, row), o in zip(places, own, strict=True)]
        keys, ends = np.concatenate(seen), np.cumsum([0, *map(len, seen)]).astype(np.int32)

        def rope(plain: Reference, x: Bits, _cos: F32, _sin: F32, _at: I64) -> Any:
            return plain.rope(x, cos, sin, np.arange(count))

        def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
            all_k, all_v = kept = next(layer)
            if keep:
                all_k[where], all_v[where] = k, v
            else:
                all_k, all_v = (np.concatenate(pair) for pair in zip(kept, (k, v), strict=True))
            return plain.attention(q, all_k[keys], all_v[keys], np.arange(count + 1, dtype=np.int32), ends)

        tokens = np.array([oracle.tokens[at] if row.token is None else row.token for at, row in places])
        decoder = edited(oracle.decoder, Edit("rope", rope), Edit("attention", attention))
        logits = oracle.head(oracle.decoder, oracle.hidden(decoder, tokens))
        return oracle.from_logits(logits, targets=targets)

    def fitting(self, at: int, rows: Iterator[Row], wanted: np.float32) -> Row | None:
        """The first of the rows that has the wanted value; the likeliest by itself, then ever more at once."""
        size, most = 1, max(1, min(_TOGETHER, _KEYS // (at + 1)))
        while some := list(islice(rows, size)):
            hit = np.flatnonzero(self.values(at, some) == wanted)
            if hit.size:
                return some[int(hit[0])]
            size = min(8 * size, most)
        return None


def row_by_row(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """From the first wrong row on: other positions, keys that it does not see, or another token as its input."""
    config, differs = oracle.decoder.config, np.flatnonzero(evidence.differs)
    if len(oracle.tokens) * config.layers * config.kv_heads * config.head_dim > _LARGEST:
        return
    first = int(evidence.positions[differs[0]]) - 1
    if best := nearest(evidence, oracle, _followed(evidence, oracle, first)):
        yield best


def _followed(evidence: Evidence, oracle: Oracle, first: int) -> Iterator[Candidate]:
    for kind in (_positions, _masks, _angles, _inputs):
        kept = Kept(oracle)
        rows, values = _follow(evidence, oracle, kept, first, kind)
        if len(rows) >= min(_ROWS, len(values)):
            cause, name = _named(rows, first, len(evidence.rollout.tokens))
            yield cause, name, values


def _follow(evidence: Evidence, oracle: Oracle, kept: Kept, first: int, kind: Any) -> tuple[list[Row], Logprobs]:
    """What every row from `first` on was, and the window's values; no row where the first few are not explained."""
    values, rows = evidence.truth[oracle.window].copy(), list[Row]()
    found, start, end = evidence.found[oracle.window], int(oracle.rows[0]), int(oracle.rows[-1]) + 1
    at, last, astray = max(first, start), Row(), 0
    while at < end:
        row = kept.fitting(at, kind(oracle, at, last, rows), found[at - start])
        if row is None and len(rows) < _ROWS:
            return [], values
        astray = astray + 1 if row is None else 0
        some = [last if row is None else row]
        if len(rows) >= _ROWS - 1:  # many rows cost hardly more than one, so they are taken to go on in the same way
            some += _as_before([*rows, *some], min(end - at, max(1, _KEYS // end)) - 1)
        said = kept.follow(at, some)
        right = (said == found[at - start : at - start + len(some)])[1:]
        count = len(some) if right.all() or astray >= _ASTRAY else 1 + int(right.argmin())
        values[at - start : at - start + count], last = said[:count], some[count - 1]
        rows += some[:count]
        at += count
    return rows, values


def _as_before(rows: Sequence[Row], count: int) -> list[Row]:
    """How rows go on: each as far from the one before as the last one is, hidden keys by one token or not at all."""
    before, last = rows[-2:]
    (a, b), (c, d) = before.hidden, last.hidden
    first, end = (c - a, d - b) if (c - a, d - b) in ((0, 1), (1, 1)) else (0, 0)
    by = last.offset - before.offset
    return [
        replace(last, offset=last.offset + i * by, hidden=(c + i * first, d + i * end)) for i in range(1, count + 1)
    ]


def _positions(oracle: Oracle, at: int, last: Row, before: Sequence[Row]) -> Iterator[Row]:
    """As the row before, standing still, then all others from near to far."""
    tried = [last.offset, last.offset - 1, last.offset + 1, 0, -at] if before else []
    # One that is right in front of the response alone is none that moved the response, which another search looks for.
    far = min(_FARTHEST, max(2 * at, 64)) if at >= oracle.prompt_len else _BESIDE
    # A rotation is relative: where those in front were moved on, a row stands further back than 0.
    tried += [by for size in range(1, far + 1) for by in (size, -size)]
    yield from (Row(offset=by) for by in dict.fromkeys(tried))


def _masks(oracle: Oracle, at: int, last: Row, before: Sequence[Row]) -> Iterator[Row]:
    """As the row before, with a window that moves on, nothing hidden; for the first row every span of keys."""
    if before:
        first, end = last.hidden
        yield from (last, Row(hidden=(first, end + 1)), Row(hidden=(first + 1, end + 1)), Row())
        if len(before) >= _ROWS and last.hidden == (0, 0):
            return
    # Where nothing is right in front, a mask of the prompt is another search's.
    every = at <= _MOST_KEYS and at > oracle.rows[0]
    edges = range(at + 1) if every else _some_edges(oracle, at)
    if not before or last.hidden != (0, 0):
        yield from (Row(hidden=(a, b)) for b in reversed(edges) for a in edges if a < b)


def _some_edges(oracle: Oracle, at: int) -> list[int]:
    cuts = {0, oracle.prompt_len, at, *range(0, at, max(_EDGES, at // _MOST_KEYS // _EDGES * _EDGES))}
    most = _SLICES if at < oracle.prompt_len else at + 1  # of which the first wrong row may be the edge
    cuts |= {int(edge) for parts, inner in slicings(at + 1) if parts <= most for edge in inner}
    return sorted(cut for cut in cuts if cut <= at)


def _inputs(oracle: Oracle, at: int, last: Row, before: Sequence[Row]) -> Iterator[Row]:
    """Another token in the place of the first row's, its own behind it."""
    if before:
        yield Row()
    elif oracle.decoder.config.vocab <= _TOKENS:
        yield from (Row(token=token) for token in range(oracle.decoder.config.vocab))


def _angles(oracle: Oracle, at: int, last: Row, before: Sequence[Row]) -> Iterator[Row]:
    """Another scaling of the rotation from the first row on."""
    if before:
        yield last
    else:
        # Where nothing is right in front, what scales all rows is another search's.
        known = scalings(oracle, at, at > oracle.rows[0])
        yield from (Row(scaling=scaling) for scaling in known)


def _named(rows: list[Row], first: int, total: int) -> tuple[str, str]:
    """Cause, and what happened, run by run."""
    if rows[0].token is not None:
        return "other_context", f"a sequence with token {rows[0].token} in the place of token {first}"
    if rows[0].scaling is not None:
        return "rope_scaling", f"{rows[0].scaling.name}, from token {first} on"
    if any(row.offset for row in rows):
        runs = [(offset, len(list(run))) for offset, run in groupby(row.offset for row in rows)]
        starts = np.cumsum([first, *(count for _, count in runs)])[:-1]
        said = ", ".join(
            f"by {by:+d} from token {at} on" for (by, _), at in list(zip(runs, starts, strict=True))[:_TOLD]
        )
        # Slices in another order have all positions, each once.
        taken = {first + at + row.offset for at, row in enumerate(rows)}
        cut = len(runs) > 1 and len(taken) == len(rows) and _at_slices(total, starts.tolist())
        return ("context_parallel" if cut else "position_offset"), f"positions moved {said}"
    return _named_mask(rows, first, total)


def _named_mask(rows: list[Row], first: int, total: int) -> tuple[str, str]:
    begun, ended = rows[0].hidden
    if all(row.hidden == (0, ended + at) for at, row in enumerate(rows)):
        return "attention_mask", f"an attention in which tokens from {first} on see {first - ended + 1} back"
    runs = [(hidden, len(list(run))) for hidden, run in groupby(row.hidden for row in rows)]
    starts = np.cumsum([first, *(count for _, count in runs)]).tolist()
    said = ", ".join(
        f"from {at} to {until - 1} do not see tokens {a} to {b - 1}"
        for ((a, b), _), at, until in list(zip(runs, starts, starts[1:], strict=False))[:_TOLD]
        if b > a
    )
    edges = [*starts, *(edge for hidden, _ in runs for edge in hidden)]
    moving = len(runs) > 2 and all(
        after[0] - before[0] == size for (before, size), (after, _) in pairwise(runs) if before[1] and after[1]
    )
    if moving or (_at_slices(total, edges) and (begun > 0 or len(runs) > 1 or first % _SMALLEST)):
        cause = "context_parallel"
    else:
        # Keys right in front that are gone are a chunk's or a block's; others were hidden on purpose.
        blocks = begun == 0 or not (begun % _SMALLEST or ended % _SMALLEST)
        cause = "kv_boundary" if ended == first and blocks else "attention_mask"
    return cause, f"an attention in which tokens {said}"


def _at_slices(total: int, edges: list[int]) -> bool:
    """Whether these are edges of as many slices as there are ranks, most of all there are, and not of cached blocks.

    The last row is nobody's.
    """
    inner = {edge for edge in edges if 0 < edge < total - 1}
    blocks = total % _EDGES == 0 and all(edge % _EDGES == 0 for edge in inner)
    ranks = (2, 3, 4) if blocks else (2, 3, 4, 6, 8, 16)
    tried = (set(cuts.tolist()) for parts, cuts in slicings(total) if parts in ranks)
    return any(inner <= cuts and 2 * len(inner) >= len(cuts) for cuts in tried)
