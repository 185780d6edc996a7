"""Top-k, top-p, min-p and their kin on one side: its probabilities are divided by the mass that was kept.

found − truth is then −ln(mass kept) at every token, and the mass is the sum of the k largest probabilities for some k,
at the stated temperature or at the filter's own. Over the tokens, those k say which filter it was: every filter keeps
the tokens up to some limit of its own measure, and so every kept token is within it and the next one is not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from auditor.causes.evidence import HINT, STRONG, Evidence, Suggestion
from auditor.causes.oracle import F32, F64, I64, Oracle
from auditor.causes.search import Candidate, nearest

_TOLERANCE: Final = (
    2e-4  # of a logarithm of a mass: fp32 noise of both sides, far below the step from one k to the next
)
_FINE: Final = 2e-5  # the same where the temperature is open, too
_ROWS: Final = 64
_FEW: Final = 12
_ALL: Final = 1 << 22  # probabilities that are held at a time
_WORK: Final = 1 << 25  # probabilities that are looked at to find a temperature
_HEATS: Final = (np.arange(5, 201) / 100, np.arange(1, 31) / 10, np.array([0.6, 0.7, 0.8, 1.0]))
_MOSTLY: Final = 0.9
_STEP: Final = 1e-9  # of a measure
_TOO_FEW: Final = 0.25  # of the tokens: where likelier ones than the drawn one must have been left out
_ALONE: Final = ("top_k", "top_p", "min_p", "epsilon", "top_a", "top_n_sigma")
_TOGETHER: Final = (("top_k", "top_p"), ("top_k", "min_p"), ("top_p", "min_p"), ("top_k", "top_p", "min_p"))
_AMONG: Final = "top_p among them"
_MORE: Final = 64  # tokens that top_k may leave beyond those that any row kept


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows at one temperature: which tokens are likeliest, and their probabilities. rows: [R]; p, mass: [R,V]."""

    rows: I64
    p: F64
    mass: F64
    chosen: F64  # of the drawn token
    kept: I64  # how many of the likeliest have the mass that the side's value says
    fits: np.ndarray  # bool [R]: whether they have it


