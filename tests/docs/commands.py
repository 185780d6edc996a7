"""The commands in the pages: where they are, what they need, and whether somebody runs them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
OPERATIONS = sorted((REPOSITORY / "docs" / "operations").glob("*.md"))
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"sh(?: needs=(\w+))?")
# What a line begins with that is meant to be typed.
_TYPED = re.compile(
    r"^(?:make|pip|python3?|ray|docker|docker-compose|helm|kubectl|curl|promtool|amtool|bash|\S+/\S+) \S"
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fence ```sh or ```sh needs=WHAT. need: empty where it runs on any machine with the tools."""

    page: Path
    need: str
    code: str


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """The shell fences of a page, in order. text: instead of the page's own."""
    text = page.read_text("utf-8") if text is None else text
    found = [(_SHELL.fullmatch(language.strip()), code) for language, code in _FENCE.findall(text)]
    return [Block(page, shell[1] or "", code) for shell, code in found if shell]


def nobody_runs(page: Path, runners: Collection[str], text: str | None = None) -> list[str]:
    """Commands of a page in fences that are no shell or whose need has no runner."""
    text = page.read_text("utf-8") if text is None else text
    orphans = [block.code for block in blocks(page, text) if block.need not in runners]
    for language, code in _FENCE.findall(text):
        if not _SHELL.fullmatch(language.strip()):
            orphans += [line for line in code.splitlines() if _TYPED.match(line)]
    return orphans


def workplace(folder: Path) -> Path:
    """A folder that looks like the repository, in which commands may leave what they like."""
    for name in ("auditor", "services", "rl_kernel", "helm", "docs", "tests", "build", "pyproject.toml"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "deploy").mkdir()
    for path in (REPOSITORY / "deploy").iterdir():
        (folder / "deploy" / path.name).symlink_to(path)
    return folder


def run_script(code: str, folder: Path, environment: Mapping[str, str] | None = None, seconds: float = 120) -> str:
    """Run the lines as one script and return what it printed; AssertionError unless every line succeeds.

    What the script leaves running in the background is ended, first by SIGTERM.
    """
    with running_script(code, folder, environment) as script:
        return script.finish(seconds)


@dataclass(frozen=True, slots=True)
class Script:
    """A script that runs; what it prints goes to `output`."""

    process: subprocess.Popen[bytes]
    output: Path

    def finish(self, seconds: float) -> str:
        """What it printed, when its last line is done."""
        status = self.process.wait(seconds)
        said = self.output.read_text(errors="replace")
        assert status == 0, said[-4000:]
        return said


@contextmanager
def running_script(
    code: str, folder: Path, environment: Mapping[str, str] | None = None, grace_s: float = 20.0
) -> Iterator[Script]:
    """The lines as one script; with the block ends it too, and what it left running in the background.

    grace_s: between SIGTERM and SIGKILL.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=folder, env={**os.environ, "PATH": path, **(environment or {})}, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield Script(process, folder / "output")
    finally:
        _end_group(process, grace_s)


def _end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    for number, seconds in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 4.0)):
        sent, deadline = False, time.monotonic() + seconds
        while time.monotonic() < deadline:
            process.poll()  # else its own remains are the group's last member
            try:
                os.killpg(process.pid, 0 if sent else number)
            except ProcessLookupError:
                return
            sent = True
            time.sleep(0.05)
