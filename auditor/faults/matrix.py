"""Run every fault through the auditor's own judgement and diagnosis, and count what it says."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from auditor.causes.inputs import cause_of_failure
from auditor.causes.sample import Weights, diagnose_sample
from auditor.compare import Logprobs
from auditor.contracts import known_contracts
from auditor.faults.declared import DECLARED, DeclaredFault
from auditor.faults.suite import FAULTS, Fault, Pair, PairFault, routed
from auditor.faults.world import VERSIONS, Drawn, World
from auditor.judge import Faulty, ReferenceLogprobs, Verdict, judge_pair, judge_with_reference
from auditor.preconditions import first_failure

PROMPT, RESPONSE = 24, 72
AnyFault = Fault | PairFault | DeclaredFault


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was said of one broken sample. side: wrong in truth; named: the side that was named; causes: as ranked."""

    fault: str
    right: frozenset[str]
    side: str
    named: str
    causes: tuple[tuple[str, float, str], ...]

    @property
    def first(self) -> str:
        """The cause that was named first."""
        return self.causes[0][0] if self.causes else "unknown"

    @property
    def missed(self) -> bool:
        """Whether the sample passed as sound."""
        return self.named == Faulty.NONE.value

    @property
    def correct(self) -> bool:
        """Whether the first cause is a right one."""
        return not self.missed and self.first in self.right


SUITE: Final[tuple[AnyFault, ...]] = (*FAULTS, PairFault("other experts", frozenset({"routing"}), routed), *DECLARED)


def outcomes(faults: Sequence[AnyFault], world: World, each: int, seconds: float = math.inf) -> Iterator[Outcome]:
    """Each of these faults `each` times, on a side drawn at random. seconds: for the causes of a sample, at most."""
    for fault in faults:
        if isinstance(fault, DeclaredFault):
            for sample in world.draw(each, PROMPT, RESPONSE):
                yield _declared(fault.name, fault.causes, fault.bend(world, world.records(sample)))
            continue
        if isinstance(fault, PairFault):
            for sample in world.draw(each, PROMPT, RESPONSE):
                side = world.random.choice(["rollout", "trainer"])
                pair = fault.bend(world, sample, world.records(sample), side)
                yield _judged(world, sample, fault, side, pair, seconds)
            continue
        for sample, wrong in _broken(world, fault, each):
            side = world.random.choice(["rollout", "trainer"])
            rollout, trainer = world.records(sample)
            pair = (
                (replace(rollout, logprobs=wrong), trainer)
                if side == "rollout"
                else (rollout, replace(trainer, logprobs=wrong))
            )
            yield _judged(world, sample, fault, side, pair, seconds)


def _broken(world: World, fault: Fault, count: int) -> Iterator[tuple[Drawn, Logprobs]]:
    """Samples with the fault inside; one in which it changes no bit, as another order of sums may, is drawn again."""
    while count:
        for sample in world.draw(count, PROMPT, RESPONSE):
            wrong = fault.wrong(world, sample)
            right = world.logprobs(world.decoder(sample.version), sample)
            if wrong.tobytes() != right.tobytes():
                count -= 1
                yield sample, wrong


def flagged_clean(world: World, count: int) -> int:
    """How many of `count` sound samples are not judged a match, with the reference."""
    flagged = 0
    contracts = known_contracts()
    for sample in world.draw(count, PROMPT, 8):
        rollout, trainer = world.records(sample)
        truth = world.logprobs(world.decoder(sample.version), sample)
        judgement = judge_pair(rollout, trainer, contracts).judgement
        judgement = judge_with_reference(judgement, rollout, trainer, ReferenceLogprobs(truth, truth, "fma32"))
        flagged += judgement.verdict is not Verdict.MATCH
    return flagged


def table(found: list[Outcome]) -> str:
    """The confusion matrix: a line a fault, with how often each cause was named first."""
    return "\n".join(rows(found, max(len(outcome.fault) for outcome in found)))


def rows(found: list[Outcome], width: int) -> list[str]:
    """Its lines. width: of the faults' names."""
    lines = []
    for name in dict.fromkeys(outcome.fault for outcome in found):
        mine = [outcome for outcome in found if outcome.fault == name]
        firsts = Counter("(missed)" if outcome.missed else outcome.first for outcome in mine)
        sides = sum(outcome.named == outcome.side for outcome in mine)
        said = ", ".join(f"{cause} {count}" for cause, count in firsts.most_common())
        right = sum(outcome.correct for outcome in mine)
        lines.append(f"{name:<{width}}  {right}/{len(mine)} right, side {sides}/{len(mine)}  {said}")
    return lines


def _judged(world: World, sample: Drawn, fault: Fault | PairFault, side: str, pair: Pair, seconds: float) -> Outcome:
    rollout, trainer = pair
    decoder = world.decoder(sample.version)
    truth = world.logprobs(decoder, sample)
    reference = ReferenceLogprobs(truth, truth, "fma32")
    judgement = judge_pair(rollout, trainer, known_contracts()).judgement
    judgement = judge_with_reference(judgement, rollout, trainer, reference)
    weights = Weights(decoder, tuple(range(1, VERSIONS + 1)), world.decoder)
    suggestions = diagnose_sample(rollout, trainer, reference, weights, seconds=seconds)
    said = tuple((s.cause, s.score, s.evidence) for s in suggestions)
    return Outcome(fault.name, fault.causes, side, judgement.side.value, said)


def _declared(fault: str, right: frozenset[str], pair: Pair) -> Outcome:
    failure = first_failure(*pair, known_contracts())
    if failure is None:
        return Outcome(fault, right, "declared", Faulty.NONE.value, ())
    suggestion = cause_of_failure(failure, *pair)
    return Outcome(fault, right, "declared", "declared", ((suggestion.cause, suggestion.score, suggestion.evidence),))
