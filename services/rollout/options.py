"""How the rollout engine is run, and what must hold of a model before vLLM is started on it."""

import os
from dataclasses import dataclass
from pathlib import Path

from rl_kernel.errors import ModelError
from rl_kernel.reference import model as reference
from rl_kernel.reference.config import DecoderConfig
from rl_kernel.reference.weights import map_weights
from services.config import Config, Numerics


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How vLLM is run.

    threads: CPU threads of each tensor-parallel rank; with several, vLLM starts processes for itself and for each.
    max_num_batched_tokens: of one step; a longer prompt is prefilled in chunks. block_size: tokens of a KV-cache
    block. kv_cache_mb: memory for keys and values of each rank, MiB.
    """

    engine_id: str = "rollout-0"
    numerics: Numerics = "strict"
    profile: str = "portable"
    segments: int = 1
    tp_size: int = 1
    threads: int = 1
    max_model_len: int = 256
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    kv_cache_mb: int = 64
    prefix_caching: bool = True
    block_size: int = 32

    @classmethod
    def of(cls, config: Config, engine_id: str = "rollout-0") -> "EngineOptions":
        """The options that the job's config asks for."""
        return cls(
            engine_id=engine_id,
            numerics=config.numerics.mode,
            profile=config.numerics.profile,
            segments=config.numerics.segments,
            tp_size=config.rollout.tp_size,
            threads=config.numerics.threads,
            max_model_len=config.rollout.max_model_len,
            max_num_seqs=config.rollout.max_num_seqs,
            kv_cache_mb=config.rollout.kv_cache_mb,
            prefix_caching=config.rollout.prefix_caching,
        )


def check_split(config: DecoderConfig, options: EngineOptions) -> None:
    """Raise ModelError if the model cannot be cut as `options` say."""
    tp_size = options.tp_size
    for name, count in (("attention heads", config.heads), ("kv heads", config.kv_heads)):
        if count % tp_size:
            raise ModelError(f"rollout tp_size {tp_size} does not divide the model's {count} {name}")
    if options.numerics == "native":
        return
    if options.segments % tp_size:
        raise ModelError(f"rollout tp_size {tp_size} does not divide segments {options.segments}")
    for name, width in (("attention width", config.heads * config.head_dim), ("MLP width", config.intermediate)):
        if width % options.segments:
            raise ModelError(f"segments {options.segments} does not divide the model's {name} {width}")


def check_tensors(config: DecoderConfig, folder: Path) -> None:
    """Raise ModelError if `folder` does not hold exactly what a model of this config needs, in bf16."""
    tensors = map_weights(folder)
    if config.tied and "lm_head.weight" in tensors:
        # Also where it repeats the embedding: whether a model is tied, vLLM tells by the file.
        raise ModelError(f"{folder}: 'lm_head.weight' must not be there, since tie_word_embeddings is true")
    reference.check_tensors(folder, config, tensors)


def thread_binding(options: EngineOptions) -> str:
    """Cores of each rank in vLLM's notation; ranks share cores where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = []
    for rank in range(options.tp_size):
        own = [cores[(rank * options.threads + i) % len(cores)] for i in range(options.threads)]
        ranks.append(",".join(str(core) for core in dict.fromkeys(own)))
    return "|".join(ranks)
