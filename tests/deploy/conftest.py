"""One Prometheus for all tests that need no more than to be watched by one."""

import shutil
from collections.abc import Iterator

import pytest

from tests.deploy.watched import Watched, watched


@pytest.fixture(scope="session", name="watched")
def _watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Started by the first test that wants it; what it watches goes on while others run, and nobody waits."""
    if not (shutil.which("prometheus") and (shutil.which("alertmanager") or shutil.which("prometheus-alertmanager"))):
        pytest.skip("prometheus or alertmanager is missing: make ops-tools")
    with watched(tmp_path_factory.mktemp("watched")) as all_of_it:
        yield all_of_it
