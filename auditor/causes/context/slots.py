"""What every slot of the cache does to the values, to the first order: in all its layers, heads and readers at once.

Whatever stands in the place of a token's key and value, each row that reads it leans towards it or away from it, and
its result moves along. Slots of a span add up, so that every span is told from every other without a forward.

B rows that are asked for, T tokens, L layers, H query heads, G key heads, D head dimension, K and R edges.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from auditor.causes.edits import Edit, edited
from auditor.causes.evidence import STRONG, Evidence, Suggestion
from auditor.causes.oracle import F32, F64, I64, Oracle
from auditor.causes.weights.response import Response, response_of, rows_of
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import I32, Bits, Reference, widen

Kv = tuple[Bits, Bits]

_ANY_STRENGTH: Final = (0.5, 2.0)  # of what the first order says, where a change is large
_EXACTLY: Final = 1e-3  # of a rounding, squared: a difference below which is none
_UNTOLD: Final = 0.3  # of a difference: what the first order does not tell
_ROWS: Final = 72  # wrong rows that are asked for
_ENOUGH: Final = 48  # of them, where roundings hide little
_HIDDEN: Final = 3.0  # in roundings
_SHORT: Final = 64  # slots, of which all rows are told apart
_POINTING: Final = 0.46  # more than a look, less than anything that takes away much
_EACH: Final = 2  # spans that are kept of one kind
KINDS: Final = ("keys and values", "keys", "values")


@dataclass(frozen=True, slots=True)
class Tenant:
    """What may stand in slots. name: with `{}` for the tokens.

    of: layer and its own keys and values → what stands there; None where the slots are seen so many `times`.
    whole: whether the first slots are others for the last ones.
    """

    cause: str
    name: str
    of: Callable[[int, Bits, Bits], Kv] | None
    cost: float = 0.0
    whole: bool = False
    times: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Slots first..last as rows from `since` on read them.

    kind: of `KINDS`; heads: [L,G], which of them. share: of the difference's square, that it takes away.
    """

    tenant: Tenant
    first: int
    last: int
    since: int
    kind: int
    heads: Any
    where: str
    unlikely: float
    share: float = 0.0

    @property
    def name(self) -> str:
        """What is said of it."""
        span = f"tokens {self.first} to {self.last - 1}" if self.last > self.first + 1 else f"token {self.first}"
        since = f", as rows from {self.since} on read them" if self.since else ""
        return self.tenant.name.format(f"{KINDS[self.kind]} of {span}{self.where}") + since


