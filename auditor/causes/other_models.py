"""Which of several other models' values a side has."""

from collections.abc import Iterable

from auditor.causes.evidence import CERTAIN, Evidence, Suggestion, bits_hit, explained, worth_saying
from auditor.causes.oracle import Oracle
from rl_kernel.reference.model import Decoder


def nearest_model(evidence: Evidence, oracle: Oracle, models: Iterable[tuple[str, str, Decoder]]) -> Suggestion | None:
    """Whichever explains most of the difference, if any explains enough; none is tried behind one that is certain.

    models: cause, name and decoder; the cheap and the common first, since each costs a forward.
    """
    window = oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    best: Suggestion | None = None
    for cause, name, decoder in models:
        predicted = oracle.logprobs(decoder)
        score = explained(found, truth, predicted, active)
        if worth_saying(score) and (best is None or score > best.score):
            hits = bits_hit(found, predicted, active)
            best = Suggestion(cause, score, f"the values are those of {name}; {hits}")
            if score >= CERTAIN:
                break
    return best
