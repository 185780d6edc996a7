"""Many tokens that a softmax leaves out, favours or allows: a list of them, a run of ids, or one that moves ever more.

As in `softmax`, e^(truth − found) − 1 is the mass that was added at a row, as a share of what was there. Of a list
whose tokens all moved the same way every share has one sign, and then few rows say which tokens they are. The drawn
token's own mass is no part of it: whoever masks tokens keeps the one that was drawn.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from auditor.causes.evidence import STRONG, Evidence, Suggestion
from auditor.causes.fit import roundings
from auditor.causes.oracle import F32, F64, I64, Oracle
from auditor.causes.search import Candidate, nearest

_WORK: Final = 1 << 23  # probabilities that are looked at
_ROWS: Final = 128
_LEAST: Final = 12
_ONE_WAY: Final = 0.75  # of the rows
_EXACT: Final = 2e-4  # of the mass, left by the right tokens
_ALIKE: Final = 0.02  # of a share
_FEW: Final = 3  # rows for each token that is found, unless all are alike
_TOKENS: Final = 4096  # that are told apart
_EDGES: Final = 512
_FARTHEST: Final = 300.0
_TINY: Final = 1e-6
_COUNTS: Final = 1e-3  # of the heaviest one's mass
_SHIFTS: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 0.5, 1.5)  # of a logit, as people set them
_LAST_BITS: Final = 1e-6  # of a value of fp32
_UNSURE: Final = 0.02  # of the largest number
_MOSTLY: Final = 0.6  # of the rows
_STEADY: Final = 1.05  # times the way from the smallest to the largest: what a number that only grows walks


def many_tokens(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Tokens that were masked, moved or allowed together, or one that moves from row to row."""
    window, vocab = oracle.window, oracle.decoder.config.vocab
    found, truth = (values[window].astype(np.float64) for values in (evidence.found, evidence.truth))
    # A value of 0 says of no token but the drawn one that it was there, which anything says that puts it there.
    rows = np.flatnonzero(evidence.differs[window] & (found < 0.0) & np.isfinite(found))[: min(_ROWS, _WORK // vocab)]
    if rows.size < _LEAST or np.abs(found[rows] - truth[rows]).max() < _TINY:
        return
    added = np.expm1(np.clip(truth[rows] - found[rows], -_FARTHEST, _FARTHEST))
    sign = 1.0 if np.median(added) > 0 else -1.0
    one_way = sign * added > 0
    if one_way.mean() < _ONE_WAY:
        return
    rows, added = rows[one_way], added[one_way]
    mass = np.exp(oracle.every_token(rows).astype(np.float64)[:, :vocab])
    own = mass[np.arange(rows.size), oracle.targets[rows]].copy()
    mass[np.arange(rows.size), oracle.targets[rows]] = 0.0
    if best := nearest(evidence, oracle, _candidates(oracle, mass, own, added, sign)):
        yield best
        return
    told = _heaviest(mass)
    if moving := _moving(oracle, rows, added, mass[:, told], told):
        yield moving


def _candidates(oracle: Oracle, mass: F64, own: F64, added: F64, sign: float) -> Iterator[Candidate]:
    vocab = mass.shape[1]
    if sign < 0:
        for wanted, inside, how in ((-added, False, "without tokens"), (1.0 + added - own, True, "of tokens")):
            if run := _run_of(mass, wanted):
                gone = np.arange(vocab) if inside else np.arange(*run)
                gone = np.setdiff1d(gone, np.arange(*run)) if inside else gone
                name = f"a softmax {how} {run[0]} to {run[1] - 1} of {vocab}"
                yield "logit_processor", name, oracle.from_logits(_without(oracle, gone))
            chosen = _listed(mass, wanted, (1.0,))
            if chosen and chosen[1] is not None and abs(chosen[1] - 1.0) < _ALIKE:
                gone = np.setdiff1d(np.arange(vocab), chosen[0]) if inside else chosen[0]
                name = f"a softmax {how} {_said(chosen[0])} of {vocab}"
                yield "logit_processor", name, oracle.from_logits(_without(oracle, gone))
    shifts = np.expm1(sign * np.array(_SHIFTS) / oracle.temperature)
    if chosen := _listed(mass, sign * added, (sign * shifts).tolist()):
        tokens, share = chosen
        if share is None or sign * share <= -1.0:
            shares = _bounded(mass[:, tokens], sign * added, np.inf)
            by = oracle.temperature * np.log1p(np.maximum(sign * shares, 1e-9 - 1.0))
            yield _moved(oracle, tokens, by.astype(np.float32))
            return
        for by in roundings(oracle.temperature * float(np.log1p(sign * share))):
            yield _moved(oracle, tokens, np.full(len(tokens), by, np.float32))


def _moved(oracle: Oracle, tokens: I64, by: F32) -> Candidate:
    logits: F32 = oracle.own_logits.copy()
    logits[:, tokens] += by
    how = f"by {by[0]:+.4g}" if (by == by[0]).all() else f"by {by.min():+.3g} to {by.max():+.3g}"
    return "logit_processor", f"logits of {_said(tokens)} moved {how}", oracle.from_logits(logits)


def _without(oracle: Oracle, gone: I64) -> F32:
    logits: F32 = oracle.own_logits.copy()
    kept = logits[np.arange(len(logits)), oracle.targets]
    logits[:, gone] = -np.inf
    logits[np.arange(len(logits)), oracle.targets] = kept
    return logits


def _run_of(mass: F64, wanted: F64) -> tuple[int, int] | None:
    """The run of ids first..last whose mass is the wanted one in all rows, if there is one."""
    vocab = mass.shape[1]
    ends = np.arange(_EDGES // 4)
    edges = np.unique(np.r_[np.linspace(0, vocab, _EDGES // 2).astype(int), ends, vocab - ends].clip(0, vocab))
    edges = np.arange(vocab + 1) if vocab < _EDGES else edges
    up_to = np.concatenate([np.zeros((len(mass), 1)), np.cumsum(mass, axis=1)], axis=1)[:, edges]
    left = np.zeros((len(edges), len(edges)))
    for row, share in zip(up_to, wanted, strict=True):
        left += np.abs(row[None, :] - row[:, None] - share)
    first, last = np.unravel_index(int(left.argmin()), left.shape)
    if first >= last or left[first, last] > _EXACT * np.abs(wanted).sum():
        return None
    return int(edges[first]), int(edges[last])


def _listed(mass: F64, wanted: F64, usual: Sequence[float]) -> tuple[I64, float | None] | None:
    """The tokens of which so much of each one's mass is the wanted one, and how much, if that is one number.

    usual: such numbers, for more tokens than rows tell apart where each has its own.
    """
    if not (wanted > 0).all():
        return None
    ids = _heaviest(mass)
    mass = mass[:, ids]
    shares = _bounded(mass, wanted, np.inf)
    if np.abs(mass @ shares - wanted).sum() > _EXACT * wanted.sum():
        return None  # nor with fewer that may be
    tokens, share = _alike(mass, shares)
    if share is not None or _FEW * tokens.size <= len(wanted):
        return ids[tokens], share
    for share in usual:
        shares = _bounded(share * mass, wanted, 1.0)
        tokens, one = _alike(mass, shares)
        exact = np.abs(share * mass @ shares - wanted).sum() < _EXACT * wanted.sum()
        if exact and one is not None and abs(one - 1.0) < _ALIKE:
            return ids[tokens], share
    return None


def _alike(mass: F64, shares: F64) -> tuple[I64, float | None]:
    """Tokens whose part of what is explained is no rounding's, and the share of all, if they have one."""
    weight = shares * mass.max(axis=0)
    told = shares[weight > _COUNTS * weight.max(initial=0.0)]
    usual = float(np.median(told)) if told.size else 0.0
    if (np.abs(told - usual) < _ALIKE * usual).all():
        return np.flatnonzero(shares > usual / 2), usual
    return np.flatnonzero(weight > _TINY * weight.max(initial=0.0)), None


def _bounded(columns: F64, wanted: F64, most: float) -> F64:
    """Shares from 0 to `most` of columns [R,V] that make the wanted [R]: least squares by those that are needed."""
    shares, free = np.zeros(columns.shape[1]), np.zeros(columns.shape[1], np.bool_)
    size = np.maximum(np.sqrt((columns * columns).sum(axis=0)), 1e-300)
    for _ in range(3 * len(wanted)):
        gain = columns.T @ (wanted - columns @ shares) / size
        gain = np.where(free, 0.0, np.where(shares > 0, -gain, gain))
        if gain.max() < 1e-10 * np.abs(wanted).max() or free.sum() >= len(wanted) - 1:
            break
        free[gain.argmax()] = True
        while free.any():
            at = np.flatnonzero(free)
            rest = wanted - columns @ np.where(free, 0.0, shares)
            best = np.linalg.lstsq(columns[:, at] / size[at], rest, rcond=None)[0] / size[at]
            limit = np.where(best < 0, 0.0, np.where(best > most, most, best))
            out = best != limit
            if not out.any():
                shares[at] = best
                break
            steps = np.where(out, (limit - shares[at]) / np.where(out, best - shares[at], 1.0), np.inf)
            step = max(float(steps.min()), 0.0)
            shares[at] += step * (best - shares[at])
            stopped = steps <= step
            shares[at[stopped]] = limit[stopped]
            free[at[stopped]] = False
    return shares


def _heaviest(mass: F64) -> I64:
    """Tokens that have mass in some row, in the order of their ids; of a large vocabulary the first few thousand."""
    return np.sort(np.argsort(-mass.max(axis=0), kind="stable")[:_TOKENS])


def _moving(oracle: Oracle, rows: I64, added: F64, mass: F64, told: I64) -> Suggestion | None:
    """One token that explains every row, by a number that only grows or only shrinks, or that a logit's size does."""
    with np.errstate(divide="ignore", invalid="ignore"):
        by = oracle.temperature * np.log1p(np.where(mass > 0, added[:, None] / mass, np.nan))
        unsure = oracle.temperature * _LAST_BITS / (mass + added[:, None])
    size = np.abs(oracle.own_logits[np.ix_(rows, told)].astype(np.float64))
    for how, share in (("", 1.0), (" of its size", size)):
        numbers = np.where(unsure < _UNSURE * np.nanmax(np.abs(by), axis=0, initial=0.0), by / share, np.nan)
        known = np.isfinite(numbers)
        tokens = np.flatnonzero((known.mean(axis=0) > _MOSTLY) & (known.sum(axis=0) >= _LEAST))
        if not tokens.size:
            continue
        path, blur = numbers[:, tokens], (unsure / share)[:, tokens]
        # Where a row does not tell, the way goes on from the last one that does.
        last = np.maximum.accumulate(np.where(np.isfinite(path), np.arange(len(path))[:, None], 0), axis=0)
        steps, blurs = (np.take_along_axis(each, last, axis=0) for each in (path, blur))
        steps = np.maximum(np.abs(np.diff(steps, axis=0)) - blurs[1:] - blurs[:-1], 0.0)
        reach = np.nanmax(path, axis=0) - np.nanmin(path, axis=0)
        walked = np.nansum(steps, axis=0) / np.maximum(reach, 1e-300)
        walked[np.nanmax(steps, axis=0, initial=0.0) > 0.5 * reach] = np.inf
        at = int(walked.argmin())
        if walked[at] < _STEADY and reach[at] > 0.05 * np.nanmax(np.abs(path[:, at])):
            said, token = path[np.isfinite(path[:, at]), at], int(told[tokens[at]])
            return Suggestion(
                "logit_processor",
                STRONG,
                f"the values are those of a softmax in which the logit of token {token} moves ever further,"
                f" by {said[0]:+.3g}{how} near row {int(rows[0])} and {said[-1]:+.3g} near row {int(rows[-1])}",
            )
    return None


def _said(tokens: I64) -> str:
    return f"{len(tokens)} tokens ({', '.join(map(str, tokens[:8].tolist()))}{' …' if len(tokens) > 8 else ''})"
