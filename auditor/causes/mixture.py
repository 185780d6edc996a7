"""Two versions of the weights in one model: which tensors are of which, or how far all have come between them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from auditor.causes.oracle import F64, Oracle
from auditor.causes.search import subsets
from auditor.compare import Logprobs
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import Bits, narrow, widen

_SINGLE: Final = 32  # tensors that are told apart one by one
_USUAL_SHARES: Final = (2.0, 0.5, 4.0, 8.0, 0.25, 16.0)
_RANKS: Final = (2, 4, 8)
_BY_COLUMN: Final = ("o_proj", "down_proj")
_BLOCKS: Final = ("self_attn.", "mlp.", "norm", "proj")
_ON_THE_WAY: Final = 0.75  # of the difference: what a first guess must leave at most to be worked on
_PASSES: Final = 3
_BEST: Final = 2  # blocks whose share is looked for
_FEW: Final = 12
_TILE: Final = 64  # tokens of the vocabulary that a rank has whole

Chosen = frozenset[str]


class Mixture:
    """The oracle's own weights, `now`, with parts of another version, `old`, judged on some rows of the window."""

    def __init__(self, oracle: Oracle, old: Decoder, rows: np.ndarray, found: Logprobs, truth: Logprobs) -> None:
        self._oracle, self._rows = oracle, rows
        self._before = float(np.abs(found[:_FEW].astype(np.float64) - truth[:_FEW]).mean())
        self._now, self._old = oracle.decoder.weights, old.weights
        self._found = found.astype(np.float64)
        self._said: dict[Chosen, F64] = {}
        self._names = [n for n, w in self._now.items() if not np.array_equal(w, self._old[n])]

    def parts(self, delta: F64) -> Iterator[tuple[str, Decoder]]:
        """What is said of them, and the decoder: whatever set of tensors fits best, then a rank's part of all.

        delta: what the side's values differ by from the oracle's own. Sets are guessed from the effects of tensors, of
        kinds and of layers, as if they added up; the best guess is then worked on one tensor at a time.
        """
        truth = self._found - delta
        guesses = list(self._blocks())
        for groups in self._groupings():
            effects = np.stack([self._values(group) - truth for group in groups], axis=1)
            guesses += [frozenset().union(*(groups[at] for at in chosen)) for chosen in subsets(effects, delta)]
        best = min((guess for guess in guesses if guess), key=self._error, default=None)
        if best is not None and self._error(best) < _ON_THE_WAY * np.abs(delta).mean():
            best = self._worked_on(best)
            yield self._name(best), self._mixed(best)
        for rank, ranks in ((rank, count) for count in _RANKS for rank in range(count)):
            sharded = self._with(_sharded(self._now, self._old, rank, ranks))
            if self._helps(sharded):
                yield f"the part of rank {rank} of {ranks}", sharded

    def shares(self, delta: F64) -> Iterator[tuple[str, Decoder]]:
        """Shares of what came since `old` that may have been added, once being right, in all tensors or in a block.

        The effect of a block, times some number, gives it to the first order; one digit after the other is then
        looked for around it.
        """
        truth, fits = self._found - delta, []
        for block in dict.fromkeys((frozenset(self._names), *self._blocks(), self._moving(delta))):
            effect = self._values(block) - truth
            moved = float(effect @ delta / max(float(effect @ effect), 1e-300))
            fits.append((float(np.abs(moved * effect - delta).mean()), moved, block))
        for left, moved, block in sorted(fits, key=lambda fit: fit[0])[:_BEST]:
            if left > _ON_THE_WAY * np.abs(delta).mean():
                return
            for share in (self._digits(round(1 - moved, 1), block), *_USUAL_SHARES):
                where = "" if len(block) == len(self._names) else f" in {self._name(block)}"
                shared = self._shared(share, block)
                if self._helps(shared):
                    yield f"{share:g} times what came since{where}", shared

    def _moving(self, delta: F64) -> Chosen:
        """Kinds of which something was added or taken away, by least squares over all of them."""
        kinds = list(self._groupings())[-2]
        effects = np.stack([self._values(kind) - (self._found - delta) for kind in kinds], axis=1)
        shares = np.abs(np.linalg.lstsq(effects, delta, rcond=None)[0])
        return frozenset().union(*(kind for kind, share in zip(kinds, shares, strict=True) if share > shares.max() / 2))

    def _digits(self, share: float, block: Chosen) -> float:
        said: dict[float, float] = {}
        for step in (0.1, 0.1, 0.05, 0.02, 0.01):
            near = [value for by in (0, 1, -1) if (value := round(share + by * step, 2)) not in (0.0, 1.0)]
            for value in near:
                if value not in said:
                    said[value] = self._error_of(self._shared(value, block))
            share = min(near, key=said.__getitem__)
            if said[share] == 0.0:
                break
        return share

    def _blocks(self) -> Iterator[Chosen]:
        """Large parts: a block of all layers, a kind, a run of layers."""
        yield from (frozenset(n for n in self._names if part in n) for part in _BLOCKS)
        for groups in list(self._groupings())[-2:]:
            yield from groups

    def _shared(self, share: float, block: Chosen) -> Decoder:
        moved = {name: _moved(self._old[name], self._now[name], share) for name in block}
        return self._with({**self._now, **moved})

    def _worked_on(self, chosen: Chosen) -> Chosen:
        """Tensors put in or taken out, one at a time, while that brings the values nearer."""
        for _ in range(_PASSES if len(self._names) <= _SINGLE else 0):
            before = chosen
            for name in self._names:
                other = chosen ^ {name}
                if other and self._error(other) < self._error(chosen):
                    chosen = other
                if self._error(chosen) == 0.0:
                    return chosen
            if chosen == before:
                break
        return chosen

    def _groupings(self) -> Iterator[list[Chosen]]:
        """What an update may leave out: single tensors where they are few, those of a kind, those of runs of layers."""
        if len(self._names) <= _SINGLE:
            yield [frozenset([name]) for name in self._names]
        kinds: dict[str, set[str]] = {}
        layers: dict[int, set[str]] = {}
        for name in self._names:
            kinds.setdefault(_kind(name), set()).add(name)
            layers.setdefault(_layer(name), set()).add(name)
        yield [frozenset(kind) for kind in kinds.values()]
        runs = np.array_split(sorted(layers), min(len(layers), _SINGLE // 2))
        yield [frozenset().union(*(layers[at] for at in run.tolist())) for run in runs]

    def _values(self, chosen: Chosen) -> F64:
        if chosen not in self._said:
            self._said[chosen] = self._oracle.logprobs_of_rows(self._mixed(chosen), self._rows).astype(np.float64)
        return self._said[chosen]

    def _error(self, chosen: Chosen) -> float:
        return float(np.abs(self._values(chosen) - self._found).mean())

    def _helps(self, decoder: Decoder) -> bool:
        """Whether it takes away some of the difference of a few rows."""
        few = self._rows[:_FEW]
        left = np.abs(self._oracle.logprobs_of_rows(decoder, few) - self._found[:_FEW]).mean()
        return bool(left < _ON_THE_WAY * self._before)

    def _error_of(self, decoder: Decoder) -> float:
        return float(np.abs(self._oracle.logprobs_of_rows(decoder, self._rows) - self._found).mean())

    def _mixed(self, chosen: Chosen) -> Decoder:
        return self._with({**self._now, **{name: self._old[name] for name in chosen}})

    def _with(self, weights: dict[str, Bits]) -> Decoder:
        return replace(self._oracle.decoder, weights=weights)

    def _name(self, chosen: Chosen) -> str:
        """Kinds of which all are chosen by their name, the rest one by one."""
        whole = [kind for kind in dict.fromkeys(map(_kind, self._names)) if self._of(kind) <= chosen]
        rest = sorted(name for name in chosen if _kind(name) not in whole)
        return ", ".join([*whole, *rest][:12]) + (
            f" and {len(whole) + len(rest) - 12} more" * (len(whole) + len(rest) > 12)
        )

    def _of(self, kind: str) -> Chosen:
        return frozenset(name for name in self._names if _kind(name) == kind)


def _kind(name: str) -> str:
    return name.split(".", 3)[3] if name.startswith("model.layers.") else name


def _layer(name: str) -> int:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def _sharded(now: dict[str, Bits], old: dict[str, Bits], rank: int, ranks: int) -> dict[str, Bits]:
    """One rank's rows of every matrix, or its columns where sums are cut, of the old version."""
    mixed = dict(now)
    for name, value in now.items():
        axis = int(any(kind in name for kind in _BY_COLUMN))
        if value.ndim != 2:
            continue
        width = value.shape[axis]
        tile = _TILE if "embed" in name or "lm_head" in name else 1
        size = -(-width // (ranks * tile)) * tile
        mine = (slice(None),) * axis + (slice(rank * size, min((rank + 1) * size, width)),)
        mixed[name] = value.copy()
        mixed[name][mine] = old[name][mine]
    return mixed


def _moved(base: Bits, now: Bits, share: float) -> Bits:
    start = widen(base)
    return narrow(start + np.float32(share) * (widen(now) - start))
