"""Laws 2 and up: what a row's result may not depend on. Held against the reference and every backend."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.contracts import laws
from tests.contracts.subjects import ReferenceSubject, backends

_SUBJECTS = [ReferenceSubject(), *backends()]


@pytest.mark.parametrize("subject", _SUBJECTS, ids=lambda s: s.name)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_law(law: Callable[[Any], None], subject: Any) -> None:
    if law is laws.paging_changes_no_bit and isinstance(subject, ReferenceSubject):
        pytest.skip("the reference has no paged cache: paging is how a backend stores keys, not part of the contract")
    law(subject)
