"""The V2 model runner's sampler with log-probabilities by contract, from fp32 logits divided by the temperature.

Which token is drawn is vLLM's business (Gumbel noise of seed and position) and not on the path to a logprob. Shape
suffixes: R rows of the step, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from rl_kernel.integrations.vllm.requests import refuse
from rl_kernel.integrations.vllm.row_temperatures import row_temperatures
from rl_kernel.integrations.vllm.runtime import StrictRuntime


class StrictGPUSampler(Sampler):
    """Temperature only: everything else that vLLM can do to logits changes the distribution, and is refused.

    A temperature of 0 is greedy, and its logprobs are those at temperature 1, as in vLLM.
    """

    _now: torch.Tensor  # temperatures of the rows of the step that is being sampled

    def __init__(self, runtime: StrictRuntime, vocab: int, **like_vllm: Any) -> None:
        # "logits": vLLM then gathers the ids that are asked for, and leaves log-probabilities to us.
        super().__init__(**(like_vllm | {"logprobs_mode": "processed_logits"}))
        self._logp = runtime.plan.function("linear_logp", "logp_from_logits")
        self._vocab = vocab

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """As vLLM's; PlanError for anything but a temperature."""
        refuse(sampling_params)
        super().add_request(req_idx, sampling_params)

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> SamplerOutput:
        """logits[R,V] fp32 → sampled ids, and the logprobs of the sampled and the other ids."""
        logits = logits.contiguous()
        asked_for = self.sampling_states.temperature.gpu
        self._now = temperature = row_temperatures(asked_for, input_batch.expanded_idx_mapping)
        output: SamplerOutput = super().__call__(logits, input_batch)
        asked = output.logprobs_tensors
        if asked is None:
            return output
        logprobs, _ = self._logp(logits, asked.logprob_token_ids.long(), temperature, vocab=self._vocab)
        if self.logprob_token_ids_state.max_num_token_ids(input_batch.idx_mapping_np):
            logprobs.masked_fill_(asked.logprobs == float("-inf"), float("-inf"))  # vLLM's mark for "not asked"
        return replace(output, logprobs_tensors=asked._replace(logprobs=logprobs))

    def apply_sampling_params(self, logits: torch.Tensor, *_: Any, **__: Any) -> Any:
        """logits[R,V] of this step → logits / temperature, the same division as in the contract."""
        return logits / self._now[:, None]
