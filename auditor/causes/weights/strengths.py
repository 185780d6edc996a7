"""Another strength of what came since another version: an adapter scaled, added twice, or left in under the next one.

A strength is a number: to the first order the difference says which, and how surely. Few digits are tried first.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations
from typing import Final

import numpy as np

from auditor.causes.oracle import F64
from auditor.causes.weights.mixture import Guess, Measured, Source
from auditor.causes.weights.parts import Names, kind_of
from auditor.causes.weights.response import Effect, total
from rl_kernel.reference.ops import Bits, narrow, widen

_USUAL: Final = (2.0, 0.5, 4.0, 8.0, 0.25, 16.0, 1 / 3, 2 / 3, 4 / 3, -1.0)
_BLOCKS: Final = 8  # of which strengths are looked for
_SURELY: Final = 3.0  # standard deviations
_SMALLEST: Final = 0.08  # of bf16 weights a smaller one is often none
_LARGEST: Final = 16.0
_OFTEN: Final = 1.0  # costs
_ROUND: Final = 2.0
_ODD: Final = 4.0
_LEFT_IN: Final = 3.0
_SINGLE: Final = 64  # tensors
_ALONE: Final = 3.0
_AVERAGED: Final = 3.0  # a cost of each version

Effects = Mapping[str, Effect]


class Strengths:
    """Guesses about the update of each of some versions, by their numbers."""

    def __init__(self, measured: Measured, sources: Mapping[int, Source], effects: Mapping[int, Effects]) -> None:
        self._measured, self._sources, self._effects = measured, sources, effects
        self._now = measured.oracle.decoder.weights

    def guesses(self) -> Iterator[Guess]:
        """Strengths in the blocks that fit best, and updates that are in there once too often."""
        fits: list[tuple[float, int, tuple[str, Names, float]]] = []
        for version in self._sources:
            for said, names, cost in self._blocks(version):
                effect = self._effect(version, names)
                moved, _ = _fitted(effect, self._measured.delta)
                all_in = cost + self._sources[version].cost
                fits.append((self._measured.unlikely(moved * effect, all_in), version, (said, names, all_in)))
        for _, version, block in sorted(fits, key=lambda fit: fit[0])[:_BLOCKS]:
            yield from self._of_block(version, *block)
        for version in self._sources:
            alone = self._measured.layout(self._sources[version]).names[:_SINGLE]
            for name in () if self._measured.dear else alone:
                yield from self._of_block(version, name, frozenset([name]), _ALONE, usual=True)
        for later, earlier in permutations(self._sources, 2):
            yield from self._left_in(later, earlier)
        if self._measured.response is not None:
            for count in range(2, len(self._sources) + 1):
                yield from map(self._average, combinations(self._sources, count))

    def _average(self, versions: Sequence[int]) -> Guess:
        """All tensors a mixture of some versions and the stated one, as an average over steps is."""
        every = [frozenset(self._measured.layout(self._sources[version]).names) for version in versions]
        effects = np.stack([self._effect(v, names) for v, names in zip(versions, every, strict=True)], axis=1)
        shares = np.round(np.linalg.lstsq(effects, self._measured.delta, rcond=None)[0], 2)
        parts = dict(zip(versions, shares.astype(np.float32), strict=True))

        def make() -> dict[str, Bits]:
            mixed: dict[str, Bits] = {}
            for name, weight in self._now.items():
                own = widen(weight)
                moved = [p * (widen(self._sources[v].weights[name]) - own) for v, p in parts.items()]
                mixed[name] = narrow((own + np.sum(moved, axis=0)).astype(np.float32))
            return mixed

        said = " and ".join(f"{share:g} of version {version}" for version, share in parts.items())
        effect = effects @ shares
        unlikely = self._measured.unlikely(effect, _AVERAGED * len(versions))
        return Guess("adapter_scale", f"a mixture of all tensors, {said} in it", unlikely, make, effect)

    def _of_block(self, version: int, said: str, names: Names, cost: float, usual: bool = False) -> Iterator[Guess]:
        """usual: only strengths that are."""
        effect = self._effect(version, names)
        moved, spread = _fitted(effect, self._measured.delta)
        where = "" if said == "all tensors" else f" in {said}"
        for share, more in [(u, _OFTEN) for u in _USUAL] if usual else _candidates(1.0 - moved, _SURELY * spread):
            cause, name = "adapter_scale", f"version {version} with {share:g} times what came since{where}"
            if share == 0.0:
                cause, name = self._sources[version].cause, self._sources[version].of.format(said)
            unlikely = self._measured.unlikely((1.0 - share) * effect, cost + more)
            old = self._sources[version].weights

            def make(share: float = share, old: Mapping[str, Bits] = old) -> dict[str, Bits]:
                return {**self._now, **{n: _moved(old[n], self._now[n], share) for n in names}}

            # Half of every change, and every change in half of the values, point the same way.
            source = self._sources[version]
            some = (source.cause, source.of.format(f"some values of {said}")) if 0.0 < share < 1.0 else None
            yield Guess(cause, name, unlikely, make, (1.0 - share) * effect, rather=some)

    def _left_in(self, later: int, earlier: int) -> Iterator[Guess]:
        """What came from one version to another is added once more."""
        first, last = self._sources[earlier].weights, self._sources[later].weights
        for said, names, cost in self._blocks(later, earlier):
            effect = self._effect(later, names) - self._effect(earlier, names)

            def make(names: Names = names) -> dict[str, Bits]:
                return {**self._now, **{n: _added(self._now[n], last[n], first[n]) for n in names}}

            name = f"what changes from version {earlier} to {later} in {said} added once more"
            yield Guess("adapter_scale", name, self._measured.unlikely(effect, _LEFT_IN + cost), make, effect)

    def _effect(self, version: int, names: Names) -> F64:
        layout = self._measured.layout(self._sources[version])
        return total(self._effects[version], layout.whole(names), len(self._measured.delta))

    def _blocks(self, version: int, without: int | None = None) -> Iterator[tuple[str, Names, float]]:
        """Each set of tensors once: large ones, and the kinds that together fit best."""
        layout = self._measured.layout(self._sources[version])
        seen: set[Names] = set()
        sets = layout.everywhere() if self._measured.dear and without is not None else layout.large()
        large = ((said, names, 0.0) for said, names in sets)
        for said, names, cost in (*large, *self._fitting(version, without)):
            if names and names not in seen:
                seen.add(names)
                yield said, names, cost

    def _fitting(self, version: int, without: int | None) -> Iterator[tuple[str, Names, float]]:
        """Kinds put together one by one, while one strength of them all takes away more of the difference."""
        if self._measured.response is None:
            return
        kinds: dict[str, set[str]] = {}
        for name in self._measured.layout(self._sources[version]).names:
            kinds.setdefault(kind_of(name), set()).add(name)
        each = {kind: self._effect(version, frozenset(names)) for kind, names in kinds.items()}
        if without is not None:
            each = {kind: effect - self._effect(without, frozenset(kinds[kind])) for kind, effect in each.items()}
        chosen: list[str] = []
        so_far, delta = np.zeros(len(self._measured.delta)), self._measured.delta
        while left := [kind for kind in each if kind not in chosen]:
            best = max(left, key=lambda kind: _explained(so_far + each[kind], delta))
            if _explained(so_far + each[best], delta) <= _explained(so_far, delta):
                break
            chosen.append(best)
            so_far = so_far + each[best]
            subsets = math.comb(len(kinds), len(chosen))
            yield ", ".join(chosen), frozenset(name for kind in chosen for name in kinds[kind]), math.log(subsets)


def _fitted(effect: F64, delta: F64) -> tuple[float, float]:
    """How many times an effect makes a difference, by least squares, and the standard deviation; 0 where it is none."""
    size = float(effect @ effect)
    if size == 0.0:
        return 0.0, 0.0
    moved = float(effect @ delta) / size
    left = delta - moved * effect
    return moved, float(np.sqrt(max(1.0, float(left @ left) / len(left)) / size))


def _explained(effect: F64, delta: F64) -> float:
    """The part of a difference's square that some strength of an effect takes away."""
    size = float(effect @ effect)
    return float(effect @ delta) ** 2 / size if size > 0.0 else 0.0


def _candidates(share: float, within: float) -> Iterator[tuple[float, float]]:
    """Strengths that somebody may have set, and how unlikely each is: the usual ones, and what lies near."""
    tried = dict.fromkeys(_USUAL, _OFTEN) | {0.0: 0.0}
    for step, cost in ((0.1, _ROUND), (0.05, _ROUND + 1.0), (0.01, _ODD)):
        around = round(share / step)
        count = min(int(within / step) + 1, 12)
        for at in range(around - count, around + count + 1):
            tried.setdefault(round(at * step, 2), cost)
    for value, cost in tried.items():
        if value == 0.0 or (_SMALLEST < abs(value) <= _LARGEST and value != 1.0):
            yield value, cost


def _moved(base: Bits, now: Bits, share: float) -> Bits:
    start = widen(base)
    return narrow(start + np.float32(share) * (widen(now) - start))


def _added(now: Bits, later: Bits, earlier: Bits) -> Bits:
    return narrow(widen(now) + (widen(later) - widen(earlier)))
