from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_kernel.integrations.megatron.parallel import join_tensor_parallel, leave_tensor_parallel
from rl_kernel.torch_autograd import TensorParallel
from tests.integrations.megatron.cases import model_folder
from tests.models import TINY_MODELS


@pytest.fixture(scope="module")
def tp() -> Iterator[TensorParallel]:
    yield join_tensor_parallel()
    leave_tensor_parallel()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: model_folder(root, name) for name in TINY_MODELS}
