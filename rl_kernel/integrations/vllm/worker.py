"""vLLM's CPU worker with strict layers."""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from rl_kernel.errors import PlanError
from rl_kernel.integrations.vllm.build import check_engine, make_runtime
from rl_kernel.integrations.vllm.hooks import strict_layers
from rl_kernel.integrations.vllm.sampler import StrictSampler
from rl_kernel.integrations.vllm.worker_calls import NativeCalls, StrictCalls


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


class StrictCPUWorker(StrictCalls, SeededCPUWorker):
    """Builds its model out of strict layers and counts what serves every op."""

    def init_device(self) -> None:
        """As vLLM's, where the engine has a contract."""
        check_engine(self.vllm_config)
        super().init_device()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """As vLLM's, inside the hooks; then look at everything that was built."""
        if self.use_v2_model_runner:
            raise PlanError("vLLM's V2 model runner samples by other means on CPU; strict mode needs the V1 runner")
        self._runtime = make_runtime(self.vllm_config, torch.device("cpu"))
        with strict_layers(self._runtime):
            super().load_model(load_dummy_weights=load_dummy_weights)
        self.model_runner.sampler = StrictSampler(self._runtime, self.model_config.get_vocab_size())
        self._look(StrictSampler)


class NativeCPUWorker(NativeCalls, SeededCPUWorker):
    """vLLM's own worker and arithmetic; only the engine's calls are added."""
