"""The pages say what the code does: metrics, labels, codes, conditions."""

import re
from dataclasses import fields
from pathlib import Path

from auditor import errors
from auditor.drift import DriftStatistics
from auditor.judge import Verdict
from auditor.preconditions import Condition
from tests.auditor.processes import REPOSITORY, running_auditor

METRICS = (REPOSITORY / "docs" / "metrics.md").read_text()
PROTOCOL = (REPOSITORY / "docs" / "audit-protocol.md").read_text()


def test_every_metric_that_is_served_is_documented_and_the_other_way_round(tmp_path: Path) -> None:
    import urllib.request

    with running_auditor(tmp_path) as auditor, urllib.request.urlopen(f"http://{auditor.http}/metrics") as answer:
        types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", answer.read().decode(), re.MULTILINE))
    served = {(name, kind) for name, kind in types.items() if not name.endswith("_created")}
    assert served == set(re.findall(r"^\| `(auditor_\w+)` \| (\w+) \|", METRICS, re.MULTILINE))


def test_every_statistic_is_documented() -> None:
    for field in fields(DriftStatistics):
        assert f"`{field.name}`" in METRICS, field.name


def test_every_code_that_can_be_raised_is_documented() -> None:
    source = "".join(path.read_text() for path in (REPOSITORY / "auditor").rglob("*.py"))
    codes = set(
        re.findall(
            r'(?:RecordError|RecomputeError|LedgerError|LimitError)\([^()]*(?:\([^()]*\)[^()]*)*, "(\w+)"\s*\)', source
        )
    )
    codes |= {
        getattr(errors, name).code
        for name in ("ConflictError", "RecordError", "LimitError", "AuthError", "LedgerError")
    }
    assert len(codes) > 15
    for code in codes:
        assert f"`{code}`" in PROTOCOL, code


def test_every_condition_and_verdict_is_documented() -> None:
    for name in (*Condition, *Verdict):
        assert f"| `{name.value}` |" in PROTOCOL, name


def test_every_cause_is_documented() -> None:
    """Names as they are written where suggestions are made."""
    folder = REPOSITORY / "auditor" / "causes"
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    causes = set(re.findall(r'Suggestion\(\s*"(\w+)"', source)) | set(
        re.findall(r'^    "[\w.]+": "(\w+)",$', source, re.MULTILINE)
    )
    assert len(causes) > 15
    for cause in causes:
        assert f"`{cause}`" in PROTOCOL, cause
