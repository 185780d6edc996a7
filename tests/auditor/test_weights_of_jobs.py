"""Jobs that share an auditor publish the same version numbers; each one's weights are told apart by their digest."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from auditor.errors import RecomputeError
from auditor.recompute_worker import Models
from auditor.weights_place import LocalWeights
from rl_kernel.contracts import model_contract
from rl_kernel.reference.weights import weight_digest
from tests.auditor.samples import pair
from tests.models import write_tiny_model

CONTRACT = model_contract("portable").digest()


def publish(root: Path, version: int, seed: int) -> str:
    folder = write_tiny_model(root / f"v{version:06d}", seed=seed)
    digest = weight_digest(folder)
    (folder / "manifest.json").write_text(json.dumps({"weight_version": version, "weight_digest": digest}))
    return digest


@pytest.mark.parametrize("first", ["", "first"], ids=["beside a job in the root itself", "in folders of their own"])
def test_each_job_gets_its_own_weights_and_a_diagnosis_its_own_versions(first: str, tmp_path: Path) -> None:
    ours = [publish(tmp_path / first, version, seed=version) for version in (1, 2)]
    theirs = [publish(tmp_path / "second", version, seed=10 + version) for version in (1, 2, 3)]
    store = LocalWeights(tmp_path)
    models = Models(store)
    for digests in (ours, theirs):
        for version, digest in enumerate(digests, 1):
            assert models.get(version, digest, CONTRACT).weight_digest == digest
        rollout, _ = pair()
        named = replace(rollout, weight_version=2, weight_digest=digests[1], contract_digest=CONTRACT)
        around = models.around(named)
        assert list(around.versions) == list(range(1, len(digests) + 1))
        assert around.load(1).weight_digest == digests[0]


def test_weights_that_no_job_has_are_refused_by_name(tmp_path: Path) -> None:
    publish(tmp_path / "second", 1, seed=1)
    with pytest.raises(RecomputeError, match=r"v000001 does not exist, and no manifest under .* names ffff"):
        LocalWeights(tmp_path).folder(1, "ff" * 32)
