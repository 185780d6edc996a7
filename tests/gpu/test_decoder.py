"""A whole decoder: log-probabilities on the GPU, prefill and decode, are the reference's on the CPU, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rl_kernel.contracts import model_contract
from rl_kernel.reference.model import Decoder
from tests.gpu.tensors import same_as_reference, same_bits
from tests.models import TINY_MODELS, TinyModel, write_tiny_model

pytestmark = pytest.mark.gpu

# Qwen3-8B but for the number of layers and the vocabulary, whose cost on a CPU is linear.
QWEN3_8B_WIDE = TinyModel(
    "qwen3", layers=4, hidden=4096, intermediate=12288, heads=32, kv_heads=8, head_dim=128, vocab=8192, rope_theta=1e6,
    eps=1e-6,
)  # fmt: skip


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_tiny_decoders(tmp_path: Path, name: str, segments: int) -> None:
    from tests.gpu.decoder import GpuDecoder

    law = Decoder.open(write_tiny_model(tmp_path / name, TINY_MODELS[name]), model_contract("sm90", segments=segments))
    gpu, random = GpuDecoder(law), np.random.default_rng(1)
    tokens = [random.integers(0, law.config.vocab, n) for n in (2, 70, 131, 33)]
    expected = law.logprobs(tokens, [1] * len(tokens), 0.8)
    for found, want in zip(gpu.prefill([torch.from_numpy(t) for t in tokens], 0.8), expected, strict=True):
        same_as_reference(found, want, f"{name}, prefill")


def test_decode_is_prefill(tmp_path: Path) -> None:
    from tests.gpu.decoder import GpuDecoder

    law = Decoder.open(write_tiny_model(tmp_path, TINY_MODELS["qwen3"]), model_contract("sm90"))
    gpu = GpuDecoder(law)
    tokens = torch.from_numpy(np.random.default_rng(2).integers(0, law.config.vocab, (5, 90)))
    same_bits(gpu.decode(tokens, 1.0), torch.stack(gpu.prefill(list(tokens), 1.0)), "decode against prefill")


@pytest.mark.slow
def test_qwen3_8b_widths(tmp_path: Path) -> None:
    from tests.gpu.decoder import GpuDecoder

    law = Decoder.open(write_tiny_model(tmp_path, QWEN3_8B_WIDE), model_contract("sm90", segments=8))
    gpu, random = GpuDecoder(law), np.random.default_rng(3)
    tokens = [random.integers(0, law.config.vocab, n) for n in (12, 9)]
    expected = law.logprobs(tokens, [1] * len(tokens), 1.0)
    for found, want in zip(gpu.prefill([torch.from_numpy(t) for t in tokens], 1.0), expected, strict=True):
        same_as_reference(found, want, "prefill")
    same_bits(
        gpu.decode(torch.from_numpy(tokens[0])[None], 1.0)[0],
        gpu.prefill([torch.from_numpy(tokens[0])], 1.0)[0],
        "decode",
    )
