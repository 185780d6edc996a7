"""The pages say what the code does: metrics, labels, codes, conditions."""

import ast
import re
import urllib.request
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

from auditor.client import AuditClient
from auditor.drift import DriftStatistics
from auditor.judge import Verdict
from auditor.preconditions import Condition
from auditor.records import SIDES
from tests.auditor.processes import REPOSITORY, running_auditor
from tests.auditor.samples import pair

METRICS = (REPOSITORY / "docs" / "metrics.md").read_text()
PROTOCOL = (REPOSITORY / "docs" / "audit-protocol.md").read_text()


def test_every_metric_that_is_served_is_documented_and_the_other_way_round(tmp_path: Path) -> None:
    with running_auditor(tmp_path) as auditor, urllib.request.urlopen(f"http://{auditor.http}/metrics") as answer:
        types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", answer.read().decode(), re.MULTILINE))
    served = set(types.items())
    assert served == set(re.findall(r"^\| `((?:auditor|process)_\w+)` \| (\w+) \|", METRICS, re.MULTILINE))


def test_a_clean_runs_series_are_as_many_as_the_page_on_sizing_says(tmp_path: Path) -> None:
    with running_auditor(tmp_path) as auditor, ExitStack() as clients:
        rollouts, trainers = (
            clients.enter_context(AuditClient(auditor.grpc, "run", spool_dir=tmp_path / side)) for side in SIDES
        )
        for step in range(2):
            rollout, trainer = pair(step=step)
            rollouts.submit_rollout(rollout)
            trainers.submit_trainer(trainer)
        for client in (rollouts, trainers):
            assert client.flush(10).accepted == 2
        with urllib.request.urlopen(f"http://{auditor.http}/metrics") as answer:
            series = answer.read().decode().count('run_id="run"')
    sizing = (REPOSITORY / "docs/operations/sizing.md").read_text()
    assert f"Series a run: {series}, " in sizing
    assert f"(1,000) at once: {series},000 series" in sizing


def test_every_statistic_is_documented() -> None:
    for field in fields(DriftStatistics):
        assert f"`{field.name}`" in METRICS, field.name


def test_the_page_lists_exactly_the_codes_that_the_code_has() -> None:
    codes = set().union(*(codes_in(path.read_text()) for path in (REPOSITORY / "auditor").rglob("*.py")))
    assert len(codes) > 30
    assert codes_on(PROTOCOL) == codes


def test_a_code_is_found_wherever_one_is_made() -> None:
    source = """
_NAMED: Final = "named"
class OwnError(AuditorError):
    code = "of_a_class"
def f(on_error):
    raise RecordError(f"x {1}", "of_an_error")
    raise LedgerError("y", _NAMED)
    on_error("told")
    _problem(request, status, "of_a_problem", "detail")
    return {"code": "of_an_answer", "error": "z"}, ConflictError("no code")
"""
    assert codes_in(source) == {"named", "of_a_class", "of_an_error", "told", "of_a_problem", "of_an_answer"}
    assert codes_on("| status | code | x |\n| --- | --- | --- |\n| `A` | `b`, `c` | `d` |\n\n| `e` | `f` |\n") == {
        "b",
        "c",
    }


def codes_in(source: str) -> set[str]:
    """Every stable code that a module can give: to an error, a problem, a counter, or an answer of a worker."""
    tree = ast.parse(source)
    named = {
        node.target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    found: set[object] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(body=body):
                found |= {
                    at.value.value
                    for at in body
                    if isinstance(at, ast.Assign)
                    and isinstance(at.value, ast.Constant)
                    and ast.unparse(at.targets[0]) == "code"
                }
            case ast.Call(func=func, args=args):
                name = ast.unparse(func).rpartition(".")[2].lstrip("_")
                at = 1 if name.endswith("Error") else {"on_error": 0, "problem": 2}.get(name, len(args))
                if at < len(args):
                    found.add(_constant(args[at], named))
            case ast.Dict(keys=keys, values=values):
                found |= {
                    _constant(value, named)
                    for key, value in zip(keys, values, strict=True)
                    if isinstance(key, ast.Constant) and key.value == "code"
                }
    return {code for code in found if isinstance(code, str)}


def _constant(node: ast.expr, named: dict[str, object]) -> object:
    if isinstance(node, ast.Name):
        return named.get(node.id)
    return node.value if isinstance(node, ast.Constant) else None


def codes_on(page: str) -> set[str]:
    """What stands in the columns headed `code` of a page's tables."""
    found: set[str] = set()
    for table in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
        rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
        if "code" in rows[0]:
            at = rows[0].index("code")
            found |= {code for row in rows[2:] for code in re.findall(r"`(\w+)`", row[at])}
    return found


def test_every_condition_and_verdict_is_documented() -> None:
    for name in (*Condition, *Verdict):
        assert f"| `{name.value}` |" in PROTOCOL, name


def test_every_cause_is_documented() -> None:
    """Names as they are written where suggestions are made."""
    folder = REPOSITORY / "auditor" / "causes"
    source = "".join(path.read_text() for path in folder.rglob("*.py"))
    causes = set(
        re.findall(r'(?:Suggestion\(|Model\(|Model\.of\(decoder,|Model\.of\(oracle\.decoder,)\s*"(\w+)"', source)
    )
    causes |= set(re.findall(r'yield "(\w+)", (?:f"|name|said)', source)) - {
        "attention",
        "rope",
        "swiglu",
        "residual_add",
    }
    causes |= set(re.findall(r'^    "[\w.]+": "(\w+)",$', source, re.MULTILINE))
    assert len(causes) > 25
    for cause in causes:
        assert f"`{cause}`" in PROTOCOL, cause
