"""One search for causes, asked of one sample with one fault inside."""

from collections.abc import Callable, Iterator

from auditor.causes.evidence import CERTAIN, Evidence, Suggestion
from auditor.causes.oracle import Oracle
from auditor.compare import Logprobs
from auditor.faults.world import VERSIONS, Drawn, World

Compute = Callable[[Evidence, Oracle], Iterator[Suggestion]]


def evidence_of(world: World, sample: Drawn, wrong: Logprobs) -> Evidence:
    rollout, trainer = world.records(sample)
    return Evidence(wrong, trainer.logprobs, rollout.mask, rollout, rollout, trainer)


def oracle_of(world: World, sample: Drawn) -> Oracle:
    response = len(sample.tokens) - sample.prompt
    decoder, heat = world.decoder(sample.version), sample.temperature
    versions = range(1, VERSIONS + 1)
    return Oracle(decoder, sample.tokens, sample.prompt, heat, (0, response), versions, world.decoder)


def said(compute: Compute, world: World, sample: Drawn, wrong: Logprobs) -> Suggestion | None:
    """The best that one search says of the sample."""
    found = list(compute(evidence_of(world, sample, wrong), oracle_of(world, sample)))
    return max(found, key=lambda suggestion: suggestion.score, default=None)


def certain(compute: Compute, world: World, sample: Drawn, wrong: Logprobs, cause: str, *words: str) -> None:
    suggestion = said(compute, world, sample, wrong)
    assert suggestion is not None
    assert (suggestion.cause, suggestion.score) == (cause, CERTAIN), suggestion
    for word in words:
        assert word in suggestion.evidence
