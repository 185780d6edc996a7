"""Which of several predictions, or of several other models, a side's values are those of.

A model costs a forward, so it is first tried on a few wrong rows, which cost as much of one as reaches the last one.
A change whose effect points where the side's does, and is not it, is then looked for in some places only.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Final

import numpy as np

from auditor.causes.edits import Edit, Place, edited, places
from auditor.causes.evidence import CERTAIN, SETTLED, Evidence, Suggestion, bits_hit, explained, worth_saying
from auditor.causes.oracle import F64, I64, Oracle
from auditor.causes.purse import OutOfBudget
from auditor.causes.together import alike
from auditor.compare import Logprobs
from rl_kernel.reference.model import Decoder

Candidate = tuple[str, str, Logprobs]

_FEW: Final = 12  # wrong rows on which a model is tried before it is run on all
_HOPELESS: Final = 0.25
_ALIGNED: Final = 0.5  # cosine of two differences above which one may be a part of the other; of few rows, so not low
_SMALLER: Final = 0.1  # of the difference: an effect that no kin of it makes up for
_LARGER: Final = 4.0
_STILL_ALIGNED: Final = 0.3  # on all wrong rows
_CONFINED: Final = 4  # changes that are looked for in some places only
_SMALL: Final = 0.05  # of the difference: an effect that least squares tells nothing of
_PLACES: Final = 16  # places, or runs of layers, that are told apart
_AT_ONCE: Final = (2, 4, 8)  # models that are run together: the first ones are the likeliest
_TOGETHER: Final = 2048  # tokens of theirs


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder that a side may have run.

    kin: of one kin, the first has the smallest effect, and none one much larger. apart: whether it is looked for in
    some places only even where its effect everywhere tells nothing, since one place outweighs the others.
    whole: whether what it does to the first tokens depends on the last ones.
    """

    cause: str
    name: str
    decoder: Decoder
    kin: str = ""
    edit: Edit | None = None
    apart: bool = False
    whole: bool = False

    @classmethod
    def of(cls, decoder: Decoder, cause: str, name: str, edit: Edit, kin: str = "", **more: bool) -> "Model":
        """The decoder with an op changed everywhere."""
        return cls(cause, name, edited(decoder, edit), kin, edit, **more)


def nearest(evidence: Evidence, oracle: Oracle, candidates: Iterable[Candidate]) -> Suggestion | None:
    """Whichever candidate explains most, if any explains enough; none is computed behind one that is certain.

    candidates: cause, what has those values, and the values float32 of the oracle's window; the cheap and the common
    first. All are kept for `Oracle.said`. Where the budget ends, whichever was the best until then.
    """
    window = oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    best: Suggestion | None = None
    try:
        for cause, name, predicted in candidates:
            oracle.said.append((cause, name, predicted))
            score = explained(found, truth, predicted, active)
            if worth_saying(score) and (best is None or score > best.score):
                best = Suggestion(cause, score, f"the values are those of {name}; {bits_hit(found, predicted, active)}")
                if score >= CERTAIN:
                    break
    except OutOfBudget:
        if best is None:
            raise
    return best


def nearest_model(evidence: Evidence, oracle: Oracle, models: Iterable[Model]) -> Suggestion | None:
    """Whichever model explains most of the difference, if any explains enough, everywhere or in some places only."""
    trial = _Trial(evidence, oracle)
    best = nearest(evidence, oracle, trial.promising(models))
    if best is None:
        return nearest(evidence, oracle, trial.confined())
    if best.score < CERTAIN:
        try:
            confined = nearest(evidence, oracle, trial.confined())
        except OutOfBudget:
            return best
        if confined is not None and confined.score > best.score:
            return confined
    return best


def promising(evidence: Evidence, oracle: Oracle, values: Callable[[I64], Logprobs]) -> bool:
    """Whether a few wrong rows of the window do not rule a prediction out; values: of such rows."""
    return promising_of(evidence, oracle, 1, lambda few: [values(few)])[0]


