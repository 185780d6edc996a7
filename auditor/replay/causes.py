"""A search for the causes of a capsule's mismatch that may take longer than the one beside a live job."""

import numpy as np

from auditor.capsule import Capsule
from auditor.causes.evidence import Suggestion
from auditor.causes.inputs import cause_of_failure
from auditor.causes.sample import diagnose_sample
from auditor.contracts import known_contracts
from auditor.preconditions import first_failure
from auditor.recompute_worker import Models, recompute


def search(capsule: Capsule, models: Models, seconds: float) -> list[str]:
    """Lines that say what the causes are, the likeliest first. seconds: for each side that differs, at most."""
    failure = first_failure(capsule.rollout, capsule.trainer, known_contracts())
    if failure is not None:
        return [_line(cause_of_failure(failure, capsule.rollout, capsule.trainer))]
    reference = recompute(models, capsule.rollout, capsule.trainer)
    with np.errstate(all="ignore"):  # what a broken side reports may overflow anything
        found = diagnose_sample(
            capsule.rollout, capsule.trainer, reference, models.around(capsule.rollout), np.inf, seconds
        )
    return [_line(suggestion) for suggestion in found] or ["causes: none found"]


def _line(suggestion: Suggestion) -> str:
    of = f", {suggestion.side}" if suggestion.side else ""
    return f"cause {suggestion.cause} ({suggestion.score:.2f}){of}: {suggestion.evidence}"
