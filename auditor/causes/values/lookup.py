"""A wrong value that is a right one of somewhere else: of another token in its row, of another place in the response.

Right values are told by their bits: among the values of one response, or of one row of a vocabulary, two are hardly
ever equal by chance.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from auditor.causes.context.context_parallel import sliced_at, slicings
from auditor.causes.evidence import CERTAIN, IN_PART, STRONG, Evidence, Suggestion
from auditor.causes.oracle import Oracle

_ROWS: Final = 48  # rows of which every token's value is computed
_ENOUGH: Final = 0.9
_LEAST: Final = 8
_BESIDE: Final = 4  # tokens away
_RUNS: Final = 12  # pieces of an order that are told
_NEAR: Final = 1
_A_PIECE: Final = 4  # tokens of a turn at least
_A_TURN: Final = 2  # tokens that a turn gains or loses


def value_order(evidence: Evidence) -> Iterator[Suggestion]:
    """The response's own values in another order: pieces that start over, or slices put together in a wrong order."""
    found, truth = evidence.found.view(np.uint32), evidence.truth.view(np.uint32)
    place = {int(bits): at for at, bits in enumerate(truth)}
    if len(place) < 0.9 * len(truth) or len(found) < _LEAST or not evidence.active.all():
        return
    origin = np.array([place.get(int(bits), -1) for bits in found])
    moved = evidence.differs & (origin >= 0)
    numbers, times = np.unique(found[evidence.differs], return_counts=True)
    put = numbers[times > 2]  # what stands where values were missing
    if moved.sum() < max(_LEAST, _ENOUGH * (evidence.differs & ~np.isin(found, put)).sum()):
        return
    lag = origin - np.arange(len(found))
    known = np.flatnonzero(origin >= 0)
    starts = [int(known[0]), *(int(at) for before, at in pairwise(known) if lag[at] != lag[before])]
    if len(starts) < 2 and origin.min() >= 0:
        return  # one lag for all is another cause's
    exact = bool(origin.min() >= 0)
    by = int(lag[moved][0])
    if abs(by) <= _BESIDE and (lag[moved] == by).all():
        where = f"{abs(by)} {'before' if by < 0 else 'after'}"
        said = f"{int(moved.sum())} values are those of the token {where}, the others right"
        yield Suggestion("off_by_one", IN_PART if exact else STRONG, said)
        return
    pieces = ", ".join(f"from {at} those of {int(origin[at])} on" for at in starts[:_RUNS])
    # Beyond an end of the response its last value is said again.
    cut_off = [at for at in starts if at == starts[0] or 0 < origin[at] < len(found) - 1]
    if len(found) >= _A_PIECE * len(cut_off) and _ever_further(lag[cut_off]):
        said = f"the values are the reference's, ever further away: {pieces}"
        yield Suggestion("off_by_one", CERTAIN if exact else IN_PART, said)
        return
    cut = _slices(evidence, starts, origin)
    over = f"at the edges of {cut} slices of the sequence" if cut else f"in {len(starts)} pieces"
    yield Suggestion(
        "context_parallel" if cut else "value_order",
        CERTAIN if exact else IN_PART,
        f"the values are the reference's in another order, {over}: {pieces}",
    )


def other_token(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Each wrong value is that of another token in the very same row."""
    window = oracle.window
    differs = np.flatnonzero(evidence.differs[window] & np.isfinite(evidence.found[window]))[:_ROWS]
    if not differs.size:
        return
    vocab = oracle.decoder.config.vocab
    values = oracle.every_token(differs)[:, :vocab].view(np.uint32)
    same = values == evidence.found[window][differs].view(np.uint32)[:, None]
    same[np.arange(differs.size), oracle.targets[differs]] = False
    hit = same.any(axis=1)
    if hit.sum() < _ENOUGH * differs.size:
        return
    first = int(np.flatnonzero(hit)[0])
    at, token = int(differs[first]), int(same[first].argmax())
    own = _first_of_its_slice(evidence, evidence.positions[differs + window.start], same)
    cut = own or sliced_at(evidence, differs + window.start)
    where = f"; they stand at the edges of {cut} slices of the sequence" if cut else ""
    where += ", each with the first token of the slice in front" if own else ""
    yield Suggestion(
        "context_parallel" if cut else "other_token",
        CERTAIN if hit.sum() >= 2 and hit.all() else STRONG,
        f"{int(hit.sum())} of {differs.size} wrong values are those of another token in the same row, the first one of"
        f" token {token} where {int(oracle.targets[at])} stands{where}",
    )


def _first_of_its_slice(evidence: Evidence, places: np.ndarray, same: np.ndarray) -> int:
    """Into how many slices the sequence is cut where each of these tokens (places int64 [n] in the sequence) begins one
    and was looked up as the first one of the slice in front, as labels shifted slice by slice are; 0: into none.

    same: bool [n, V]: whether the value is that token's. So much is no chance even of one token.
    """
    tokens = evidence.rollout.tokens
    for parts, edges in slicings(len(tokens)):
        at = np.searchsorted(edges, places)
        if at.max() < edges.size and (edges[at] == places).all():
            begins = np.r_[0, edges][at]
            if same[np.arange(places.size), tokens[begins]].all():
                return parts
    return 0


def _ever_further(lags: np.ndarray) -> bool:
    """Whether each piece lies a token or two further away than the one before, as where each turn loses one."""
    steps = np.diff(lags)
    return bool(len(lags) > 2 and ((steps > 0).all() or (steps < 0).all()) and np.abs(steps).max() <= _A_TURN)


def _slices(evidence: Evidence, starts: list[int], origin: np.ndarray) -> int:
    """Into how many slices the sequence is cut where every piece comes from between two edges; 0 where into none."""
    if len(np.unique(origin)) < len(origin):
        return 0  # what comes twice was not put in another order
    total, prompt = len(evidence.rollout.tokens), evidence.rollout.prompt_len
    places = np.array([*starts, *(int(origin[at]) for at in starts)]) + prompt
    inner = places[places > prompt]
    for parts, edges in slicings(total):
        near = (np.abs(inner[:, None] - np.r_[0, edges, total][None, :]).min(axis=1) <= _NEAR).all()
        if near and 2 * len(starts) >= parts:  # of many slices, some have edges anywhere
            return parts
    return 0