def hinted(evidence: Evidence, oracle: Oracle, values: Callable[[I64], Logprobs]) -> bool:
    """Whether wrong rows all along the window do not rule a prediction out of all of it, or of a part.

    values: of such rows.
    """
    found, truth = evidence.found[oracle.window], evidence.truth[oracle.window]
    wrong = np.flatnonzero(evidence.differs[oracle.window] & np.isfinite(found))
    if wrong.size <= _FEW:
        return True
    few = wrong[np.linspace(0, wrong.size - 1, _FEW).astype(np.int64)]
    said = values(few)
    hit = found[few].view(np.uint32) == said.view(np.uint32)
    return bool(hit.any()) or explained(found[few], truth[few], said, np.ones(few.size, np.bool_)) >= _HOPELESS


def promising_of(
    evidence: Evidence, oracle: Oracle, count: int, values: Callable[[I64], Sequence[Logprobs]]
) -> list[bool]:
    """The same of `count` predictions that are computed together."""
    found, truth = evidence.found[oracle.window], evidence.truth[oracle.window]
    few = np.flatnonzero(evidence.differs[oracle.window] & np.isfinite(found))[:_FEW]
    if not few.size:
        return [True] * count
    every = np.ones(few.size, np.bool_)
    return [explained(found[few], truth[few], each, every) >= _HOPELESS for each in values(few)]


