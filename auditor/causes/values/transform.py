"""Values made of the right ones: another base, a sign, probabilities for logarithms, a clamp, a mean, fewer digits."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from auditor.causes.evidence import HINT, IN_PART, STRONG, Evidence, Suggestion

_LEAST: Final = 12
_STEPS: Final = 8  # of fp32, that a decimal is at least
_PARTS: Final = 6  # of the smallest step between two values, that it may be several times
_LEVELS: Final = 1 << 16
_REACH: Final = 3  # tokens on each side that a mean is taken over
_MORE_THAN_ROUNDING: Final = 0.01
_MORE_THAN_LAST_BITS: Final = 1e-4

Said = tuple[float, str]
NOTHING: Final[Said] = (0.0, "")

_BASES: Final = {1 / np.log(2.0): "logarithms of base 2", 1 / np.log(10.0): "logarithms of base 10", -1.0: "negated"}


def value_transform(evidence: Evidence) -> Iterator[Suggestion]:
    """A limit that values do not pass, a function of each value, a mixture of several."""
    found, truth = _finite(evidence)
    if found.size < _LEAST:
        return
    if said := _limited(found, truth) or _one_value(found, truth):
        yield Suggestion("value_transform", STRONG + 0.05, said)
        return
    if np.ptp(found) == 0.0:
        return  # a number that stands for all of them
    for score, said in (
        _in_turns(found, truth),
        _on_a_grid(found, truth),
        _shifted(found, truth),
        *_of_each(found, truth),
        _mixed(found, truth),
    ):
        if said:
            yield Suggestion("value_transform", score, said)
            return


def _of_each(found: np.ndarray, truth: np.ndarray) -> Iterator[Said]:
    """Values in the order of the right ones and far from them, all of them or wherever they are wrong."""
    wrong = found != truth
    for part in (np.ones(len(found), np.bool_), wrong):
        if part.sum() >= _LEAST:
            score, said = _function(found[part], truth[part])
            yield score, said + ("" if part.all() else f", at {int(part.sum())} tokens of {part.size}") if said else ""


def _function(found: np.ndarray, truth: np.ndarray) -> Said:
    if np.median(np.abs(found - truth) / np.maximum(np.abs(truth), 1e-3)) < _MORE_THAN_ROUNDING:
        return NOTHING
    steps = np.diff(found[np.argsort(truth, kind="stable")])
    rising, falling = float((steps >= 0).mean()), float((steps <= 0).mean())
    if max(rising, falling) < 0.98 or len(np.unique(found)) < found.size // 3:
        return NOTHING
    slope = float(found @ truth / (truth @ truth))
    straight = float(np.abs(found - slope * truth).max()) < 1e-3 * float(np.abs(found).max())
    name = next((text for factor, text in _BASES.items() if abs(slope - factor) < 1e-3 * abs(factor)), "")
    how = f"{slope:.5g} times the reference's" + (f", {name}" if name else "") if straight else "a function of them"
    turned = " turned round" if falling > rising else ""
    said = f"the {found.size} values are in the reference's order{turned}: {how}"
    return (STRONG if straight else HINT + 0.2), said


def _limited(found: np.ndarray, truth: np.ndarray) -> str:
    """All that differ have one value, or one of two, beyond which the right ones lie."""
    differs = found != truth
    if differs.sum() < 3 or differs.all():
        return ""
    low, high = differs & (truth < found), differs & (truth > found)
    said = []
    for there, limit, how in ((low, found.min(), "below"), (high, found.max(), "above")):
        if there.any() and ((found[there] != limit).any() or limit == 0.0):
            return ""
        if there.any():
            said.append(f"{how} {limit:.4g}, where {int(there.sum())} of the reference's do")
    return f"no value lies {' and none '.join(said)}"


def _shifted(found: np.ndarray, truth: np.ndarray) -> Said:
    """One number added to every value, or to every probability before its logarithm was taken."""
    for name, moved in (("value", found - truth), ("probability", np.exp(found) - np.exp(truth))):
        size = float(np.median(moved))
        noise = 4e-7 * (np.abs(truth) + 1.0 if name == "value" else np.exp(truth) * (np.abs(truth) + 1.0))
        if abs(size) > 8 * float(np.median(noise)) and (np.abs(moved - size) < 0.02 * abs(size) + noise).all():
            # Mass that a filter left out may be much the same everywhere; what is added to a probability is not.
            return (IN_PART if name == "probability" else STRONG), f"{size:+.4g} is added to every {name}"
    return NOTHING


def _one_value(found: np.ndarray, truth: np.ndarray) -> str:
    """The same everywhere, and one that sums the right ones up."""
    if np.ptp(found) > 1e-5 * abs(float(found[0])):
        return ""
    sums = {
        "mean": truth.mean(),
        "sum": truth.sum(),
        "median": np.median(truth),
        "smallest": truth.min(),
        "largest": truth.max(),
    }
    name = next((name for name, value in sums.items() if abs(value - found[0]) < 1e-3 * abs(value)), "")
    if not name and np.ptp(found) == 0.0:
        return ""
    return f"all {found.size} values are {found[0]:.5g}" + (f", the {name} of the reference's" if name else "")


def _on_a_grid(found: np.ndarray, truth: np.ndarray) -> Said:
    """Rounded or cut to multiples of something, themselves or as probabilities: printed, or held in few bits."""
    narrow = found.astype(np.float32)
    if not (narrow.view(np.uint32) & 0xFFFF).any() or (narrow.astype(np.float16) == narrow).all():
        return NOTHING  # what 16 bits hold is a multiple of something, too
    for of, side, right in (("values", found, truth), ("probabilities", np.exp(found), np.exp(truth))):
        if side.max() > 1.0 and of == "probabilities":
            break
        above = np.unique(side) - side.min()
        finest = float(np.diff(above).min(initial=np.inf))
        blur = 4e-7 * np.abs(side).max() if of == "values" else 4e-7 * float((side * (1 - found)).max())
        for part in range(1, _PARTS):
            unit = finest / part
            if not _STEPS * blur < unit < np.ptp(side) or np.ptp(side) > _LEVELS * unit:
                continue
            for far in above[1:].tolist():  # the farther, the better it is known
                unit = far / max(1.0, np.rint(far / unit))
            left = np.abs(above / unit - np.rint(above / unit)) * unit
            if (left <= max(2 * blur, 0.01 * unit)).all() and _off_by(side - right, unit):
                digits = round(-np.log10(unit))
                decimal = abs(unit * 10.0**digits - 1.0) < 1e-3
                how = f"have at most {digits} decimals" if decimal else f"lie {unit:.4g} apart, or a multiple of it"
                return STRONG + 0.06, f"all {of} {how}"
    return NOTHING


def _off_by(errors: np.ndarray, unit: float) -> bool:
    """Whether errors are those of rounding or cutting to a unit: none larger, and not all far smaller."""
    size = np.abs(errors)
    return bool((size < 1.02 * unit).all() and size.mean() > 0.05 * unit)


def _in_turns(found: np.ndarray, truth: np.ndarray) -> Said:
    """Runs of one number that sums up the right ones there, or sums that begin anew with each turn."""
    edges = np.flatnonzero(np.diff(found) != 0.0) + 1
    if edges.size and edges.size <= found.size // 3:
        runs = [slice(a, b) for a, b in pairwise((0, *edges.tolist(), found.size))]
        for name, of in (("means", np.mean), ("sums", np.sum), ("smallest", np.min), ("largest", np.max)):
            if all(abs(of(truth[run]) - found[run][0]) < 1e-4 * (1 + abs(found[run][0])) for run in runs):
                return STRONG + 0.06, f"the values are the {name} of {len(runs)} turns"
    begun = np.abs(found - truth) < 1e-4
    going = np.abs(np.diff(found) - truth[1:]) < 1e-4 * (1 + np.abs(found[1:]))
    if (begun[1:] | going).all() and begun[0] and going.mean() > 0.5:
        turns = int((~going).sum()) + 1
        each = f" of each of {turns} turns" if turns > 1 else ""
        return STRONG + 0.05, f"the values are sums from the first token on{each}"
    return NOTHING


def _mixed(found: np.ndarray, truth: np.ndarray) -> Said:
    """Each value a sum of right ones, or of the ones before it, with the same few weights everywhere."""
    before = np.concatenate([[0.0], found[:-1]])
    near = [np.roll(truth, lag) for lag in range(-_REACH, _REACH + 1)]
    count = np.arange(1.0, len(truth) + 1.0)
    sums = np.cumsum(truth)
    bases = {
        "sums from the first token on": [sums],
        "means from the first token on": [sums / count],
        "sums to the last token": [sums[-1] - sums + truth],
        "values weighted with what was said before": [truth, before],
        "weighted means of neighbours": near,
        "values that a count of tokens multiplies": [truth * count, truth],
        "values divided by a count of tokens": [truth / count],
    }
    inner = slice(_REACH, -_REACH)
    size = float(np.abs(found - truth)[inner].mean())
    if size < _MORE_THAN_LAST_BITS:
        return NOTHING
    for name, columns in bases.items():
        matrix = np.stack(columns, axis=1)[inner]
        weights = np.linalg.lstsq(matrix, found[inner], rcond=None)[0]
        left = np.abs(matrix @ weights - found[inner]).mean()
        if matrix.shape[0] > 2 * matrix.shape[1] and left < 1e-3 * size and left < _MORE_THAN_LAST_BITS:
            return STRONG, f"the values are {name}, with weights {', '.join(f'{w:.4g}' for w in weights)}"
    usable = (found != 0.0).all() and (truth != 0.0).all()
    ratios = np.log(np.abs(found / truth)) if usable else np.zeros(len(found))
    trend = np.polyfit(count, ratios, 1)
    if abs(trend[0]) > 1e-5 and np.abs(np.polyval(trend, count) - ratios).max() < 1e-4:
        return STRONG, f"each value is {np.exp(trend[0]):.4g} times as large, beside the reference's, as the one before"
    return NOTHING


def _finite(evidence: Evidence) -> tuple[np.ndarray, np.ndarray]:
    usable = evidence.active & np.isfinite(evidence.found) & np.isfinite(evidence.truth)
    return evidence.found[usable].astype(np.float64), evidence.truth[usable].astype(np.float64)
