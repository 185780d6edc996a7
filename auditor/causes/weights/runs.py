"""Runs of rows or columns that other weights may have: of a file, as buckets cut it, or of every tensor, as ranks do.

Effects add up to the first order, so what a run makes is a difference of two sums, and all of them are weighed at once.
B wrong rows of the response, P places where a run may begin or end.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Final, NamedTuple

import numpy as np

from auditor.causes.oracle import F64, I64
from auditor.causes.weights.parts import MOST, Choice, Layout, Names, Part, by_column, span
from auditor.causes.weights.response import Effect

_RANKS: Final = (2, 4, 8, 3, 6, 5, 7, 16)
_USUAL: Final = (2, 4, 8)
_PLACES: Final = 384  # of a file that are told apart at first
_FINER: Final = 16  # times, by which each look at the ends of a run is closer
_REFINED: Final = 3  # runs of a file whose ends are looked for row by row
_OF_RANKS: Final = 24  # runs of ranks that are worth a guess
_EXACTLY: Final = 1e-3
_TURNED: Final = 0.5  # a cost, so that a half is not said to be all but the other

_EVENLY: Final = ", of the padded vocabulary"

Effects = Mapping[str, Effect]
Span = tuple[int, int]


class Run(NamedTuple):
    """From one place to another; turned: everything but that."""

    unlikely: float
    first: int
    last: int
    turned: bool


def runs(layout: Layout, effects: Effects, delta: F64) -> Iterator[Choice]:
    """The likeliest runs of a file, and of ranks in all tensors or some. effects: known row by row, or not at all."""
    if not effects:
        yield from _unweighed(layout)
    else:
        for order in dict.fromkeys((layout.names, tuple(sorted(layout.names)))):
            yield from _of_file([name for name in order if name in effects], layout, effects, delta)
        weighed = sorted(_of_ranks(layout, effects, delta), key=lambda pair: pair[0])
        yield from (choice for _, choice in weighed[:_OF_RANKS])


def _best(sums: F64, costs: F64, delta: F64, kept: int) -> list[Run]:
    """The likeliest runs. sums: [P,B], of all that stands before a place; costs: [P], of a place as an end."""
    found: list[Run] = []
    for turned in (False, True):
        toward, moved = (delta - sums[-1], -sums) if turned else (delta, sums)
        own, along = np.einsum("pb,pb->p", moved, moved), moved @ toward
        left = toward @ toward + (own + 2 * along)[:, None] + (own - 2 * along)[None, :] - 2 * moved @ moved.T
        unlikely = 0.5 * len(delta) * np.log(np.maximum(left, 0.0) + _EXACTLY * len(delta))
        unlikely += costs[:, None] + costs[None, :] + _TURNED * turned
        unlikely[np.tril_indices(len(sums))] = np.inf
        unlikely[0, -1] = np.inf  # everything is no run
        likeliest = np.argpartition(unlikely, min(kept, unlikely.size - 1), axis=None)[:kept]
        for at in likeliest.tolist():
            first, last = divmod(at, len(sums))
            if np.isfinite(unlikely[first, last]):
                found.append(Run(float(unlikely[first, last]), first, last, turned))
    return sorted(found)[:kept]


def _of_file(order: Sequence[str], layout: Layout, effects: Effects, delta: F64) -> Iterator[Choice]:
    """First between places that are far apart, then between any two rows near the ends of the best."""
    edges = np.cumsum([0, *(layout.shapes[name][0] for name in order)])
    count = int(edges[-1]) + 1

    def weighed(places: I64) -> tuple[F64, F64]:
        """What all before each place makes [P,B], and its cost as an end."""
        costs = np.where(np.isin(places, edges), math.log(len(edges)), math.log(count))
        costs[np.isin(places, (0, count - 1))] = 0.0
        return _before(places, edges, [effects[name].rows for name in order]), costs

    step = -(-count // _PLACES)
    coarse = np.union1d(np.arange(0, count, step), edges)
    kept = {(int(coarse[r.first]), int(coarse[r.last]), r.turned): r for r in _best(*weighed(coarse), delta, _REFINED)}
    steps = [step]
    while steps[-1] > 1 or len(steps) == 1:
        steps.append(max(1, steps[-1] // _FINER))
    for step, finer in pairwise(steps):
        found: dict[tuple[int, int, bool], Run] = {}
        for ends in sorted(kept, key=kept.__getitem__)[:_REFINED]:
            near = [np.arange(max(0, at - step), min(count, at + step + 1), finer) for at in ends[:2]]
            fine = np.unique(np.concatenate([[0, count - 1], ends[:2], *near]))
            for run in _best(*weighed(fine), delta, _REFINED):
                found[int(fine[run.first]), int(fine[run.last]), run.turned] = run
        kept = found
    for first, last, turned in kept:
        parts = tuple(
            Part(name, 0, max(first, a) - a, min(last, b) - a)
            for name, a, b in zip(order, edges[:-1].tolist(), edges[1:].tolist(), strict=True)
            if max(first, a) < min(last, b)
        )
        said = f"rows {parts[0].first} of {parts[0].name} to {parts[-1].last - 1} of {parts[-1].name}"
        cost = float(weighed(np.array([first, last]))[1].sum())
        yield _choice(layout, layout.names, parts, turned, said, cost)


def _before(places: I64, edges: I64, sums: Sequence[F64]) -> F64:
    """Of a file that is cut at `edges` into tensors with these sums [B,N+1], all before each place, [P,B]."""
    whole = np.cumsum([np.zeros(len(sums[0])), *(each[:, -1] for each in sums)], axis=0)
    tensor = np.minimum(np.searchsorted(edges, places, side="right") - 1, len(sums) - 1)
    result: F64 = whole[tensor].astype(np.float64)
    for at in np.unique(tensor):
        mine = tensor == at
        result[mine] += sums[at][:, places[mine] - edges[at]].T
    return result


def _choice(
    layout: Layout, among: Sequence[str], parts: tuple[Part, ...], turned: bool, said: str, cost: float
) -> Choice:
    if not turned:
        return Choice(said, parts, cost)
    return Choice(f"all but {said}", layout.rest(among, parts), cost)


def _of_ranks(layout: Layout, effects: Effects, delta: F64) -> Iterator[tuple[float, Choice]]:
    """How unlikely a run of ranks is, and the run."""
    sets: dict[Names, str] = {}
    many = len(layout.names) > MOST
    alone = () if many else ((name, frozenset([name])) for name in layout.names)
    for said, names in (*(layout.everywhere() if many else layout.large()), *alone):
        sets.setdefault(names & frozenset(effects), said)
    for names, said in sets.items():
        matrices = [name for name in layout.names if name in names and len(layout.shapes[name]) == 2]
        every = [name for name in layout.names if name in names]
        cost, where = 1.5, ""
        if said != "all tensors":
            cost, where = 3.5, f" in {said}"
        for how, axis, cut, whole in (
            ("", None, matrices, []),
            (", and norms", None, matrices, [name for name in every if name not in matrices]),
            (_EVENLY, None, matrices, []),
            (", by rows", 0, every, []),
            (", by columns", 1, matrices, []),
        ):
            if (
                cut
                and (whole or how != ", and norms")
                and (how != _EVENLY or any("embed" in n or "lm_head" in n for n in cut))
                and (axis != 1 or all(effects[n].columns is not None for n in cut))
            ):
                axes = {name: by_column(name) if axis is None else axis for name in cut}
                left = delta - sum((effects[name].whole for name in whole), np.zeros(len(delta)))
                more = layout.whole(frozenset(whole))
                ranks = _USUAL if many else _RANKS
                for run, choice in _of_cut(layout, effects, left, axes, ranks, _span_of(how), cost + 1.0 * bool(how)):
                    name = f"{choice.said}{how}{where}"
                    yield run + choice.cost, Choice(name, (*choice.parts, *more), choice.cost)


def _of_cut(
    layout: Layout,
    effects: Effects,
    delta: F64,
    axes: Mapping[str, int],
    counts: Sequence[int],
    part: Callable[..., Span],
    cost: float,
) -> Iterator[tuple[float, Choice]]:
    """Of tensors that are each cut along an axis of their own. counts: of ranks. part: as `span`."""
    for ranks in counts:
        ends = {
            n: [0, *(part(n, layout.shapes[n][axis], rank, ranks)[1] for rank in range(ranks))]
            for n, axis in axes.items()
        }
        sums = np.sum([effects[n].parts(axis)[:, ends[n]] for n, axis in axes.items()], axis=0).T
        more = cost + math.log(ranks * (ranks + 1) / 2) + 1.0 * (ranks not in _USUAL)
        for run in _best(sums, np.zeros(ranks + 1), delta, 2):
            held = (Part(n, axis, ends[n][run.first], ends[n][run.last]) for n, axis in axes.items())
            whose = f"rank {run.first}" if run.last == run.first + 1 else f"ranks {run.first} to {run.last - 1}"
            said, mine = f"the part of {whose} of {ranks}", tuple(p for p in held if p.first < p.last)
            yield run.unlikely, _choice(layout, list(axes), mine, run.turned, said, more)


def _span_of(how: str) -> Callable[..., Span]:
    """How ranks share a vocabulary: at whole tiles, evenly, or anywhere, as every other tensor."""
    if how == _EVENLY:
        return partial(span, even=True)
    return span if how in ("", ", and norms") else lambda name, *widths: span("", *widths)


def _unweighed(layout: Layout) -> Iterator[Choice]:
    """Ranks' parts of all products or of some, where no effect is known."""
    for ranks, (said, names) in product(_USUAL, layout.large()):
        for rank in range(ranks):
            mine = [(n, by_column(n)) for n in layout.names if n in names and len(layout.shapes[n]) == 2]
            parts = (Part(n, axis, *span(n, layout.shapes[n][axis], rank, ranks)) for n, axis in mine)
            held = tuple(part for part in parts if part.first < part.last)
            yield Choice(f"the part of rank {rank} of {ranks} in {said}", held, 3.5 + ranks / 8)
