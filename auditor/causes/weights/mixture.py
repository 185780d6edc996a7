"""Other weights in parts of a model: which parts, of which other weights, make what a side reports.

Every part's effect is known to the first order, so what is likely can be told from what is not without a forward. The
likeliest are then tried in the contract's arithmetic on the first wrong tokens, of which a right guess has the bits.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import Evidence
from auditor.causes.oracle import F64, I64, Oracle
from auditor.causes.weights.parts import Choice, Layout, Part, replaced
from auditor.causes.weights.response import Effect, Response, response_of, rows_of, total
from auditor.causes.weights.runs import runs
from auditor.causes.weights.streamed import Streamed, streamed
from auditor.compare import Logprobs
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import Bits

_ROWS: Final = 72  # wrong rows on which weights are told apart
_FEW: Final = 2  # of them whose bits tell
_FAR: Final = 100.0  # times `rounding_noise`
_NOT_SO_FAR: Final = 30.0  # the same, where the model has to be run back for it
_ALL_ANEW: Final = 2.1  # times `rounding_noise`, in which about half of the roundings fall out anew
_EXACTLY: Final = 1e-3  # of a rounding, squared: a difference below which is none
_SIMPLE: Final = 3.0  # times a cost: of the many sets of many tensors some fit few rows a little better than what is so
_DEAR: Final = 24  # guesses, each of which costs a good part of a second
_BESIDE: Final = 10.0  # as a logarithm: how much likelier one guess makes another not worth a trial
_BEAM: Final = 24
_KEPT: Final = 192  # sets
_ROUNDS: Final = 10
_ANOTHER: Final = 3.0  # as a logarithm: how unlikely each further set of weights is in one model


Effects = Mapping[str, Effect]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Other weights that parts may be of. cost: as a choice's. of: what is said of parts, with `{}` for their name."""

    cause: str
    of: str
    weights: Mapping[str, Bits]
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Guess:
    """Weights and ops that a side may have had. unlikely: the lower, the sooner it is tried. effect: [B], in roundings.

    make: weights that are not the oracle's own. whole: as a model's. rather: cause and what is said where it leaves
    more than rounding.
    """

    cause: str
    said: str
    unlikely: float
    make: Callable[[], Mapping[str, Bits]]
    effect: F64
    sources: tuple[Source, ...] = ()
    edits: tuple[Edit, ...] = ()
    whole: bool = False
    rather: tuple[str, str] | None = None


class Measured:
    """The difference of a side in some rows, in roundings, and what other weights make of it."""

    def __init__(
        self, oracle: Oracle, response: Response | Streamed | None, rows: I64, found: Logprobs, truth: Logprobs
    ) -> None:
        self.oracle, self.response, self._rows = oracle, response, rows
        self._found = found
        self._layouts: dict[int, Layout] = {}
        self.delta: F64 = self._in_roundings(truth)

    @property
    def size(self) -> float:
        """Root of the mean square: 1 where every rounding fell out anew."""
        return float(np.sqrt((self.delta * self.delta).mean()))

    def effects(self, sources: Sequence[Source], parts: bool = False) -> Sequence[Effects]:
        """As the response's; of nothing where there is none."""
        others = [source.weights for source in sources]
        return self.response.effects(others, parts) if self.response else [{} for _ in others]

    def layout(self, source: Source) -> Layout:
        """Of the tensors that a source changes."""
        if id(source) not in self._layouts:
            now = self.oracle.decoder.weights
            changed = [n for n, w in now.items() if _differs(w, source.weights[n])]
            self._layouts[id(source)] = Layout(now, changed)
        return self._layouts[id(source)]

    def unlikely(self, effect: F64, cost: float) -> float:
        """Of weights with this effect: what it leaves of the difference, as a logarithm, and the cost."""
        left = self.delta - effect
        cost *= _SIMPLE if self.dear else 1.0
        return cost + 0.5 * len(left) * float(np.log(left @ left + _EXACTLY * len(left)))

    def gained(self, guess: Guess) -> float:
        """How much likelier a guess is than no change at all, as a logarithm."""
        return self.unlikely(0.0 * guess.effect, 0.0) - guess.unlikely

    def explained(self, guess: Guess) -> float:
        """The part of the difference's square that a guess takes away; 0 where nothing is known of it."""
        if self.response is None:
            return 0.0
        left = self.delta - guess.effect
        return 1.0 - min(1.0, float(left @ left) / float(self.delta @ self.delta))

    def left(self, guess: Guess) -> float:
        """What a guess leaves, as `size`."""
        left = self.delta - guess.effect
        return float(np.sqrt((left * left).mean()))

    def is_exact(self, guess: Guess) -> bool:
        """Whether it has the side's bits in a few rows."""
        decoder, few = self.decoder(guess), self._rows[:_FEW]
        if guess.whole:
            return self.oracle.logprobs(decoder)[few].tobytes() == self._found[:_FEW].tobytes()
        return self.oracle.logprobs_of_rows(decoder, few).tobytes() == self._found[:_FEW].tobytes()

    @property
    def dear(self) -> bool:
        """Whether a guess costs so much that only those are tried that are likely beside others."""
        return isinstance(self.response, Streamed)

    def first_exact(self, guesses: Iterable[Guess], most: int) -> Guess | None:
        """Of the likeliest so many."""
        likeliest = sorted(guesses, key=lambda guess: guess.unlikely)[:most]
        if self.dear:
            self.oracle.purse.renew()
            likeliest = [g for g in likeliest[:_DEAR] if g.unlikely < likeliest[0].unlikely + _BESIDE]
        return next((guess for guess in likeliest if self.is_exact(guess)), None)

    def begin_from(self, guess: Guess) -> None:
        """Measure around a guess, where what is left is closer to the first order."""
        values = self.oracle.logprobs_of_rows(self.decoder(guess), self._rows)
        self.delta = self._in_roundings(values) + guess.effect

    def decoder(self, guess: Guess) -> Decoder:
        """The oracle's own, with the weights and ops of a guess."""
        other = replace(self.oracle.decoder, weights={**self.oracle.decoder.weights, **guess.make()})
        return edited(other, *guess.edits) if guess.edits else other

    def _in_roundings(self, values: Logprobs) -> F64:
        delta = self._found.astype(np.float64) - values
        return self.response.in_roundings(delta) if self.response else 0.0 * delta


