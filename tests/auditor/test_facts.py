"""What the client says of a side without `rl_kernel` is what `rl_kernel` says."""

import json
from pathlib import Path

import numpy as np
import pytest

from auditor import facts
from auditor.contracts import SEGMENTS, known_contracts
from auditor.errors import RecordError
from auditor.records import Environment
from rl_kernel.contract import PROFILES
from rl_kernel.environment import read_environment
from rl_kernel.reference.rope_table import rope_digest
from rl_kernel.reference.weights import map_weights, weight_digest
from tests.models import LLAMA, TinyModel, write_tiny_model

TIED = TinyModel(tied=True)


def test_every_contract_that_an_auditor_knows_has_its_digest_here_and_no_other() -> None:
    assert {facts.contract_digest(profile, n) for profile in PROFILES for n in SEGMENTS} == set(known_contracts())
    assert len(facts._CONTRACTS) == len(known_contracts())
    for (profile, segments), digest in facts._CONTRACTS.items():
        contract = known_contracts()[digest]
        assert (contract.profile.name, contract.segments) == (profile, segments)
    with pytest.raises(RecordError, match=r"no contract of profile 'sm70' in 3 segments; there are cdna3, portable"):
        facts.contract_digest("sm70", 3)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "yarn", "factor": 2.0}])
def test_a_rotary_table_has_one_name(scaling: dict[str, object] | None) -> None:
    assert facts.rope_digest(1_000_000, 128, scaling) == rope_digest(1e6, 128, scaling)
    assert facts.rope_digest(1e6, 128) != facts.rope_digest(1e6, 64)


@pytest.mark.parametrize("model", [LLAMA, TIED])
def test_weights_have_one_name_on_disk_and_in_memory(model: TinyModel, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", model, seed=3)
    assert facts.weight_digest(folder) == weight_digest(folder)
    held = {name: (dtype, array.copy()) for name, (dtype, array) in map_weights(folder).items()}
    held["lm_head.weight"] = held.get("lm_head.weight", held["model.embed_tokens.weight"])
    triples = [(name, dtype, array) for name, (dtype, array) in held.items()]
    assert facts.digest_of_tensors(reversed(triples), tied=model.tied) == weight_digest(folder)
    held["model.norm.weight"][1][0] ^= 1
    assert facts.digest_of_tensors(triples, tied=model.tied) != weight_digest(folder)


def test_an_environment_has_one_name_and_can_be_said_by_hand() -> None:
    read = read_environment("fma32", "cpu-x86_64")
    said = facts.environment("cpu-x86_64", "fma32")
    assert (said.arch, said.mma, said.digest) == ("cpu-x86_64", "fma32", read.digest())
    assert said.versions == tuple(sorted(f"{package} {version}" for package, version in read.versions))
    said = Environment("cpu", "fma32", "", {"vllm": "0.32.0", "torch": "2.13.0"})  # type: ignore[arg-type]
    assert said.versions == ("torch 2.13.0", "vllm 0.32.0")
    for wrong in (["torch"], ["a 1", "a 2"], "torch 2", [3]):
        with pytest.raises(RecordError, match=r"environment\.versions"):
            Environment("cpu", "fma32", "", wrong)  # type: ignore[arg-type]
    engine = facts.environment("cuda-sm90", "sm90", {"torch": "2.11", "cublas": "13"})
    trainer = facts.environment("cuda-sm90", "sm90", {"cublas": "13", "torch": "2.11"})
    assert engine == trainer != facts.environment("cuda-sm90", "sm90", {"torch": "2.10", "cublas": "13"})


def test_what_is_no_model_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is no Hugging Face model folder"):
        facts.weight_digest(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(RecordError, match=r"holds no \*\.safetensors file"):
        facts.weight_digest(tmp_path)
    folder = write_tiny_model(tmp_path / "m", LLAMA, seed=1)
    (file,) = folder.glob("*.safetensors")
    whole = file.read_bytes()
    for cut in (4, 100, len(whole) - 2):
        file.write_bytes(whole[:cut])
        with pytest.raises(RecordError, match="is no Hugging Face model folder") as caught:
            facts.weight_digest(folder)
        assert "\n" not in str(caught.value)
    file.write_bytes(np.random.default_rng(1).bytes(500))
    with pytest.raises(RecordError, match="is no Hugging Face model folder"):
        facts.weight_digest(folder)
