"""Law 1: every backend computes the reference's bits, for every op, on every case."""

import pytest

from rl_kernel.compare import compare_bits
from tests.contracts.cases import Case, all_cases
from tests.contracts.subjects import BackendSubject, ReferenceSubject, backends

_BACKENDS = backends()
_CASES = {s.plan.contract.profile.name: all_cases(ReferenceSubject(s.plan.contract.profile.name)) for s in _BACKENDS}
_PAIRS = [(s, c) for s in _BACKENDS for c in _CASES[s.plan.contract.profile.name]]


@pytest.mark.parametrize(("subject", "case"), _PAIRS, ids=[f"{s.name}-{c.name}" for s, c in _PAIRS])
def test_backend_has_the_bits_of_the_reference(subject: BackendSubject, case: Case) -> None:
    expected = case.run(ReferenceSubject(subject.plan.contract.profile.name))
    found = case.run(subject)
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        difference = compare_bits(a, b)
        assert difference.equal, f"{subject.name} {case.name} result {i}: {difference}"


@pytest.mark.parametrize("case", [c for c in all_cases(ReferenceSubject()) if c.method == "gemm"], ids=lambda c: c.name)
def test_a_prepacked_weight_changes_no_bit(case: Case) -> None:
    packing = [subject for subject in _BACKENDS if hasattr(subject, "gemm_packed")]
    assert packing, "nothing packs"
    for subject in packing:
        (found,), (expected,) = (
            Case(case.name, m, case.args, case.kwargs).run(subject) for m in ("gemm_packed", "gemm")
        )
        assert compare_bits(found, expected).equal
