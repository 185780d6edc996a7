"""Log-probabilities of sampled tokens by contract, from fp32 logits divided by the temperature.

Also of the top k, or of given ids. Which token is drawn is vLLM's business and not on the path to a logprob; but equal
logits and an equal seed draw equal tokens. Shape suffixes: R sequences of the step, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.logprobs import batched_count_greater_than
from vllm.v1.sample.sampler import Sampler

from rl_kernel.errors import PlanError
from rl_kernel.integrations.vllm.requests import StrictRequests
from rl_kernel.integrations.vllm.runtime import StrictRuntime


class StrictSampler(Sampler):
    """Temperature only: everything else that vLLM can do to logits changes the distribution, and is refused.

    A temperature of 0 is greedy, and its logprobs are those at temperature 1, as in vLLM.
    """

    def __init__(self, runtime: StrictRuntime, vocab: int) -> None:
        # "raw": vLLM's own sampler then computes no log-softmax, which nobody would read.
        super().__init__(logprobs_mode="raw_logprobs")
        self._logp = runtime.plan.function("linear_logp", "logp_from_logits")
        self._vocab = vocab

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """logits[R,V] fp32 → sampled ids[R,1], and the logprobs of the sampled and the other ids."""
        _refuse(sampling_metadata, predict_bonus_token)
        logits = logits.contiguous()
        temperature = _temperature(logits, sampling_metadata)
        z = logits.div(temperature[:, None])
        sampled = self._draw(z, sampling_metadata)
        logprobs = self._logprobs(logits, z, temperature, sampled, sampling_metadata)
        return SamplerOutput(sampled_token_ids=sampled.to(torch.int32).unsqueeze(-1), logprobs_tensors=logprobs)

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Prompt logprobs come this way: refused, vLLM's are wrong when a prefix is cached."""
        raise PlanError("prompt_logprobs are not served in strict mode; score a text by generating from it")

    def _draw(self, z: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        if metadata.all_greedy:
            return self.greedy_sample(z).long()
        # vLLM's op works in place on what it is given.
        drawn, _ = self.topk_topp_sampler(z.clone(), metadata.generators, None, None)
        if metadata.all_random:
            return drawn.long()
        assert metadata.temperature is not None
        return torch.where(metadata.temperature < _GREEDY, self.greedy_sample(z), drawn).long()

    def _logprobs(
        self,
        logits: torch.Tensor,
        z: torch.Tensor,
        temperature: torch.Tensor,
        sampled: torch.Tensor,
        metadata: SamplingMetadata,
    ) -> LogprobsTensors | None:
        top, asked = metadata.max_num_logprobs, metadata.logprob_token_ids
        if top is None and not asked:
            return None
        first = sampled[:, None]
        if asked:
            others, absent = _asked_ids(asked, len(sampled))
        else:
            others, absent = z.topk(top or 0, dim=-1).indices, None
        ids = torch.cat((first, others), dim=1)
        logprobs, _ = self._logp(logits, ids, temperature, vocab=self._vocab)
        if absent is not None:
            logprobs[:, 1:].masked_fill_(absent, float("-inf"))
        ranks = batched_count_greater_than(z, z.gather(-1, first))
        return LogprobsTensors(ids.to(torch.int32), logprobs, ranks)


_GREEDY = 1e-5  # vLLM's own threshold, below which a temperature means greedy


def _temperature(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    if metadata.all_greedy or metadata.temperature is None:
        return torch.ones(logits.shape[0], dtype=torch.float32)
    return torch.where(metadata.temperature < _GREEDY, 1.0, metadata.temperature)


def _asked_ids(asked: Mapping[int, Sequence[int]], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row → ids, as ids[rows,longest] padded with 0, and where the padding is (vLLM answers −inf there)."""
    longest = max(len(ids) for ids in asked.values())
    table = torch.zeros((rows, longest), dtype=torch.int64)
    absent = torch.ones((rows, longest), dtype=torch.bool)
    for row, ids in asked.items():
        table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        absent[row, : len(ids)] = False
    return table, absent


def _refuse(metadata: SamplingMetadata, bonus: bool) -> None:
    """Raise PlanError for anything but a temperature."""
    for name, asked in (
        ("speculative decoding", bonus or bool(metadata.spec_token_ids and any(metadata.spec_token_ids))),
        ("top_p", metadata.top_p is not None),
        ("top_k", metadata.top_k is not None),
        ("penalties", not metadata.no_penalties),
        ("allowed_token_ids", metadata.allowed_token_ids_mask is not None),
        ("bad_words", bool(metadata.bad_words_token_ids)),
        ("logprobs=-1", metadata.max_num_logprobs == -1),
        ("a logits processor", _active(metadata)),
    ):
        if asked:
            raise PlanError(f"{name} changes what is sampled from and has no contract; use temperature only")


def _active(metadata: SamplingMetadata) -> bool:
    """Whether min_p, logit_bias, min_tokens or a foreign logits processor has something to do."""
    idle = {"min_p_count": 0, "biases": {}, "min_toks": {}}
    return any(
        not any(getattr(processor, state, None) == nothing for state, nothing in idle.items())
        for processor in metadata.logitsprocs.all
        if type(processor) is not StrictRequests
    )
