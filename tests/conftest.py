"""A missing tool is a skip for a person who has not installed it, and a failure where CI is set.

A skip whose reason says `… is missing` is about this machine; what a test cannot have anywhere gives another reason.
"""

import atexit
import gc
import os
from collections.abc import Generator
from typing import Any

import pytest

# What is imported is no garbage: while it is, and where the interpreter ends, nobody looks for any.
gc.disable()
atexit.register(gc.freeze)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _no_tool_may_miss((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _no_tool_may_miss((yield))


def _no_tool_may_miss(report: Any) -> Any:
    if os.environ.get("CI") and report.outcome == "skipped" and "is missing" in str(report.longrepr):
        report.outcome, report.longrepr = "failed", f"CI is set, so this is no skip: {report.longrepr}"
    return report
