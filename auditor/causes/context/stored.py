"""Keys and values held in fewer bits: which of them, in which layers and heads, for which rows, under what scale.

What a rounding does to each layer's attention is computed, and what that does to the values is known to the first
order; so all roundings of keys or values, anywhere, are told apart by one attention each.

B rows that are asked for, T tokens, L layers, G key heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from auditor.causes.computation.precision import CASTS, FORMATS, OF_KEYS, Coarse, Rounding, coarse
from auditor.causes.context.slots import Kv, Place, Tenant, asked, cached, in_place, pointing, scopes, whitening
from auditor.causes.edits import plain_reference
from auditor.causes.evidence import SETTLED, Evidence, Suggestion
from auditor.causes.oracle import F32, F64, I64, Oracle
from auditor.causes.search import Model, nearest, nearest_model
from auditor.causes.weights.response import Response
from rl_kernel.reference.ops import Bits, narrow, widen

_FEW: Final = 2  # rows whose bits tell
_ALIKE: Final = 4  # roundings that have them
_TRIED: Final = 32
_ATTENTION: Final = 0.2  # of a forward
_GAINED: Final = 15.0  # as a logarithm: what of so many roundings is none by chance
_BEYOND: Final = 1.5  # in roundings: less may be any
_MUCH: Final = 0.3  # of the square of a difference
_POWERS: Final = tuple(2.0**power for power in range(-4, 7) if power)
_CLIPPED: Final = (0.999, 0.995, 0.99, 0.98, 0.95, 0.9)  # of the values are below the largest that is held
_WHOLE: Final = ("a tensor", "a head", "a channel")  # scales that all tokens share
_LIMITS: Final = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
_USUAL: Final = (  # the commonest first; whether only rows that decode read them, or those of the prompt, too
    ("in FP8 (E4M3) without a scale", False),
    ("in FP8 (E4M3) without a scale", True),
    ("in FP8 (E5M2) without a scale", False),
    ("in FP8 (E4M3) with a scale a token and head", False),
    ("in FP8 (E4M3) with a scale a tensor", False),
    ("in FP8 (E5M2) without a scale", True),
    ("in 8-bit integers with a scale a token and head", False),
    ("in FP8 (E4M3) with a scale a head", False),
)


def usual_caches(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """What most caches are held in, of all tokens in all layers: also of a model that is too large to be run back."""
    if evidence.begins is None and (best := nearest_model(evidence, oracle, _usual(oracle))):
        yield best


def _usual(oracle: Oracle) -> Iterator[Model]:
    known, config = dict(_roundings()), oracle.decoder.config
    every = np.ones((config.layers, config.kv_heads), np.bool_)
    for name, late in _USUAL:
        whole = any(shared in name for shared in _WHOLE)
        tenant = Tenant("kv_precision", f"{{}} {name}", partial(_of_slots, known[name]), whole=whole)
        place = Place(tenant, 0, len(oracle.tokens), oracle.prompt_len * late, 0, every, "", 0.0)
        yield Model("kv_precision", f"an attention with {place.name}", in_place(oracle.decoder, place), whole=whole)


def stored_in_fewer_bits(evidence: Evidence, oracle: Oracle) -> Iterator[Suggestion]:
    """The rounding that has the side's bits, or that the difference points to."""
    window = oracle.window
    if evidence.begins is not None:
        return  # nothing is held in fewer bits from some token on
    rows, response = asked(evidence, oracle)
    if response is None:
        return
    found, truth = (values[window][rows] for values in (evidence.found, evidence.truth))
    measured = _Measured(oracle, response, found.astype(np.float64) - truth)
    places = sorted(measured.places(), key=lambda place: place.unlikely)[:_TRIED]
    exact = [place for place in _everywhere_too(places) if _is_exact(oracle, place, rows, found)][:_ALIKE]
    gained = measured.nothing - places[0].unlikely
    tried = exact or (places[:1] if gained > _GAINED and measured.size > _BEYOND else [])
    said = [f"an attention with {place.name}" for place in tried]
    values = (oracle.logprobs(in_place(oracle.decoder, place)) for place in tried)
    best = nearest(evidence, oracle, (("kv_precision", name, v) for name, v in zip(said, values, strict=True)))
    if best is not None:
        yield best
    if tried and (best is None or best.score < SETTLED) and tried[0].share > _MUCH:
        yield pointing(tried[0], len(rows))


def _everywhere_too(places: Sequence[Place]) -> Iterator[Place]:
    """Each place, and all layers: what the first one makes of the others' values, the first order does not tell."""
    yield from places
    wider = {(place.tenant.name, place.since, place.kind): place for place in places if place.where}
    yield from (replace(place, heads=np.ones_like(place.heads), where="") for place in wider.values())


def _is_exact(oracle: Oracle, place: Place, rows: I64, found: F32) -> bool:
    decoder, few = in_place(oracle.decoder, place), rows[:_FEW]
    values = oracle.logprobs(decoder)[few] if place.tenant.whole else oracle.logprobs_of_rows(decoder, few)
    return values.tobytes() == found[:_FEW].tobytes()


