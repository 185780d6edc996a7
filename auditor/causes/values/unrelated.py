"""Values of something else: of another sample, all of them or in a part, or of other tokens behind the same ones.

Values of another sample are as likely as right ones and have nothing to do with them; a model that went wrong finds
what was drawn unlikely, and stays alike. And where other tokens were scored behind the right ones, each is found by the
bits of its value: among all tokens of the first wrong row, then of the row behind it.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import CERTAIN, HINT, IN_PART, Evidence, Suggestion, correlation
from auditor.causes.oracle import I64, Oracle

_LEAST: Final = 12
_FAR: Final = 0.05
_MOSTLY: Final = 0.8
_UNLIKE: Final = 0.35  # a correlation
_WITHIN: Final = 0.95  # of the spread: how far quartiles may be apart
_NEARLY: Final = 0.95
_STEPS: Final = 6  # tokens that are followed
_ENOUGH: Final = 3


def unrelated_values(evidence: Evidence) -> Iterator[Suggestion]:
    """As likely as right ones on the whole, and nothing to do with them token by token, wherever the side is wrong."""
    usable = evidence.active & np.isfinite(evidence.found) & np.isfinite(evidence.truth)
    wrong = np.flatnonzero(evidence.differs & usable)
    if wrong.size < _LEAST:
        return
    found, truth = (values[wrong].astype(np.float64) for values in (evidence.found, evidence.truth))
    if len(np.unique(found)) < _MOSTLY * found.size:
        return  # nobody computed them
    if (np.abs(found - truth) > _FAR).mean() < _MOSTLY or abs(correlation(found, truth)) >= _UNLIKE:
        return
    # A model that went wrong so far that nothing is alike finds what was drawn unlikely.
    quarters = [np.quantile(values, (0.25, 0.5, 0.75)) for values in (found, truth)]
    if (quarters[1] - quarters[0]).max() >= _WITHIN * float(truth.std()) or found.max() > 0.0:
        return
    where = "" if wrong.size > _NEARLY * usable.sum() else f"of {wrong.size} from token {wrong[0]} to {wrong[-1]}, "
    yield Suggestion(
        "unrelated_values",
        HINT + (0.12 if where else 0.0),
        f"{where}correlation with the reference {correlation(found, truth):.2f}, though the values lie where its own do"
        f" (medians {quarters[0][1]:.3g} and {quarters[1][1]:.3g}): as those of another sample would",
    )


def other_response(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """From the first wrong row on, other tokens were scored: each is found by the bits of its value, then its row."""
    window = oracle.window
    found = evidence.found[window].view(np.uint32)
    wrong = np.flatnonzero(evidence.differs[window] & np.isfinite(evidence.found[window]))
    if wrong.size < _ENOUGH:
        return
    first = int(wrong[0])
    tokens, told = oracle.tokens[: int(oracle.rows[first]) + 1], list[int]()
    for at in range(first, min(first + _STEPS, len(found))):
        token = _scored(oracle, tokens, found[at])
        if token is None:
            break
        told.append(token)
        tokens = np.append(tokens, token)
    own = oracle.targets[first : first + len(told)]
    others = int((own != told).sum())
    if len(told) < _ENOUGH or others < 2:
        return
    until_end = len(told) == min(_STEPS, len(found) - first)
    yield Suggestion(
        "unrelated_values",
        CERTAIN if until_end else IN_PART,
        f"the values are those of other tokens behind the same ones: from response token {first + window.start} on"
        f" those of {', '.join(map(str, told))}, where {', '.join(map(str, own.tolist()))} stand",
    )


def _scored(oracle: Oracle, tokens: I64, bits: np.uint32) -> int | None:
    """The token whose value behind those has these bits."""
    vocab = oracle.decoder.config.vocab
    hidden = oracle.hidden(oracle.decoder, tokens)[-1:]
    ids = np.arange(vocab)[None, :]
    heat = np.full(1, oracle.temperature, np.float32)
    values = oracle.decoder.reference.logp_from_logits(oracle.head(oracle.decoder, hidden), ids, heat, vocab=vocab)[0][
        0
    ]
    hit = np.flatnonzero(values.view(np.uint32) == bits)
    return int(hit[0]) if hit.size else None
