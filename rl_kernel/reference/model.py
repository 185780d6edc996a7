"""A Llama or Qwen3 decoder on the reference ops, straight from safetensors. What a logprob must be.

Shape suffixes: T tokens of all sequences, E hidden, H query heads, G kv heads, D head_dim, F intermediate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl_kernel.contract import ModelContract
from rl_kernel.errors import ModelError, ShapeError
from rl_kernel.reference.config import DecoderConfig
from rl_kernel.reference.ops import F32, I64, Bits, Reference, embedding
from rl_kernel.reference.rope_table import rope_table
from rl_kernel.reference.weights import Array, digest_tensors, map_weights

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LOGIT_ROWS = 128  # rows of logits held at a time; changes no bit
_BATCH_TOKENS = 1024  # tokens of one pass; changes no bit

Observer = Callable[[str, Bits], None]
Layers = Callable[[int, Bits], None]


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model of one weight version under one contract."""

    config: DecoderConfig
    contract: ModelContract
    reference: Reference
    weights: dict[str, Bits]
    weight_digest: str
    rope: tuple[F32, F32]

    @classmethod
    def open(cls, folder: Path, contract: ModelContract) -> "Decoder":
        """Map the model in `folder`. ModelError: missing, incomplete, of another architecture, or not bf16."""
        config = DecoderConfig.read(folder)
        tensors = map_weights(folder)
        check_tensors(folder, config, tensors)
        digest = digest_tensors(((n, d, a) for n, (d, a) in tensors.items()), tied=config.tied)
        rope = rope_table(config.rope_theta, config.head_dim, config.max_position, config.rope_scaling)
        weights = {name: array for name, (_, array) in tensors.items()}
        return cls(config, contract, Reference.of(contract), weights, digest, rope)

    def logprobs(
        self,
        tokens: Sequence[I64],
        prompt_lens: Sequence[int],
        temperature: float = 1.0,
        positions: Sequence[I64] | None = None,
        layers: Layers | None = None,
    ) -> list[F32]:
        """Log-probability of every response token, tokens[i][prompt_lens[i]:], fp32, one array a sequence.

        tokens[i]: whole numbers [N]; positions[i]: int64 [N], by which they are rotated, 0, 1, … by default. layers:
        called with the number and the output [T,E] of each layer, for the sequences that are computed together.
        ShapeError: no prompt or no response, an id that the vocabulary does not have, a position that the model does
        not have, a temperature that is not above 0.
        """
        self._check(tokens, prompt_lens, temperature)
        places = [np.arange(len(ids)) for ids in tokens] if positions is None else positions
        result: list[F32] = []
        for batch in _batches(tokens):
            parts = ([tokens[i] for i in batch], [prompt_lens[i] for i in batch], [places[i] for i in batch])
            result += self._logprobs(*parts, temperature, layers)
        return result

    def _check(self, tokens: Sequence[I64], prompt_lens: Sequence[int], temperature: float) -> None:
        if len(tokens) != len(prompt_lens):
            raise ShapeError(f"{len(tokens)} sequences have {len(prompt_lens)} prompt lengths; each needs one")
        if not 0 < temperature < np.inf:
            raise ShapeError(f"temperature is {temperature}; it must be above 0 and finite")
        for ids, cut in zip(map(np.asarray, tokens), prompt_lens, strict=True):
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise ShapeError(f"tokens are {ids.dtype} {list(ids.shape)}; they must be whole numbers [N]")
            if not 1 <= cut < len(ids):
                raise ShapeError(f"prompt_len {cut} must be at least 1 and below the sequence's {len(ids)} tokens")
            if not 0 <= ids.min() <= ids.max() < self.config.vocab:
                raise ShapeError(f"token ids lie in {ids.min()}..{ids.max()}; the vocabulary has {self.config.vocab}")

    def _logprobs(
        self,
        tokens: list[I64],
        prompt_lens: list[int],
        positions: list[I64],
        temperature: float,
        layers: Layers | None,
    ) -> list[F32]:
        hidden = self.hidden(tokens, positions=positions, layers=layers)
        starts = np.cumsum([0, *(len(ids) for ids in tokens)])
        rows = np.concatenate(
            [s + np.arange(c - 1, len(i) - 1) for s, c, i in zip(starts, prompt_lens, tokens, strict=False)]
        )
        target = np.concatenate([ids[cut:] for ids, cut in zip(tokens, prompt_lens, strict=True)]).astype(np.int64)
        head = self.weights[_EMBEDDING if self.config.tied else _HEAD]
        flat = np.concatenate([
            self.reference.linear_logp(
                hidden[rows[i : i + _LOGIT_ROWS]], head, target[i : i + _LOGIT_ROWS],
                temperature=temperature, vocab=self.config.vocab,
            )[0]
            for i in range(0, len(rows), _LOGIT_ROWS)
        ])  # fmt: skip
        return np.split(flat, np.cumsum([len(i) - c for i, c in zip(tokens, prompt_lens, strict=True)])[:-1])

    def hidden(
        self,
        tokens: Sequence[I64],
        observe: Observer | None = None,
        positions: Sequence[I64] | None = None,
        layers: Layers | None = None,
    ) -> Bits:
        """Final normalised hidden states [T,E] of the sequences, one after another.

        observe: called with the name and the output of every op, in order (`layers.3.attention`, …). positions, layers:
        as in `logprobs`.
        """
        config, see = self.config, observe or (lambda name, value: None)
        lengths = [len(ids) for ids in tokens]
        cu = np.cumsum([0, *lengths]).astype(np.int32)
        places = np.concatenate([np.arange(n) for n in lengths] if positions is None else positions)
        if len(places) != cu[-1] or places.dtype != np.int64:
            raise ShapeError(f"{len(places)} positions of {places.dtype} for {cu[-1]} tokens; each needs one of int64")
        lowest, highest = int(places.min()), int(places.max())
        if positions is None and highest >= config.max_position:
            raise ShapeError(
                f"a sequence of {highest + 1} tokens is longer than max_position_embeddings {config.max_position}"
            )
        if not 0 <= lowest <= highest < config.max_position:
            raise ShapeError(f"positions lie in {lowest}..{highest}; max_position_embeddings is {config.max_position}")
        x_TE = embedding(np.concatenate(tokens).astype(np.int64), self.weights[_EMBEDDING])
        see("embedding", x_TE)
        for layer in range(config.layers):
            x_TE = self._attention(layer, x_TE, places, cu, see)
            x_TE = self._mlp(layer, x_TE, see)
            if layers is not None:
                layers(layer, x_TE)
        x_TE = self.reference.rms_norm(x_TE, self.weights["model.norm.weight"], config.rms_norm_eps)
        see("norm", x_TE)
        return x_TE

    def _attention(self, layer: int, x_TE: Bits, positions: I64, cu: np.ndarray, see: Observer) -> Bits:
        config, ref, eps = self.config, self.reference, self.config.rms_norm_eps
        weight = self._layer(layer, "input_layernorm")
        normed = ref.rms_norm(x_TE, weight, eps)
        see(f"layers.{layer}.input_norm", normed)
        q, k, v = (ref.gemm(normed, self._layer(layer, f"self_attn.{name}_proj")) for name in "qkv")
        q_THD = q.reshape(-1, config.heads, config.head_dim)
        k_TGD, v_TGD = (a.reshape(-1, config.kv_heads, config.head_dim) for a in (k, v))
        see(f"layers.{layer}.qkv", np.concatenate([q, k, v], axis=1))
        if config.qk_norm:
            q_THD = ref.rms_norm(q_THD, self._layer(layer, "self_attn.q_norm"), eps)
            k_TGD = ref.rms_norm(k_TGD, self._layer(layer, "self_attn.k_norm"), eps)
        q_THD, k_TGD = (ref.rope(a, *self.rope, positions) for a in (q_THD, k_TGD))
        see(f"layers.{layer}.rope", np.concatenate([q_THD.reshape(len(q), -1), k_TGD.reshape(len(q), -1)], axis=1))
        out_THD, _, _ = ref.attention(q_THD, k_TGD, v_TGD, cu, cu)
        out = out_THD.reshape(len(q), -1)
        see(f"layers.{layer}.attention", out)
        projected = ref.gemm(out, self._layer(layer, "self_attn.o_proj"), segments=self.contract.segments)
        see(f"layers.{layer}.o_proj", projected)
        return ref.residual_add(projected, x_TE)

    def _mlp(self, layer: int, x_TE: Bits, see: Observer) -> Bits:
        ref = self.reference
        normed = ref.rms_norm(x_TE, self._layer(layer, "post_attention_layernorm"), self.config.rms_norm_eps)
        see(f"layers.{layer}.post_attention_norm", normed)
        gate, up = (ref.gemm(normed, self._layer(layer, f"mlp.{name}_proj")) for name in ("gate", "up"))
        both = np.concatenate([gate, up], axis=1)
        see(f"layers.{layer}.gate_up", both)
        active_TF = ref.swiglu(both)
        see(f"layers.{layer}.swiglu", active_TF)
        projected = ref.gemm(active_TF, self._layer(layer, "mlp.down_proj"), segments=self.contract.segments)
        see(f"layers.{layer}.down_proj", projected)
        return ref.residual_add(projected, x_TE)

    def _layer(self, layer: int, name: str) -> Bits:
        return self.weights[f"model.layers.{layer}.{name}.weight"]


