"""Each command in docs/operations is run as it stands, on other ports, with less patience and with a tiny model."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from auditor.client import AuditClient
from deploy.tour.stack import free_ports, running_stack
from tests.auditor.postgres_server import PostgresServer
from tests.auditor.processes import running_auditor
from tests.auditor.samples import pair
from tests.docs.commands import OPERATIONS, REPOSITORY, blocks, nobody_runs, run_script, workplace

TOOLS = ("curl", "promtool", "amtool", "prometheus", "prometheus-alertmanager")
PORTS = (50051, 9464, 9090, 9093, 9099)


def moved(code: str, ports: Mapping[int, int]) -> str:
    """The commands on other ports, for the usual ones may be taken; and Prometheus, which is waited for, in a hurry."""
    for usual, free in ports.items():
        code = code.replace(f":{usual}", f":{free}")
    code = code.replace("sed 's/auditor:", "sed 's/: 5s/: 1s/; s/auditor:")
    return code.replace("resend-delay=5s", "resend-delay=1s")


def of_a_page(page: Path, folder: Path) -> None:
    """All that needs nothing but the tools, one block after the other, as a reader goes through it."""
    code = "".join(block.code for block in blocks(page) if not block.need)
    for tool in TOOLS:
        if re.search(rf"^{tool} ", code, re.MULTILINE) and not shutil.which(tool):
            pytest.skip(f"{tool} is missing: make ops-tools")
    if "build/tools" in code and not (REPOSITORY / "build/tools").exists():
        pytest.skip("helm is missing: make ops-tools")
    run_script(moved(code, dict(zip(PORTS, free_ports(len(PORTS)), strict=True))), workplace(folder))


def with_prometheus(code: str, folder: Path) -> None:
    if not shutil.which("prometheus"):
        pytest.skip("prometheus is missing: make ops-tools")
    with running_stack(folder / "stack", {}) as stack:
        places = {9090: stack.prometheus, 9093: stack.alertmanager}
        ports = {usual: int(url.rpartition(":")[2]) for usual, url in places.items()}
        run_script(moved(code, ports), workplace(folder))
    assert len(list((folder / "pictures").glob("*.png"))) == 3


def with_postgresql(code: str, folder: Path) -> None:
    server = PostgresServer()
    try:
        server.fresh_database()
        with running_auditor(folder, "--ledger", server.url) as auditor:
            client = AuditClient(auditor.grpc, "run", spool_dir=folder / "spool", queue_size=8)
            for record in pair():
                client.submit_rollout(record) if record.side == "rollout" else client.submit_trainer(record)
            assert client.flush(20).accepted == 2
            client.close()
            auditor.stop()
        said = run_script(code, workplace(folder), {"AUDITOR_DATABASE": server.url})
        assert "entries verify" in said
    finally:
        server.close()


def with_a_client_only(code: str, folder: Path) -> None:
    """There is no cluster here: kubectl and helm read the commands, and nothing is sent."""
    kubectl, helm = (REPOSITORY / "build/tools/helm-3" / name for name in ("kubectl", "helm"))
    if not (kubectl.exists() and helm.exists()):
        pytest.skip("kubectl or helm is missing: make ops-tools")
    workplace(folder)
    for name in ("tokens.yaml", "backup.db"):
        (folder / name).write_text("[]\n")
    for line in code.splitlines():
        arguments = line.partition(" ")[2]
        if line.startswith("helm "):
            assert "kind: " in run_script(f"{helm} template {arguments.partition(' ')[2]}", folder)
        elif " create " in line:
            assert "kind: " in run_script(f"{kubectl} {arguments} --dry-run=client -o yaml", folder)
        else:
            # An unknown flag or subcommand is refused before anything is asked of a server that is not there.
            command = [kubectl, "--server=http://127.0.0.1:1", *shlex.split(arguments)]
            refused = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            assert "refused" in refused.stderr, refused.stderr


RUNNERS: dict[str, Callable[[str, Path], None]] = {
    "prometheus": with_prometheus,
    "postgresql": with_postgresql,
    "cluster": with_a_client_only,
}
SOAKED = {"network", "docker"}  # tests/docs/test_images_and_compose.py
WALKED = {"ray"}  # tests/deploy/test_ray.py
BLOCKS = [block for page in OPERATIONS for block in blocks(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in OPERATIONS if blocks(p)], ids=lambda page: str(page.stem))
def test_the_commands_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    of_a_page(page, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("need", RUNNERS)
def test_the_commands_that_need_something_run_with_it(need: str, tmp_path: Path) -> None:
    found = [block.code for block in BLOCKS if block.need == need]
    assert found, f"no page has a block that needs {need}: take its runner away"
    RUNNERS[need]("".join(found), tmp_path)


@pytest.mark.parametrize("page", OPERATIONS, ids=lambda page: str(page.stem))
def test_there_is_no_command_that_nobody_runs(page: Path) -> None:
    assert nobody_runs(page, {"", *RUNNERS, *SOAKED, *WALKED}) == []


@pytest.mark.parametrize(
    "mutant",
    ["```sh needs=luck\ntrue\n```\n", "```\nmake coffee\n```\n", "```bash\nauditor/secret --now\n```\n"],
    ids=["unknown need", "no shell", "another shell"],
)
def test_a_command_that_nobody_runs_would_be_found(mutant: str) -> None:
    page = OPERATIONS[0]
    assert nobody_runs(page, {"", *RUNNERS, *SOAKED, *WALKED}, page.read_text() + "\n" + mutant)


def test_a_command_that_is_added_is_run_and_fails_where_it_is_wrong(tmp_path: Path) -> None:
    (page,) = [page for page in OPERATIONS if page.stem == "operate"]
    added = page.read_text().replace("python -m auditor.capsule --help", "python -m auditor.capsule --halp")
    code = [block for block in blocks(page, added) if not block.need][-1].code
    with pytest.raises(AssertionError, match=r"auditor\.capsule: error:"):
        run_script(code, workplace(tmp_path))


@pytest.mark.parametrize("page", OPERATIONS, ids=lambda page: str(page.stem))
def test_links_and_files_that_are_named_are_there(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([\w./-]+\.md)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`?((?:deploy|helm|tests|docs)/[\w./-]+\.(?:md|py|sh|ya?ml|json|Dockerfile))`?", text):
        assert (REPOSITORY / path).exists(), path
