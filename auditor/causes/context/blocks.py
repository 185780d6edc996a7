"""A block of the cache that holds something that nobody knows: hiding it does to the values what the side's fault does.

Whatever stands there, rows lean towards it less than towards what belongs there, as they do where nothing is. Where a
part of the block says more than all of it, other tokens stand in the prompt, and no other block in the cache.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from auditor.causes.context.seen import seeing, without
from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import Oracle
from auditor.causes.search import resemblance

Span = tuple[int, int]

_ROWS: Final = 24  # wrong rows by which parts are told apart
_LEAST: Final = 12
_BEYOND: Final = 0.05  # a median difference that something else in a slot makes
_BLOCKS: Final = (16, 32, 64, 128, 256)
_MOST: Final = 6  # blocks that are told apart
_TOGETHER: Final = 8
_ALIKE: Final = 0.5  # cosine of two differences
_BARELY: Final = 0.05  # by which a part must be more alike than its block
_SCORE: Final = 0.46  # more than a look, less than anything that takes away much


def unknown_block(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Which block of the prompt it is, or which part of it, where hiding one is like the difference."""
    window, prompt = oracle.window, oracle.prompt_len
    rows = np.flatnonzero(evidence.differs[window] & np.isfinite(evidence.found[window]))[:_ROWS]
    size = next((size for size in _BLOCKS if prompt <= _MOST * size), 0)
    if evidence.begins is not None or rows.size < _LEAST or not 0 < size < prompt:
        return
    delta, truth = evidence.delta[window][rows], evidence.truth[window][rows].astype(np.float64)
    if np.median(np.abs(delta)) < _BEYOND or oracle.beyond_the_prompt:
        return
    blocks = list(pairwise([*range(0, prompt, size), prompt]))
    alike: dict[Span, float] = {}
    tried = blocks
    while tried:
        for at in range(0, len(tried), _TOGETHER):
            some = tried[at : at + _TOGETHER]
            unseen = [edited(oracle.decoder, Edit("attention", seeing(without(*span)))) for span in some]
            for span, values in zip(some, oracle.of_each(unseen, rows), strict=True):
                alike[span] = resemblance(values - truth, delta)
        best = max(alike, key=alike.__getitem__)
        tried = [span for span in _parts(best) if span not in alike] if best in tried else []
    best = max(alike, key=alike.__getitem__)
    if alike[best] < _ALIKE:
        return
    inside = max(blocks, key=lambda block: alike[block])
    if (
        alike[inside] > _ALIKE
        and alike[inside] > alike[best] - _BARELY
        and inside[0] <= best[0]
        and best[1] <= inside[1]
    ):
        best = inside
    said = f"where nothing sees tokens {best[0]} to {best[1] - 1}, values move as here: cosine {alike[best]:.2f}"
    if best in blocks:
        yield Suggestion("kv_boundary", _SCORE, f"{said}; they are a block of {size}, and no part of it says much more")
    else:
        yield Suggestion("other_context", _SCORE, f"{said}; something else stands there")


def _parts(span: Span) -> list[Span]:
    """Its halves and what is between them."""
    first, last = span
    quarter = (last - first) // 4
    if not quarter:
        return []
    return [(first, first + 2 * quarter), (first + quarter, last - quarter), (first + 2 * quarter, last)]
