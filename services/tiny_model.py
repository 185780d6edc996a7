"""A random model small enough to train and break in seconds, as Hugging Face writes one."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from rl_kernel.reference.config import DecoderConfig
from rl_kernel.reference.model import expected_tensors
from rl_kernel.reference.ops import Bits, narrow
from services.trainer.tensor_file import Entry, write_tensors

_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 331,
    "hidden_size": 160,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write_tiny_model(folder: Path) -> Path:
    """Write config.json and model.safetensors (bf16), always the same, into `folder`, made if missing; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=2), "utf-8")
    random = np.random.default_rng(0)
    entries = [
        Entry(name, "BF16", shape) for name, shape in expected_tensors(DecoderConfig.of(_CONFIG, "the tiny model"))
    ]
    write_tensors(folder / "model.safetensors", entries, (_draw(random, entry.shape) for entry in entries))
    return folder


def _draw(random: np.random.Generator, shape: tuple[int, ...]) -> Bits:
    """Norms around 1; matrices that keep the activations' scale."""
    draw = random.standard_normal(shape, dtype=np.float32)
    return narrow(1 + draw / 8 if len(shape) == 1 else draw * 1.5 * shape[-1] ** -0.5)
