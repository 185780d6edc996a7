"""Records of one sample, as two sound sides would report it, and ways to bend one of them."""

from dataclasses import replace
from typing import Any

import numpy as np

from auditor.contracts import known_contracts
from auditor.records import Environment, Layout, Positions, RolloutRecord, Sampling, TrainerRecord
from rl_kernel.contracts import model_contract

CONTRACT = model_contract("portable", segments=2)
CONTRACTS = known_contracts()
ENVIRONMENT = Environment("cpu-x86_64", "fma32", "aa" * 32)
LAYOUT = Layout(tp_size=1, cp_size=1, vocab_size=331, padded_vocab_size=384, vocab_shards=(0, 384))
PROMPT, RESPONSE = 8, 32


def pair(
    sample_id: str = "0", *, run_id: str = "run", step: int = 0, seed: int = 0
) -> tuple[RolloutRecord, TrainerRecord]:
    """Two sides that agree bit by bit."""
    random = np.random.default_rng([seed, step, *sample_id.encode()])
    tokens = random.integers(0, LAYOUT.vocab_size, PROMPT + RESPONSE).astype(np.uint32)
    logprobs = -random.exponential(2.0, RESPONSE).astype(np.float32)
    common: dict[str, Any] = {
        "run_id": run_id,
        "step": step,
        "sample_id": sample_id,
        "prompt_len": PROMPT,
        "logprobs": logprobs,
        "mask": np.ones(RESPONSE, np.bool_),
        "sampling": Sampling(temperature=1.0, seed=7),
        "weight_version": 1,
        "weight_digest": "01" * 32,
        "contract_digest": CONTRACT.digest(),
        "environment": ENVIRONMENT,
        "layout": LAYOUT,
        "positions": Positions(rope_digest="02" * 32),
    }
    rollout = RolloutRecord(engine_id="rollout-0", tokens=tokens, finish_reason="stop", **common)
    trainer = TrainerRecord(trainer_id="trainer-0", token_count=len(tokens), tokens=tokens, **common)
    return rollout, trainer


def with_logprobs(record: Any, index: int, value: float) -> Any:
    """The record with one log-probability replaced."""
    logprobs = record.logprobs.copy()
    logprobs[index] = value
    return replace(record, logprobs=logprobs)


def one_ulp_off(record: Any, index: int = 5) -> Any:
    """The record with one log-probability moved to the next float."""
    return with_logprobs(record, index, np.nextafter(record.logprobs[index], np.float32(0)))
