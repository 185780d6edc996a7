"""The reference with one thing changed: what a side would have reported under a hypothesis.

T tokens of the window, E hidden, V vocabulary, W response tokens of the window. Only a window of the response is
recomputed, for a long sample would cost more than it tells.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from auditor.causes.edits import Edit, edited
from auditor.causes.purse import Purse
from auditor.causes.together import hidden_of_each
from auditor.compare import Logprobs
from auditor.errors import RecomputeError
from rl_kernel.contracts import model_contract
from rl_kernel.errors import ModelError
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import I32, Bits, Reference

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


Kv = tuple[Bits, Bits, Bits]

_EMBEDDING: Final = "model.embed_tokens.weight"
_LAYERS: Final = "model.layers."
_KEPT: Final = 1 << 26  # values of queries, keys and values that are kept of one forward


class VersionUnavailable(Exception):
    """A weight version that is listed cannot be opened, as one that is just being published or deleted."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward under unchanged weights: hidden bf16 [T,E].

    layers: queries and keys (rotated) and values of each layer; None of a sample too long to keep them. states: what
    each layer is given, bf16 [T,E], and what the last one gives; None of a sample too long.
    """

    decoder: Decoder
    hidden: Bits
    layers: list[Kv] | None
    states: list[Bits] | None


class Oracle:
    """Computes predictions for one sample.

    decoder: of the weights and contract that the record names. tokens: int64 [N]. window: response tokens first..last
    (exclusive) that predictions are for. versions: weight versions that `load` can open. budget, seconds: forwards and
    time allowed; a slow machine or a large model gets fewer hypotheses tried.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokens: npt.NDArray[np.int64],
        prompt_len: int,
        temperature: float,
        window: tuple[int, int],
        versions: Sequence[int] = (),
        load: Callable[[int], Decoder] | None = None,
        budget: float = 760,
        seconds: float = math.inf,
    ) -> None:
        self.decoder = decoder
        self.prompt_len = prompt_len
        self.temperature = temperature
        self.window = slice(*window)
        self.versions = tuple(versions)
        # Cause, name and values of what was predicted so far, for whichever explains a part only.
        self.said: list[tuple[str, str, Logprobs]] = []
        # What rounding alone makes of the sample, once somebody has measured it.
        self.noise: float | None = None
        # Whether values are further off than where nothing of the prompt is seen, once somebody has looked.
        self.beyond_the_prompt = False
        # What the model's weights do to the values of some rows, once somebody has computed it.
        self.responses: dict[bytes, object] = {}
        # Of the oracle's own weights (None) and of other versions: what many a hypothesis begins with, computed once.
        self._passes: dict[int | None, Pass] = {}
        self._version: int | None = None
        self._values: dict[tuple[int, float], Logprobs] = {}
        self._load = load
        self.purse = Purse(budget, seconds)
        # A causal model never sees what comes after the window.
        self.tokens = tokens[: prompt_len + window[1]]
        self.rows = np.arange(prompt_len + window[0] - 1, prompt_len + window[1] - 1)
        self.targets = self.tokens[self.rows + 1]

    def hidden(self, decoder: Decoder, tokens: npt.NDArray[np.int64] | None = None) -> Bits:
        """Hidden states of the whole window's sequence (or of other tokens), bf16 [T,E].

        Costs one forward, or as much of one as the other tokens are shorter.
        """
        self.spend(1.0 if tokens is None else len(tokens) / len(self.tokens))
        return decoder.hidden([self.tokens if tokens is None else tokens])

    def once(self, version: int | None = None) -> Pass:
        """The forward of a weight version, or of the oracle's own weights, which costs one the first time.

        VersionUnavailable.
        """
        key = self._version if version is None else version
        if key not in self._passes:
            decoder = self.decoder if version is None else self.version(version)
            config, layers = decoder.config, list[Kv]()
            heads = config.heads + 2 * config.kv_heads
            fits = len(self.tokens) * config.layers * heads * config.head_dim <= _KEPT

            def keep(plain: Reference, q: Bits, k: Bits, v: Bits, cu_q: I32, cu_k: I32) -> Any:
                layers.append((q.copy(), k.copy(), v.copy()))
                return plain.attention(q, k, v, cu_q, cu_k)

            sums: list[Bits] = []

            def keep_sum(plain: Reference, block: Bits, stream: Bits) -> Bits:
                sums.append(plain.residual_add(block, stream))
                return sums[-1]

            edits = [Edit("residual_add", keep_sum), Edit("attention", keep)] if fits else []
            hidden = self.hidden(edited(decoder, *edits) if fits else decoder)
            states = [decoder.weights[_EMBEDDING][self.tokens], *sums[1::2]]
            self._passes[key] = Pass(decoder, hidden, *((layers, states) if fits else (None, None)))
        return self._passes[key]

    def logprobs_of(self, version: int) -> Logprobs:
        """What a weight version would report, float32 [W]; computed once. VersionUnavailable."""
        key = version, self.temperature
        if key not in self._values:
            done = self.once(version)
            self._values[key] = self.from_logits(self.head(done.decoder, done.hidden[self.rows]))
        return self._values[key]

    @property
    def own_hidden(self) -> Bits:
        """Hidden states without any fault, bf16 [T,E]."""
        return self.once().hidden

    def logits(self, rows: npt.NDArray[np.int64] | None = None) -> F32:
        """Logits without any fault of `rows` (the window's by default), fp32 [W,V]."""
        return self.head(self.decoder, self.own_hidden[self.rows if rows is None else rows])

    @cached_property
    def own_logits(self) -> F32:
        """Logits of the window's rows, fp32 [W,V]."""
        return self.logits()

    def head(self, decoder: Decoder, hidden: Bits) -> F32:
        """fp32 logits [W,V] of hidden [W,E]."""
        return decoder.reference.gemm_fp32(hidden, _head_of(decoder))

    @property
    def head_weights(self) -> Bits:
        """Weights of the output layer, bf16 [V,E]."""
        return _head_of(self.decoder)

    def from_logits(
        self, logits: F32, temperature: float | None = None, targets: npt.NDArray[np.int64] | None = None
    ) -> Logprobs:
        """Log-probabilities float32 [W] of logits [W,V]."""
        wanted = self.targets if targets is None else targets
        heat = np.full(len(logits), self.temperature if temperature is None else temperature, np.float32)
        logp, _ = self.decoder.reference.logp_from_logits(
            logits, wanted[:, None].astype(np.int64), heat, vocab=self.decoder.config.vocab
        )
        return logp[:, 0]

    def every_token(self, at: npt.NDArray[np.int64]) -> F32:
        """Log-probabilities of the whole vocabulary in some rows of the window, without any fault, fp32 [len(at),V]."""
        ids = np.tile(np.arange(self.decoder.config.vocab), (len(at), 1))
        heat = np.full(len(at), self.temperature, np.float32)
        rows = self.own_logits[at]
        return self.decoder.reference.logp_from_logits(rows, ids, heat, vocab=self.decoder.config.vocab)[0]

    def logprobs(self, decoder: Decoder) -> Logprobs:
        """What another decoder would report, float32 [W]; costs as much of one forward as is not as it was."""
        return self.from_logits(self.head(decoder, self._resumed(decoder, len(self.tokens))[self.rows]))

    def logprobs_of_rows(self, decoder: Decoder, at: npt.NDArray[np.int64]) -> Logprobs:
        """As `logprobs`, in some rows of the window, float32 [len(at)]; costs as much as reaches the last one."""
        rows = self.rows[at]
        hidden = self._resumed(decoder, int(rows.max()) + 1)
        return self.from_logits(self.head(decoder, hidden[rows]), targets=self.targets[at])

    def of_each(self, decoders: Sequence[Decoder], at: npt.NDArray[np.int64]) -> list[Logprobs]:
        """As `logprobs_of_rows` of several decoders that are `alike`, which are run together."""
        rows, count = self.rows[at], len(decoders)
        tokens = self.tokens[: int(rows.max()) + 1]
        self.spend(count * len(tokens) / len(self.tokens))
        hidden = [each[rows] for each in hidden_of_each(decoders, tokens)]
        return self._of_hidden(hidden, np.tile(self.targets[at], count))

    def of_sequences(
        self, sequences: Sequence[npt.NDArray[np.int64]], rows: Sequence[npt.NDArray[np.int64]], at: Any
    ) -> list[Logprobs]:
        """What the oracle's own decoder says of other sequences in some of their rows, as many of each.

        sequences: tokens, [N] each. rows: places in them, [len(at)] each. at: the window's rows whose tokens are asked
        for.
        """
        cut = [tokens[: int(places.max()) + 1] for tokens, places in zip(sequences, rows, strict=True)]
        self.spend(sum(map(len, cut)) / len(self.tokens))
        ends = np.cumsum([len(tokens) for tokens in cut])
        hidden = np.split(self.decoder.hidden(cut), ends[:-1])
        taken = [each[places] for each, places in zip(hidden, rows, strict=True)]
        return self._of_hidden(taken, np.tile(self.targets[at], len(taken)))

    def _of_hidden(self, hidden: Sequence[Bits], targets: npt.NDArray[np.int64]) -> list[Logprobs]:
        logits = self.head(self.decoder, np.concatenate(hidden))
        return np.split(self.from_logits(logits, targets=targets), len(hidden))

    def _resumed(self, decoder: Decoder, count: int) -> Bits:
        """Hidden states of the first tokens, bf16 [count,E]: what stands before the first other weights is known."""
        own, config = self.decoder, decoder.config
        same = decoder.reference is own.reference and decoder.contract is own.contract and decoder.rope is own.rope
        changed = [n for n, w in decoder.weights.items() if w is not own.weights.get(n)]
        begins = min((_layer_of(name, config.layers) for name in changed), default=0)
        states = self.once().states if same and config is own.config and begins else None
        if states is None:
            return self.hidden(decoder, self.tokens[:count])
        self.spend(count / len(self.tokens) * (1.0 - begins / config.layers))
        weights = {_in_layer(n, -begins): w for n, w in decoder.weights.items()} | {_EMBEDDING: states[begins][:count]}
        rest = replace(decoder, config=replace(config, layers=config.layers - begins), weights=weights)
        return rest.hidden([np.arange(count)])

    def version(self, version: int) -> Decoder:
        """The decoder of another weight version, which may have to be fetched first; VersionUnavailable."""
        self.check_budget()
        assert self._load is not None, "no versions were given"
        try:
            return self._load(version)
        except (RecomputeError, ModelError) as error:
            raise VersionUnavailable(f"weight version {version}: {error}") from error

    def of_version(self, version: int) -> "Oracle":
        """The same sample under another weight version; VersionUnavailable."""
        other = copy.copy(self)
        other.decoder = self.once(version).decoder
        other.said, other.responses, other._version = [], {}, version
        other.__dict__.pop("own_logits", None)
        return other

    def spend(self, forwards: float) -> None:
        """Something else costs so many forwards; OutOfBudget where nothing more may be computed."""
        self.purse.spend(forwards)

    def with_logits(self, logits: F32) -> "Oracle":
        """The same sample with other logits in the window, fp32 [W,V], for what is read off those."""
        other = copy.copy(self)
        other.said = []
        other.__dict__["own_logits"] = logits
        return other

    def at_temperature(self, temperature: float) -> "Oracle":
        """The same sample at another temperature, for what is done to its logits besides."""
        other = copy.copy(self)
        other.said, other.temperature = [], temperature
        return other

    def check_budget(self) -> None:
        """OutOfBudget where nothing more may be computed."""
        self.purse.check()

    @cached_property
    def frequencies(self) -> F64:
        """Rotary frequencies that the weights' config names, float64 [head_dim / 2]."""
        dim = self.decoder.config.head_dim
        powers = np.float64(self.decoder.config.rope_theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
        return np.asarray(powers)

    def with_segments(self, segments: int) -> Decoder:
        """The decoder with its row-parallel sums cut in another number of parts."""
        return replace(self.decoder, contract=model_contract(self.decoder.contract.profile.name, segments=segments))


def _head_of(decoder: Decoder) -> Bits:
    return decoder.weights[_EMBEDDING if decoder.config.tied else "lm_head.weight"]


def _layer_of(name: str, layers: int) -> int:
    """The layer that a tensor is of; what stands behind them all is of the one behind the last."""
    if name.startswith(_LAYERS):
        return int(name.split(".")[2])
    return 0 if name == _EMBEDDING else layers


def _in_layer(name: str, by: int) -> str:
    """A tensor's name where layers are numbered otherwise."""
    if not name.startswith(_LAYERS):
        return name
    _, _, layer, rest = name.split(".", 3)
    return f"{_LAYERS}{int(layer) + by}.{rest}"
