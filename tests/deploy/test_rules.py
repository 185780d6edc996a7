"""The rule file says what its tests and its runbook say, and the tests can fail."""

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from auditor.export.metrics import COUNTERS
from tests.auditor.processes import running_auditor
from tests.auditor.samples import one_ulp_off
from tests.deploy.watched import report

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "deploy" / "prometheus"
RUNBOOK = REPOSITORY / "docs" / "operations" / "alerts.md"
RULES: dict[str, Any] = yaml.safe_load((FOLDER / "rules.yml").read_text())
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule
}
RULE_TESTS: dict[str, Any] = yaml.safe_load((FOLDER / "rules_test.yml").read_text())
TESTS = " ".join(test["name"] for test in RULE_TESTS["tests"])

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is missing: make ops-tools")


# Debian 12's in the path, and those of later releases where deploy/tools.sh could get them: 2.42, 2.53, 3.5.
PROMTOOLS = ["promtool", *map(str, sorted((REPOSITORY / "build/tools").glob("*/usr/bin/promtool"), reverse=True))]


def promtool(*arguments: str, program: str = "promtool") -> subprocess.CompletedProcess[str]:
    """What it says on both channels, in order, is its `stdout`."""
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run([program, *arguments], **pipe, text=True, timeout=120, check=False)


@needs_promtool
@pytest.mark.parametrize("program", PROMTOOLS)
def test_promtool_accepts_the_rules_and_their_tests_pass(program: str) -> None:
    print(promtool("--version", program=program).stdout.splitlines()[0])
    for check in (("check", "rules", "rules.yml"), ("check", "config", "--syntax-only", "prometheus.yml")):
        checked = promtool(*check[:-1], str(FOLDER / check[-1]), program=program)
        assert checked.returncode == 0, checked.stdout
    tested = promtool("test", "rules", str(FOLDER / "rules_test.yml"), program=program)
    assert tested.returncode == 0, tested.stdout


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_severity_a_summary_a_runbook_and_both_tests(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("critical", "warning", "none")
    assert rule["annotations"]["summary"]
    path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert REPOSITORY / path == RUNBOOK
    headings = re.findall(r"^## (.*)$", RUNBOOK.read_text(), re.MULTILINE)
    assert anchor in {heading.lower() for heading in headings}
    assert f"{alert} fires" in TESTS
    assert f"{alert} is silent" in TESTS or alert == "Watchdog"


@needs_promtool
@pytest.mark.slow
@pytest.mark.parametrize("alert", ALERTS)
def test_the_tests_reject_an_alert_that_never_fires_always_does_or_waits_another_time(
    alert: str, tmp_path: Path
) -> None:
    # Only the alert's own tests, and the rules that they are about: all of them would take minutes.
    own = [test for test in RULE_TESTS["tests"] if re.search(rf"\b{alert} (fires|is silent)", test["name"])]
    changes: list[dict[str, Any]] = [{}, *mutants(alert)]
    for number, change in enumerate(changes):
        (tmp_path / f"rules{number}.yml").write_text(json.dumps(only_for(own, alert, change)))
        tests = {**RULE_TESTS, "rule_files": [f"rules{number}.yml"], "tests": own}
        (tmp_path / f"tests{number}.yml").write_text(json.dumps(tests))
    files = [str(tmp_path / f"tests{number}.yml") for number in range(len(changes))]
    said = promtool("test", "rules", *files)
    outcomes = re.findall(r"Unit Testing:\s+(\S+)\s+(SUCCESS|FAILED)", said.stdout)
    assert [file for file, _ in outcomes] == files, said.stdout
    assert outcomes[0][1] == "SUCCESS"
    passed = [change for change, (_, outcome) in zip(changes[1:], outcomes[1:], strict=True) if outcome == "SUCCESS"]
    assert passed == []


def only_for(tests: list[dict[str, Any]], alert: str, change: dict[str, Any]) -> dict[str, Any]:
    """The rules without the alerts that `tests` do not name, and with one of them changed."""
    named = json.dumps(tests)
    patterns = re.findall(r'alertname=~\\"(.*?)\\"', named)
    rules = deepcopy(RULES)
    for group in rules["groups"]:
        kept = []
        for rule in group["rules"]:
            name = rule.get("alert", "")
            if not name or name in named or any(re.fullmatch(pattern, name) for pattern in patterns):
                kept.append({**rule, **change} if name == alert else rule)
        group["rules"] = kept
    return rules


def mutants(alert: str) -> list[dict[str, Any]]:
    """What is changed in each: never and always true, and each of its two times gone and ten times as long."""
    rule = ALERTS[alert]
    changes: list[dict[str, Any]] = [{"expr": "vector(0) > 1", "for": "0s"}]
    if alert != "Watchdog":
        changes.append({"expr": "vector(1)", "for": "0s"})
    for name in ("for", "keep_firing_for"):
        if name in rule:
            changes += [{name: "0s"}, {name: re.sub(r"\d+", lambda number: f"{number[0]}0", rule[name])}]
    texts = {key: one_cluster(text) for key, text in rule["annotations"].items()}
    if texts != rule["annotations"]:
        changes.append({"annotations": texts})
    return changes


def one_cluster(text: str) -> str:
    """A text that asks for the run, whichever cluster it is in."""
    return text.replace("cluster=%q,", "").replace(" $labels.cluster", "")


def test_every_alert_that_waits_has_a_mutant_for_it() -> None:
    waiting = {alert for alert, rule in ALERTS.items() if "for" in rule}
    assert len(waiting) == 12
    assert all({"for": "0s"} in mutants(alert) for alert in waiting)
    assert {"for": "300s"} in mutants("AuditorDown")
    asking = {alert for alert, rule in ALERTS.items() if "query" in str(rule["annotations"])}
    assert {alert for alert in ALERTS if "annotations" in mutants(alert)[-1]} == asking


def test_every_metric_in_the_rules_is_one_that_the_auditor_exports(tmp_path: Path) -> None:
    expressions = " ".join(str(rule["expr"]) for group in RULES["groups"] for rule in group["rules"])
    used = set(re.findall(r"(?<![:\w])auditor_\w+", expressions))
    with running_auditor(tmp_path) as auditor:
        exported = {name.partition("{")[0] for name in auditor.metrics()} | exported_families(auditor.http)
    assert used <= exported, used - exported
    assert {f"auditor_{name}_total" for name in COUNTERS} <= exported


def exported_families(http: str) -> set[str]:
    """Names in the TYPE lines, which are there before the first value."""
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=10) as answer:
        return set(re.findall(r"^# TYPE (\w+)", answer.read().decode(), re.MULTILINE))


