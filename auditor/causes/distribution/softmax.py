"""Mass that a softmax has too much or too little: tokens masked or favoured, padding counted, tokens never drawn.

Where the drawn token's own logit is untouched, found − truth = lse(truth) − lse(found), so at every row
e^(truth − found) − 1 is the mass that was added to the softmax, as a share of what was there. For a token whose logit
moved by b that share is (e^(b/T) − 1)·p(token), with one b for all rows, and for several it is their sum; for padding
of constant logits it is K·e^(−lse).
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import HINT, STRONG, Evidence, Suggestion, correlation
from auditor.causes.oracle import F32, F64, I64, Oracle
from auditor.causes.search import Candidate, nearest
from auditor.compare import Mask

_WORK: Final = 1 << 23  # probabilities that are looked at
_ROWS: Final = 128
_LEAST: Final = 8
_MOST: Final = 16  # tokens that may have been touched
_LEFT: Final = 0.1  # of the mass, not explained
_EACH: Final = 0.3  # of a row's mass, not explained
_ROWS_A_TOKEN: Final = 8  # that a token explains, unless all is exact
_ROWS_OPEN: Final = 2  # that are looked at beside what a token explains, even where all is exact
_FITTING: Final = 0.75  # of the rows
_FORETOLD: Final = 0.2  # of the mass, not explained by what the other rows say
_EXACT: Final = 1e-4
_NOISE: Final = 5e-3
_ROUNDING: Final = 1e-6
_MASKED: Final = -0.99
_EVEN: Final = 0.35  # of the mean: how far a filter's mass spreads
_EVERYWHERE: Final = 0.75  # of the tokens
_MUCH: Final = 2.0  # a difference that padding does not make


def touched_tokens(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The few tokens, or the padding, whose mass at every row makes the difference."""
    window = oracle.window
    found, truth = evidence.found[window], evidence.truth[window]
    wrong = np.flatnonzero(evidence.differs[window] & np.isfinite(found))
    wrong = wrong[: min(_ROWS, max(_LEAST, _WORK // oracle.decoder.config.vocab))]
    delta = truth[wrong].astype(np.float64) - found[wrong]
    if wrong.size < _LEAST or np.median(np.abs(delta)) < _ROUNDING:
        return
    # Rows whose own token was touched go the other way; they are the fewer ones.
    lower = (delta > 0).mean() > 0.5
    same = (delta > 0) == lower
    tokens, times = np.unique(oracle.targets[wrong], return_counts=True)
    once = np.isin(oracle.targets[wrong], tokens[times == 1])
    for rows in (wrong, wrong[same], wrong[once], wrong[once & same]):
        if rows.size < _LEAST:
            continue
        added = np.expm1(np.clip(truth[rows].astype(np.float64) - found[rows], -50.0, 50.0))
        columns, scale = _columns(oracle, rows)
        support, shares, plain = _pursued(columns, added, oracle.targets[rows])
        left = np.abs(added - columns[:, support] @ shares)[plain]
        explained = 1.0 - float(left.sum() / np.abs(added[plain]).sum())
        fits = (left < _EACH * np.abs(added[plain])).mean() > _FITTING
        exact = explained > 1.0 - _EXACT * _ROWS_A_TOKEN
        few = len(support) * _ROWS_A_TOKEN <= rows.size
        told = exact or (few and explained >= 1.0 - _LEFT and _foretells(columns[plain][:, support], added[plain]))
        if (
            told
            and _can_be(shares, int(plain.sum()))
            and explained >= 1.0 - _LEFT
            and fits
            and _varies(columns[:, support] @ shares)
        ):
            yield _said(support, shares, explained, columns.shape[1] - 1, scale)
            if columns.shape[1] - 1 not in support and (
                best := nearest(evidence, oracle, _moved(oracle, support, shares))
            ):
                yield best
            return


def tokens_forbidden(evidence: Evidence) -> Iterator[Suggestion]:
    """Every value too high, or every one too low: mass was taken out of every softmax, or put in."""
    delta = evidence.delta[evidence.differs]
    if delta.size < 12 or np.abs(np.median(delta)) < 1e-3 or evidence.found[evidence.differs].max() > _ROUNDING:
        return  # above 0 nothing is a probability's
    share = np.abs(np.expm1(np.clip(-delta, -50.0, 50.0)))
    numbers = f"by {np.abs(delta).min():.3g} to {np.abs(delta).max():.3g}, as in a softmax in which"
    if (delta > 0).mean() > 0.98:
        # A filter of the likeliest leaves out much the same mass everywhere, other tokens have what mass they have.
        everywhere = evidence.differs.sum() > _EVERYWHERE * evidence.active.sum()
        cause = "truncated_sampling" if everywhere and share.std() < _EVEN * share.mean() else "logit_processor"
        said = f"too high, {numbers} tokens of {share.min():.1%} to {share.max():.1%} of the mass were left out"
    elif (delta < 0).mean() > 0.98 and correlation(evidence.found, evidence.truth) > 0.95 and delta.min() > -_MUCH:
        cause = "vocabulary"
        said = f"too low, {numbers} another {share.min():.1%} to {share.max():.1%} of the mass were counted"
    else:
        return
    yield Suggestion(cause, HINT + 0.05, f"all values are {said}")


def _columns(oracle: Oracle, rows: np.ndarray) -> tuple[F64, float]:
    """Probabilities of every token [rows,V], and behind them e^(−lse), times a number that is handed out too."""
    z = oracle.own_logits[rows, : oracle.decoder.config.vocab].astype(np.float64) / oracle.temperature
    top = z.max(axis=1, keepdims=True)
    lse = top + np.log(np.exp(z - top).sum(axis=1, keepdims=True))
    return np.concatenate([np.exp(z - lse), np.exp(lse.min() - lse)], axis=1), float(np.exp(lse.min()))


def _pursued(columns: F64, added: F64, targets: I64) -> tuple[list[int], F64, Mask]:
    """Columns taken one after the other, each the one that explains most of what is left, and their shares.

    Then the rows that count: what a touched token's own row has too much is another thing than mass.
    """
    size = np.sqrt((columns * columns).sum(axis=0))
    unit = columns / np.maximum(size, 1e-12 * size.max())
    support: list[int] = []
    shares: F64 = np.zeros(0)
    left, plain = added, np.ones(len(added), np.bool_)
    for _ in range(min(_MOST, len(added) // 4)):
        gain = unit[plain].T @ left[plain]
        gain[support] = 0.0
        gain[-1] = max(gain[-1], 0.0)  # padding only adds
        support.append(int(np.abs(gain).argmax()))
        without = ~np.isin(targets, support)
        if without.sum() < _LEAST:
            break
        plain = without
        shares = np.asarray(np.linalg.lstsq(columns[plain][:, support], added[plain], rcond=None)[0], np.float64)
        left = added - columns[:, support] @ shares
        if np.abs(left[plain]).sum() < _NOISE * np.abs(added[plain]).sum():
            break
    return support[: len(shares)], shares, plain


def _can_be(shares: F64, rows: int) -> bool:
    """Whether logits could do that: none takes more mass away than its token has; as many tokens as rows fit anything.

    rows: those of which nothing but mass is asked.
    """
    return bool((shares > -1.0 - _LEFT).all()) and rows >= _ROWS_OPEN * len(shares)


def _foretells(columns: F64, added: F64) -> bool:
    """Whether each row's mass follows from the others': columns [rows,tokens] with shares that are fitted without it.

    Of many thousand tokens there is one for each row that has its mass there and nowhere else. It fits, and tells
    nothing.
    """
    left = added - columns @ np.linalg.lstsq(columns, added, rcond=None)[0]
    own = (np.linalg.qr(columns)[0] ** 2).sum(axis=1)  # how much of a row's fit is its own doing
    foretold = np.abs(left / np.maximum(1.0 - own, 1e-9))
    return float(foretold.sum()) < _FORETOLD * float(np.abs(added).sum())


def _said(support: list[int], shares: F64, explained: float, padding: int, scale: float) -> Suggestion:
    if support == [padding]:
        return Suggestion(
            "vocabulary",
            STRONG * explained,
            f"the softmax has {shares[0] * scale:.1f} more in its sum than the vocabulary gives, as that many padding"
            f" rows of logit 0 would; it explains {explained:.1%} of the difference",
        )
    how = ", ".join(
        f"{token} is masked" if share < _MASKED else f"{token} is moved by {np.log1p(share):+.3g}"
        for token, share in zip(support, shares, strict=True)
    )
    return Suggestion(
        "logit_processor",
        STRONG * explained,
        f"the values are those of a softmax in which the logit of token {how}; it explains {explained:.1%} of"
        " the difference",
    )


def _moved(oracle: Oracle, support: list[int], shares: F64) -> Iterator[Candidate]:
    """The logits moved by that much, in few digits first."""
    for digits in range(4):
        logits: F32 = oracle.own_logits.copy()
        for token, share in zip(support, shares, strict=True):
            moved = -np.inf if share < _MASKED else round(oracle.temperature * float(np.log1p(share)), digits)
            logits[:, token] += np.float32(moved)
        yield "logit_processor", f"logits of {len(support)} tokens masked or moved", oracle.from_logits(logits)


def _varies(column: F64) -> bool:
    """A share that is the same at every row explains any constant, and so names nothing."""
    return float(column.std()) > 0.05 * float(np.abs(column).mean())
