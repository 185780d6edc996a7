"""What the contract needs to know of a decoder, read from a Hugging Face config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_kernel.errors import ModelError
from rl_kernel.reference.rope_table import rope_digest
from rl_kernel.reference.weights import read_json

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A Llama or Qwen3 decoder. Sizes are counts; `qk_norm` is what sets Qwen3 apart."""

    model_type: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position: int
    tied: bool

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head before RoPE."""
        return self.model_type == "qwen3"

    @property
    def rope_digest(self) -> str:
        """Names the RoPE table; equal on two sides that rotate alike."""
        return rope_digest(self.rope_theta, self.head_dim, self.rope_scaling)

    @classmethod
    def read(cls, folder: Path) -> "DecoderConfig":
        """Read `folder`/config.json; ModelError names a missing key or a feature that has no contract."""
        raw = read_json(folder / "config.json")
        try:
            return cls._from_dict(raw)
        except KeyError as error:
            raise ModelError(f"{folder}/config.json has no {error.args[0]!r}") from None
        except ModelError as error:
            raise ModelError(f"{folder}/config.json: {error}") from None

    @classmethod
    def _from_dict(cls, raw: Mapping[str, Any]) -> "DecoderConfig":
        model_type = raw["model_type"]
        if model_type not in ARCHITECTURES:
            raise ModelError(
                f"architecture {model_type!r} has no contract; there is one for {', '.join(ARCHITECTURES)}"
            )
        for key, allowed in (
            ("attention_bias", (False, None)),
            ("mlp_bias", (False, None)),
            ("use_sliding_window", (False, None)),
            ("hidden_act", ("silu", None)),
            ("quantization_config", (None,)),
        ):
            if raw.get(key) not in allowed:
                raise ModelError(f"{key}={raw[key]!r} has no contract; it must be {allowed[0]!r}")
        rope = dict(raw.get("rope_parameters") or {})
        theta = raw.get("rope_theta", rope.pop("rope_theta", None))
        if theta is None:
            raise KeyError("rope_theta")
        scaling = raw.get("rope_scaling") or rope or None
        kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
        if kind != "default":
            raise ModelError(f"rope_scaling type {kind!r} has no contract; it must be 'default'")
        heads = int(raw["num_attention_heads"])
        return cls(
            model_type=model_type,
            vocab=int(raw["vocab_size"]),
            hidden=int(raw["hidden_size"]),
            intermediate=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=float(theta),
            rope_scaling=None,
            max_position=int(raw["max_position_embeddings"]),
            tied=bool(raw.get("tie_word_embeddings", False)),
        )
