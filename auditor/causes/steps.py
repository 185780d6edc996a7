"""Two faults, one upon the other: what the right values' kin do not explain, those of another version or heat may.

What is done to values, to logits and to rows costs no forward, so it is tried again upon what a first fault would give.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from auditor.causes.distribution.head import low_precision_head
from auditor.causes.distribution.logits import logit_processor
from auditor.causes.distribution.masses import many_tokens
from auditor.causes.distribution.penalties import repeated
from auditor.causes.distribution.shards import one_shard
from auditor.causes.distribution.softmax import touched_tokens
from auditor.causes.distribution.softmax_steps import rounded_steps
from auditor.causes.distribution.temperature import temperature
from auditor.causes.distribution.truncation import truncation
from auditor.causes.evidence import STRONG, Evidence, Suggestion
from auditor.causes.oracle import Oracle, VersionUnavailable
from auditor.causes.values.lookup import other_token, value_order
from auditor.causes.values.misalignment import shifted_from_a_point, shifted_values, wrong_row
from auditor.causes.values.transform import value_transform
from auditor.compare import Logprobs

NEARLY: Final = 0.99 * STRONG
_PENALTIES: Final = (1.05, 1.1)
_OF_VALUES: Final = (shifted_values, shifted_from_a_point, value_order, value_transform)
_OF_UNHEATED: Final = (rounded_steps, other_token, one_shard, touched_tokens, many_tokens, logit_processor)
_OF_LOGITS: Final = (temperature, low_precision_head, wrong_row)


def two_steps(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """A fault of values or logits upon values that were never heated, or upon another version's."""
    if oracle.temperature != 1.0:
        raw = oracle.from_logits(oracle.own_logits, 1.0)
        yield from _upon("temperature 1", raw, evidence, oracle)
        upon, unheated = _with_truth(raw, evidence, oracle), oracle.at_temperature(1.0)
        for compute in (*_OF_LOGITS[1:], *_OF_UNHEATED) if upon.differs.any() else ():
            yield from (_beside("temperature 1", said) for said in compute(upon, unheated) if said.score >= NEARLY)
    stated = evidence.record.weight_version
    before = [version for version in sorted(oracle.versions, reverse=True) if version < stated]
    for version in dict.fromkeys([*before[:1], *before[-1:]]):
        try:
            other = oracle.of_version(version)
        except VersionUnavailable:
            continue
        name = f"weight version {version}"
        yield from _upon(name, other.from_logits(other.own_logits), evidence, oracle)
        for compute in _OF_LOGITS:
            yield from (_beside(name, said) for said in compute(evidence, other) if said.score >= STRONG)


def sampler_defaults(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """A repetition penalty, and another temperature or a filter beside it, as a model's own defaults have all three."""
    for penalty in _PENALTIES:
        punished = oracle.with_logits(repeated(oracle, penalty))
        upon = _with_truth(punished.from_logits(punished.own_logits), evidence, oracle)
        for compute in (temperature, truncation):
            said = compute(upon, punished)
            yield from (_beside(f"a repetition penalty of {penalty:g}", s) for s in said if s.score >= NEARLY)


def _upon(name: str, values: Logprobs, evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    other = _with_truth(values, evidence, oracle)
    if other.differs.any():
        for read in _OF_VALUES:
            yield from (_beside(name, said) for said in read(other) if said.score >= STRONG)


def _with_truth(values: Logprobs, evidence: Evidence, oracle: Oracle) -> Evidence:
    """The evidence as it is of the window, with other values for the right ones."""
    truth, active = evidence.truth.copy(), np.zeros(len(evidence.truth), np.bool_)
    truth[oracle.window] = values
    active[oracle.window] = evidence.active[oracle.window]
    return replace(evidence, truth=truth, active=active)


def _beside(name: str, said: Suggestion) -> Suggestion:
    return replace(said, evidence=f"beside what {name} gives in place of the stated one's: {said.evidence}")