def check_tensors(folder: Path, config: DecoderConfig, tensors: Mapping[str, tuple[str, Array]]) -> None:
    """Raise ModelError unless `tensors`, mapped from `folder`, are those of `config` in bf16, and no others.

    A tied model's file may repeat the embedding as `lm_head.weight`. Other values there are refused: they say that the
    model is not tied, and engines take them for the output layer.
    """
    expected = set()
    for name, shape in expected_tensors(config):
        if name not in tensors:  # before the next is asked for: a config may speak of 10⁹ layers
            raise ModelError(f"{folder}: tensor {name!r} is missing")
        expected.add(name)
        dtype, array = tensors[name]
        if dtype != "BF16" or array.shape != shape:
            found = f"{dtype}{list(array.shape)}"
            raise ModelError(f"{folder}: tensor {name!r} is {found}, the model needs BF16{list(shape)}")
    if config.tied and _HEAD in tensors and not np.array_equal(tensors[_HEAD][1], tensors[_EMBEDDING][1]):
        raise ModelError(
            f"{folder}: {_HEAD!r} is not the embedding, but tie_word_embeddings is true; correct config.json"
        )
    for name in sorted(tensors.keys() - expected - ({_HEAD} if config.tied else set())):
        raise ModelError(
            f"{folder}: tensor {name!r} is not of the {config.model_type} decoder of {config.layers} layers that "
            f"config.json describes; remove it, or correct config.json"
        )


