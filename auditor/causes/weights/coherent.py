"""One thing on the way that is larger or smaller than it should be, by the same factor at every token.

Other weights, other tokens and roundings move each token's value their own way. Where one factor of what a product, a
norm or all of a kind computes explains the differences of many tokens, an op or its constant is another one, even
though nobody knows which.

B wrong rows of the response.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from auditor.causes.evidence import STRONG, Evidence, Suggestion
from auditor.causes.fit import few_digits
from auditor.causes.oracle import F64, Oracle
from auditor.causes.weights.mixture import Guess, Measured, measured_of
from auditor.causes.weights.parts import kind_of
from auditor.causes.weights.response import Response
from auditor.causes.weights.versions import told
from rl_kernel.reference.ops import Bits, narrow, widen

_GAINED: Final = 9.0  # as a logarithm: what of some forty factors is none by chance
_SHARE: Final = 0.2  # of the square of a difference
_POINTING: Final = 0.46
_NORMED: Final = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
_NOTHING: Final = 0.25  # a factor that leaves hardly anything of a tensor: it holds something else
_LEAST: Final = 1.5  # in roundings


def one_factor(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """A tensor of which all values are multiplied, to the bit; or what it is that one factor would explain."""
    measured = measured_of(evidence, oracle)
    if measured is None or not isinstance(measured.response, Response) or measured.size < _LEAST:
        return
    features, delta = _features(measured.response), measured.delta
    moved = {name: float(x @ delta) / float(x @ x) for name, x in features.items() if x.any()}
    left = {name: delta - factor * features[name] for name, factor in moved.items()}
    name = min(left, key=lambda n: float(left[n] @ left[n]))
    share = 1.0 - float(left[name] @ left[name]) / float(delta @ delta)
    if -0.5 * len(delta) * np.log(1.0 - share) < _GAINED or share < _SHARE:
        return
    factor = 1.0 + moved[name]
    exact = measured.first_exact(_guesses(measured, name, factor), most=8)
    if exact is not None:
        yield from told(evidence, measured, exact, None)
    else:
        said = (
            f"the difference at {len(delta)} tokens is that of {name} times {factor:.3g}, by {share:.0%} of its square"
        )
        cause = "other_weights" if abs(factor) < _NOTHING else "model_config"
        yield Suggestion(cause, max(_POINTING, STRONG * (1.0 - float(np.sqrt(1.0 - share)))), said)


def _guesses(measured: Measured, name: str, factor: float) -> Iterator[Guess]:
    weights = measured.oracle.decoder.weights
    for number in dict.fromkeys([*few_digits(abs(factor)), 0.5, 2.0, 0.0]):

        def make(number: float = number) -> Mapping[str, Bits]:
            wanted = {n for n in weights if n == name or kind_of(n) == name}
            return {n: narrow(widen(weights[n]) * np.float32(number)) for n in wanted}

        yield Guess("other_weights", f"{name} times {number:g}", abs(number - factor), make, 0.0 * measured.delta)


def _features(response: Response) -> dict[str, F64]:
    """What a factor of each tensor, and of each kind of them, makes of the values, [B] in roundings."""
    found: dict[str, F64] = {}
    normed = response.backward.decoder.config.qk_norm
    for signal in response.backward.signals():
        # A norm makes the same of any factor; and less of all logits is what every large fault looks like.
        if ".layers." not in signal.tensor or (normed and kind_of(signal.tensor) in _NORMED):
            continue
        weight = response.backward.weights[signal.tensor]
        if signal.given is None:
            each = signal.of_output @ weight
        elif signal.of_output.ndim == 3:
            each = np.einsum("btn,tn->b", signal.of_output, signal.given @ weight.T)
        else:
            continue
        effect: F64 = response.in_roundings(each.astype(np.float64))
        found[signal.tensor] = effect
        kind = kind_of(signal.tensor)
        found[kind] = found.get(kind, np.zeros(len(effect))) + effect
    return found
