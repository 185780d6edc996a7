"""Mixtures of experts: the two sides sent tokens to different experts."""

from collections.abc import Iterator

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion


def other_experts(evidence: Evidence) -> Iterator[Suggestion]:
    """Tokens whose experts differ, against tokens whose values differ. Needs both sides' routed experts."""
    ours, theirs = evidence.rollout.routed_experts, evidence.trainer.routed_experts
    if ours is None or theirs is None or ours.shape != theirs.shape or len(ours) < len(evidence.rollout.tokens):
        return
    moved = (np.sort(ours, axis=1) != np.sort(theirs, axis=1)).any(axis=1)
    rows = evidence.positions - 1  # the row that computes a token's value is the one before it
    routed, differs = moved[rows], evidence.differs
    if not moved.any() or not differs.any():
        return
    covered = float(routed[differs].mean())
    first = int(rows[np.flatnonzero(differs)[0]])
    if covered >= 0.5 or moved[: first + 1].any():
        yield Suggestion(
            "routing",
            max(0.5 + 0.45 * covered, 0.6),
            f"{int(routed.sum())} of {routed.size} response tokens went to other experts; {covered:.0%} of the"
            f" {int(differs.sum())} differing tokens are among them; of those in front of the first,"
            f" {int(moved[: first + 1].sum())} went elsewhere",
        )
