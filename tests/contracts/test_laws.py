"""Laws 2 and up: what a row's result may not depend on. Held against the reference and every backend."""

from collections.abc import Callable
from typing import Any

import pytest

from rl_kernel.contract import PROFILES
from tests.contracts import laws
from tests.contracts.subjects import ReferenceSubject, backends

_SUBJECTS = [*(ReferenceSubject(profile) for profile in PROFILES), *backends()]
# The reference has no paged cache: paging is how a backend stores keys, not part of the contract.
_PAIRS = [
    (law, s) for law in laws.LAWS for s in _SUBJECTS if hasattr(s, "paged_attention") or "paging" not in law.__name__
]


@pytest.mark.parametrize(("law", "subject"), _PAIRS, ids=[f"{law.__name__}-{s.name}" for law, s in _PAIRS])
def test_law(law: Callable[[Any], None], subject: Any) -> None:
    law(subject)
