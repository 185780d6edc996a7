"""Values made of more than the right value: a logit, its row's sum, best or entropy, another heat's or version's value.

Each is a sum of two such numbers of its own row with the same weights everywhere, as it is or as a probability.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Final

import numpy as np

from auditor.causes.evidence import SETTLED, Evidence, Suggestion
from auditor.causes.oracle import F64, Oracle, VersionUnavailable

_LEAST: Final = 12
_MOST_ROWS: Final = 1 << 22  # probabilities that are looked at
_LEFT: Final = 2e-4  # of the difference
_LAST_BITS: Final = 2e-6
_FAR: Final = 1e-3
_NO_WEIGHT: Final = 1e-4
_WHOLE: Final = "the value"
_OWN: Final = "the right value"


def combined_values(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The one or two numbers of each row, and the weights, that make every value, or every wrong one."""
    window, vocab = oracle.window, oracle.decoder.config.vocab
    wrong = np.flatnonzero(evidence.differs[window] & np.isfinite(evidence.found[window]))
    wrong = wrong[: max(_LEAST, _MOST_ROWS // vocab)]
    found, truth = (values[window][wrong].astype(np.float64) for values in (evidence.found, evidence.truth))
    if wrong.size < _LEAST or np.median(np.abs(found - truth)) < _FAR or np.ptp(found) < _FAR:
        return
    numbers = {_OWN: truth, **_of_rows(oracle, wrong), **_of_versions(evidence, oracle, wrong)}
    chances = {name: np.exp(np.minimum(n, 0.0)) for name, n in numbers.items()}
    for of, made, wanted in (("value", numbers, found), ("probability", chances, np.exp(np.minimum(found, 0.0)))):
        if of == "probability" and found.max() > 0.0:
            return
        size = np.abs(wanted - made[_OWN]).mean()
        for names in (*((name,) for name in made), *combinations(made, 2)):
            matrix = np.stack([*(made[name] for name in names), np.ones(wrong.size)], axis=1)
            weights = np.linalg.lstsq(matrix, wanted, rcond=None)[0]
            left = float(np.abs(matrix @ weights - wanted).mean())
            same = names[0].startswith((_WHOLE, _OWN)) and abs(weights[0] - 1.0) < _NO_WEIGHT
            if len(names) == 1 and same and abs(weights[-1]) < _NO_WEIGHT:
                continue  # another cause's
            if left < _LEFT * size and left < _LAST_BITS * (1.0 + np.abs(wanted).mean()) and _counts(matrix, weights):
                said = " and ".join(f"{w:.4g} times {name}" for w, name in zip(weights, names, strict=False))
                more = f" and {weights[-1]:+.4g}" if abs(weights[-1]) > _NO_WEIGHT else ""
                where = "" if wrong.size == len(evidence.found[window]) else f", at {wrong.size} tokens"
                yield Suggestion("value_transform", SETTLED, f"each {of} is {said}{more}{where}")
                return


def _counts(matrix: F64, weights: F64) -> bool:
    """Whether each of the numbers moves the sum, and the right value by itself would not do."""
    return bool((np.abs(weights[:-1]) * matrix[:, :-1].std(axis=0) > _NO_WEIGHT).all())


def _of_rows(oracle: Oracle, rows: np.ndarray) -> Mapping[str, F64]:
    raw = oracle.own_logits[rows, : oracle.decoder.config.vocab].astype(np.float64)
    z, every = raw / oracle.temperature, np.arange(rows.size)
    top = z.max(axis=1)
    lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    entropy = lse - (np.exp(z - lse[:, None]) * z).sum(axis=1)
    chosen = oracle.targets[rows]
    best = raw.max(axis=1)
    unheated = raw[every, chosen] - best - np.log(np.exp(raw - best[:, None]).sum(axis=1))
    numbers = {"the token's logit": z[every, chosen], "the largest logit": top, "the row's entropy": entropy}
    if oracle.temperature != 1.0:
        numbers["the value at temperature 1"] = unheated
    return numbers


def _of_versions(evidence: Evidence, oracle: Oracle, rows: np.ndarray) -> Mapping[str, F64]:
    before = sorted(version for version in oracle.versions if version < evidence.record.weight_version)
    numbers = {}
    for version in dict.fromkeys((*before[-1:], *before[:1])):
        try:
            values = oracle.logprobs_of(version)[rows]
        except VersionUnavailable:
            continue
        numbers[f"the value of version {version}"] = values.astype(np.float64)
    return numbers