@needs_promtool
def test_promtool_has_nothing_against_what_a_scrape_gets_and_would_have_against_a_counter_of_another_name(
    tmp_path: Path,
) -> None:
    with running_auditor(tmp_path) as auditor:
        report(auditor, tmp_path, range(2), one_ulp_off)
        with urllib.request.urlopen(f"http://{auditor.http}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    for given, code in ((text, 0), (text.replace("auditor_records_total", "auditor_records"), 3)):
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=given, capture_output=True, text=True, check=False
        )
        assert checked.returncode == code, checked.stderr
    helps = re.findall(r"^# HELP (?:auditor|process)_\w+ (.*)$", text, re.MULTILINE)
    assert len(helps) > 25
    assert len(set(helps)) == len(helps)
    # Each is read alone.
    assert [said for said in helps if re.match("Those|It|They", said)] == []


@pytest.mark.skipif(not shutil.which("amtool"), reason="amtool is missing: make ops-tools")
@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (("alertname=MismatchedTokens", "severity=critical"), "page"),
        (("alertname=NotComparableShare", "severity=warning"), "notify"),
        (("alertname=Watchdog", "severity=none"), "heartbeat"),
        (("alertname=SomethingElse",), "notify"),
    ],
)
def test_alertmanager_routes_by_severity(labels: tuple[str, ...], receiver: str) -> None:
    config = FOLDER / "alertmanager.yml"
    command = ["amtool", "config", "routes", "test", f"--config.file={config}", f"--verify.receivers={receiver}"]
    routed = subprocess.run([*command, *labels], capture_output=True, text=True, timeout=60, check=False)
    assert routed.returncode == 0, routed.stdout + routed.stderr


@pytest.mark.skipif(not shutil.which("amtool"), reason="amtool is missing: make ops-tools")
def test_amtool_and_amlint_find_nothing_in_the_alertmanager_config() -> None:
    checked = subprocess.run(
        ["amtool", "check-config", str(FOLDER / "alertmanager.yml")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    linted = amlint(FOLDER / "alertmanager.yml")
    assert linted.returncode == 0, linted.stdout + linted.stderr


def amlint(config: Path) -> subprocess.CompletedProcess[str]:
    """Warnings count as errors; routes and inhibitions are held against the rules."""
    program = Path(sys.executable).with_name("amlint")
    if not program.exists():
        pytest.skip("amlint is missing: pip install '.[ops]'")
    command = [program, "check", "--strict", "--rules", FOLDER / "rules.yml", config]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not shutil.which("amtool"), reason="amtool is missing: make ops-tools")
def test_amtool_rejects_a_receiver_that_is_not_there_and_amlint_a_route_that_nothing_reaches(tmp_path: Path) -> None:
    text = (FOLDER / "alertmanager.yml").read_text()
    (tmp_path / "nobody.yml").write_text(text.replace("- receiver: page\n", "- receiver: pgae\n"))
    refused = subprocess.run(["amtool", "check-config", tmp_path / "nobody.yml"], capture_output=True, check=False)
    assert refused.returncode != 0
    config = yaml.safe_load(text)
    config["route"]["routes"].append(config["route"]["routes"][1])
    (tmp_path / "twice.yml").write_text(yaml.safe_dump(config))
    assert amlint(tmp_path / "twice.yml").returncode != 0
