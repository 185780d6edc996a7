"""The model in fp32 and without roundings, once forward and once back for each row whose value is asked for.

B rows that are asked for, T tokens, E hidden, H query heads, G key heads, D head dimension, N and K of a matrix [N,K].
"""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from auditor.causes.oracle import F32, I64, Oracle
from rl_kernel.reference.ops import Bits, widen

_OF_A_LAYER: Final = 9  # tensors that are asked for again and again while a layer is run back


@dataclass(frozen=True, slots=True)
class Signal:
    """How the asked values move with one thing that is computed on the way.

    tensor: the matrix or norm that computes it, "" where none does (it is rounded all the same). of_output: for each
    row of a group [B,T,N], or [B,N] where each row has a token of its own, or where the tokens are summed up (a norm's
    weights). given: what a matrix is applied to, [T,K] or [B,K]; for a thing that no tensor computes, its values [T,N]
    or [B,N]. rows: the group's. attention: whether it is what a layer's attention gives.
    """

    tensor: str
    of_output: F32
    given: F32 | None
    rows: slice
    attention: bool = False


class Backward:
    """The model around its own weights, with the values of some rows to be moved."""

    def __init__(self, oracle: Oracle, at: I64, group: int | None = None) -> None:
        """at: rows of the window, rising [B]. group: so many are run back together, all of them by default.

        In groups they need no memory that grows with their number, nor with the model's: weights are widened anew.
        """
        self.decoder, self._rows = oracle.decoder, oracle.rows[at]
        self.tokens = oracle.tokens[: int(self._rows.max()) + 1]
        self._targets, self._heat = oracle.targets[at], np.float32(oracle.temperature)
        self._group = group or len(at)
        self.weights = Widened(oracle.decoder.weights, None if group is None else _OF_A_LAYER)
        self._seen: list[dict[str, F32]] = []
        self._forward()

    def signals(self) -> Iterator[Signal]:
        """Of everything, from the output layer back to the embedding. A tied embedding comes twice."""
        config, count = self.decoder.config, len(self._rows)
        embedding = "model.embed_tokens.weight"
        # The longest rows first, so that what is made of their tokens is made of all.
        groups = [slice(max(0, last - self._group), last) for last in range(count, 0, -self._group)]
        signal = yield from self._head_back(embedding if config.tied else "lm_head.weight")
        grads = [self._begun(rows, signal[rows]) for rows in groups]
        for layer in reversed(range(config.layers)):
            for rows, grad in zip(groups, grads, strict=True):
                yield from self._mlp_back(layer, rows, grad)
                yield from self._attention_back(layer, rows, grad)
        for rows, grad in zip(groups, grads, strict=True):
            yield Signal(embedding, grad, None, rows)

    def _head_back(self, head: str) -> Generator[Signal, None, F32]:
        """From the values to what the last norm gives and on to the hidden states, [B,E]."""
        config, norm, every = self.decoder.config, self.weights["model.norm.weight"], slice(0, len(self._rows))
        hidden, weight = self._unit * norm, self.weights[head]
        z = (hidden @ weight.T)[:, : config.vocab] / self._heat
        p = np.exp(z - z.max(axis=1, keepdims=True))
        of_logits = -p / p.sum(axis=1, keepdims=True) / self._heat
        of_logits[np.arange(len(z)), self._targets] += 1 / self._heat
        signal = of_logits @ weight[: config.vocab]
        del weight
        yield Signal(head, of_logits, hidden, every)
        yield Signal("", signal, hidden, every)
        yield Signal("model.norm.weight", signal * self._unit, None, every)
        return _through_norm(signal, self._unit, self._inverse, norm)

    def _begun(self, rows: slice, signal: F32) -> F32:
        """A group's signals [b,T,E], which begin in a token of their own."""
        last = self._rows[rows]
        grad = np.zeros((len(last), int(last.max()) + 1, self.decoder.config.hidden), np.float32)
        grad[np.arange(len(last)), last] = signal
        return grad

    def _layer(self, layer: int, name: str) -> F32:
        return self.weights[f"model.layers.{layer}.{name}.weight"]

    def _forward(self) -> None:
        config, count = self.decoder.config, len(self.tokens)
        x = widen(self.decoder.weights["model.embed_tokens.weight"][self.tokens])
        cos, sin = (table[:count, None, :] for table in self.decoder.rope)
        ahead = np.triu(np.ones((count, count), np.bool_), 1)
        for layer in range(config.layers):
            seen: dict[str, F32] = {"before": x}
            seen["unit1"], seen["inverse1"] = _unit(x, config.rms_norm_eps)
            normed = seen["unit1"] * self._layer(layer, "input_layernorm")
            for name, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
                seen[name] = _times(normed, self._layer(layer, f"self_attn.{name}_proj")).reshape(count, heads, -1)
            for name in "qk":
                if config.qk_norm:
                    seen["unit" + name], seen["inverse" + name] = _unit(seen[name], config.rms_norm_eps)
                    seen[name] = seen["unit" + name] * self._layer(layer, f"self_attn.{name}_norm")
                seen[name] = _turned(seen[name], cos, sin)
            q, k, v = (seen[name].transpose(1, 0, 2) for name in "qkv")
            k, v = (np.repeat(a, config.heads // config.kv_heads, axis=0) for a in (k, v))
            scores = q @ k.transpose(0, 2, 1) / np.float32(np.sqrt(config.head_dim))
            scores[:, ahead] = -np.inf
            p = np.exp(scores - scores.max(axis=2, keepdims=True))
            seen["p"] = (p / p.sum(axis=2, keepdims=True)).astype(np.float32)
            seen["out"] = (seen["p"] @ v).transpose(1, 0, 2).reshape(count, -1)
            x = x + _times(seen["out"], self._layer(layer, "self_attn.o_proj"))
            seen["between"] = x
            seen["unit2"], seen["inverse2"] = _unit(x, config.rms_norm_eps)
            normed = seen["unit2"] * self._layer(layer, "post_attention_layernorm")
            seen["gate"], seen["up"] = (
                _times(normed, self._layer(layer, f"mlp.{name}_proj")) for name in ("gate", "up")
            )
            seen["silu"] = seen["gate"] * _sigmoid(seen["gate"])
            x = x + _times(seen["silu"] * seen["up"], self._layer(layer, "mlp.down_proj"))
            self._seen.append(seen)
        self._unit, self._inverse = _unit(x[self._rows], config.rms_norm_eps)

    def _mlp_back(self, layer: int, rows: slice, grad: F32) -> Iterator[Signal]:
        seen, prefix = self._of(layer, grad), f"model.layers.{layer}."
        gate, up, silu = seen["gate"], seen["up"], seen["silu"]
        yield Signal(f"{prefix}mlp.down_proj.weight", grad, silu * up, rows)
        inner = _back(grad, self._layer(layer, "mlp.down_proj"))
        yield Signal("", inner, silu * up, rows)
        sigmoid = _sigmoid(gate)
        of_gate: F32 = inner * (up * (sigmoid + silu * (1 - sigmoid)))
        of_up: F32 = inner * silu
        weight = self._layer(layer, "post_attention_layernorm")
        normed = seen["unit2"] * weight
        yield Signal(f"{prefix}mlp.gate_proj.weight", of_gate, normed, rows)
        yield Signal(f"{prefix}mlp.up_proj.weight", of_up, normed, rows)
        signal = _back(of_gate, self._layer(layer, "mlp.gate_proj")) + _back(of_up, self._layer(layer, "mlp.up_proj"))
        yield Signal("", signal, normed, rows)
        of_norm = np.einsum("bte,te->be", signal, seen["unit2"])
        yield Signal(f"{prefix}post_attention_layernorm.weight", of_norm, None, rows)
        grad += _through_norm(signal, seen["unit2"], seen["inverse2"], weight)
        yield Signal("", grad, seen["between"], rows)

    def _attention_back(self, layer: int, rows: slice, grad: F32) -> Iterator[Signal]:
        seen, prefix = self._of(layer, grad), f"model.layers.{layer}."
        yield Signal(f"{prefix}self_attn.o_proj.weight", grad, seen["out"], rows)
        of_out = _back(grad, self._layer(layer, "self_attn.o_proj"))
        yield Signal("", of_out, seen["out"], rows, attention=True)
        total = np.zeros_like(grad)
        weight = self._layer(layer, "input_layernorm")
        normed = seen["unit1"] * weight
        for name, read in self._through_scores(seen, of_out).items():
            signal = read if name == "v" else (yield from self._through_rotation(layer, seen, rows, name, read))
            flat = signal.reshape(*grad.shape[:2], -1)
            yield Signal(f"{prefix}self_attn.{name}_proj.weight", flat, normed, rows)
            total += _back(flat, self._layer(layer, f"self_attn.{name}_proj"))
        yield Signal("", total, normed, rows)
        yield Signal(f"{prefix}input_layernorm.weight", np.einsum("bte,te->be", total, seen["unit1"]), None, rows)
        grad += _through_norm(total, seen["unit1"], seen["inverse1"], weight)
        yield Signal("", grad, seen["before"], rows)

    def _of(self, layer: int, grad: F32) -> dict[str, F32]:
        """What the forward saw of a layer, of as many tokens as reach a group's last row."""
        count = grad.shape[1]
        cut = {name: a[:count] for name, a in self._seen[layer].items()}
        return {**cut, "p": self._seen[layer]["p"][:, :count, :count]}

    def _through_scores(self, seen: dict[str, F32], of_out: F32) -> dict[str, F32]:
        """Of queries, keys and values as attention reads them, [B,T,heads,D], from that of its result [B,T,H·D]."""
        config, (rows, count) = self.decoder.config, of_out.shape[:2]
        group = config.heads // config.kv_heads
        out = of_out.reshape(rows, count, config.heads, -1).transpose(0, 2, 1, 3)
        q, k, v = (seen[name].transpose(1, 0, 2) for name in "qkv")
        k, v = (np.repeat(a, group, axis=0) for a in (k, v))
        p = seen["p"]
        of_p = out @ v.transpose(0, 2, 1)
        of_p -= (of_p * p).sum(axis=3, keepdims=True)
        of_p *= p / np.float32(np.sqrt(config.head_dim))
        signals = {"q": of_p @ k, "k": of_p.transpose(0, 1, 3, 2) @ q, "v": p.transpose(0, 2, 1) @ out}
        for name in "kv":
            signals[name] = signals[name].reshape(rows, config.kv_heads, group, count, -1).sum(axis=2)
        return {name: signal.transpose(0, 2, 1, 3) for name, signal in signals.items()}

    def _through_rotation(
        self, layer: int, seen: dict[str, F32], rows: slice, name: str, signal: F32
    ) -> Generator[Signal, None, F32]:
        """Back through the rotation of queries or keys, and their norm where there is one; returns the signal."""
        count = signal.shape[1]
        cos, sin = (table[:count, None, :] for table in self.decoder.rope)
        flat = (*signal.shape[:2], -1)
        yield Signal("", signal.reshape(flat), seen[name].reshape(count, -1), rows)
        signal = _turned(signal, cos, -sin)
        if self.decoder.config.qk_norm:
            unit, own = seen["unit" + name], self._layer(layer, f"self_attn.{name}_norm")
            of_norm = (signal * unit).sum(axis=(1, 2))
            yield Signal(f"model.layers.{layer}.self_attn.{name}_norm.weight", of_norm, None, rows)
            yield Signal("", signal.reshape(flat), (unit * own).reshape(count, -1), rows)
            signal = _through_norm(signal, unit, seen["inverse" + name], own)
        return signal


class Widened(dict[str, F32]):
    """Weights in fp32, made when they are asked for. kept: how many of them, all where it is None."""

    def __init__(self, weights: Mapping[str, Bits], kept: int | None = None) -> None:
        super().__init__()
        self._bits, self._kept = weights, kept

    def __missing__(self, name: str) -> F32:
        if len(self) == self._kept:
            del self[next(iter(self))]
        self[name] = widen(self._bits[name])
        return self[name]


def _times(x: F32, weight: F32) -> F32:
    product: F32 = x @ weight.T
    return product


def _back(signal: F32, weight: F32) -> F32:
    """[B,T,N] → [B,T,K], as one product."""
    product = signal.reshape(-1, signal.shape[2]) @ weight
    return product.reshape(*signal.shape[:2], -1)


def _sigmoid(x: F32) -> F32:
    result: F32 = np.float32(1) / (np.float32(1) + np.exp(-x))
    return result


def _unit(x: F32, eps: float) -> tuple[F32, F32]:
    inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(eps))
    return x * inverse, inverse


def _through_norm(signal: F32, unit: F32, inverse: F32, weight: F32) -> F32:
    inner = signal * weight
    back: F32 = inverse * (inner - unit * (inner * unit).mean(axis=-1, keepdims=True))
    return back


def _turned(x: F32, cos: F32, sin: F32) -> F32:
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
