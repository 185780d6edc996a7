"""docs/contracts.md is generated, and fresh."""

from pathlib import Path

from rl_kernel.contracts.__main__ import markdown


def test_the_contracts_page_is_what_the_contracts_say() -> None:
    page = Path(__file__).parents[2] / "docs" / "contracts.md"
    assert page.read_text() == markdown(), "run `python -m rl_kernel.contracts > docs/contracts.md`"
