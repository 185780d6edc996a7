"""NaN or infinity on one side only."""

from collections.abc import Iterator

import numpy as np

from auditor.causes.evidence import HINT, STRONG, Evidence, Suggestion


def nonfinite(evidence: Evidence) -> Iterator[Suggestion]:
    """Values that are not finite where the reference's are: an overflow, or a token that a filter had excluded."""
    broken = ~np.isfinite(evidence.found) & np.isfinite(evidence.truth) & evidence.active
    if broken.any():
        at = np.flatnonzero(broken)
        share = at.size / int(evidence.differs.sum())
        yield Suggestion(
            "nonfinite",
            max(STRONG * share, HINT + 0.1),  # no rounding makes one, however many values a stock engine rounds
            f"{at.size} values are NaN or infinite where the right ones are finite, first at {int(at[0])}",
        )
