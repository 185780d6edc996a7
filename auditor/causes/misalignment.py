"""Off by one: at the cut between prompt and response, in a chat template, in the row that a token is looked up in."""

from collections.abc import Iterator

import numpy as np

from auditor.causes.evidence import (
    CERTAIN,
    HINT,
    STRONG,
    Evidence,
    Suggestion,
    bits_hit,
    correlation,
    explained,
    worth_saying,
)
from auditor.causes.oracle import Oracle

_LEAST = 12


def shifted_values(evidence: Evidence) -> Iterator[Suggestion]:
    """The side's values are the reference's, one or a few tokens away."""
    found, truth = evidence.found, evidence.truth
    for lag in (1, -1, 2, -2, 3, -3):
        if len(found) <= abs(lag) + 3:
            continue
        near, far = (found[lag:], truth[:-lag]) if lag > 0 else (found[:lag], truth[-lag:])
        equal = int((near.view(np.uint32) == far.view(np.uint32)).sum())
        direction = "later" if lag > 0 else "earlier"
        if equal >= 0.9 * len(near):
            yield Suggestion(
                "off_by_one",
                CERTAIN if equal == len(near) else 0.95,
                f"{equal} of {len(near)} values are the reference's, {abs(lag)} token(s) {direction}",
            )
            return
        here, there = correlation(found, truth), correlation(near, far)
        if there > 0.9 and there > here + 0.3:
            yield Suggestion(
                "off_by_one",
                HINT + 0.2,
                f"correlation with the reference is {there:.3f} {abs(lag)} token(s) {direction}, {here:.3f} in place",
            )
            return


def shifted_from_a_point(evidence: Evidence) -> Iterator[Suggestion]:
    """Right up to some token, and one or a few tokens away from there on: one was lost, or came twice."""
    usable = np.isfinite(evidence.found) & np.isfinite(evidence.truth) & evidence.active
    if not usable.all() or usable.size < _LEAST:
        return
    found, truth = evidence.found.astype(np.float64), evidence.truth.astype(np.float64)
    in_place = np.abs(found - truth)
    total = float(in_place.sum())
    best: tuple[float, int, int] | None = None
    for lag in (1, -1, 2, -2):
        moved = np.abs(found - np.roll(truth, lag))
        if lag < 0:
            moved[lag:] = 0.0  # beyond the end there is nothing to compare with
        # cost[m]: in place before m, moved from m on
        cost = np.concatenate([[0.0], np.cumsum(in_place)]) + moved.sum() - np.concatenate([[0.0], np.cumsum(moved)])
        inner = cost[2 : len(found) - 4]
        at = int(inner.argmin()) + 2
        if best is None or cost[at] < best[0]:
            best = (float(cost[at]), at, lag)
    if best is not None and total > 0.0 and best[0] < 0.1 * total:
        cost_left, at, lag = best
        exact = cost_left == 0.0
        yield Suggestion(
            "off_by_one",
            CERTAIN if exact else STRONG * (1.0 - cost_left / total),
            f"the values are the reference's up to token {at}, and {abs(lag)} token(s)"
            f" {'later' if lag > 0 else 'earlier'} from there on; {cost_left / total:.1%} of the difference is left",
        )


def wrong_row(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The right token in the wrong row of logits, or the wrong token in the right row."""
    window, truth = oracle.window, evidence.truth[oracle.window]
    found, active = evidence.found[window], evidence.active[window]
    last = len(oracle.tokens) - 1
    inner = active.copy()
    inner[[0, -1]] = False  # beyond the ends of the window there is no row or token to look at
    best: tuple[float, str] | None = None
    likeliest = oracle.own_logits[:, : oracle.decoder.config.vocab].argmax(axis=1)
    for name, rows, targets in (
        ("the row after its own", np.minimum(oracle.rows + 1, last), oracle.targets),
        ("the row before its own", np.maximum(oracle.rows - 1, 0), oracle.targets),
        ("its row, where the likeliest token is taken", oracle.rows, likeliest),
        ("its row with the token before", oracle.rows, oracle.tokens[oracle.rows]),
        ("its row with the token after", oracle.rows, oracle.tokens[np.minimum(oracle.rows + 2, last)]),
    ):
        logits = oracle.own_logits if rows is oracle.rows else oracle.logits(rows)
        predicted = oracle.from_logits(logits, targets=targets)
        score = explained(found, truth, predicted, inner)
        if worth_saying(score) and (best is None or score > best[0]):
            best = (score, f"each token is looked up in {name}: {bits_hit(found, predicted, inner)}")
    if best is not None:
        yield Suggestion("off_by_one", *best)