def expected_tensors(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every weight that a model of this config must have, under Hugging Face names."""
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield _EMBEDDING, (config.vocab, config.hidden)
    if not config.tied:
        yield _HEAD, (config.vocab, config.hidden)
    yield "model.norm.weight", (config.hidden,)
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (config.hidden,),
        "post_attention_layernorm": (config.hidden,),
        "self_attn.q_proj": (query, config.hidden),
        "self_attn.k_proj": (kv, config.hidden),
        "self_attn.v_proj": (kv, config.hidden),
        "self_attn.o_proj": (config.hidden, query),
        "mlp.gate_proj": (config.intermediate, config.hidden),
        "mlp.up_proj": (config.intermediate, config.hidden),
        "mlp.down_proj": (config.hidden, config.intermediate),
    }
    if config.qk_norm:
        shapes |= {"self_attn.q_norm": (config.head_dim,), "self_attn.k_norm": (config.head_dim,)}
    for layer in range(config.layers):
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.{name}.weight", shape


def _batches(tokens: Sequence[I64]) -> Iterator[list[int]]:
    """Group neighbouring sequences so that one pass holds about _BATCH_TOKENS tokens."""
    batch: list[int] = []
    for i in range(len(tokens)):
        if batch and sum(len(tokens[j]) for j in batch) + len(tokens[i]) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
