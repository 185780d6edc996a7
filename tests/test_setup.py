"""What `make setup` needs is asked for before anything is made: one line, with the package that has it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What a machine lacks: the program that then fails, and when (a shell pattern over its arguments).
LACKS = {
    "version": ("python3.11", "*version_info*", "Python 3.11 in python3.11 is missing; apt-get install python3.11"),
    "headers": ("python3.11", "*Python.h*", "Python.h is missing; apt-get install python3.11-dev"),
    "venv": ("python3.11", "*ensurepip*", "venv with pip is missing; apt-get install python3.11-venv"),
    "libnuma": ("python3.11", "*libnuma*", "libnuma.so.1 (vLLM loads it) is missing; apt-get install libnuma1"),
    "C++20": ("c++", "*c++20*", "C++20 in c++ is missing; apt-get install g++"),
}


def set_up(folder: Path, absent: str = "", **failing: str) -> tuple[int, str]:
    """Run `make setup` where there is nothing but a shell, a Python that makes no venv, and a compiler."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("sh", "make", "mkdir", "touch", "flock", "echo", "env"):
        if path := shutil.which(name):
            (programs / name).symlink_to(path)
    for name, real in (("python3.11", sys.executable), ("c++", shutil.which("c++"))):
        if name == absent:
            continue
        pattern = failing.get(name, "nothing")
        script = f'case "$*" in {pattern}) exit 1;; "-m venv"*) echo reached; exit 7;; esac\nexec {real} "$@"'
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, folder)
    done = subprocess.run(
        ["make", "setup"], cwd=folder, env={"PATH": str(programs)}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("lack", LACKS)
def test_set_up_names_the_package_of_what_a_machine_lacks(tmp_path: Path, lack: str) -> None:
    program, when, says = LACKS[lack]
    code, said = set_up(tmp_path, **{program: when})
    assert code != 0
    assert said.splitlines()[0].startswith(f"set-up: {says}")
    assert "set-up 1/3" not in said


@pytest.mark.parametrize(
    ("absent", "says"),
    [("python3.11", "python3.11 is missing; apt-get install python3.11"), ("c++", "a C++ compiler is missing")],
)
def test_set_up_names_a_program_that_is_not_there(tmp_path: Path, absent: str, says: str) -> None:
    code, said = set_up(tmp_path, absent)
    assert code != 0
    assert said.splitlines()[0].startswith(f"set-up: {says}")


def test_set_up_goes_on_where_nothing_is_lacking(tmp_path: Path) -> None:
    assert "set-up 1/3" in (said := set_up(tmp_path)[1])
    assert "reached" in said


def test_help_names_every_command_and_is_what_make_alone_does() -> None:
    (phony,) = (line for line in (ROOT / "Makefile").read_text("utf-8").splitlines() if line.startswith(".PHONY:"))
    make = ["make", "--no-print-directory"]  # which a make around this one would have it print
    said = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {line.split()[1] for line in said.splitlines()} == set(phony.split()[1:])


def test_both_pages_list_the_same_needs() -> None:
    needs = "Debian or Ubuntu, Python 3.11 with its headers and venv, a C++20 compiler, libnuma1, two cores, 12 GiB of"
    for page in ("README.md", "CONTRIBUTING.md"):
        assert needs in (ROOT / page).read_text("utf-8"), page
