"""vLLM's CPU worker with strict layers, and the calls that the engine makes on every worker.

The methods without a leading underscore are called by name through vLLM's `collective_rpc`; arguments and results
are plain values, since they may cross processes.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from rl_kernel.contracts import model_contract
from rl_kernel.errors import PlanError, WeightDigestError
from rl_kernel.integrations.evidence import CountingPlan
from rl_kernel.integrations.vllm.hooks import strict_layers
from rl_kernel.integrations.vllm.inspection import expected_calls, foreign_sites
from rl_kernel.integrations.vllm.runtime import StrictRuntime
from rl_kernel.integrations.vllm.sampler import StrictSampler
from rl_kernel.integrations.vllm.weights import Triple, digest_while_reading, memory_digest, replace_weights
from rl_kernel.ops import strict_plan
from rl_kernel.reference.weights import digest_tensors


class SeededCPUWorker(CPUWorker):
    """vLLM's CPU worker, able to prefill the prompt of a seeded request in chunks.

    After each chunk but the last, vLLM takes back what the request's generator drew, by the offset that only a CUDA
    generator has, and so raises on a CPU. Here such a request's generator is out of reach for that step: what the
    step draws for it is thrown away, and its own generator has drawn nothing.
    """

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's."""
        runner = self.model_runner
        generators = runner.input_batch.generators
        unfinished = np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])
        kept = {row: generators.pop(row) for row in unfinished.tolist() if row in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(kept)


class StrictCPUWorker(SeededCPUWorker):
    """Builds its model out of strict layers and counts what serves every op."""

    _runtime: StrictRuntime

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """As vLLM's, inside the hooks; then look at everything that was built."""
        check_engine(self.vllm_config)
        if self.use_v2_model_runner:
            raise PlanError("vLLM's V2 model runner samples by other means on CPU; strict mode needs the V1 runner")
        self._runtime = _runtime(self.vllm_config)
        with strict_layers(self._runtime):
            super().load_model(load_dummy_weights=load_dummy_weights)
        self.model_runner.sampler = StrictSampler(self._runtime, self.model_config.get_vocab_size())
        for op, where in foreign_sites(self.get_model(), self.model_runner.sampler):
            self._runtime.plan.report_foreign(op, where)
        if self.vllm_config.additional_config["rl_kernel"]["enforce"]:
            self._runtime.plan.evidence().refuse_foreign()

    def evidence(self) -> dict[str, Any]:
        """What served each op on this rank since `reset_evidence` (fields of `Evidence`)."""
        return asdict(self._runtime.plan.evidence())

    def reset_evidence(self) -> None:
        """Count from zero."""
        self._runtime.plan.reset()

    def expected_evidence(self, steps: int) -> dict[str, int]:
        """Calls that the model's shape implies for `steps` forward passes that all sampled with logprobs."""
        tp_size = self._runtime.tp_size
        return expected_calls(self.model_config.hf_config, tp_size=tp_size, steps=steps, sampling_steps=steps)

    def replace_weights(self, folder: str) -> None:
        """Load the weights of `folder` into the layers as they stand."""
        with set_current_vllm_config(self.vllm_config):
            replace_weights(self.get_model(), Path(folder))

    def confirm_weights(self) -> tuple[str | None, str | None]:
        """(digest of the weights in memory, what is wrong with them); the digest on rank 0 only."""
        tied = bool(self.model_config.hf_config.tie_word_embeddings)
        try:
            return memory_digest(self.get_model(), self._runtime, tied=tied), None
        except WeightDigestError as error:
            return None, str(error)


class NativeCPUWorker(SeededCPUWorker):
    """vLLM's own worker and arithmetic; only the engine's calls are added."""

    _loaded: str | None = None

    def replace_weights(self, folder: str) -> None:
        """Load the weights of `folder` by vLLM's own reload."""
        seen: list[Triple] = []
        self.reload_weights(weights_iterator=digest_while_reading(Path(folder), seen))
        self._loaded = digest_tensors(seen, tied=bool(self.model_config.hf_config.tie_word_embeddings))

    def confirm_weights(self) -> tuple[str | None, str | None]:
        """As the strict worker's, of the tensors handed to vLLM's loader: its CPU linears keep no readable copy."""
        return self._loaded, None


def check_engine(config: Any) -> None:
    """Raise PlanError for a vLLM feature that has no contract."""
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    for name, value, allowed in (
        ("compilation mode", config.compilation_config.mode, (CompilationMode.NONE,)),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, (1,)),
        ("data_parallel_size", parallel.data_parallel_size, (1,)),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size, (1,)),
        ("LoRA", config.lora_config, (None,)),
        ("speculative decoding", config.speculative_config, (None,)),
        ("KV cache dtype", cache.cache_dtype, ("auto", "bfloat16")),
        ("logprobs_mode", model.logprobs_mode, ("processed_logprobs",)),
    ):
        if value not in allowed:
            raise PlanError(f"{name} = {value!r} has no contract; strict mode needs {allowed[0]!r}")


def _runtime(config: Any) -> StrictRuntime:
    settings = config.additional_config["rl_kernel"]
    contract = model_contract(settings["profile"], segments=settings["segments"])
    group = get_tp_group()
    if contract.segments % group.world_size:
        raise PlanError(f"tensor-parallel size {group.world_size} does not divide segments {contract.segments}")
    plan = CountingPlan(strict_plan(contract, "cpu"), engine="vllm", rank=group.rank_in_group)
    return StrictRuntime(plan, contract.segments, group.world_size, group.rank_in_group, group.device_group)
