"""The committed dashboards are those of the program, are sound, and show something on a real Prometheus."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from auditor.client import AuditClient
from tests.auditor.samples import one_ulp_off, pair
from tests.auditor.test_reference import true_pair, under
from tests.deploy.watched import Watched, label_values, report, wait_for

pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is missing: pip install '.[ops]'")
promql = pytest.importorskip("promql_parser", reason="promql-parser is missing: pip install '.[ops]'")

from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: E402
from grafana_foundation_sdk.models.dashboard import Dashboard  # noqa: E402

from deploy.grafana.generate import DASHBOARDS, FOLDER, text  # noqa: E402
from deploy.grafana.render import expand, main, prometheus, render_all  # noqa: E402
from deploy.prometheus.pager import main as pager  # noqa: E402
from deploy.tour.main import main as tour  # noqa: E402

NAMES = sorted(DASHBOARDS)
BENT_STEPS = 6
# One token of the first sample, and one that is NaN.
DIFFERING = 2
# Counted by an auditor that waits for nobody.
HASTY = ("unpaired_samples", "late_samples", "recompute_skipped_samples", "recompute_worker_ends", "left_runs")
# Of no use to who looks at a dashboard.
UNSHOWN = {"process_start_time_seconds", "process_virtual_memory_bytes"}


def committed(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return loaded


def expressions(name: str) -> list[str]:
    return [target["expr"] for panel in committed(name)["panels"] for target in panel.get("targets", [])]


def variables(name: str) -> dict[str, str]:
    """The query of each variable that asks Prometheus."""
    listed = committed(name)["templating"]["list"]
    return {variable["name"]: variable["query"] for variable in listed if variable["type"] == "query"}


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_json_is_what_the_program_writes(name: str) -> None:
    assert (FOLDER / f"{name}.json").read_text() == text(name), "run `make dashboards`"


@pytest.mark.parametrize("name", NAMES)
def test_json_to_model_to_json_is_the_identity(name: str) -> None:
    assert json.loads(json.dumps(Dashboard.from_json(committed(name)), cls=JSONEncoder)) == committed(name)


@pytest.mark.parametrize("name", NAMES)
def test_ids_titles_and_places_are_unique_and_every_panel_says_what_it_shows(name: str) -> None:
    panels = committed(name)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own
        assert panel["type"] == "row" or panel["description"]
        refs = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(refs)) == len(refs)


def test_dashboards_have_uids_of_their_own_and_the_variables_that_rays_have() -> None:
    assert len({committed(name)["uid"] for name in NAMES}) == len(NAMES)
    for name in NAMES:
        variables = [variable["name"] for variable in committed(name)["templating"]["list"]]
        assert variables == ["datasource", "Cluster", "SessionName", "run"]


@pytest.mark.parametrize("name", NAMES)
def test_every_expression_parses_and_every_selector_takes_the_variables(name: str) -> None:
    for expression in expressions(name):
        promql.parse(expand(expression, {}, "5m"))
        assert "$Cluster" in expression
        assert "$" not in expand(expression, {}, "5m")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_told_apart_by_run_is_told_apart_by_cluster_too(name: str) -> None:
    for panel in committed(name)["panels"]:
        for target in panel.get("targets", []):
            groups = re.findall(r"(?:by|on) \(([^)]*)\)", target["expr"])
            assert all("cluster" in group for group in groups if "run_id" in group), target["expr"]
            assert "{{cluster}}" in target["legendFormat"] or "{{run_id}}" not in target["legendFormat"]


def test_every_metric_of_the_auditor_is_in_some_panel() -> None:
    page = (FOLDER.parents[2] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `((?:auditor|process)_\w+)` \|", page, re.MULTILINE))
    shown = set(re.findall(r"\b(?:auditor|process)_\w+", " ".join(e for name in NAMES for e in expressions(name))))
    assert len(documented) > 25
    assert {name for name in documented if not any(one.startswith(name) for one in shown)} == UNSHOWN


def by_step() -> list[str]:
    """The two expressions over steps, with the gauge of the step in each."""
    return [expression for expression in expressions("drift") if "count_values" in expression]


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is missing: make ops-tools")
def test_two_clusters_with_one_run_id_are_two_curves_and_a_step_has_its_own_value(tmp_path: Path) -> None:
    """Steps of a minute: tokens that differ in each, 0, 0, 3, 1 in cluster a and none in b."""
    series, wanted = [], []
    for metric, values in (("auditor_step_mismatched_tokens", "0 0 3 1"), ("auditor_max_abs_logprob_diff", "0 0 3 1")):
        series += [
            {"series": f'{metric}{{cluster="a",run_id="r"}}', "values": values},
            {"series": f'{metric}{{cluster="b",run_id="r"}}', "values": "0x3"},
        ]
    series += [{"series": f'auditor_step{{cluster="{cluster}",run_id="r"}}', "values": "0+1x3"} for cluster in "ab"]
    for cluster, points in (("a", (0, 0, 3, 1)), ("b", (0, 0, 0, 0))):
        for step, value in enumerate(points):
            wanted.append({"labels": f'{{cluster="{cluster}",run_id="r",step="{step}"}}', "value": value})
    asked = [
        {"expr": expand(expression, {}, "1m", resolution="15s"), "eval_time": "3m", "exp_samples": wanted}
        for expression in by_step()
    ]
    test = {
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": asked}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(asked) == 2


def test_the_cost_of_a_long_range_is_that_of_its_points_and_what_is_skipped_is_said() -> None:
    assert all("[$__range:$__interval]" in expression for expression in by_step())
    panels = [panel for panel in committed("drift")["panels"] if panel["type"] == "xychart"]
    assert len(panels) == 2
    assert all("faster than a scrape are skipped" in panel["description"] for panel in panels)
    assert all(panel["options"]["mapping"] == "auto" for panel in panels)
    assert all(panel["fieldConfig"]["defaults"]["custom"]["show"] == "points" for panel in panels)


def test_a_broken_expression_would_be_found() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        promql.parse('sum(rate(auditor_records_total{cluster=~".*"}[5m])')


@pytest.fixture(scope="module")
def span(watched: Watched) -> tuple[float, float]:
    """Unix seconds in which runs with a fault of each kind were watched; a step a scrape, so that each is seen."""
    began = time.time()
    auditor = watched.auditor
    with AuditClient(auditor.grpc, "bent", spool_dir=watched.folder / "bent", queue_size=64) as client:
        for step in range(BENT_STEPS):
            for sample in range(4):
                rollout, trainer = pair(str(sample), step=step, run_id="bent")
                client.submit_rollout(rollout)
                client.submit_trainer(bent(trainer, step, sample))
            client.flush(10)
            newest = f'auditor_step{{run_id="bent"}} == {step}'
            wait_for(lambda newest=newest: watched.stack.query(newest), 10)
        client.submit_trainer(one_ulp_off(pair("0", step=0, run_id="bent")[1]))
        assert client.flush(10).refused == 1
    with AuditClient(auditor.grpc, "run", spool_dir=watched.folder / "makers", queue_size=8) as client:
        rollout, trainer = true_pair(watched.weights, "makers")
        client.submit_rollout(under("sm90", watched.weights, rollout))
        client.submit_trainer(trainer)
        client.flush(10)
    with pytest.raises(urllib.error.HTTPError):
        auditor.get("/api/v1/runs/nobody")
    hurry(watched)
    # A rate needs two scrapes of what is counted last, here in the shortest interval that is drawn.
    last = ("other_arithmetic_tokens", "recomputed_tokens", "recompute_errors", "refusals", "errors")
    for name in last + HASTY:
        query = f"count_over_time(auditor_{name}_total[5s]) > 2"
        wait_for(lambda query=query: watched.stack.query(query), 30)
    return began, time.time()


def hurry(watched: Watched) -> None:
    """What one counts that waits for nobody: a run that leaves, a sample given up, mismatches passed over."""
    report(watched.hasty, watched.folder, range(1), run_id="first")
    with AuditClient(watched.hasty.grpc, "hurried", spool_dir=watched.folder / "hasty", queue_size=32) as client:
        rollout, trainer = pair("lone", run_id="hurried")
        client.submit_rollout(rollout)
        for sample in range(8):
            sound = true_pair(watched.weights, f"{sample}")
            client.submit_rollout(replace(sound[0], run_id="hurried"))
            client.submit_trainer(replace(one_ulp_off(sound[1]), run_id="hurried"))
        client.flush(10)
        wait_for(lambda: watched.stack.query("auditor_unpaired_samples_total > 0"), 20)
        client.submit_trainer(trainer)
        client.flush(10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drift", "auditor"])
def test_every_expression_of_every_panel_returns_series_from_a_real_auditor(
    name: str, watched: Watched, span: tuple[float, float]
) -> None:
    silent = [e for e in expressions(name) if not watched.stack.query(expand(e, {"run": "run|bent|hurried"}, "1m"))]
    assert silent == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "title", ["Refused records by reason", "Failed calls and requests", "Samples that could not be recomputed"]
)
def test_what_failed_once_is_more_than_a_zero(title: str, watched: Watched, span: tuple[float, float]) -> None:
    (panel,) = [panel for panel in committed("auditor")["panels"] if panel.get("title") == title]
    (target,) = panel["targets"]
    series = watched.stack.query(expand(target["expr"], {"run": "run|bent|hurried"}, "1m"))
    assert series
    assert all(float(one["value"][1]) > 0 for one in series)


@pytest.mark.slow
def test_every_variable_has_the_values_that_grafana_would_offer(watched: Watched, span: tuple[float, float]) -> None:
    wanted = {"Cluster": {"local"}, "run": {"run", "bent"}}
    for name in NAMES:
        for variable, query in variables(name).items():
            # tests/deploy/test_ray.py has the sessions.
            if variable != "SessionName":
                assert wanted[variable] <= label_values(watched.stack, query), (name, query)
        assert label_values(watched.stack, variables(name)["run"], Cluster="elsewhere") == set()


@pytest.mark.slow
def test_each_step_has_its_own_value_in_the_curves_by_step(watched: Watched, span: tuple[float, float]) -> None:
    for expression in by_step():
        series = watched.stack.query(expand(expression, {}, "1m"))
        assert {one["metric"]["run_id"] for one in series} >= {"run", "bent"}
        ours = [one for one in series if one["metric"]["run_id"] == "bent"]
        points = {int(one["metric"]["step"]): float(one["value"][1]) for one in ours}
        assert points.keys() == set(range(BENT_STEPS))
        assert all((points[step] == 0) == (step < 3) for step in points), "the fault begins with step 3"
        if "auditor_step_mismatched_tokens" in expression:
            assert max(points.values()) == DIFFERING, "of one step, not since the run began"


@pytest.mark.slow
def test_every_dashboard_is_drawn(watched: Watched, span: tuple[float, float], tmp_path: Path) -> None:
    drawn = render_all(prometheus(watched.stack.prometheus), span, tmp_path, {"run": "run|bent|hurried"})
    assert [path.name for path in drawn] == [f"dashboard-{name}.png" for name in NAMES]
    assert all(path.stat().st_size > 20_000 for path in drawn)
    assert drawn[tmp_path / "dashboard-drift.png"] == ()
    assert drawn[tmp_path / "dashboard-auditor.png"] == ()


def bent(trainer: Any, step: int, sample: int) -> Any:
    """A fault of each kind in the later steps."""
    if step < 3:
        return trainer
    if sample == 0:
        return one_ulp_off(trainer, step)
    if sample == 1:
        return replace(trainer, weight_version=2)
    if sample == 2:
        values = trainer.logprobs.copy()
        values[4] = np.nan
        return replace(trainer, logprobs=values)
    return trainer


@pytest.mark.parametrize("base", ["http://127.0.0.1:1", "nonsense"])
def test_what_is_no_prometheus_is_named_in_a_line(
    tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--prometheus", base, "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {base} does not answer")


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        (main, ["--minutes", "nan"], "--minutes nan: a number above 0 is expected"),
        (pager, ["--listen", "127.0.0.1:99999"], "--listen '127.0.0.1:99999' is no host:port"),
        (tour, ["--wait", "nan"], "--wait nan: seconds are expected"),
        (tour, ["--out", "{file}"], "--out {file}: Not a directory"),
    ],
)
def test_a_wrong_argument_is_named_with_exit_code_2(
    tmp_path: Path, program: Any, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit) as ended:
        program([argument.format(file=file) for argument in arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(said.format(file=file))
