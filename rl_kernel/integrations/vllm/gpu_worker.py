"""vLLM's GPU worker with strict layers: the V2 model runner, compiled or not, with CUDA graphs or without."""

from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from rl_kernel.errors import PlanError
from rl_kernel.integrations.opaque.graph_tally import GraphTally
from rl_kernel.integrations.opaque.known_kernels import foreign_kernels
from rl_kernel.integrations.vllm.build import check_engine, make_runtime
from rl_kernel.integrations.vllm.gpu_sampler import StrictGPUSampler
from rl_kernel.integrations.vllm.hooks import strict_layers
from rl_kernel.integrations.vllm.worker_calls import NativeCalls, StrictCalls


class StrictGPUWorker(StrictCalls, Worker):
    """Builds its model out of strict layers and counts what serves every op, also when graphs are replayed."""

    _tally: GraphTally

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """As vLLM's, inside the hooks; then look at everything that was built."""
        check_engine(self.vllm_config)
        if not self.use_v2_model_runner:
            raise PlanError("on GPUs strict mode needs vLLM's V2 model runner; unset VLLM_USE_V2_MODEL_RUNNER")
        self._tally = GraphTally(torch.device("cuda"))
        self._runtime = make_runtime(self.vllm_config, torch.device("cuda"), self._tally)
        with strict_layers(self._runtime):
            super().load_model(load_dummy_weights=load_dummy_weights)
        self.get_model().model.norm.seal = {"seal": True}
        runner = self.model_runner
        runner.sampler = StrictGPUSampler(
            self._runtime,
            self.model_config.get_vocab_size(),
            vllm_config=self.vllm_config,
            max_num_reqs=runner.max_num_reqs,
            vocab_size=runner.vocab_size,
            device=runner.device,
            req_states=runner.req_states,
            num_speculative_tokens=runner.decode_query_len,
        )
        self._look(StrictGPUSampler)

    def evidence(self) -> dict[str, Any]:
        """As on every device; a kernel in a captured graph that no op of ours launches is a foreign site."""
        for name in foreign_kernels(kernel for graph in self.graph_kernels() for kernel in graph):
            self._report("an unknown op", f"kernel {name} in a captured CUDA graph")
        return super().evidence()

    def graph_kernels(self) -> list[dict[str, int]]:
        """Of every captured graph: the driver's name of each kernel in it, and how many."""
        return [dict(kernels) for kernels in self._tally.kernels.values()]


class NativeGPUWorker(NativeCalls, Worker):
    """vLLM's own worker and arithmetic; only the engine's calls are added."""
