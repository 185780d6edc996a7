"""Models, samples and one pass over them, shared by the Megatron tests and by the processes that they start."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from rl_kernel.integrations.megatron.model import StrictModel
from rl_kernel.integrations.megatron.packing import Tokens, pack
from rl_kernel.integrations.megatron.weights import pieces
from rl_kernel.plan import Plan
from rl_kernel.torch_autograd import TensorParallel
from tests.models import TINY_MODELS, write_tiny_model

TEMPERATURE = 0.7
# One token to score, a sample as long as a KV block, one a token longer.
LENGTHS = ((3, 1), (5, 60), (20, 46), (2, 9))


def model_folder(root: Path, name: str) -> Path:
    return write_tiny_model(root / name, TINY_MODELS[name], seed=1)


def samples(vocab: int) -> list[Tokens]:
    draw = np.random.default_rng(5)
    return [
        Tokens(tuple(draw.integers(0, vocab, prompt).tolist()), tuple(draw.integers(0, vocab, response).tolist()))
        for prompt, response in LENGTHS
    ]


def build(folder: Path, plan: Plan, tp: TensorParallel) -> StrictModel:
    model = StrictModel(folder, plan, tp)
    model.load(folder)
    return model


def score(model: StrictModel, tokens: Sequence[Tokens]) -> np.ndarray:
    decoder = model.layout.decoder
    with torch.no_grad():
        packed = pack(tokens, vocab=decoder.vocab, max_position=decoder.max_position)
        return model.logprobs(packed, TEMPERATURE).cpu().numpy()


def forward_backward(
    model: StrictModel, tokens: Sequence[Tokens], cuts: Sequence[int] = ()
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logprobs, and the gradients of sum(sin(logprob)) under Hugging Face names; the batch is cut before `cuts`."""
    decoder, logprobs = model.layout.decoder, []
    model.clear_gradients()
    bounds = [0, *cuts, len(tokens)]
    for first, last in pairwise(bounds):
        packed = pack(tokens[first:last], vocab=decoder.vocab, max_position=decoder.max_position)
        new = model.logprobs(packed, TEMPERATURE)
        logprobs.append(new.detach().cpu().clone())
        model.backward(new, torch.cos(new.detach().cpu()))  # the CPU's cosine on every device
    model.finish_gradients()
    model.prove()
    gradients = {name: p.main_grad for name, p in model.parameters.items()}
    return torch.cat(logprobs).numpy(), {
        p.name: p.whole(model.tp).clone().cpu().numpy() for p in pieces(model.layout, gradients)
    }


def differing(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> list[str]:
    """Names whose arrays are not the same bits; all of them if the names differ or there are none."""
    if left.keys() != right.keys() or not left:
        return sorted(left.keys() | right.keys() | {"nothing"})
    return [name for name in left if not np.array_equal(left[name].view(np.uint32), right[name].view(np.uint32))]
