"""What the engine asks of a worker, whatever device that runs on.

The methods without a leading underscore are called by name through vLLM's `collective_rpc`; arguments and results
are plain values, since they may cross processes.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm.config import set_current_vllm_config

from rl_kernel.errors import WeightDigestError
from rl_kernel.integrations.vllm.inspection import expected_calls, foreign_sites
from rl_kernel.integrations.vllm.runtime import StrictRuntime
from rl_kernel.integrations.vllm.weights import Triple, digest_while_reading, memory_digest, replace_weights
from rl_kernel.reference.weights import digest_tensors


class StrictCalls:
    """Of a worker whose model was built out of strict layers."""

    vllm_config: Any
    model_config: Any
    model_runner: Any
    _runtime: StrictRuntime
    _wanted: type
    _reported: set[tuple[str, str]]
    get_model: Callable[[], Any]  # vLLM's worker has it

    def _look(self, wanted: type) -> None:
        """Look at the built model. wanted: the sampler's class. EvidenceError if `enforce` was asked for."""
        self._wanted, self._reported = wanted, set()
        self._look_again()
        if self.vllm_config.additional_config["rl_kernel"]["enforce"]:
            self._runtime.plan.evidence().refuse_foreign()

    def _look_again(self) -> None:
        """Note whatever is not ours now; what was noted once stays."""
        for op, where in foreign_sites(self.get_model(), self.model_runner.sampler, self._wanted):
            self._report(op, where)

    def _report(self, op: str, where: str) -> None:
        if (op, where) not in self._reported:
            self._reported.add((op, where))
            self._runtime.plan.report_foreign(op, where)

    def evidence(self) -> dict[str, Any]:
        """What served each op on this rank since `reset_evidence`, and what ever was foreign (fields of `Evidence`)."""
        self._look_again()
        return asdict(self._runtime.plan.evidence())

    def reset_evidence(self) -> None:
        """Count from zero."""
        self._runtime.plan.reset()

    def expected_evidence(self, steps: int) -> dict[str, int]:
        """Calls that the model's shape implies for `steps` forward passes that all sampled with logprobs."""
        return expected_calls(
            self.model_config.hf_config,
            tp_size=self._runtime.tp_size,
            steps=steps,
            sampling_steps=steps,
            opaque=self._runtime.opaque,
        )

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


class NativeCalls:
    """Of a worker with vLLM's own arithmetic."""

    model_config: Any
    _loaded: str | None = None
    get_model: Callable[[], Any]  # vLLM's worker has it, and its own reload
    reload_weights: Callable[..., None]

    def replace_weights(self, folder: str) -> None:
        """Load the weights of `folder` by vLLM's own reload.

        On a CPU that reload leaves a tied output layer as it was packed at the start, and every log-probability would
        be one of the first weights' head: it is packed again here.
        """
        seen: list[Triple] = []
        tied = bool(self.model_config.hf_config.tie_word_embeddings)
        self.reload_weights(weights_iterator=digest_while_reading(Path(folder), seen))
        if tied:
            head = self.get_model().lm_head
            head.quant_method.process_weights_after_loading(head)
        self._loaded = digest_tensors(seen, tied=tied)

    def confirm_weights(self) -> tuple[str | None, str | None]:
        """As the strict worker's, of the tensors handed to vLLM's loader: its linears may keep no readable copy."""
        return self._loaded, None
