"""Requests that cross the boundaries of blocks, chunks and cached prefixes, and what comes back as plain bits."""

from collections.abc import Sequence

import numpy as np

from rl_kernel.contracts import model_contract
from rl_kernel.reference.model import Decoder
from services.engines import Generated
from services.records import Sampling
from services.rollout.engine import RolloutEngine, _sampling_params

VOCAB = 331
TEMPERATURE = 0.7
Prompt = tuple[int, ...]


def prompts(count: int, *, longest: int = 90, seed: int = 0) -> list[Prompt]:
    """`count` random prompts of 1 to `longest` tokens."""
    random = np.random.default_rng(seed)
    return [tuple(random.integers(0, VOCAB, random.integers(1, longest + 1)).tolist()) for _ in range(count)]


def sampling(count: int, new_tokens: int = 6) -> list[Sampling]:
    """One seed each, at a temperature that is not 1."""
    return [Sampling(TEMPERATURE, seed=100 + i, max_new_tokens=new_tokens) for i in range(count)]


def bits(response: Generated) -> tuple[Prompt, bytes]:
    """Tokens and the bit patterns of their logprobs."""
    return response.tokens, response.logprobs.tobytes()


def cached_tokens(engine: RolloutEngine, asked: Sequence[Prompt]) -> list[int]:
    """Tokens of each prompt that vLLM takes from its prefix cache, by its own count."""
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in asked]
    outputs = engine._llm.generate(inputs, [_sampling_params(how) for how in sampling(len(asked), 1)], use_tqdm=False)
    return [output.num_cached_tokens for output in outputs]


def run(engine: RolloutEngine, asked: Sequence[Prompt], new_tokens: int = 6) -> list[tuple[Prompt, bytes]]:
    """Generate for all prompts in one batch."""
    return [bits(r) for r in engine.generate(asked, sampling(len(asked), new_tokens))]


def reference_bits(folder, asked, responses, segments: int = 1) -> list[bytes]:  # type: ignore[no-untyped-def]
    """What the reference decoder says about the same tokens."""
    decoder = Decoder.open(folder, model_contract(segments=segments))
    tokens = [np.array(p + r[0], np.int64) for p, r in zip(asked, responses, strict=True)]
    found = decoder.logprobs(tokens, [len(p) for p in asked], TEMPERATURE)
    return [logprobs.tobytes() for logprobs in found]
