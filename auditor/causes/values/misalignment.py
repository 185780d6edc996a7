"""Off by one: at the cut between prompt and response, in a chat template, in the row that a token is looked up in."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from auditor.causes.evidence import CERTAIN, HINT, STRONG, Evidence, Suggestion, correlation
from auditor.causes.oracle import I64, Oracle
from auditor.causes.search import Candidate, hinted, nearest
from auditor.compare import Logprobs

_LEAST = 12
_FARTHEST = 16  # tokens that equal bits are looked for away
_ALIKE = 3  # tokens that resemblance is looked for away


def shifted_values(evidence: Evidence) -> Iterator[Suggestion]:
    """The side's values are the reference's, one or a few tokens away."""
    found, truth = evidence.found, evidence.truth
    for lag in (lag for size in range(1, _FARTHEST + 1) for lag in (size, -size)):
        if len(found) <= abs(lag) + 3:
            continue
        near, far = (found[lag:], truth[:-lag]) if lag > 0 else (found[:lag], truth[-lag:])
        edge = slice(None, lag) if lag > 0 else slice(lag, None)
        if found[edge].tobytes() == truth[edge].tobytes():
            continue  # what is right at the edge has not moved
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
        if abs(lag) <= _ALIKE and there > 0.9 and there > here + 0.3:
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
    inner = evidence.active.copy()
    inner[[oracle.window.start, oracle.window.stop - 1]] = (
        False  # beyond the window there is no row or token to look at
    )
    evidence = replace(evidence, active=inner)
    if best := nearest(evidence, oracle, _wrong_rows(evidence, oracle)):
        yield best


def _wrong_rows(evidence: Evidence, oracle: Oracle) -> Iterator[Candidate]:
    last, targets, count = len(oracle.tokens) - 1, oracle.targets, len(oracle.rows)
    for by in (1, -1, 2, -2):

        def beside(rows: I64, by: int = by) -> Logprobs:
            return oracle.from_logits(oracle.own_logits[np.clip(rows + by, 0, count - 1)], targets=targets[rows])

        if hinted(evidence, oracle, beside):
            name = f"each token in the row {abs(by)} {'after' if by > 0 else 'before'} its own"
            rows = np.clip(oracle.rows + by, 0, last)
            yield "off_by_one", name, oracle.from_logits(oracle.logits(rows), targets=targets)
    for name, others in (
        ("the likeliest token in each row", oracle.own_logits[:, : oracle.decoder.config.vocab].argmax(axis=1)),
        ("the token before in each row", oracle.tokens[oracle.rows]),
        ("the token after in each row", oracle.tokens[np.minimum(oracle.rows + 2, last)]),
    ):

        def of_others(rows: I64, others: I64 = others) -> Logprobs:
            return oracle.from_logits(oracle.own_logits[rows], targets=others[rows])

        if hinted(evidence, oracle, of_others):
            cause = "other_token" if "likeliest" in name else "off_by_one"
            yield cause, name, oracle.from_logits(oracle.own_logits, targets=others)
