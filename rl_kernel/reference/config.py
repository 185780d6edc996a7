"""What the contract needs to know of a decoder, read from a Hugging Face config.json."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rl_kernel.errors import ModelError
from rl_kernel.reference.rope_table import rope_digest
from rl_kernel.reference.weights import read_json

ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MOST: Final = 2**31 - 1
# Positions are the one size that no tensor of the model bounds, and there is a row of the RoPE table for each.
_MOST_POSITIONS: Final = 2**22
_FULL: Final = "full_attention"
_PLAIN_ROPE: Final = "default"
# Keys that ask an engine for other arithmetic than the contract's, with the values that do not.
_ALLOWED: Final[Mapping[str, tuple[object, ...]]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "bias": (False, None),
    "qkv_bias": (False, None),
    "is_causal": (True, None),
    "use_sliding_window": (False, None),
    "hidden_act": ("silu", None),
    "logit_scale": (1, None),
    "partial_rotary_factor": (1, None),
    "dual_chunk_attention_config": (None,),
    "quantization_config": (None,),
}

Raw = Mapping[str, Any]


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
        return cls.of(read_json(folder / "config.json"), f"{folder}/config.json")

    @classmethod
    def of(cls, raw: Raw, source: str) -> "DecoderConfig":
        """As `read`, of what it has read already. source: what it is, as a message begins."""
        try:
            return cls._from_dict(raw)
        except KeyError as error:
            raise ModelError(f"{source} has no {error.args[0]!r}") from None
        except ModelError as error:
            raise ModelError(f"{source}: {error}") from None

    @classmethod
    def _from_dict(cls, raw: Raw) -> "DecoderConfig":
        model_type = _architecture(raw)
        _refuse_other_arithmetic(raw)
        hidden, heads, layers = (_count(raw, k) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        kv_heads = _count(raw, "num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ModelError(f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
        head_dim = _count(raw, "head_dim", default=hidden // heads)
        if head_dim < 2 or head_dim % 2:
            raise ModelError(f"head_dim={head_dim} has no contract; RoPE turns pairs, so it must be even")
        _refuse_other_attention(raw, layers)
        return cls(
            model_type=model_type,
            vocab=_count(raw, "vocab_size"),
            hidden=hidden,
            intermediate=_count(raw, "intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive(raw, "rms_norm_eps"),
            rope_theta=_theta(raw),
            rope_scaling=None,
            max_position=_count(raw, "max_position_embeddings", most=_MOST_POSITIONS),
            tied=_flag(raw, "tie_word_embeddings"),
        )


def _architecture(raw: Raw) -> str:
    model_type = raw["model_type"]
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ModelError(
            f"architecture {_shown(model_type)} has no contract; there is one for {', '.join(ARCHITECTURES)}"
        )
    wanted = [ARCHITECTURES[model_type]]
    if raw.get("architectures") not in (None, wanted):
        raise ModelError(f"architectures={_shown(raw['architectures'])} has no contract; it must be {wanted}")
    return model_type


def _refuse_other_arithmetic(raw: Raw) -> None:
    for key, allowed in _ALLOWED.items():
        if raw.get(key) not in allowed:
            raise ModelError(f"{key}={_shown(raw[key])} has no contract; it must be {allowed[0]!r}")
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window") is not False:
        raise ModelError(f"sliding_window={_shown(raw['sliding_window'])} has no contract; it must be None")


def _refuse_other_attention(raw: Raw, layers: int) -> None:
    kinds = raw.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind != _FULL for kind in kinds):
        raise ModelError(
            f"layer_types={_shown(kinds)} has no contract; it must be {_FULL!r} for each of the {layers} layers"
        )


def _theta(raw: Raw) -> float:
    """RoPE's base, which may stand in more than one place."""
    places = {"the config": raw} | {name: _plain_rope(name, raw) for name in ("rope_parameters", "rope_scaling")}
    found = {name: _positive(it, "rope_theta") for name, it in places.items() if it.get("rope_theta") is not None}
    if not found:
        raise KeyError("rope_theta")
    if len(set(found.values())) > 1:
        said = ", ".join(f"{theta:g} in {name}" for name, theta in found.items())
        raise ModelError(f"rope_theta contradicts itself: {said}; keep the one that the model was trained with")
    return next(iter(found.values()))


def _plain_rope(name: str, raw: Raw) -> Raw:
    """The object `name`, which may not be there, and must not ask for another RoPE than the plain one."""
    rope = raw.get(name) or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{name}={_shown(rope)} must be an object, or null for plain RoPE")
    for key in ("rope_type", "type"):
        if rope.get(key) not in (None, _PLAIN_ROPE):
            raise ModelError(f"{name} type {_shown(rope[key])} has no contract; it must be {_PLAIN_ROPE!r}")
    if rope.get("partial_rotary_factor") not in _ALLOWED["partial_rotary_factor"]:
        raise ModelError(f"partial_rotary_factor={_shown(rope['partial_rotary_factor'])} has no contract; it must be 1")
    for key in sorted(rope.keys() - {"rope_theta", "rope_type", "type", "partial_rotary_factor"}):
        raise ModelError(f"{name} has {_shown(key)}, which has no contract; plain RoPE has a rope_theta and no more")
    return rope


def _count(raw: Raw, key: str, *, default: int | None = None, most: int = _MOST) -> int:
    """A whole number from 1; `default`, where there is one, stands for null and for a key that is not there."""
    value = raw[key] if default is None else raw.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 1 <= value <= most:
        raise ModelError(f"{key}={_shown(value)} must be a whole number from 1 to {most}")
    return value


def _positive(raw: Raw, key: str) -> float:
    value = raw[key]
    number = float(value) if type(value) is float or (type(value) is int and abs(value) < 2**64) else math.nan
    if not 0 < number < math.inf:
        raise ModelError(f"{key}={_shown(value)} must be a number above 0")
    return number


def _flag(raw: Raw, key: str) -> bool:
    value = raw.get(key)
    if not isinstance(value, bool | None):
        raise ModelError(f"{key}={_shown(value)} must be true or false")
    return bool(value)


def _shown(value: object) -> str:
    """As Python writes it, cut short."""
    return reprlib.repr(value)
