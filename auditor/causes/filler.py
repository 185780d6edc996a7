"""Exact zeros on one side: values that nobody computed. Forced EOS, speculation, padding for what is missing."""

from collections.abc import Iterator

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion


def filler(evidence: Evidence) -> Iterator[Suggestion]:
    """A log-probability of exactly 0 where the reference's is not near it.

    Never certain: a filter that keeps one token gives it exactly 0 too, and is then the better explanation.
    """
    zero = (evidence.found == 0.0) & evidence.differs & (evidence.truth < -1e-6)
    differing = int(evidence.differs.sum())
    if not zero.any() or differing == 0:
        return
    at = np.flatnonzero(zero)
    share = at.size / differing
    last = at.size == 1 and at[0] == len(zero) - 1
    yield Suggestion(
        "filler",
        0.5 + 0.4 * share,
        f"exactly 0.0 at {at.size} of {differing} differing tokens, first at {int(at[0])}"
        + (" (the last token, as a forced end would have it)" if last else "")
        + f"; the reference has {evidence.truth[at[0]]:.4f} there",
    )
