"""Megatron-core cut over two GPUs: the logprobs, gradients and digest of one."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rl_kernel.contracts import model_contract
from rl_kernel.ops import strict_plan
from rl_kernel.reference.weights import weight_digest
from tests.gpu.engines import needs
from tests.models import TINY_MODELS, write_tiny_model

pytestmark = [pytest.mark.gpu, needs("megatron.core"), pytest.mark.xdist_group("two gpus")]
SEGMENTS = 2


def every_model(rank, rendezvous, folders, tp_size):
    """Name → logprobs, gradients, digest, as this rank has them."""
    from rl_kernel.integrations.megatron.parallel import join_tensor_parallel
    from rl_kernel.integrations.megatron.weights import own_digest
    from tests.integrations.megatron.cases import build, forward_backward, samples

    tp = join_tensor_parallel(tp_size, rank, rendezvous, device="cuda")
    found = {}
    for name, folder in folders.items():
        model = build(folder, strict_plan(model_contract("sm90", segments=SEGMENTS), "cuda"), tp)
        logprobs, gradients = forward_backward(model, samples(331))
        found[name] = logprobs, gradients, own_digest(model.layout, model.parameters, tp)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_tiny_model(root / name, spec, seed=1) for name, spec in TINY_MODELS.items()}


@pytest.fixture(scope="module")
def found(folders):
    from tests.integrations.megatron.ranks import on_ranks

    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; here {torch.cuda.device_count()}")
    return on_ranks(1, every_model, folders, 1), on_ranks(2, every_model, folders, 2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_two_gpus_give_the_logprobs_gradients_and_digest_of_one(name, rank, found, folders):
    from tests.integrations.megatron.cases import differing

    one, two = found[0][0][name], found[1][rank][name]
    assert np.array_equal(one[0].view(np.uint32), two[0].view(np.uint32))
    assert differing(one[1], two[1]) == []
    assert one[2] == two[2] == weight_digest(folders[name])
