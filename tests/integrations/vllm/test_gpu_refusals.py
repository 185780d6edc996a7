"""What a GPU engine refuses can be asked without a GPU: more than a temperature, settings without a contract."""

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors_params_validator

from rl_kernel.errors import PlanError
from rl_kernel.integrations.vllm import REQUESTS, engine_arguments
from rl_kernel.integrations.vllm.requests import refuse


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"structured_outputs": StructuredOutputsParams(regex="[0-9]+")}, "structured_outputs"),
        ({"thinking_token_budget": 2}, "thinking_token_budget"),
        ({"watermarking": True}, "watermarking"),
        ({"min_tokens": 2, "max_tokens": 4}, "min_tokens"),
        ({"logit_bias": {1: 2.0}}, "logit_bias"),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_a_request_for_more_than_a_temperature_is_refused(asked, named):
    with pytest.raises(PlanError, match=f"^{named} "):
        refuse(SamplingParams(**asked))
    admit = build_custom_logits_processors_params_validator([REQUESTS])  # what the V2 runner's engine asks
    with pytest.raises(VLLMValidationError, match=f"^{named} "):
        admit(SamplingParams(**asked))


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.0}, {"temperature": 0.7, "seed": 3, "logprobs": 5}])
def test_a_temperature_is_served(asked):
    refuse(SamplingParams(**asked))


def test_vllms_own_batch_invariance_beside_ours_is_refused_before_vllm_changes_torch(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(PlanError, match="VLLM_BATCH_INVARIANT = '1' has no contract; strict mode needs '0'"):
        engine_arguments()