def measured_of(
    evidence: Evidence, oracle: Oracle, near: bool = True, others: Sequence[Mapping[str, Bits]] = ()
) -> Measured | None:
    """Of the first wrong rows of the window; None where they are few, or right up to some token: no tensor is.

    near: None also where the difference is far beyond what the first order tells. others: of which effects are asked,
    where a model is too large to know them of whatever is asked later.
    """
    window = oracle.window
    found, truth = evidence.found[window], evidence.truth[window]
    rows = np.flatnonzero(evidence.differs[window] & np.isfinite(found))[:_ROWS]
    if rows.size < _FEW or evidence.begins is not None:
        return None
    median = float(np.median(np.abs(evidence.delta[evidence.differs])))
    if oracle.noise is not None and median > _FAR * oracle.noise:
        return None if near else Measured(oracle, None, rows, found[rows], truth[rows])
    rows = rows_of(oracle, rows)
    response: Response | Streamed | None = response_of(oracle, rows)
    if response is None and others and (oracle.noise is None or median < _NOT_SO_FAR * oracle.noise):
        response = streamed(oracle, rows, others)
        rows = rows if response is None else response.at
    measured = Measured(oracle, response, rows, found[rows], truth[rows])
    if measured.response is not None:
        oracle.noise = median / max(_ALL_ANEW * measured.size, 1e-9)
    return measured


def _differs(a: Bits, b: Bits) -> bool:
    """The first rows say it mostly."""
    return a is not b and not (np.array_equal(a[:1], b[:1]) and np.array_equal(a, b))


