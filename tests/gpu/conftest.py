"""Everything here needs the GPU that the backends were proven on; elsewhere the tests are skipped, and say so."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU (sm_90)"))
