"""What may change on a machine without changing a bit: instruction set, threads, floating-point flags, callers."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from rl_kernel.compare import compare_bits
from rl_kernel.ops.gemm import cpu as gemm
from rl_kernel.ops.tensors import extension
from tests.contracts.cases import all_cases
from tests.contracts.subjects import BackendSubject, ReferenceSubject, backends
from tests.rl_kernel.cpu_draws import LARGE, draw, same_bits

_CASES = all_cases(ReferenceSubject())
_WIDEST = extension.isa()


def _available() -> list[str]:
    found = []
    for name in ("avx512", "avx2", "plain"):
        try:
            extension.force_isa(name)
        except ValueError:
            continue
        found.append(name)
    extension.force_isa(None)
    return found


@pytest.fixture(params=_available())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    extension.force_isa(request.param)
    yield request.param
    extension.force_isa(None)


@pytest.fixture
def cpu() -> BackendSubject:
    return next(s for s in backends() if s.plan.device == "cpu")


def test_every_instruction_set_computes_the_bits_of_the_reference(isa: str, cpu: BackendSubject) -> None:
    assert extension.isa() == isa
    reference = ReferenceSubject()
    for case in _CASES:
        for found, expected in zip(case.run(cpu), case.run(reference), strict=True):
            difference = compare_bits(found, expected)
            assert difference.equal, f"{isa} {case.name}: {difference}"


@pytest.mark.parametrize("op", LARGE)
def test_inputs_that_cross_blocks_have_the_same_bits_on_every_instruction_set(op: str, isa: str) -> None:
    found = LARGE[op]()
    extension.force_isa(None)
    assert same_bits(found, LARGE[op]()), f"{op} on {isa} differs from {_WIDEST}"


def test_an_unknown_instruction_set_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'sse9' is unknown or this CPU lacks it"):
        extension.force_isa("sse9")


@pytest.mark.parametrize("op", LARGE)
def test_the_number_of_threads_changes_no_bit(op: str) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(LARGE[op]())
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_the_comparison_would_notice_another_summation_order() -> None:
    x, w = draw(1, 8, 512), draw(2, 64, 512)
    one, two = (gemm.gemm(x, w, segments=s, out_dtype=torch.float32) for s in (1, 2))
    assert not same_bits((one,), (two,))


def test_flushing_of_subnormals_set_by_others_changes_no_bit_and_is_left_as_found() -> None:
    x, w = draw(1, 9, 64, scale=1e-20), draw(2, 130, 64, scale=1e-19)
    expected = gemm.gemm(x, w, out_dtype=torch.float32)
    assert ((expected != 0) & (expected.abs() < 2.0**-126)).any(), "no subnormal result: the test would show nothing"
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        found = gemm.gemm(x, w, out_dtype=torch.float32)
        flushed = torch.tensor([2.0**-100]) * 2.0**-40
    finally:
        torch.set_flush_denormal(False)
    assert flushed.item() == 0.0, "the flag was not in force, or the op did not restore it"
    assert same_bits((found,), (expected,))


def test_two_callers_at_once_get_the_bits_that_each_gets_alone() -> None:
    alone = {op: run() for op, run in LARGE.items()}
    wrong: list[str] = []

    def call(order: list[str]) -> None:
        wrong.extend(op for op in order if not same_bits(LARGE[op](), alone[op]))

    orders = [list(LARGE), list(LARGE)[::-1]]
    callers = [threading.Thread(target=call, args=(order,)) for order in orders]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_other_python_threads_run_while_a_product_is_computed() -> None:
    x, w, span = draw(1, 512, 2048), gemm.pack(draw(2, 4096, 2048)), []

    def call() -> None:
        span.append(time.perf_counter())
        gemm.gemm(x, w)
        span.append(time.perf_counter())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.2)  # so that only a released lock lets this thread in
    try:
        caller, seen = threading.Thread(target=call), []
        caller.start()
        while caller.is_alive():
            seen.append(time.perf_counter())
    finally:
        sys.setswitchinterval(interval)
    assert sum(span[0] < t < span[1] for t in seen) > 10


# The child calls nothing of torch that has threads: those would hang there.
_FORK = """
import os, signal, torch
from rl_kernel.ops.gemm import cpu as gemm
from tests.rl_kernel.cpu_draws import draw
torch.set_num_threads(2)
x, w = draw(1, 100, 600), draw(2, 900, 600)
compute = lambda: gemm.gemm(x, w, out_dtype=torch.float32).numpy().tobytes()
before = compute()
child = os.fork()
if child == 0:
    signal.alarm(60)  # a child that waits for threads it does not have is killed, and the test fails
    os._exit(0 if compute() == before else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_computes_the_same_bits_with_threads_of_its_own() -> None:
    assert subprocess.run([sys.executable, "-c", _FORK], check=False).returncode == 0