class Mixture:
    """The oracle's own weights with parts of others."""

    def __init__(self, measured: Measured, sources: Sequence[Source], effects: Sequence[Effects]) -> None:
        self._measured, self._sources, self._effects = measured, sources, effects
        self._now = measured.oracle.decoder.weights

    def of_choices(self, choices_of: Callable[[Layout], Iterable[Choice]]) -> Iterator[Guess]:
        """Every choice of parts, of every source."""
        for source, effects in zip(self._sources, self._effects, strict=True):
            layout = self._measured.layout(source)
            for choice in choices_of(layout):
                if choice.parts:
                    yield self._guess(((source, effects, choice.parts),), source.cost + choice.cost, choice.said)

    def of_runs(self) -> Iterator[Guess]:
        """The likeliest runs of a file or of ranks, of every source; effects must be known row by row."""
        for source, effects in zip(self._sources, self._effects, strict=True):
            for choice in runs(self._measured.layout(source), effects, self._measured.delta):
                yield self._guess(((source, effects, choice.parts),), source.cost + choice.cost, choice.said)

    def of_sets(self) -> list[Guess]:
        """Any tensors of any of the sources: sets that are found one tensor at a time, the best few of them kept."""
        names = list(dict.fromkeys(name for effects in self._effects for name in effects))
        if not names:
            return []
        rows = len(self._measured.delta)
        column = np.zeros((len(self._sources) + 1, len(names), rows))
        for at, effects in enumerate(self._effects):
            for place, name in enumerate(names):
                if name in effects:
                    column[at + 1, place] = effects[name].whole
        states = _beam(column, self._measured.delta)
        return [self._of_state(names, state, effect) for state, effect in states if any(state)]

    def _of_state(self, names: Sequence[str], state: tuple[int, ...], effect: F64) -> Guess:
        chosen = []
        for at in sorted(set(state) - {0}):
            source = self._sources[at - 1]
            mine = frozenset(n for n, s in zip(names, state, strict=True) if s == at)
            parts = self._measured.layout(source).whole(mine)
            chosen.append((source, self._effects[at - 1], parts))
        count = sum(map(bool, state))
        cost = _ANOTHER * len(chosen) + math.log(math.comb(len(names), count)) + count * math.log(len(chosen))
        return self._guess(chosen, cost, None)

    def _guess(self, chosen: Sequence[tuple[Source, Effects, Sequence[Part]]], cost: float, said: str | None) -> Guess:
        measured = self._measured
        effect = sum((total(e, parts, len(measured.delta)) for _, e, parts in chosen), np.zeros(len(measured.delta)))

        def make() -> Mapping[str, Bits]:
            weights = self._now
            for source, _, parts in chosen:
                weights = replaced(weights, source.weights, parts)
            return weights

        name = " and ".join(source.of.format(said or _named(parts)) for source, _, parts in chosen)
        sources = tuple(source for source, _, _ in chosen)
        return Guess(sources[0].cause, name, measured.unlikely(effect, cost), make, effect, sources)


def _named(parts: Sequence[Part]) -> str:
    names = [part.name for part in parts]
    return ", ".join(names[:12]) + f" and {len(names) - 12} more" * (len(names) > 12)


def _beam(column: F64, delta: F64) -> list[tuple[tuple[int, ...], F64]]:
    """Which source each tensor is of (0: none), and the effect of all: the likeliest of those on the way, in order.

    column: [S+1,tensors,B].
    """
    sources, tensors, rows = column.shape
    places = np.arange(tensors)
    between = np.einsum("sib,tib->ist", column, column)  # of two sources' effects of one tensor
    states = np.repeat(np.arange(sources)[:, None], tensors, axis=1)
    seen: dict[bytes, tuple[float, I64]] = {}
    for _ in range(_ROUNDS + tensors // 2):
        left = delta - column[states, places].sum(axis=1)
        toward = np.einsum("mb,sib->mis", left, column)  # [M,tensors,S+1]
        here = np.take_along_axis(toward, states[:, :, None], axis=2)
        own = between[places[None, :], states, states][:, :, None]
        cross = between[places[None, :], states]
        squares = between[places[:, None], np.arange(sources), np.arange(sources)]
        remains = (left * left).sum(axis=1)[:, None, None] - 2 * (toward - here) + squares + own - 2 * cross
        moved = np.repeat(states, tensors * sources, axis=0).reshape(len(states), tensors, sources, tensors)
        moved[:, places, :, places] = np.arange(sources)
        flat = moved.reshape(-1, tensors)
        used = (np.sort(flat, axis=1)[:, 1:] != np.sort(flat, axis=1)[:, :-1]).sum(axis=1) + 1 - (flat == 0).any(axis=1)
        unlikely = _ANOTHER * used + 0.5 * rows * np.log(np.maximum(remains.reshape(-1), 0.0) + _EXACTLY * rows)
        best = np.argsort(unlikely, kind="stable")[: 4 * _BEAM]
        before = len(seen)
        for at in best:
            seen.setdefault(flat[at].tobytes(), (float(unlikely[at]), flat[at]))
        ranked = sorted(seen.values(), key=lambda pair: pair[0])
        if len(seen) == before:
            break
        states = np.stack([state for _, state in ranked[:_BEAM]])
    return [(tuple(state.tolist()), column[state, places].sum(axis=0)) for _, state in ranked[:_KEPT]]
