"""Which of several other models' values a side has."""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import Candidate, Evidence, Suggestion, explained, nearest
from auditor.causes.oracle import Oracle
from rl_kernel.reference.model import Decoder

_FEW: Final = 12  # wrong rows on which a model is tried before it is run on all
_HOPELESS: Final = 0.25


def nearest_model(evidence: Evidence, oracle: Oracle, models: Iterable[tuple[str, str, Decoder]]) -> Suggestion | None:
    """Whichever explains most of the difference, if any explains enough; none is tried behind one that is certain.

    models: cause, name and decoder; the cheap and the common first, since each costs a forward, or the beginning of one
    where that already shows that it is another model.
    """
    return nearest(evidence, oracle.window, _worth_a_forward(evidence, oracle, models))


def _worth_a_forward(
    evidence: Evidence, oracle: Oracle, models: Iterable[tuple[str, str, Decoder]]
) -> Iterator[Candidate]:
    window = oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    few = np.flatnonzero(evidence.differs[window] & np.isfinite(found))[:_FEW]
    for cause, name, decoder in models:
        if few.size == _FEW:
            trial = oracle.logprobs_of_rows(decoder, few)
            if explained(found[few], truth[few], trial, active[few]) < _HOPELESS:
                continue
        yield cause, name, oracle.logprobs(decoder)
