"""Strict ops under an unmodified vLLM.

vLLM calls `register` in every process (entry point `vllm.general_plugins`). It only makes a name known: an engine is
strict when, and only when, it is built with `engine_arguments`. The worker named there puts the strict layers in
place of vLLM's while *its* model is built (`hooks`), and reports what really served each op (`worker.evidence`).
"""

from typing import Any

QUANTIZATION = "rl_kernel_strict"
STRICT_WORKER = "rl_kernel.integrations.vllm.worker.StrictCPUWorker"
NATIVE_WORKER = "rl_kernel.integrations.vllm.worker.NativeCPUWorker"


def register() -> None:
    """Make the quantization name known to vLLM. Changes nothing for an engine that does not ask for it."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config  # noqa: PLC0415

    from rl_kernel.integrations.vllm.quantization import StrictConfig  # noqa: PLC0415

    if QUANTIZATION not in QUANTIZATION_METHODS:
        register_quantization_config(QUANTIZATION)(StrictConfig)


def engine_arguments(*, profile: str = "portable", segments: int = 1) -> dict[str, Any]:
    """The arguments that make `vllm.LLM` (or its engine arguments) strict."""
    return {
        "dtype": "bfloat16",
        "quantization": QUANTIZATION,
        "worker_cls": STRICT_WORKER,
        "enforce_eager": True,
        "logprobs_mode": "processed_logprobs",
        "additional_config": {"rl_kernel": {"profile": profile, "segments": segments}},
    }


def native_engine_arguments() -> dict[str, Any]:
    """The same for the control group: vLLM's own arithmetic in the same dtype, with the same calls on the worker."""
    return {
        "dtype": "bfloat16",
        "worker_cls": NATIVE_WORKER,
        "enforce_eager": True,
        "logprobs_mode": "processed_logprobs",
    }