class Slots:
    """Of one sample: keys and values as they should be, and how the asked values move with each layer's attention."""

    def __init__(self, oracle: Oracle, response: Response, delta: F64, edges: I64, readers: I64) -> None:
        """delta: [B]. edges: [K+1], where spans may begin and end; readers: [R], rows from which on they are read."""
        own = response.in_roundings(delta)
        self.hidden = float((own * own).mean()) < _HIDDEN**2  # by roundings, so that every row is needed
        self._rows = np.arange(len(delta))[:: 1 if self.hidden or edges[-1] <= _SHORT else 1 + len(delta) // _ENOUGH]
        # Of few rows the last one may stand in front of some slots, which it does not read.
        self._edges, self._readers = edges[edges <= (reached := response.of_attention[0].shape[1])], readers
        if self._edges[-1] < min(reached, edges[-1]):
            self._edges = np.append(self._edges, reached)
        self._whiten = whitening(response, delta, self._rows)
        self._found, self._noise = delta[self._rows], np.diag(response.spread)[self._rows]
        self._delta = self._whiten @ self._found
        self.kept = cached(oracle, oracle.decoder)
        self._layers = [self._layer(at, of[self._rows]) for at, of in enumerate(reversed(response.of_attention))]

    def _layer(self, at: int, of_result: F32) -> tuple[F32, ...]:
        """Queries [H,T,D], keys and values [G,K',D], chances [H,T,K'], signal [B,H,T,D], and what leaning does."""
        count, last = of_result.shape[1], int(self._edges[-1])
        q, k, v = (widen(a[:count]).transpose(1, 0, 2) for a in self.kept[at])
        heads, group = len(q), len(q) // len(k)
        every_k, every_v = (np.repeat(a, group, axis=0) for a in (k, v))
        scores = q @ every_k.transpose(0, 2, 1) / np.float32(np.sqrt(q.shape[2]))
        scores[:, np.triu(np.ones((count, count), np.bool_), 1)] = -np.inf
        p = np.exp(scores - scores.max(axis=2, keepdims=True))
        p /= p.sum(axis=2, keepdims=True)
        signal = of_result.reshape(len(of_result), count, heads, -1).transpose(0, 2, 1, 3)
        lean = signal @ every_v[:, :last].transpose(0, 2, 1)
        lean -= (signal * (p @ every_v)).sum(axis=3, keepdims=True)
        return q, k[:, :last], v[:, :last], p[:, :, :last], signal, lean

    @property
    def nothing(self) -> float:
        """How unlikely it is that nothing is changed."""
        return 0.5 * len(self._delta) * float(np.log(self._delta @ self._delta))

    def in_front(self) -> float:
        """How much likelier it is that what is wrong stands in these slots than that it is everywhere, as a logarithm.

        Of the rows' differences, each as a multiple of what changes of one size there would make of it, the one that
        varies less. Not finite where a row does not differ.
        """
        there = sum((self._sensitivity(*layer) for layer in self._layers), np.zeros(len(self._rows)))
        size = np.log(np.abs(self._found))
        here, anywhere = (float(np.var(size - 0.5 * np.log(much))) for much in (there, self._noise))
        return 0.5 * len(size) * float(np.log(anywhere / here))

    def _sensitivity(self, q: F32, k: F32, v: F32, p: F32, signal: F32, lean: F32) -> F64:
        """What it makes to change all keys and values of a layer by as large a part of them, squared, [B]."""
        of_values = p.transpose(0, 2, 1) @ signal
        of_keys = (lean * p).transpose(0, 1, 3, 2) @ q / np.float32(np.sqrt(q.shape[2]))
        squares = ((of_values**2).sum(axis=(1, 2, 3)) * (v**2).mean(), (of_keys**2).sum(axis=(1, 2, 3)) * (k**2).mean())
        result: F64 = np.add(*squares, dtype=np.float64)
        return result

    def places(self, tenant: Tenant) -> Iterator[Place]:
        """The likeliest of every kind, in all heads or some."""
        effects = np.stack([self._effects(at, tenant) for at in range(len(self._layers))], axis=2)
        kinds, rows, layers, groups = effects.shape[:4]
        flat = np.moveaxis(effects, 1, 0).reshape(rows, -1)
        white = (self._whiten @ flat).reshape(rows, kinds, layers, groups, *effects.shape[4:])
        for where, heads in scopes(layers, groups):
            inside = white[:, :, heads].sum(axis=2)  # [B,kinds,R,K]
            later = np.flip(np.flip(inside, 2).cumsum(axis=2), 2)
            ends = np.concatenate([np.zeros_like(later[..., :1]), later.cumsum(axis=3)], axis=3)
            for kind in range(kinds):
                for reader in range(len(self._readers)):
                    yield from self._spans(tenant, ends[:, kind, reader], kind, reader, heads, where)

    def _effects(self, at: int, tenant: Tenant) -> F32:
        """[kinds,B,G,R,K]: of each run of slots upon each run of readers."""
        q, k, v, p, signal, lean = self._layers[at]
        group = len(q) // len(k)
        if tenant.of is None:
            now = tenant.times * p / (1 + (tenant.times - 1) * np.minimum(p, np.float32(1 - 1e-6)))
            found = [(now - p) / np.maximum(1 - p, np.float32(1e-6)) * lean]
        else:
            other_k, other_v = (widen(a[: k.shape[1]]).transpose(1, 0, 2) for a in tenant.of(at, *self.kept[at][1:]))
            nearer = q @ np.repeat(other_k - k, group, axis=0).transpose(0, 2, 1) / np.float32(np.sqrt(q.shape[2]))
            grown = p * np.exp(np.clip(nearer, -30, 30))
            now = grown / (1 - p + grown)
            of_keys = (now - p) / np.maximum(1 - p, np.float32(1e-6)) * lean
            of_values = signal @ np.repeat(other_v - v, group, axis=0).transpose(0, 2, 1)
            found = [of_keys + now * of_values, of_keys, p * of_values]
        every = np.stack(found).reshape(len(found), len(signal), len(k), group, *p.shape[1:]).sum(axis=3)
        starts = np.minimum(self._readers, every.shape[3] - 1)
        pooled: F32 = np.add.reduceat(np.add.reduceat(every, starts, axis=3), self._edges[:-1], axis=4)
        return pooled

    def _spans(self, tenant: Tenant, ends: F64, kind: int, reader: int, heads: Any, where: str) -> Iterator[Place]:
        """ends: [B,K+1], of all slots up to each edge."""
        square, toward = ends.T @ ends, ends.T @ self._delta
        own = np.diag(square)
        size = np.maximum(own[:, None] + own[None, :] - 2 * square, 1e-12)  # [first,last]
        along = toward[None, :] - toward[:, None]
        strength = np.clip(along / size, *_ANY_STRENGTH)
        left = self._delta @ self._delta - 2 * strength * along + strength**2 * size
        left[np.tril_indices(len(left))] = np.inf
        rows, total = len(self._delta), len(self._edges) - 1
        cost = tenant.cost + 2.0 * bool(where) + 1.0 * bool(kind)
        for at in np.argsort(left, axis=None)[:_EACH]:
            first, last = np.unravel_index(at, left.shape)
            if np.isfinite(left[first, last]):
                span_cost = cost if first == 0 and last == total else cost + np.log(total)
                unlikely = span_cost + 0.5 * rows * np.log(max(left[first, last], 0.0) + _EXACTLY * rows)
                span = int(self._edges[first]), int(self._edges[last])
                share = 1.0 - max(left[first, last], 0.0) / float(self._delta @ self._delta)
                yield Place(tenant, *span, int(self._readers[reader]), kind, heads, where, float(unlikely), share)


def asked(evidence: Evidence, oracle: Oracle) -> tuple[I64, Response | None]:
    """The first wrong rows of the window, and the model run back for them; None where they are few or it is large."""
    wrong = evidence.differs[oracle.window] & np.isfinite(evidence.found[oracle.window])
    rows = rows_of(oracle, np.flatnonzero(wrong)[:_ROWS])
    return rows, response_of(oracle, rows)


def whitening(response: Response, delta: F64, rows: I64) -> F64:
    """What makes multiples of roundings of some rows' differences, beside which a large one has an error of its own."""
    own = response.in_roundings(delta)
    spread = response.spread[np.ix_(rows, rows)]
    untold = _UNTOLD**2 * float((own * own).mean()) * np.diag(np.diag(spread))
    inverse: F64 = np.linalg.inv(np.linalg.cholesky(spread + untold)).astype(np.float64)
    return inverse


def pointing(place: Place, rows: int) -> Suggestion:
    """That a difference at so many tokens points to something whose bits it has not."""
    score = max(_POINTING, STRONG * (1.0 - float(np.sqrt(1.0 - place.share))))
    where = f"points where {place.name} would move it, by {place.share:.0%} of its square"
    said = f"the difference at {rows} tokens {where}"
    return Suggestion(place.tenant.cause, score, said)


def scopes(layers: int, groups: int) -> Iterator[tuple[str, Any]]:
    """Which key heads of which layers one mistake touches: all, a layer, every second one, a rank's, one."""
    every = np.ones((layers, groups), np.bool_)
    yield "", every
    at = np.arange(layers)
    runs = [([int(i)], f"layer {i}") for i in at] if layers <= 32 else []
    runs += [(at[i::2].tolist(), f"every second layer from {i} on") for i in (0, 1) if layers > 2]
    for some, said in runs if layers > 1 else []:
        chosen = np.zeros_like(every)
        chosen[some] = True
        yield f" in {said}", chosen
    for ranks in (2, 4):
        for rank in range(ranks) if groups % ranks == 0 else []:
            mine = np.arange(groups) * ranks // groups == rank
            yield f" on rank {rank} of {ranks}", every & mine
            for layer in at[:32] if layers > 1 else []:
                yield f" on rank {rank} of {ranks} in layer {layer}", every & mine & (at == layer)[:, None]


def cached(oracle: Oracle, decoder: Decoder) -> list[tuple[Bits, Bits, Bits]]:
    """Queries and keys (rotated) and values of every layer, of the whole window's sequence.

    Costs a forward, unless it is the oracle's own and was kept.
    """
    if decoder is oracle.decoder and (known := oracle.once().layers) is not None:
        return known
    kept: list[tuple[Bits, Bits, Bits]] = []

    def keep(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        kept.append((q.copy(), k.copy(), v.copy()))
        return plain.attention(q, k, v, cu_q, cu_k)

    oracle.hidden(edited(decoder, Edit("attention", keep)))
    return kept


def in_place(decoder: Decoder, place: Place) -> Decoder:
    """The decoder of which some rows read other keys and values in some slots."""
    edits = []
    for layer in range(decoder.config.layers):
        if place.heads[layer].any():
            edits.append(Edit("attention", _attention(place, layer)).at((layer, 0)))
    return edited(decoder, *edits)


def _attention(place: Place, layer: int) -> Any:
    """Attention of one layer; what rows in front or other heads give stays."""
    of = place.tenant.of

    def attention(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
        count = len(q)
        own = plain.attention(q, k, v, cu_q, cu_k)
        since = max(place.since, place.last if of is None else 0)
        if since >= count:
            return own
        if of is None:
            again = np.tile(np.arange(place.first, place.last), place.tenant.times)
            keys = np.r_[0 : place.first, again, place.last : count]
            ends = np.array([0, count - since], np.int32), np.array([0, len(keys)], np.int32)
            other = plain.attention(q[since:].copy(), k[keys], v[keys], *ends)
        else:
            caches, where = (k.copy(), v.copy()), slice(place.first, min(place.last, count))
            for cache, foreign in list(zip(caches, of(layer, k, v), strict=True))[slice(*_SLICES[place.kind])]:
                cache[where] = foreign[where]
            other = plain.attention(q, *caches, cu_q, cu_k)
        mine = np.repeat(place.heads[layer], q.shape[1] // k.shape[1])
        parts: Any = zip(own, other, strict=True)
        for part, changed in parts:
            part[since:, mine] = changed[since - count :, mine]
        return own

    return attention


_SLICES: Final = ((0, 2), (0, 1), (1, 2))
