"""Each command in docs/operations is run as it stands, or parsed where it needs what is not here."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.tour.stack import free_ports

REPOSITORY = Path(__file__).parents[2]
DOCS = sorted((REPOSITORY / "docs" / "operations").glob("*.md"))
BLOCK = re.compile(r"^```sh(?: needs=(\w+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What a command may need that a test machine has not: each is run elsewhere or cannot be run here.
NEEDS = {"network", "docker", "cluster", "prometheus", "ray", "postgresql"}
TOOLS = ("curl", "promtool", "amtool")


def blocks(doc: Path) -> list[tuple[str, str]]:
    return [(need, code) for need, code in BLOCK.findall(doc.read_text())]


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.stem))
def test_every_command_is_valid_and_says_what_it_needs(doc: Path) -> None:
    for need, code in blocks(doc):
        assert need in NEEDS | {""}
        checked = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True, check=False)
        assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    "doc", [doc for doc in DOCS if any(not need for need, _ in blocks(doc))], ids=lambda d: str(d.stem)
)
def test_the_commands_that_need_nothing_run_in_order(doc: Path, tmp_path: Path) -> None:
    code = "".join(code for need, code in blocks(doc) if not need)
    for tool in TOOLS:
        if re.search(rf"^{tool} ", code, re.MULTILINE) and not shutil.which(tool):
            pytest.skip(f"{tool} is missing: make ops-tools")
    if "build/tools" in code and not (REPOSITORY / "build/tools").exists():
        pytest.skip("helm is missing: make ops-tools")
    for name in ("auditor", "services", "rl_kernel", "deploy", "helm", "docs", "tests", "build"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    grpc, http = free_ports(2)
    script = code.replace(":50051", f":{grpc}").replace(":9464", f":{http}")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        # What runs in the background holds the pipe open; the script itself has ended when this returns.
        code = process.wait(120)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    output = process.stdout.read() if process.stdout else ""
    assert code == 0, output


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.stem))
def test_links_and_files_that_are_named_are_there(doc: Path) -> None:
    text = doc.read_text()
    for target in re.findall(r"\]\(([\w./-]+\.md)", text):
        assert (doc.parent / target).exists(), target
    for path in re.findall(r"`?((?:deploy|helm|tests|docs)/[\w./-]+\.(?:md|py|sh|ya?ml|json|Dockerfile))`?", text):
        assert (REPOSITORY / path).exists(), path
