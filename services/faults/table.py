"""The faults: fifteen kinds, each in a real engine."""

from functools import partial
from typing import Final

from services.faults import in_rollout, in_trainer
from services.faults.fault import EngineFault


def _one_of(*causes: str) -> frozenset[str]:
    return frozenset(causes)


_STALE, _HEAT, _CUT = _one_of("stale_weights"), _one_of("temperature"), _one_of("truncated_sampling")
_KV, _ROPE, _HEAD = _one_of("kv_boundary"), _one_of("rope_scaling"), _one_of("bf16_head")
_ORDER = _one_of("reduction_order")
# A stock engine has both: sums in other orders, and logits in bf16.
_STOCK = _one_of("reduction_order", "bf16_head")

FAULTS: Final = (
    EngineFault("stale weights", "one sync skipped", "rollout", _STALE, in_rollout.nothing_loaded, shows=2),
    EngineFault("stale weights", "two syncs skipped", "rollout", _STALE, in_rollout.nothing_loaded, shows=3, early=1),
    EngineFault("stale weights", "trainer resumed one version late", "trainer", _STALE, in_trainer.resumed_late),
    EngineFault(
        "LoRA not merged", "base without its adapter", "rollout", _one_of("weights_never_delivered"),
        in_rollout.base_loaded, clean=0, shows=4, early=2,
        note="the adapter is the part of low rank of a full update",
    ),
    EngineFault("temperature", "values before the temperature", "rollout", _HEAT, in_rollout.before_temperature),
    EngineFault("temperature", "stock vLLM, raw log-probabilities", "rollout", _HEAT, in_rollout.stock_raw),
    EngineFault("temperature", "temperature forgotten", "trainer", _HEAT, in_trainer.temperature_forgotten),
    EngineFault("top-p", "renormalised over 0.9", "rollout", _CUT, in_rollout.nucleus),
    EngineFault("top-p", "stock vLLM, top_p 0.9", "rollout", _CUT, in_rollout.stock_nucleus),
    EngineFault("off-by-one", "labels shifted twice", "trainer", _one_of("off_by_one"), in_trainer.labels_late),
    EngineFault("off-by-one", "logits not shifted", "trainer", _one_of("off_by_one"), in_trainer.rows_late),
    EngineFault("shifted mask", "loss mask one early", "declared", _one_of("off_by_one", "mask"),
                in_trainer.mask_shifted),
    EngineFault("EOS filler", "end forced with 0.0", "rollout", _one_of("filler"), in_rollout.forced_end),
    EngineFault("retokenised tokens", "through text", "declared", _one_of("retokenisation"), in_trainer.through_text,
                note="the tiny model has no tokenizer; a BPE of letters and pairs of them stands for it"),
    EngineFault("stale KV", "prefix cache not reset", "rollout", _one_of("stale_kv"), in_rollout.cache_kept, shows=2),
    EngineFault("stale KV", "weights updated in mid-generation", "rollout", _one_of("stale_kv"),
                in_rollout.loaded_midway, shows=2),
    EngineFault("chunk boundary", "a chunk that does not see the one before", "rollout", _KV, in_rollout.chunks_alone),
    EngineFault("chunk boundary", "a block of the next request", "rollout", _KV, in_rollout.foreign_block),
    EngineFault("RoPE scaling", "scaled by 4", "rollout", _ROPE, in_rollout.scaled_rope),
    EngineFault("RoPE scaling", "another base", "rollout", _ROPE, in_rollout.other_base),
    EngineFault("RoPE scaling", "another base, declared", "declared", _ROPE,
                partial(in_rollout.other_base, declared=True)),
    EngineFault("RoPE scaling", "stock vLLM, scaled by hf_overrides", "rollout", _ROPE, in_rollout.stock_scaled_rope),
    EngineFault("RoPE scaling", "scaled by 4 in the trainer", "trainer", _ROPE, in_trainer.rope_scaled),
    EngineFault("CP slice", "labels shifted slice by slice", "trainer", _one_of("context_parallel"),
                in_trainer.labels_in_slices),
    EngineFault("CP slice", "slices that see themselves only", "trainer", _one_of("context_parallel"),
                in_trainer.slices_alone),
    EngineFault("bf16 head", "logits through bf16", "rollout", _HEAD, in_rollout.bf16_logits),
    EngineFault("bf16 head", "values through bf16", "rollout", _HEAD, in_rollout.bf16_values),
    EngineFault("bf16 head", "Megatron's own output layer", "trainer", _HEAD, in_trainer.stock_head),
    EngineFault("split-K", "one product in two halves", "rollout", _ORDER, in_rollout.split_product),
    EngineFault("split-K", "torch's products", "trainer", _ORDER, in_trainer.stock_products),
    EngineFault("split-K", "stock vLLM", "rollout", _STOCK, in_rollout.stock),
    EngineFault("split-K", "stock Megatron-core", "trainer", _STOCK, in_trainer.stock),
    EngineFault("routing", "other experts", "trainer", _one_of("routing"), in_trainer.other_experts,
                note="the model is dense: gate and up in each other's place stand for another expert"),
)  # fmt: skip
