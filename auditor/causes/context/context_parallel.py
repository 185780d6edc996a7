"""Context parallelism: differences at the edges of the slices that a sequence is cut into."""

from collections.abc import Iterator

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion

_REACH = 2  # tokens on each side of an edge
_PARTS = (2, 4, 8, 16, 3, 6, 12, 5, 7, 9, 10, 14)
_SHORTEST = 6  # tokens of a slice
_MOST_EDGES = 0.7
_ENOUGH = 3  # wrong values that stand at edges by chance hardly ever
_AT_EDGES = 0.7  # a score
_SPIKE = 1e-3  # below this a difference is one of rounding


def slice_edges(evidence: Evidence) -> Iterator[Suggestion]:
    """The largest differences lie one at each edge of a slice, far above all others."""
    size = np.abs(evidence.delta)
    total = len(evidence.rollout.tokens)
    stated = {evidence.rollout.layout.cp_size, evidence.trainer.layout.cp_size} - {0, 1}
    for parts in sorted(stated) or (2, 4, 8, 3, 6):
        # Causal balancing gives a rank two slices, so there are edges at halves of a slice too.
        for slices in (parts, 2 * parts):
            edges = np.unique(np.round(np.arange(1, slices) * total / slices))
            inside = edges[(edges >= evidence.positions[0] - 1) & (edges <= evidence.positions[-1])]
            distance = np.abs(evidence.positions[:, None] - inside[None, :])
            near = distance.min(axis=1, initial=total) <= _REACH
            if inside.size < 2 or near.mean() > 0.5 or not near.any():
                continue
            spikes = np.array([size[column <= _REACH].max(initial=0.0) for column in distance.T])
            rest = float(np.quantile(size[~near], 0.95))
            if (spikes > max(_SPIKE, 5.0 * rest)).sum() >= max(2, 0.75 * inside.size):
                yield Suggestion(
                    "context_parallel",
                    0.8 + 0.1 * bool(stated),
                    f"differences of {spikes.min():.3g} to {spikes.max():.3g} within {_REACH} tokens of the"
                    f" {inside.size} edges of {slices} slices of {total} tokens, {rest:.3g} elsewhere",
                )
                return
    wrong = np.flatnonzero(evidence.differs)
    if wrong.size >= _ENOUGH and (parts := sliced_at(evidence, wrong)):
        said = f"the {wrong.size} values that are wrong stand at the edges of {parts} slices, one each"
        yield Suggestion("context_parallel", _AT_EDGES, said)


def sliced_at(evidence: Evidence, at: np.ndarray) -> int:
    """Into how many slices a sequence is cut where these response tokens stand, one each, at the edges; 0 into none.

    Nearly all edges of the response must be among them: of many slices, some have edges anywhere.
    """
    positions = evidence.positions[at]
    for parts, edges in slicings(len(evidence.rollout.tokens)):
        inside = edges[(edges >= evidence.positions[0]) & (edges <= evidence.positions[-1])]
        near = np.abs(positions[:, None] - inside[None, :]) <= 1
        if len(positions) < 2 or not near.any(axis=1).all():
            continue
        hit = near.sum(axis=0)
        # In the middle of the sequence both slices are one rank's, where ranks hold two.
        missed = inside[(hit == 0) & (np.abs(inside - len(evidence.rollout.tokens) / 2) > 1)].size
        if hit.max() == 1 and missed <= (1 - _MOST_EDGES) * inside.size:
            return parts
    return 0


def slicings(total: int) -> Iterator[tuple[int, np.ndarray]]:
    """Numbers of slices, the common ones first, and the inner edges of so many tokens in them: even, or padded."""
    for parts in _PARTS:
        if total >= _SHORTEST * parts:
            yield parts, np.unique(np.round(np.arange(1, parts) * total / parts).astype(np.int64))
            size = -(-total // (2 * parts)) * 2
            if size * parts != total:
                yield parts, np.arange(size, total, size)
