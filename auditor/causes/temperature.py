"""Another temperature: not divided by T, divided twice, or T on one side only (raw instead of processed)."""

from collections.abc import Iterator

import numpy as np

from auditor.causes.evidence import Evidence, Suggestion, bits_hit, explained, worth_saying
from auditor.causes.fit import best_fit
from auditor.causes.oracle import F64, Oracle

_ROWS = 16
_LOWEST, _HIGHEST = 0.05, 20.0


def temperature(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The temperature at which the reference gives what the side reports, and whether it then gives the same bits."""
    window = oracle.window
    found, truth, active = evidence.found[window], evidence.truth[window], evidence.active[window]
    stated = oracle.temperature
    fitted = _fit(oracle, found, active)
    candidates = [1.0, stated * stated, 1.0 / stated, *(round(fitted, digits) for digits in (1, 2, 3)), fitted]
    best, best_score, best_predicted = stated, 0.0, truth
    for candidate in dict.fromkeys(candidates):
        if candidate == stated or not _LOWEST <= candidate <= _HIGHEST:
            continue
        predicted = oracle.from_logits(oracle.own_logits, candidate)
        score = explained(found, truth, predicted, active)
        if score > best_score:
            best, best_score, best_predicted = candidate, score, predicted
    if worth_saying(best_score):
        how = {1.0: ", as if not divided at all", stated * stated: ", as if divided twice"}.get(best, "")
        yield Suggestion(
            "temperature",
            best_score,
            f"the values are those of temperature {best:.4g}{how}; {stated:.4g} is stated; "
            + bits_hit(found, best_predicted, active),
        )


def _fit(oracle: Oracle, found: np.ndarray, active: np.ndarray) -> float:
    """The temperature of the smallest mean error on a few rows."""
    usable = np.flatnonzero(active & np.isfinite(found))[:_ROWS]
    if usable.size == 0:
        return oracle.temperature
    logits: F64 = oracle.own_logits[usable, : oracle.decoder.config.vocab].astype(np.float64)
    chosen = oracle.own_logits[usable, oracle.targets[usable]].astype(np.float64)
    wanted = found[usable].astype(np.float64)

    def error(t: float) -> float:
        z = logits / t
        top = z.max(axis=1)
        lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
        return float(np.abs(chosen / t - lse - wanted).mean())

    return best_fit(error, _LOWEST, _HIGHEST) or oracle.temperature
