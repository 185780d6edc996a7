"""Other weights than the record names: stale, never delivered, delivered in part or in another strength."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from auditor.causes.evidence import SETTLED, STRONG, Evidence, Suggestion
from auditor.causes.oracle import Oracle, VersionUnavailable
from auditor.causes.search import Candidate, nearest
from auditor.causes.weights.mixture import Effects, Guess, Measured, Mixture, Source, measured_of
from auditor.causes.weights.parts import MOST, Choice, Layout
from auditor.causes.weights.strengths import Strengths

_TRIED: Final = 12
_LIKELIEST: Final = 160  # guesses that are tried on a few tokens
_UNLIKELY: Final = 40  # the same, where none fits
_HIDDEN: Final = 3.0  # in roundings: more cannot be hidden by them
_FITS: Final = 8.0  # as a logarithm: how much likelier than no change a guess is, as no guess of many is by chance
_SURELY: Final = 12.0  # the same, as none is by chance even of the many that a large model has
_CLOSE: Final = 15.0  # the same, from where on it is worked on
_PASSES: Final = 2
_IN_ONE: Final = 5  # other weights that are looked for in one model
_LEFT: Final = 1.3  # in roundings: more is left by a guess that is not it
_FAR: Final = 12.0  # in roundings: where the first order tells nothing
_MUCH: Final = 0.3  # of the square of a difference
_POINTING: Final = 0.46  # more than a look, less than anything that was computed and takes away much


def stale_weights(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The weight version under which the reference gives what the side reports; the nearest ones are tried first."""
    if best := nearest(evidence, oracle, _versions(evidence, oracle)):
        yield best


def _versions(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    stated = evidence.record.weight_version
    others = [version for version in oracle.versions if version != stated]
    near = sorted(others, key=lambda version: (abs(version - stated), version > stated))[:_TRIED]
    first = min(oracle.versions, default=stated)
    for version in dict.fromkeys([*near[:4], *([first] if first != stated else []), *near[4:]]):
        try:
            values = oracle.logprobs_of(version)
        except VersionUnavailable:
            continue
        which = f"weight version {version}{', the first one,' if version == first else ''}"
        away = f"{abs(stated - version)} {'behind' if version < stated else 'ahead'}"
        name = f"{which} where {stated} is stated, {away}"
        yield _cause(version, first, stated), name, values


def _cause(version: int, first: int, stated: int) -> str:
    return "weights_never_delivered" if version == first and stated - version > 1 else "stale_weights"


def mixed_weights(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Some tensors, or some ranks' parts of them, of other versions; or another strength of what came since."""
    versions = _sources(evidence, oracle)
    measured = measured_of(evidence, oracle, others=[source.weights for source in versions.values()])
    if measured is not None:
        effects = measured.effects(list(versions.values()), parts=True)
        more = Strengths(measured, versions, dict(zip(versions, effects, strict=True))).guesses()
        yield from searched(evidence, measured, list(versions.values()), Layout.choices, more, effects, in_runs=True)


def searched(
    evidence: Evidence,
    measured: Measured,
    sources: Sequence[Source],
    choices_of: Callable[[Layout], Iterable[Choice]],
    more: Iterable[Guess] = (),
    effects: Sequence[Effects] | None = None,
    most: int | None = None,
    in_runs: bool = False,
) -> Iterator[Suggestion]:
    """What has the side's bits among parts of other weights; or what points where they are.

    more: other guesses. effects: of the sources, where they are known. most: how many are tried, where the first order
    does not tell. in_runs: whether runs of rows are looked for; effects must be known row by row, or not at all.
    """
    effects = measured.effects(sources) if effects is None else effects
    mixture = Mixture(measured, sources, effects)
    guesses = [*mixture.of_choices(choices_of), *(mixture.of_runs() if in_runs else ()), *more]
    exact = measured.first_exact(guesses, most or _worth(measured, guesses))
    if exact is None and measured.response is not None and most is None and not measured.dear:
        best: dict[Source, float] = {}
        for guess in guesses:
            for source in guess.sources:
                best[source] = min(guess.unlikely, best.get(source, np.inf))
        near = [at for at, source in enumerate(sources) if source in sorted(best, key=best.__getitem__)[:_IN_ONE]]
        mixture = Mixture(measured, [sources[at] for at in near], [effects[at] for at in near])
        exact, sets = _in_sets(measured, mixture)
        guesses += sets
    yield from told(evidence, measured, exact, None if most else min(guesses, key=_unlikely, default=None))


def _unlikely(guess: Guess) -> float:
    return guess.unlikely


def _in_sets(measured: Measured, mixture: Mixture) -> tuple[Guess | None, list[Guess]]:
    """Any tensors together: one with the side's bits, and the likeliest; worked on where it comes close."""
    found = []
    for _ in range(_PASSES):
        sets = mixture.of_sets()
        found += sets[:1]
        exact = measured.first_exact(sets, _worth(measured, sets))
        if exact is not None or not sets or measured.gained(sets[0]) < _CLOSE:
            return exact, found
        measured.begin_from(sets[0])
    return None, found


def _worth(measured: Measured, guesses: Sequence[Guess]) -> int:
    """How many are tried: few where none fits and rounding may be all that it is, fewer where it cannot hide one."""
    if measured.response is None or max(map(measured.gained, guesses), default=0.0) > _FITS:
        return _LIKELIEST
    return _UNLIKELY if measured.size < _HIDDEN else _UNLIKELY // 8


def told(evidence: Evidence, measured: Measured, exact: Guess | None, likeliest: Guess | None) -> Iterator[Suggestion]:
    """What the values of a guess explain, and how much the difference points where it moves them."""
    oracle, guess = measured.oracle, exact or likeliest
    if guess is None or (exact is None and measured.gained(guess) < _FITS):
        return
    if exact is None and guess.rather is not None and measured.left(guess) > _LEFT:
        cause, name = guess.rather
        guess = replace(guess, cause=cause, said=name)
    best = nearest(evidence, oracle, [(guess.cause, guess.said, oracle.logprobs(measured.decoder(guess)))])
    if best is not None:
        yield best
    share = measured.explained(guess)
    if (best is None or best.score < SETTLED) and share > _MUCH and measured.size < _FAR:
        score = max(_POINTING, STRONG * (1.0 - float(np.sqrt(1.0 - share))))
        said = f"the difference at {len(measured.delta)} tokens points where {guess.said} would move it"
        sure = measured.gained(guess) > _SURELY
        yield Suggestion(guess.cause, score, f"{said}, by {share:.0%} of its square", sure)


def _sources(evidence: Evidence, oracle: Oracle) -> dict[int, Source]:
    """By version: the ones before, the first, the next."""
    stated = evidence.record.weight_version
    before = [version for version in sorted(oracle.versions, reverse=True) if version < stated]
    after = [version for version in sorted(oracle.versions) if version > stated]
    first = min(oracle.versions, default=stated)
    found: dict[int, Source] = {}
    many = len(oracle.decoder.weights) > MOST  # of which each other version costs a good part of a second
    further = [*after[:1], *before[1:2]] if many else [*before[1:3], *after[:1]]
    for version in dict.fromkeys([*before[:1], *before[-1:], *further]):
        try:
            weights = oracle.version(version).weights
        except VersionUnavailable:
            continue
        cost = 0.0 if version in (first, *before[:1]) else float(abs(stated - version))
        found[version] = Source(
            _cause(version, first, stated), f"version {stated} with {{}} of version {version}", weights, cost
        )
    return found
