"""What a request may ask of a strict engine: a temperature, and logprobs of what was sampled, of the top k or of ids.

vLLM asks `StrictRequests` where a request arrives, in either model runner's engine: there a refusal is that request's
error. One that the sampler raises later ends the whole engine, and every other request with it.
"""

from typing import Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as GPULogitsProcessor

from rl_kernel.errors import PlanError


def refuse(asked: SamplingParams) -> None:
    """Raise PlanError for what changes the distribution that is sampled from, and for logprobs of a prompt."""
    for name, found in (
        ("top_p", asked.top_p != 1.0),
        ("top_k", asked.top_k > 0),
        ("min_p", asked.min_p != 0.0),
        ("presence_penalty", asked.presence_penalty != 0.0),
        ("frequency_penalty", asked.frequency_penalty != 0.0),
        ("repetition_penalty", asked.repetition_penalty != 1.0),
        ("min_tokens", bool(asked.min_tokens)),
        ("logit_bias", bool(asked.logit_bias)),
        ("allowed_token_ids", bool(asked.allowed_token_ids)),
        ("bad_words", bool(asked.bad_words)),
        ("structured_outputs", asked.structured_outputs is not None),
        ("thinking_token_budget", asked.thinking_token_budget is not None),
        ("watermarking", asked.watermarking is True),
    ):
        if found:
            raise PlanError(f"{name} changes what is sampled from and has no contract; use temperature only")
    if asked.logprobs == -1:
        raise PlanError("logprobs=-1 asks for the whole vocabulary; strict mode serves the top k")
    if asked.prompt_logprobs is not None:
        raise PlanError("prompt_logprobs are not served in strict mode; score a text by generating from it")


class StrictRequests(LogitsProcessor, GPULogitsProcessor):
    """A logits processor of both model runners that touches no logit: vLLM lets such a class look at each request."""

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise vLLM's error of a bad request, with the words of `refuse`."""
        try:
            refuse(sampling_params)
        except PlanError as error:
            raise VLLMValidationError(str(error)) from None

    def apply(self, logits: torch.Tensor, *_: Any) -> torch.Tensor:
        """The same logits."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """Yes: it changes nothing."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """There is none."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """No logits of the request are to be processed."""
        return False
