"""Another temperature: not divided by T, divided twice, T on one side only, several, or one that changes as it goes."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from auditor.causes.evidence import STRONG, Evidence, Suggestion
from auditor.causes.fit import roundings
from auditor.causes.oracle import F64, I64, Oracle
from auditor.causes.search import Candidate, hinted, nearest
from auditor.compare import Logprobs

_LOWEST: Final = 0.05
_HIGHEST: Final = 20.0
_GRID: Final = 97
_WORK: Final = 1 << 24  # logits that are raised to a power on the grid
_LEAST: Final = 12
_ENOUGH: Final = 3
_HALVINGS: Final = 40
_SAME: Final = 1e-4
_MOVING: Final = 0.5  # of the steps from token to token
_TOGETHER: Final = 3  # temperatures of different tokens that are tried for all


def temperature(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The temperatures at which the reference gives what the side reports, and whether it then gives the same bits."""
    rows, heats = _of_each_row(evidence, oracle)
    best = nearest(evidence, oracle, _candidates(evidence, oracle, heats))
    if best is not None:
        yield best
    by_entropy = np.argsort(_entropies(oracle, rows), kind="stable")
    for order, along in ((np.arange(len(rows)), ""), (by_entropy, ", in the order of the rows' entropies")):
        for rising in (True, False):
            if said := _schedule(rows[order], heats[order], rising, along):
                yield said


def _entropies(oracle: Oracle, rows: np.ndarray) -> F64:
    z = oracle.own_logits[rows, : oracle.decoder.config.vocab].astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    mass = np.exp(z)
    entropies: F64 = np.log(mass.sum(axis=1)) - (mass * z).sum(axis=1) / mass.sum(axis=1)
    return entropies


def _candidates(evidence: Evidence, oracle: Oracle, heats: F64) -> Iterator[Candidate]:
    stated = oracle.temperature
    usual = {1.0: ", as if not divided at all", stated * stated: ", as if divided twice", 1.0 / stated: ", the inverse"}
    found = [value for heat in _commonest(heats, stated) for value in roundings(heat)]
    for heat in dict.fromkeys((*usual, *found)):
        if abs(heat / stated - 1.0) <= _SAME or not _LOWEST <= heat <= _HIGHEST:
            continue

        def values(rows: I64, heat: float = heat) -> Logprobs:
            return oracle.from_logits(oracle.own_logits[rows], heat, oracle.targets[rows])

        if hinted(evidence, oracle, values):
            name = f"temperature {heat:.4g}{usual.get(heat, '')}, where {stated:.4g} is stated"
            yield "temperature", name, oracle.from_logits(oracle.own_logits, heat)


def _commonest(heats: F64, stated: float) -> list[float]:
    """The median of those nearest to the stated one, and what comes most often in two digits."""
    usable = heats[np.isfinite(heats).any(axis=1)]
    if len(usable) < _ENOUGH:
        return []  # one number explains one value
    near = usable[np.arange(len(usable)), np.nanargmin(np.abs(np.log(usable / stated)), axis=1)]
    values, times = np.unique(np.round(usable[np.isfinite(usable)], 2), return_counts=True)
    return [float(np.median(near)), *(float(values[at]) for at in np.argsort(-times, kind="stable")[:_TOGETHER])]


def _of_each_row(evidence: Evidence, oracle: Oracle) -> tuple[np.ndarray, F64]:
    """Wrong rows, and the temperatures that each of them would have needed, float64 [rows,2]; NaN where there is none.

    A value is reached at no temperature, at one, or at two.
    """
    window, vocab = oracle.window, oracle.decoder.config.vocab
    wrong = np.flatnonzero(evidence.differs[window] & np.isfinite(evidence.found[window]))
    rows = wrong[np.linspace(0, len(wrong) - 1, min(len(wrong), max(_LEAST, _WORK // (_GRID * vocab)))).astype(int)]
    logits = oracle.own_logits[rows, :vocab].astype(np.float64)
    gaps = oracle.own_logits[rows, oracle.targets[rows]].astype(np.float64)[:, None] - logits
    wanted = evidence.found[window][rows].astype(np.float64)
    points = np.geomspace(_LOWEST, _HIGHEST, _GRID)
    over = np.array([_logp(gaps, np.full(len(rows), t)) > wanted for t in points]).reshape(_GRID, len(rows))
    heats = np.full((len(rows), 2), np.nan)
    for at, row in enumerate(over.T):
        crossings = np.flatnonzero(row[1:] != row[:-1])[:2]
        heats[at, : len(crossings)] = [
            _root(gaps[at : at + 1], wanted[at], points[i], points[i + 1]) for i in crossings
        ]
    return rows, heats


def _root(gaps: F64, wanted: float, low: float, high: float) -> float:
    """The temperature between two at which one row has the wanted value."""
    over = _logp(gaps, np.array([low]))[0] > wanted
    for _ in range(_HALVINGS):
        middle = float(np.sqrt(low * high))
        if (_logp(gaps, np.array([middle]))[0] > wanted) == over:
            low = middle
        else:
            high = middle
    return float(np.sqrt(low * high))


def _logp(gaps: F64, heat: F64) -> F64:
    """Log-probability of the drawn token at a temperature a row; gaps: its logit less each other one, [rows,V]."""
    z = -gaps / heat[:, None]
    top = z.max(axis=1)
    values: F64 = -(top + np.log(np.exp(z - top[:, None]).sum(axis=1)))
    return values


def _schedule(rows: np.ndarray, heats: F64, rising: bool, along: str) -> Suggestion | None:
    """Every token has a temperature of its own, and they follow one another."""
    if len(rows) < _LEAST:
        return None
    way = heats if rising else 1.0 / heats
    path = [float(np.nanmin(way[0], initial=np.inf))]
    for row in way[1:]:
        further = row[row >= path[-1] * (1 - _SAME)]
        if not further.size:
            return None
        path.append(max(float(further.min()), path[-1]))
    ends = (path[0], path[-1]) if rising else (1 / path[0], 1 / path[-1])
    steps = np.diff(path) > _SAME * np.array(path[1:])
    if not np.isfinite(ends).all() or steps.mean() < _MOVING or path[-1] < 1.02 * path[0]:
        return None
    return Suggestion(
        "temperature",
        STRONG,
        f"each value is that of a temperature of its own, from {ends[0]:.4g} at token {rows[0]} of the window to"
        f" {ends[1]:.4g} at token {rows[-1]}, never turning back{along}; {len(rows)} tokens were looked at",
    )
