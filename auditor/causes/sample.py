"""The diagnosis of one sample: which side to look at, which part of it, and what is computed there."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion
from auditor.causes.oracle import Oracle
from auditor.causes.table import diagnose, ranked
from auditor.judge import ReferenceLogprobs
from auditor.records import Record, RolloutRecord, TrainerRecord
from rl_kernel.reference.model import Decoder

_WINDOW: Final = 128  # response tokens that hypotheses are computed for
_FORWARDS: Final = 760
_BEFORE: Final = 16  # of them before the first difference, which must stay equal under a hypothesis


@dataclass(frozen=True, slots=True)
class Weights:
    """The decoder that a record names, and the other versions that can be opened."""

    decoder: Decoder
    versions: Sequence[int]
    load: Callable[[int], Decoder]


def diagnose_sample(
    rollout: RolloutRecord,
    trainer: TrainerRecord,
    reference: ReferenceLogprobs,
    weights: Weights,
    budget: float | None = None,
    seconds: float = math.inf,
) -> tuple[Suggestion, ...]:
    """Causes for each side that differs from the reference, ranked together.

    budget, seconds: for each side; forwards are counted by default where seconds are not.
    """
    if budget is None:
        budget = _FORWARDS if seconds == math.inf else math.inf
    found: list[Suggestion] = []
    sides: tuple[tuple[Record, np.ndarray], ...] = ((rollout, reference.rollout), (trainer, reference.trainer))
    for record, truth in sides:
        evidence = Evidence(record.logprobs, truth, record.mask, record, rollout, trainer)
        if evidence.differs.any():
            of_side = diagnose(evidence, _oracle(evidence, weights, budget, seconds))
            found += [replace(suggestion, side=record.side) for suggestion in of_side]
    return ranked(found)


def diagnose_pair(rollout: RolloutRecord, trainer: TrainerRecord) -> tuple[Suggestion, ...]:
    """Causes read off the two sides alone, where there is no reference: what the rollout would have done wrong."""
    return diagnose(Evidence(rollout.logprobs, trainer.logprobs, rollout.mask, rollout, rollout, trainer), None)


def _oracle(evidence: Evidence, weights: Weights, budget: float, seconds: float) -> Oracle:
    first = int(np.flatnonzero(evidence.differs)[0])
    start = max(0, first - _BEFORE)
    rollout = evidence.rollout
    return Oracle(
        weights.decoder,
        rollout.tokens.astype(np.int64),
        rollout.prompt_len,
        1.0 if rollout.sampling.logprobs_mode == "raw_logprobs" else rollout.sampling.temperature,
        (start, min(len(evidence.found), start + _WINDOW)),
        weights.versions,
        weights.load,
        budget,
        seconds,
    )