def truncation(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """Whether one filter explains every token, at the stated temperature or beside another one."""
    window = oracle.window
    found, truth = evidence.found[window], evidence.truth[window]
    wrong = evidence.active[window] & np.isfinite(found) & np.isfinite(truth)
    # A filter may hold for a part only; where it keeps all there is nothing to see.
    wrong &= np.abs(found.astype(np.float64) - truth) > _TOLERANCE
    rows = np.flatnonzero(wrong)[: min(_ROWS, max(_FEW, _ALL // oracle.decoder.config.vocab))]
    if rows.size < 4 or found[rows].max() > _TOLERANCE:
        return
    if not found[rows].any() and rows.size < rows[-1] - rows[0] + 1:
        return  # one token kept at each says no more than that the value is 0, and values among them are right
    lifts = found[rows].astype(np.float64) - truth[rows]
    if lifts.min() > -_TOLERANCE:
        seen = _look(evidence, oracle, rows, oracle.temperature, _TOLERANCE)
        if seen.fits.mean() >= _MOSTLY:
            if said := _filtered(evidence, oracle, seen):
                yield said
                return
        elif short := _short(seen, lifts):
            yield short
    yield from _beside_a_temperature(evidence, oracle, rows)


def _filtered(evidence: Evidence, oracle: Oracle, seen: _Rows) -> Suggestion | None:
    """The filter of the stated temperature, or of 1, that kept those tokens."""
    name = ""
    for heat in dict.fromkeys((oracle.temperature, 1.0)):
        # Whatever the temperature, the likeliest tokens are the same ones.
        if limits := _limits(_measures(oracle, seen.rows, heat), seen.kept, seen.fits):
            name = _said(limits) + (f" at temperature {heat:g}" if heat != oracle.temperature else "")
            break
    if not name and _is_sharp(seen.mass[seen.fits], seen.kept[seen.fits]):
        name = "some filter, or several at once"
    if not name:
        return None
    return Suggestion(
        "truncated_sampling",
        STRONG * float(seen.fits.mean()) + (0.05 if seen.fits.all() else 0.0),
        f"the values are those of {name}: at {int(seen.fits.sum())} of {seen.rows.size} tokens the probability is"
        f" divided by the mass of the {int(seen.kept.min())} to {int(seen.kept.max())} likeliest tokens",
    )


def _short(seen: _Rows, lifts: F64) -> Suggestion | None:
    """Less was kept than the tokens that are likelier than the drawn one: what no filter of the likeliest does."""
    chosen = seen.chosen
    likelier = np.where(seen.p > chosen[:, None] * (1 + _TOLERANCE), seen.p, 0.0).sum(axis=1) + chosen
    short = np.exp(-lifts) < likelier * (1 - _TOLERANCE)
    if short.mean() < _TOO_FEW:
        return None
    return Suggestion(
        "logit_processor",
        HINT + 0.1,
        f"the values are those of a softmax that leaves out likelier tokens than the drawn one, at {int(short.sum())}"
        f" of {short.size} tokens, as where only some are allowed",
    )


def _beside_a_temperature(evidence: Evidence, oracle: Oracle, rows: I64) -> Iterator[Suggestion]:
    """A filter and another temperature than the stated one, which few tokens tell apart from all others."""
    few = rows[np.linspace(0, len(rows) - 1, min(_FEW, len(rows))).astype(np.int64)]
    ordered = ordered_logits(oracle, few)
    heats = next((h for h in _HEATS if h.size * few.size * oracle.decoder.config.vocab < _WORK), _HEATS[-1])
    for heat in heats.tolist():
        if abs(heat - oracle.temperature) < _TOLERANCE:
            continue
        seen = _look(evidence, oracle, few, heat, _FINE, ordered)
        if seen.fits.mean() < _MOSTLY or seen.mass[np.arange(few.size), seen.kept - 1].min() > 1 - _TOLERANCE:
            continue
        seen = _look(evidence, oracle, rows, heat, _FINE)
        if seen.fits.mean() >= _MOSTLY and (best := nearest(evidence, oracle, _joint(oracle, seen, heat))):
            yield best
            return


def _joint(oracle: Oracle, seen: _Rows, heat: float) -> Iterator[Candidate]:
    """The values of the filters that kept those tokens, chosen at that temperature or at another one."""
    for of in dict.fromkeys((heat, 1.0, oracle.temperature)):
        if limits := _limits(_measures(oracle, seen.rows, of), seen.kept, seen.fits):
            logits: F32 = oracle.own_logits.copy()
            for at in range(len(logits)):
                gone = _order(oracle, at)[_within(_measures(oracle, np.array([at]), of), limits) :]
                logits[at, gone[gone != oracle.targets[at]]] = -np.inf
            name = f"{_said(limits)}, and of temperature {heat:g} where {oracle.temperature:g} is stated"
            yield "truncated_sampling", name, oracle.from_logits(logits, heat)


def _order(oracle: Oracle, row: int) -> I64:
    """Tokens of a row, the likeliest first."""
    return np.argsort(-oracle.own_logits[row, : oracle.decoder.config.vocab], kind="stable")


def _look(
    evidence: Evidence, oracle: Oracle, rows: I64, heat: float, tolerance: float, ordered: F64 | None = None
) -> _Rows:
    """How many of the likeliest tokens were kept in some rows, as the values say at a temperature.

    A side that filters what another one drew keeps the drawn token beside the likeliest. ordered: as of
    `ordered_logits`, where it is known.
    """
    z = ordered_logits(oracle, rows) if ordered is None else ordered
    p, own = _heated(z, heat), oracle.own_logits[rows, oracle.targets[rows]].astype(np.float64)
    logp = (own - z[:, 0]) / heat + np.log(p[:, 0])
    mass, chosen = np.cumsum(p, axis=1), np.exp(logp)
    lifts = evidence.found[oracle.window][rows].astype(np.float64) - logp
    wanted, every = np.exp(-np.maximum(lifts, 0.0)), np.arange(rows.size)
    within = np.array([_count(row, m) for row, m in zip(mass, wanted, strict=True)])
    beside = np.array([_count(row, m) for row, m in zip(mass, wanted - chosen, strict=True)])
    left = np.abs(np.log(mass[every, within - 1]) + lifts)
    left_beside = np.abs(np.log(mass[every, beside - 1] + chosen) + lifts)
    left_beside[p[every, beside - 1] < chosen * (1 + tolerance)] = np.inf  # it is one of them
    kept = np.where(left_beside < left, beside, within)
    return _Rows(rows, p, mass, chosen, kept, np.minimum(left, left_beside) < tolerance)


def ordered_logits(oracle: Oracle, rows: I64) -> F64:
    """Logits of each row, the largest first, float64 [rows,V]."""
    ordered: F64 = -np.sort(-oracle.own_logits[rows, : oracle.decoder.config.vocab].astype(np.float64), axis=1)
    return ordered


def _heated(ordered: F64, heat: float) -> F64:
    """Probabilities of such rows at a temperature."""
    p: F64 = np.exp((ordered - ordered[:, :1]) / heat)
    p /= p.sum(axis=1, keepdims=True)
    return p


def _count(mass: F64, wanted: float) -> int:
    """How many of the likeliest tokens have a mass nearest to `wanted`."""
    at = int(np.searchsorted(mass, wanted))
    candidates = [k for k in (at - 1, at) if 0 <= k < len(mass)]
    return min(candidates, key=lambda k: abs(mass[k] - wanted)) + 1


def _is_sharp(mass: F64, kept: np.ndarray) -> bool:
    """Whether one token more or less would not have fitted: among many small masses some sum always does."""
    rows = np.arange(len(kept))
    one_more = mass[rows, np.minimum(kept, mass.shape[1] - 1)]
    return bool(np.median(np.log(one_more) - np.log(mass[rows, kept - 1])) > 10 * _TOLERANCE)


def _measures(oracle: Oracle, rows: I64, heat: float) -> dict[str, F64]:
    """By each filter's measure, how far a token is from the likeliest, float64 [R,V], the likeliest first."""
    p = _heated(ordered_logits(oracle, rows), heat)
    own, largest = -np.log(np.maximum(p, 1e-300)), -np.log(p[:, :1])
    spread = (oracle.own_logits[rows, : oracle.decoder.config.vocab].astype(np.float64) / heat).std(axis=1)
    ranks = np.broadcast_to(np.arange(1.0, p.shape[1] + 1.0), p.shape)
    before = np.cumsum(p, axis=1) - p
    measures = ranks, before, own - largest, own, own - 2 * largest, (own - largest) / spread[:, None]
    return dict(zip(_ALONE, measures, strict=True))


def _among(measures: dict[str, F64], count: int) -> dict[str, F64]:
    """With top_p as it is where top_k of `count` comes first."""
    before = measures["top_p"]
    whole = before[:, count : count + 1] if count < before.shape[1] else np.ones((len(before), 1))
    return {**measures, _AMONG: before / whole}


def _limits(measures: dict[str, F64], kept: I64, fits: np.ndarray) -> dict[str, float]:
    """The filters, one, two or three, whose limits kept so many tokens of each row that fits; empty where none did."""
    here, vocab = np.flatnonzero(fits), measures["top_k"].shape[1]
    last, beyond, most = kept[here] - 1, np.minimum(kept[here], vocab - 1), int(kept[here].max())

    def limits(names: tuple[str, ...], by: dict[str, F64]) -> dict[str, float]:
        """Each filter's tightest limit, if every row's next token is beyond one, and each is needed."""
        tight = {name: float(by[name][here, last].max()) for name in names}
        dropped = np.array([by[name][here, beyond] > tight[name] + _STEP for name in names]) | (kept[here] == vocab)
        return tight if dropped.any(axis=0).all() and (dropped.sum(axis=1) >= min(2, len(here))).all() else {}

    for names in (*((name,) for name in _ALONE), *_TOGETHER):
        if found := limits(names, measures):
            return found
    for count in range(most, min(most + _MORE, vocab)):
        if found := limits((_AMONG,), _among(measures, count)):
            return {"top_k": float(count), **found}
        if count == most and (found := limits(("top_k", _AMONG), _among(measures, count))):
            return found
    return {}


def _within(measures: dict[str, F64], limits: dict[str, float]) -> int:
    """How many of the likeliest tokens of one row are within all limits."""
    if _AMONG in limits:
        measures = _among(measures, int(limits["top_k"]))
    return min(int((measures[name][0] <= limit + _STEP).sum()) for name, limit in limits.items())


def _said(limits: dict[str, float]) -> str:
    """`top_k 20 and top_p above 0.9493`."""
    how = {
        "top_k": lambda limit: f"top_k {limit:.0f}",
        "min_p": lambda limit: f"min_p up to {np.exp(-limit):.4f}",
        "epsilon": lambda limit: f"a least probability up to {np.exp(-limit):.3g}",
        "top_a": lambda limit: f"top_a up to {np.exp(-limit):.4f}",
        "top_n_sigma": lambda limit: f"top_n_sigma from {limit:.4f} on",
    }
    parts = (how[name](limit) if name in how else f"{name} above {limit:.4f}" for name, limit in limits.items())
    return " and ".join(parts)
