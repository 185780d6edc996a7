"""Tiny random models in the form Hugging Face writes them: `config.json` and `model.safetensors`, bf16.

Made by NumPy alone, so that every side of a test (vLLM, Megatron, the reference decoder) reads the same bytes and
none of them made them. The same spec and seed give the same bytes on every machine.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A decoder small enough for tests, with sizes that cross boundaries.

    hidden is no multiple of the 128 lanes, vocab no multiple of the 64-id tile, and query heads share kv heads.
    """

    architecture: Literal["llama", "qwen3"] = "llama"
    tied: bool = False
    layers: int = 2
    hidden: int = 160
    intermediate: int = 224
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 331
    max_position: int = 2048
    rope_theta: float = 10000.0
    eps: float = 1e-5

    def config(self) -> dict[str, object]:
        """The contents of `config.json`."""
        name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.architecture]
        return {
            "architectures": [name],
            "model_type": self.architecture,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 0,
            "eos_token_id": self.vocab - 1,
            "torch_dtype": "bfloat16",
        }

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor's name and shape, in the order in which they are drawn."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            yield at + "input_layernorm.weight", (self.hidden,)
            yield at + "self_attn.q_proj.weight", (q, self.hidden)
            yield at + "self_attn.k_proj.weight", (kv, self.hidden)
            yield at + "self_attn.v_proj.weight", (kv, self.hidden)
            if self.architecture == "qwen3":
                yield at + "self_attn.q_norm.weight", (self.head_dim,)
                yield at + "self_attn.k_norm.weight", (self.head_dim,)
            yield at + "self_attn.o_proj.weight", (self.hidden, q)
            yield at + "post_attention_layernorm.weight", (self.hidden,)
            yield at + "mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield at + "mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield at + "mlp.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)


LLAMA = TinyModel("llama", tied=False)
LLAMA_TIED = TinyModel("llama", tied=True, head_dim=64)
QWEN3 = TinyModel("qwen3", tied=False, head_dim=64, rope_theta=1e6, eps=1e-6)
QWEN3_TIED = TinyModel("qwen3", tied=True, rope_theta=1e6, eps=1e-6)
TINY_MODELS = {"llama": LLAMA, "llama-tied": LLAMA_TIED, "qwen3": QWEN3, "qwen3-tied": QWEN3_TIED}


def tiny_weights(spec: TinyModel, seed: int = 0) -> dict[str, npt.NDArray[np.uint16]]:
    """Random weights of `spec` as bf16 bit patterns; norms scatter around 1, matrices keep the activations' scale."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in spec.shapes():
        draw = random.standard_normal(shape, dtype=np.float32)
        value = 1 + draw / 8 if len(shape) == 1 else draw * np.float32(1.5 * shape[-1] ** -0.5)
        weights[name] = _to_bf16(value.astype(np.float32))
    return weights


def write_tiny_model(folder: Path, spec: TinyModel = LLAMA, seed: int = 0) -> Path:
    """Write `spec` with the weights of `seed` into `folder` (made if missing) and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(spec.config(), indent=2))
    _write_safetensors(folder / "model.safetensors", tiny_weights(spec, seed))
    return folder


def _to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite fp32 to bf16, to nearest even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[np.uint16]]) -> None:
    """The format in full: u64 header length, JSON header padded to 8 bytes, then the tensors' bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(value.shape),
            "data_offsets": [offset, offset + value.nbytes],
        }
        offset += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(value.tobytes() for value in tensors.values())
