"""The read API against its own OpenAPI: what the schema allows is answered as the schema says, never by a 500."""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from auditor.client import AuditClient
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import one_ulp_off, pair

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def auditor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuditorProcess]:
    """With a run to find: some cases must meet what is there."""
    folder = tmp_path_factory.mktemp("api")
    with running_auditor(folder) as process:
        with AuditClient(process.grpc, "run", spool_dir=folder / "spool") as client:
            for i in range(8):
                rollout, trainer = pair(f"{i}", step=i % 2)
                client.submit_rollout(rollout)
                client.submit_trainer(one_ulp_off(trainer) if i == 3 else trainer)
            assert client.flush(10).accepted == 16
        yield process


@pytest.fixture(scope="module")
def api(auditor: AuditorProcess) -> Any:
    return schemathesis.openapi.from_url(f"http://{auditor.http}/openapi.json")


PATHS = (
    "/api/v1/runs",
    "/api/v1/runs/{run_id}",
    "/api/v1/runs/{run_id}/capsules",
    "/api/v1/runs/{run_id}/capsules/{step}/{sample_id}",
    "/api/v1/runs/{run_id}/curve",
    "/api/v1/runs/{run_id}/samples/{step}/{sample_id}",
    "/api/v1/runs/{run_id}/samples/{step}/{sample_id}/capsule",
    "/api/v1/runs/{run_id}/steps",
    "/api/v1/runs/{run_id}/steps/{step}",
    "/api/v1/runs/{run_id}/steps/{step}/samples",
    "/healthz",
    "/metrics",
    "/readyz",
    "/version",
)


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_is_one_that_the_schema_allows(api: Any, path: str) -> None:
    """Cases of schemathesis; in half of them a run that is there takes the place of the one that was made up."""

    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=api[path]["GET"].as_strategy(), known=st.booleans(), step=st.integers(0, 2), sample=st.integers(0, 8))
    def check(case: Any, known: bool, step: int, sample: int) -> None:
        if known:
            there = {"run_id": "run", "step": step, "sample_id": f"{sample}"}
            for name in case.path_parameters or {}:
                case.path_parameters[name] = there[name]
        case.call_and_validate(timeout=10)

    check()


def test_every_route_is_in_the_schema_with_its_errors(api: Any) -> None:
    raw = api.raw_schema
    paths = raw["paths"]
    assert sorted(paths) == list(PATHS)
    for path, operations in paths.items():
        answers = operations["get"]["responses"]
        assert "200" in answers, path
        if path not in ("/healthz", "/readyz"):
            assert {"401", "403", "404", "422", "429", "503"} <= set(answers), path
        for status, answer in answers.items():
            if status != "200":
                assert list(answer["content"]) == ["application/problem+json"], (path, status)


def test_a_head_is_a_get_without_its_body(auditor: AuditorProcess) -> None:
    connection = http.client.HTTPConnection(auditor.http, timeout=10)
    kept = "content-type", "content-length", "content-security-policy"
    there = [path.format(run_id="run", step=0, sample_id="0") for path in PATHS]
    for path in ("/", "/page/main.js", *there, "/openapi.json", "/api/v1/runs/none", "/nowhere"):
        heads = []
        for method in ("HEAD", "GET"):
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
            assert bool(body) == (method == "GET"), path
            heads.append((answer.status, *(answer.headers[name] for name in kept if path != "/metrics")))
        assert heads[0] == heads[1], path
    connection.request("POST", "/api/v1/runs")
    answer = connection.getresponse()
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("runs/run/steps/1/samples?verdit=mismatch", "query.verdit: no such parameter; the nearest is 'verdict'"),
        ("runs/run/steps/1/samples?Verdict=mismatch", "query.Verdict: no such parameter; the nearest is 'verdict'"),
        ("runs/run/steps?mismatched=true", "query.mismatched: no such parameter; the nearest is 'mismatching'"),
        ("runs/run/steps?mismatching=false&mismatching=true", "query.mismatching: given more than once"),
        ("runs/run?step=1", "query.step: this route has no parameters"),
    ],
)
def test_a_filter_that_is_misspelt_is_refused_and_not_left_out(auditor: AuditorProcess, asked: str, says: str) -> None:
    connection = http.client.HTTPConnection(auditor.http, timeout=10)
    connection.request("GET", f"/api/v1/{asked}")
    answer = connection.getresponse()
    problem = json.loads(answer.read())
    assert (answer.status, problem["code"], problem["detail"]) == (422, "invalid_request", says)
