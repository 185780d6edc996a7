"""Strict ops under an unmodified vLLM.

vLLM calls `register` in every process (entry point `vllm.general_plugins`). It only makes a name known: an engine is
strict when, and only when, it is built with `engine_arguments`. The worker named there puts the strict layers in
place of vLLM's while *its* model is built (`hooks`), and reports what really served each op (`worker.evidence`).
"""

import atexit
import gc
import os
from importlib.metadata import entry_points
from typing import Any

from rl_kernel.errors import EvidenceError, PlanError

QUANTIZATION = "rl_kernel_strict"
STRICT_WORKER = "rl_kernel.integrations.vllm.worker.StrictCPUWorker"
NATIVE_WORKER = "rl_kernel.integrations.vllm.worker.NativeCPUWorker"
STRICT_GPU_WORKER = "rl_kernel.integrations.vllm.gpu_worker.StrictGPUWorker"
NATIVE_GPU_WORKER = "rl_kernel.integrations.vllm.gpu_worker.NativeGPUWorker"
REQUESTS = "rl_kernel.integrations.vllm.requests:StrictRequests"
_PLUGIN = "rl_kernel"


def register() -> None:
    """Make the quantization name known to vLLM. Changes nothing for an engine that does not ask for it."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config  # noqa: PLC0415

    from rl_kernel.integrations.vllm.quantization import StrictConfig  # noqa: PLC0415

    if QUANTIZATION not in QUANTIZATION_METHODS:
        register_quantization_config(QUANTIZATION)(StrictConfig)
        # An interpreter that ends collects all that was ever imported: four seconds, where vLLM kills after five.
        atexit.register(gc.freeze)


def require_plugin() -> None:
    """Raise EvidenceError if vLLM's own processes would not find `register`; vLLM itself would only log that."""
    if not any(entry.name == _PLUGIN for entry in entry_points(group="vllm.general_plugins")):
        raise EvidenceError("vLLM would not load rl_kernel: it is not installed as a package (pip install -e .)")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        raise EvidenceError(f"vLLM would not load rl_kernel: VLLM_PLUGINS={allowed!r} does not name it")


def engine_arguments(
    *, profile: str = "portable", segments: int = 1, enforce: bool = True, device: str = "cpu"
) -> dict[str, Any]:
    """The arguments that make `vllm.LLM` (or its engine arguments) strict.

    enforce: a worker that finds an op served by anything else refuses to start. Without it the worker only reports
    that, and whoever built the engine must look at the evidence. device: `cpu`, or `cuda`, where the model is compiled
    and captured in CUDA graphs unless `enforce_eager` says otherwise. PlanError if vLLM's own batch invariance is on.
    """
    if (invariant := os.environ.get("VLLM_BATCH_INVARIANT", "0")) != "0":
        # Said before vLLM starts: it overrides torch's own functions for the rest of the process.
        raise PlanError(f"VLLM_BATCH_INVARIANT = {invariant!r} has no contract; strict mode needs '0'")
    arguments: dict[str, Any] = {
        "dtype": "bfloat16",
        "quantization": QUANTIZATION,
        "logprobs_mode": "processed_logprobs",
        "logits_processors": [REQUESTS],
        "additional_config": {"rl_kernel": {"profile": profile, "segments": segments, "enforce": enforce}},
    }
    if device == "cpu":
        return arguments | {"worker_cls": STRICT_WORKER, "enforce_eager": True}
    return arguments | {
        "worker_cls": STRICT_GPU_WORKER,
        "attention_backend": "CUSTOM",
        "enable_batch_sharded_sampling": False,
        # Never called: sums over ranks are the contract's. Its set-up tries the peers out in further processes.
        "disable_custom_all_reduce": True,
        # vLLM would warm its kernels up with requests that strict mode refuses.
        "kernel_config": {"enable_jit_warmup": False},
    }


def native_engine_arguments(*, device: str = "cpu") -> dict[str, Any]:
    """The same for the control group: vLLM's own arithmetic in the same dtype, with the same calls on the worker."""
    arguments: dict[str, Any] = {"dtype": "bfloat16", "logprobs_mode": "processed_logprobs"}
    if device == "cpu":
        return arguments | {"worker_cls": NATIVE_WORKER, "enforce_eager": True}
    return arguments | {"worker_cls": NATIVE_GPU_WORKER}
