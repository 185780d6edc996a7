"""Megatron-core on the GPU: the reference's bits forward and backward, vLLM's bits, and AdamW's of the CPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_kernel.contracts import model_contract
from rl_kernel.errors import EvidenceError
from rl_kernel.ops import strict_plan
from rl_kernel.reference.model import Decoder
from tests.gpu.engines import needs, prompts, run_engine
from tests.gpu.vllm_process import TEMPERATURE
from tests.models import TINY_MODELS, write_tiny_model

pytestmark = [pytest.mark.gpu, needs("megatron.core"), pytest.mark.xdist_group("megatron")]
REAL = Path(os.environ.get("SMOLLM2", "models/smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def tp() -> Iterator[object]:
    from rl_kernel.integrations.megatron.parallel import join_tensor_parallel, leave_tensor_parallel

    yield join_tensor_parallel(device="cuda")
    leave_tensor_parallel()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    tiny = {name: write_tiny_model(root / name, spec, seed=1) for name, spec in TINY_MODELS.items()}
    return tiny | {"smollm2": REAL}


def strict(folder, tp, segments):
    from tests.integrations.megatron.cases import build

    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"SmolLM2 is not in {folder}; `make model` fetches it")
    return build(folder, strict_plan(model_contract("sm90", segments=segments), "cuda"), tp)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("name", [*TINY_MODELS, "smollm2"])
def test_logprobs_have_the_reference_decoders_bits(name, segments, folders, tp):
    from tests.integrations.megatron.cases import samples, score

    if name == "smollm2" and segments == 2:
        pytest.skip("SmolLM2 has 9 heads; the tiny models show segments")
    model = strict(folders[name], tp, segments)
    tokens = samples(model.layout.decoder.vocab)
    law = Decoder.open(folders[name], model_contract("sm90", segments=segments)).logprobs(
        [np.array(t.prompt + t.response) for t in tokens], [len(t.prompt) for t in tokens], TEMPERATURE
    )
    assert np.array_equal(score(model, tokens).view(np.uint32), np.concatenate(law).view(np.uint32))


@pytest.mark.parametrize(("name", "segments"), [("llama", 1), ("llama-tied", 2), ("qwen3", 2), ("qwen3-tied", 1)])
def test_every_gradient_has_the_bits_of_the_reference_ops_on_the_cpu(name, segments, folders, tp, tmp_path):
    from tests.integrations.megatron.cases import differing, forward_backward, samples

    law = tmp_path / "law.npz"
    command = [sys.executable, "-m", "tests.gpu.megatron_reference", str(folders[name]), str(law), str(segments)]
    subprocess.run(command, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    found = forward_backward(strict(folders[name], tp, segments), samples(331))
    with np.load(law) as arrays:
        expected = dict(arrays)
    assert np.array_equal(found[0].view(np.uint32), expected.pop("logprobs").view(np.uint32))
    assert differing(found[1], expected) == []
    assert all(np.isfinite(g).all() and g.any() for g in found[1].values())


def test_gradients_do_not_depend_on_the_cut_into_micro_batches(folders, tp):
    from rl_kernel.integrations.megatron.packing import Tokens
    from tests.integrations.megatron.cases import differing, forward_backward

    # A chain takes groups of 16 tokens from a call's first token on, so pieces must be whole groups (contract, gemm).
    model, draw = strict(folders["qwen3"], tp, 2), np.random.default_rng(6)
    tokens = [
        Tokens(tuple(draw.integers(0, 331, n - 15).tolist()), tuple(draw.integers(0, 331, 16).tolist()))
        for n in (16, 64, 32, 48)
    ]
    whole = forward_backward(model, tokens)
    assert differing(whole[1], forward_backward(model, tokens, [1, 2, 3])[1]) == []
    assert differing(whole[1], forward_backward(model, tokens[::-1])[1]) != []


@needs("vllm")
@pytest.mark.parametrize(("name", "segments"), [("qwen3", 2), ("llama-tied", 1), ("smollm2", 1)])
def test_what_vllm_decoded_megatron_scores_to_the_bit(name, segments, folders, tp):
    from rl_kernel.integrations.megatron.packing import Tokens
    from tests.integrations.megatron.cases import score

    model = strict(folders[name], tp, segments)
    asked = prompts(model.layout.decoder.vocab, count=6)
    jobs = [["batch", "generate", {"prompts": asked, "new_tokens": 12}]]
    found = run_engine(folders[name], jobs, segments=segments)
    assert "error" not in found, found["error"]
    samples = [Tokens(tuple(p), tuple(response)) for p, (response, _) in zip(asked, found["batch"], strict=True)]
    assert score(model, samples).tobytes().hex() == "".join(logprobs for _, logprobs in found["batch"])


def test_adamw_on_the_gpu_has_the_bits_of_adamw_on_the_cpu():
    from services.trainer.optimizer import AdamW, AdamWOptions

    def run(device: str) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(3)
        weight = torch.randn(300, 701, generator=draw).bfloat16().to(device)
        optimizer = AdamW({"w": weight}, AdamWOptions(weight_decay=0.1))
        for update in range(1, 4):
            weight.main_grad = torch.randn(300, 701, generator=draw).to(device)
            optimizer.step(update, 1e-3, 0.37)
        return [x.cpu() for x in (weight, optimizer.masters["w"], optimizer.first["w"], optimizer.second["w"])]

    for gpu, cpu in zip(run("cuda"), run("cpu"), strict=True):
        assert torch.equal(gpu.view(torch.int16), cpu.view(torch.int16))


def test_a_module_that_was_replaced_is_refused(folders, tp):
    from tests.integrations.megatron.cases import samples, score

    model = strict(folders["llama"], tp, 1)
    model.module.decoder.layers[0].input_layernorm = torch.nn.RMSNorm(160).cuda()
    with pytest.raises(EvidenceError, match=r"input_layernorm is a torch\.nn"):
        score(model, samples(331))


def test_a_call_that_goes_elsewhere_is_refused(folders, tp, monkeypatch):
    from tests.integrations.megatron.cases import forward_backward, samples

    model = strict(folders["llama"], tp, 1)
    monkeypatch.setattr(model._ops, "residual_add", lambda a, b: a + b)
    with pytest.raises(EvidenceError, match=r"residual_add\.residual_add was called 0 times"):
        forward_backward(model, samples(331))
