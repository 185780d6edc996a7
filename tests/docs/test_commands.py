"""Commands named in any page are ones that the programs know: targets of make, modules, and every flag."""

import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# A module as a command, up to what ends it: a quote, a pipe, a comment, the line (which a backslash continues).
MODULE = re.compile(r"python3? -m ([\w.]+)((?:\\\n|[^`|>#&;\n)])*)")
TARGET = re.compile(r"(?:`|^)make ([a-z][\w-]*)", re.MULTILINE)
# Programs of others.
FOREIGN = {"pytest", "pip", "venv"}


@cache
def help_of(module: str) -> str:
    said = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return said.stdout


def takes_arguments(module: str) -> bool:
    folder = ROOT / module.replace(".", "/")
    source = folder / "__main__.py" if folder.is_dir() else folder.with_suffix(".py")
    assert source.exists(), f"python -m {module}: there is no such module"
    return "argparse.ArgumentParser" in source.read_text()


def unknown(text: str) -> list[str]:
    """Commands in `text` that no program takes as they are."""
    wrong = []
    for target in sorted(set(TARGET.findall(text))):
        made = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False)
        wrong += [f"make {target}"] if made.returncode else []
    for module, arguments in MODULE.findall(text):
        flags = set(re.findall(r"(?<!\S)--?[a-z][\w-]*", arguments.split(" -- ")[0]))
        if module.partition(".")[0] in FOREIGN or not takes_arguments(module):
            continue
        wrong += [f"python -m {module} {flag}" for flag in sorted(flags) if flag not in help_of(module)]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_names_is_known(page: Path) -> None:
    assert unknown(page.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("`make coffee`", "make coffee"),
        ("```\nmake coffee  # at once\n```", "make coffee"),
        ("`python -m auditor.main --ledgers x`", "python -m auditor.main --ledgers"),
    ],
)
def test_a_command_that_nobody_knows_would_be_found(text: str, command: str) -> None:
    assert unknown(text) == [command]


INTERRUPTED_AT = """
import os, runpy, signal, sys
from importlib.abc import MetaPathFinder

class Interrupt(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "pydantic":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["auditor.main", "services.main"])
def test_a_program_that_is_interrupted_while_it_is_loaded_shows_no_traceback(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_AT, module, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
