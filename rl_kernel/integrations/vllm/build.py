"""From vLLM's config to the plan and runtime of one worker, or a refusal."""

import os
from pathlib import Path
from typing import Any, Final

import torch
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context

from rl_kernel.contracts import model_contract
from rl_kernel.errors import PlanError
from rl_kernel.integrations.evidence import CountingPlan, Tally
from rl_kernel.integrations.opaque.plan import OpaquePlan
from rl_kernel.integrations.vllm import REQUESTS
from rl_kernel.integrations.vllm.runtime import StrictRuntime
from rl_kernel.ops import strict_plan
from rl_kernel.plan import Plan
from rl_kernel.reference.config import DecoderConfig

_MODES: Final = (CompilationMode.NONE, CompilationMode.DYNAMO_TRACE_ONCE, CompilationMode.VLLM_COMPILE)


def check_engine(config: Any) -> None:
    """Raise PlanError for a vLLM feature that has no contract, ModelError for a model that has none."""
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    if (Path(model.model) / "config.json").exists():
        DecoderConfig.read(Path(model.model))
    else:  # from a hub, as vLLM has read it, which fills in what is missing
        DecoderConfig.of(model.hf_config.to_dict(), f"the config of {model.model}")
    for name, value, allowed in (
        ("compilation mode", config.compilation_config.mode, _MODES),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, (1,)),
        ("data_parallel_size", parallel.data_parallel_size, (1,)),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size, (1,)),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size, (1,)),
        ("enable_dbo", parallel.enable_dbo, (False,)),
        ("enable_batch_sharded_sampling", parallel.enable_batch_sharded_sampling, (False, None)),
        ("LoRA", config.lora_config, (None,)),
        ("speculative decoding", config.speculative_config, (None,)),
        ("KV cache dtype", cache.cache_dtype, ("auto", "bfloat16")),
        # Keys and values, hidden states or a config from elsewhere: nobody can recompute them from the folder.
        ("kv_transfer_config", config.kv_transfer_config, (None,)),
        ("enable_prompt_embeds", model.enable_prompt_embeds, (False,)),
        ("hf_overrides", model.hf_overrides, ({}, None)),
        ("watermark_config", config.watermark_config, (None,)),
        # Of other processors nothing is known; without ours, one bad request would end the engine.
        ("logits_processors", model.logits_processors, ([REQUESTS],)),
        ("logprobs_mode", model.logprobs_mode, ("processed_logprobs",)),
        ("VLLM_BATCH_INVARIANT", os.environ.get("VLLM_BATCH_INVARIANT", "0"), ("0",)),
    ):
        if value not in allowed:
            raise PlanError(f"{name} = {value!r} has no contract; strict mode needs {allowed[0]!r}")


def make_runtime(config: Any, device: torch.device, tally: Tally | None = None) -> StrictRuntime:
    """The runtime of this worker; PlanError where the TP size does not fit or no backend serves an op.

    tally: counts what CUDA graphs replay, where there are any.
    """
    settings = config.additional_config["rl_kernel"]
    contract = model_contract(settings["profile"], segments=settings["segments"])
    group = get_tp_group()
    if contract.segments % group.world_size:
        raise PlanError(f"tensor-parallel size {group.world_size} does not divide segments {contract.segments}")
    plan = strict_plan(contract, device.type)
    compiled = config.compilation_config.mode is not CompilationMode.NONE
    counting = _opaque(plan, group, tally) if compiled or tally else _plain(plan, group)
    return StrictRuntime(counting, contract.segments, group.world_size, group.rank_in_group, group.device_group)


def _plain(plan: Plan, group: Any) -> CountingPlan:
    return CountingPlan(plan, engine="vllm", rank=group.rank_in_group)


def _opaque(plan: Plan, group: Any, tally: Tally | None) -> OpaquePlan:
    return OpaquePlan(
        plan,
        engine="vllm",
        rank=group.rank_in_group,
        tally=tally,
        group=group.device_group,
        in_pieces=lambda: get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE,
    )
