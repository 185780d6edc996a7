"""Two GPUs: the tree over ranks has the reference's bits whatever carries it, and a model cut in two those of one."""

import pytest
import torch

from tests.gpu import two_gpus

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    if torch.cuda.device_count() < two_gpus.RANKS:
        pytest.skip(f"needs {two_gpus.RANKS} GPUs; here {torch.cuda.device_count()}")
    return two_gpus.run()


@pytest.mark.slow
@pytest.mark.parametrize("check", two_gpus.CHECKS)
def test_two_ranks_agree(check: str, outcomes: dict[str, str]) -> None:
    assert outcomes[check] == ""
