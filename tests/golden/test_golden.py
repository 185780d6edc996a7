"""Golden bits: the reference computes today what it computed when the contract's digest was frozen."""

import json

import pytest

from rl_kernel.contract import PROFILES
from tests.golden.freeze import bits_of, golden_path


@pytest.mark.parametrize("profile", PROFILES)
def test_reference_has_the_bits_frozen_under_its_digest(profile: str) -> None:
    path = golden_path(profile)
    assert path.exists(), (
        f"no golden bits for the contract of {profile}: a changed contract needs `python -m tests.golden.freeze`"
    )
    known, found = json.loads(path.read_text()), bits_of(profile)
    assert known, "an empty golden file proves nothing"
    assert [name for name in known if found.get(name) != known[name]] == []
    assert sorted(found) == sorted(known), "new cases need `python -m tests.golden.freeze`"