class _Measured:
    """The difference of a side in some rows, and what every rounding makes of it, in roundings."""

    def __init__(self, oracle: Oracle, response: Response, delta: F64) -> None:
        own, every = response.in_roundings(delta), np.arange(len(delta))
        self.size = float(np.sqrt((own * own).mean()))
        self._whiten = whitening(response, delta, every)
        self._delta = self._whiten @ delta
        self._oracle, self._kept = oracle, cached(oracle, oracle.decoder)
        self._signals = list(reversed(response.of_attention))

    @property
    def nothing(self) -> float:
        """How unlikely it is that nothing is rounded."""
        return 0.5 * len(self._delta) * float(np.log(self._delta @ self._delta))

    def places(self) -> Iterator[Place]:
        """Every rounding of keys, of values or of both, in all heads or some, for all rows or those that decode."""
        names, layers = zip(*_roundings(), strict=True)
        self._oracle.spend(_ATTENTION * 2 * len(names))
        effects = np.stack([self._of_layer(at, layers) for at in range(len(self._kept))], axis=2)
        for at, name in enumerate(names):
            tenant = Tenant(
                "kv_precision", f"{{}} {name}", partial(_of_slots, layers[at]), whole=any(w in name for w in _WHOLE)
            )
            keys, values = effects[at]
            for kind, each in enumerate((keys + values, keys, values)):  # [L,G,2,B]
                for where, heads in scopes(*each.shape[:2]):
                    for since, made in zip((0, self._oracle.prompt_len), each[heads].sum(axis=0), strict=True):
                        place = Place(tenant, 0, len(self._oracle.tokens), since, kind, heads, where, 0.0)
                        left = self._delta - made
                        unlikely = _cost(place) + 0.5 * len(left) * float(np.log(left @ left + 1e-9))
                        share = 1.0 - float(left @ left) / float(self._delta @ self._delta)
                        yield replace(place, unlikely=unlikely, share=share)

    def _of_layer(self, at: int, roundings: Sequence[Coarse]) -> F64:
        """[roundings,2,G,2,B], in roundings."""
        signal, (q, k, v) = self._signals[at], self._kept[at]
        count, groups = signal.shape[1], k.shape[1]
        q, k, v = q[:count], k[:count], v[:count]
        plain, ends = plain_reference(self._oracle.decoder.reference), np.array([0, count], np.int32)
        own = widen(plain.attention(q, k, v, ends, ends)[0])
        changed: list[F32] = []
        for rounding in roundings:
            for keys, values in ((rounding(k), v), (k, rounding(v))):
                moved = widen(plain.attention(q, keys, values, ends, ends)[0]) - own
                for group in np.split(np.arange(q.shape[1]), groups):
                    part = np.zeros_like(moved)
                    part[:, group] = moved[:, group]
                    late = part.copy()
                    late[: self._oracle.prompt_len] = 0
                    changed += [part.reshape(-1), late.reshape(-1)]
        effects = self._whiten @ (signal.reshape(len(signal), -1) @ np.stack(changed).T)
        shaped: F64 = effects.T.reshape(len(roundings), 2, groups, 2, -1)
        return shaped


def _of_slots(rounding: Coarse, layer: int, k: Bits, v: Bits) -> Kv:
    return rounding(k), rounding(v)


def _cost(place: Place) -> float:
    return 2.0 * bool(place.where) + bool(place.kind) + bool(place.since)


def _roundings() -> Iterator[tuple[str, Coarse]]:
    """The formats that caches are held in, with scales of their own, without, or with some that do not fit."""
    yield from CASTS
    for format_, to, limit in FORMATS:
        for over, axes in OF_KEYS:
            yield f"in {format_} with a scale {over}", coarse(to, limit, axes)
    for format_, to, limit in FORMATS[:2]:
        for largest in _LIMITS:
            yield f"in {format_} of which the largest is {largest:g}", _with_scale(to, limit, largest / limit)
        for over, axes in (OF_KEYS[4], OF_KEYS[2]):
            for share in _CLIPPED:
                name = f"in {format_} with a scale {over} that clips the largest {100 * (1 - share):g} %"
                yield name, _clipped(to, limit, axes, share)
    format_, to, limit = FORMATS[0]
    for power in _POWERS:
        yield f"in {format_} with a scale of {power:g}", _with_scale(to, limit, power)


def _with_scale(to: Rounding, limit: float, scale: float) -> Coarse:
    def rounded(bits: Bits) -> Bits:
        held = np.clip(widen(bits) / np.float32(scale), -limit, limit).astype(np.float32)
        return narrow(to(held) * np.float32(scale))

    return rounded


def _clipped(to: Rounding, limit: float, axes: tuple[int, ...], share: float) -> Coarse:
    def rounded(bits: Bits) -> Bits:
        x = widen(bits)
        largest = np.quantile(np.abs(x), share, axis=axes, keepdims=True)
        scale = np.maximum(largest / limit, 1e-12).astype(np.float32)
        return narrow(to(np.clip(x / scale, -limit, limit).astype(np.float32)) * scale)

    return rounded