class _Trial:
    """Models on a few wrong rows, and which of them pointed where the side's difference does."""

    def __init__(self, evidence: Evidence, oracle: Oracle) -> None:
        window = oracle.window
        self._oracle = oracle
        self._found, self._truth = evidence.found[window], evidence.truth[window]
        self._wrong = np.flatnonzero(evidence.differs[window] & np.isfinite(self._found))
        self._few = self._wrong[:_FEW]
        self._aligned: list[tuple[float, Model]] = []

    def promising(self, models: Iterable[Model]) -> Iterator[Candidate]:
        """The values of those models that a few rows do not rule out."""
        off: set[str] = set()
        found, truth = self._found[self._few], self._truth[self._few]
        active = np.ones(len(self._few), np.bool_)
        delta = found.astype(np.float64) - truth
        for model, trial in self._tried(models, off):
            if model.kin in off:
                continue
            if trial is not None:
                effect = trial.astype(np.float64) - truth
                size = float(np.abs(effect).mean() / np.abs(delta).mean())
                if model.kin and not _SMALLER < size < _LARGER:
                    off.add(model.kin)
                if model.apart or (model.edit is not None and size > _SMALLER):
                    self._aligned.append((1.0 if model.apart else cosine(effect, delta), model))
                score = explained(found, truth, trial, active)
                if score < _HOPELESS:
                    continue
                if score >= SETTLED:  # the bits of a few rows: what ends the search is not put off
                    with self._oracle.purse.undisturbed():
                        values = self._oracle.logprobs(model.decoder)
                    yield model.cause, model.name, values
                    continue
            yield model.cause, model.name, self._oracle.logprobs(model.decoder)

    def _tried(self, models: Iterable[Model], off: Collection[str]) -> Iterator[tuple[Model, Logprobs | None]]:
        """Each model with its values of a few rows, those together that can be run so. off: kins that are ruled out."""
        if not self._few.size:
            yield from ((model, None) for model in models)
            return
        most = max(1, _TOGETHER // (int(self._oracle.rows[self._few[-1]]) + 1))
        sizes, some = chain(_AT_ONCE, repeat(_AT_ONCE[-1])), list[Model]()
        size = min(next(sizes), most)
        for model in models:
            if model.kin in off:
                continue
            apart = model.whole or not alike(self._oracle.decoder, model.decoder)
            if not apart:
                some.append(model)
            if some and (apart or len(some) == size):
                yield from zip(some, self._oracle.of_each([m.decoder for m in some], self._few), strict=True)
                some, size = [], min(next(sizes), most)
            if apart and model.whole:
                yield model, self._oracle.logprobs(model.decoder)[self._few]
            elif apart:
                yield model, self._oracle.logprobs_of_rows(model.decoder, self._few)
        if some:
            yield from zip(some, self._oracle.of_each([m.decoder for m in some], self._few), strict=True)

    def confined(self) -> Iterator[Candidate]:
        """The values of those that pointed in the right direction, in the places that together fit best."""
        self._aligned.sort(key=lambda pair: -pair[0])
        for alignment, model in self._aligned[:_CONFINED]:
            if alignment < _ALIGNED or model.edit is None:
                return
            groups = _groups(places(self._oracle.decoder, model.edit.op))
            if len(groups) > 1 and (model.apart or self._stays_aligned(model)):
                yield from self._in_places(model, model.edit, groups)

    def _stays_aligned(self, model: Model) -> bool:
        """Whether it points there on all wrong rows, too."""
        values, rows = self._oracle.logprobs(model.decoder), self._wrong
        effect = values[rows].astype(np.float64) - self._truth[rows]
        return cosine(effect, self._found[rows].astype(np.float64) - self._truth[rows]) > _STILL_ALIGNED

    def _in_places(self, model: Model, edit: Edit, groups: Sequence[tuple[Place, ...]]) -> Iterator[Candidate]:
        rows = self._wrong
        delta = self._found[rows].astype(np.float64) - self._truth[rows]
        effects = []
        for group in groups:
            values = self._oracle.logprobs(edited(self._oracle.decoder, edit.at(*group)))
            effects.append(values[rows].astype(np.float64) - self._truth[rows])
        for chosen in subsets(np.stack(effects, axis=1), delta):
            here = sorted({place for at in chosen for place in groups[at]})
            decoder = edited(self._oracle.decoder, edit.at(*here))
            where = ", ".join(f"{layer}.{call}" for layer, call in here)
            yield model.cause, f"{model.name}, at layer and place {where} only", self._oracle.logprobs(decoder)


def subsets(effects: F64, delta: F64) -> Iterator[list[int]]:
    """Which columns of effects [rows, choices], added up, make `delta` [rows]: by least squares, then the best alone.

    To the first order, parts of a small change add up.
    """
    shares = np.linalg.lstsq(effects, delta, rcond=None)[0]
    shares[np.abs(effects).mean(axis=0) < _SMALL * np.abs(delta).mean()] = 0.0
    together = [int(at) for at in np.flatnonzero(shares > 0.5)]
    left = np.abs(effects - delta[:, None]).mean(axis=0)
    tried = [together, *([int(at)] for at in np.argsort(left)[:2])]
    seen: list[list[int]] = []
    for chosen in tried:
        if chosen and chosen not in seen:
            seen.append(chosen)
            yield chosen


def _groups(all_places: Sequence[Place]) -> list[tuple[Place, ...]]:
    """Every place by itself where there are few, else what stands at one place of all layers, and runs of layers."""
    if len(all_places) <= _PLACES:
        return [(place,) for place in all_places]
    calls = sorted({call for _, call in all_places})
    layers = np.array(sorted({layer for layer, _ in all_places}))
    runs = [set(run.tolist()) for run in np.array_split(layers, min(len(layers), _PLACES // 2))]
    groups = [tuple(place for place in all_places if place[1] == call) for call in calls if len(calls) > 1]
    return groups + [tuple(place for place in all_places if place[0] in run) for run in runs if len(runs) > 1]


def resemblance(effect: F64, delta: F64) -> float:
    """How alike two differences are, -1 to 1: by their angle, and by it once the few largest rows are cut down."""
    return (cosine(effect, delta) + cosine(_evened(effect), _evened(delta))) / 2


def _evened(values: F64) -> F64:
    """One row should not speak for all."""
    limit = 2.0 * float(np.median(np.abs(values)))
    return np.clip(values, -limit, limit)


def cosine(a: F64, b: F64) -> float:
    """Of the angle between two differences, each less its mean, which all large faults have below zero.

    0 where one of them is nothing or not finite.
    """
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if np.isfinite(size) and size > 0 else 0.0
