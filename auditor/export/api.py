"""The read API: runs, steps, samples, capsules, health, metrics. Nothing here writes."""

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Response
from prometheus_client.exposition import gzip_accepted

from auditor.capsule import freeze, to_bytes
from auditor.errors import LedgerError
from auditor.export import views
from auditor.export.access import NAME, Covered, RunId, add_access, granted
from auditor.export.heads import HeadAsGet
from auditor.export.metrics import Metrics
from auditor.export.page_files import add_page
from auditor.export.problems import add_problems, known_query, responses
from auditor.grants import Grants
from auditor.judge import Verdict
from auditor.rates import Rate
from auditor.records import SampleKey
from auditor.storage.curve import read_curve
from auditor.storage.reader import Reader

_MAX_STEP: Final = 2**53
_RUNS_READ: Final = 1000
_ERRORS: Final = responses(
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
_NOT_READY: Final = responses(HTTPStatus.SERVICE_UNAVAILABLE)

StepNumber = Annotated[int, Path(ge=0, le=_MAX_STEP)]
# Where a page of capsules begins: the step and sample of the last one before it.
Cursor = Annotated[str, Query(pattern=rf"^([0-9]{{1,16}}/{NAME}{{1,128}})?$", max_length=145)]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the API says of the auditor itself. contracts: digest → name of those that it knows.

    not_ready: why no record can be taken now; empty where one can.
    """

    version: str
    contracts: Mapping[str, str]
    not_ready: Callable[[], str]


def make_api(reader: Reader, metrics: Metrics, grants: Grants, reads: Rate, facts: Facts) -> FastAPI:
    """The application. reads: how many requests a second one caller has."""
    app = FastAPI(title="auditor", version=facts.version, docs_url=None, redoc_url=None)
    add_problems(app, lambda code: metrics.count_error("http", code))
    add_access(app, grants, reads)
    app.add_middleware(HeadAsGet)
    api = APIRouter(prefix="/api/v1", responses=_ERRORS, dependencies=[Depends(known_query)])
    _add_runs(api, reader)
    _add_curve(api, reader)
    _add_samples(api, reader)
    _add_capsules(api, reader)
    app.include_router(api)
    _add_health(app, metrics, facts)
    add_page(app)
    _name_problems(app)
    return app


def _add_runs(api: APIRouter, reader: Reader) -> None:
    @api.get("/runs")
    def runs(request: Request, limit: Annotated[int, Query(ge=1, le=_RUNS_READ)] = 100) -> views.Runs:
        """The runs that the token is for, the last active first."""
        grant = granted(request)
        rows = reader.runs(limit if grant.covers_all else _RUNS_READ)
        return views.Runs(runs=[views.run_view(row) for row in rows if grant.covers(row.run_id)][:limit])

    @api.get("/runs/{run_id}", dependencies=[Covered])
    def run(run_id: RunId) -> views.Run:
        """One run."""
        return views.run_view(reader.run(run_id))

    @api.get("/runs/{run_id}/steps", dependencies=[Covered])
    def steps(
        run_id: RunId,
        first: Annotated[int, Query(ge=0, le=_MAX_STEP)] = 0,
        last: Annotated[int, Query(ge=0, le=_MAX_STEP)] = _MAX_STEP,
        mismatching: bool = False,
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    ) -> views.Steps:
        """Steps of a run, all or only those with a mismatch."""
        rows = reader.steps(run_id, first, last, mismatching, limit)
        following = rows[-1].step + 1 if len(rows) == limit else None
        return views.Steps(steps=[views.step_view(row) for row in rows], next=following)

    @api.get("/runs/{run_id}/steps/{step}", dependencies=[Covered])
    def step(run_id: RunId, step: StepNumber) -> views.Step:
        """One step: counts, verdicts, conditions, causes, statistics."""
        return views.step_view(reader.step(run_id, step))


def _add_curve(api: APIRouter, reader: Reader) -> None:
    @api.get("/runs/{run_id}/curve", dependencies=[Covered])
    def curve(
        run_id: RunId,
        first: Annotated[int, Query(ge=0, le=_MAX_STEP)] = 0,
        last: Annotated[int, Query(ge=0, le=_MAX_STEP)] = _MAX_STEP,
        points: Annotated[int, Query(ge=1, le=2000)] = 400,
    ) -> views.Curve:
        """Mismatches and the largest difference over a run, neighbouring steps merged to at most `points`."""
        return views.Curve(points=read_curve(reader, run_id, first, last, points))


def _add_samples(api: APIRouter, reader: Reader) -> None:
    @api.get("/runs/{run_id}/steps/{step}/samples", dependencies=[Covered])
    def samples(
        run_id: RunId,
        step: StepNumber,
        after: Annotated[str, Query(max_length=128, pattern=rf"^{NAME}*$")] = "",
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        verdict: Verdict | None = None,
    ) -> views.Samples:
        """Samples of a step, page by page."""
        rows = reader.samples(run_id, step, after, limit, verdict)
        following = rows[-1].key.sample_id if len(rows) == limit else None
        return views.Samples(samples=[views.sample_view(row) for row in rows], next=following)

    @api.get("/runs/{run_id}/samples/{step}/{sample_id}", dependencies=[Covered])
    def sample(run_id: RunId, step: StepNumber, sample_id: RunId) -> views.SampleDetail:
        """One sample: judgement, tokens, both sides' log-probabilities and bits."""
        key = SampleKey(run_id, step, sample_id)
        row = reader.sample(key)
        return views.detail_view(
            row, reader.record(key, "rollout"), reader.record(key, "trainer"), reader.reference(key)
        )


def _add_capsules(api: APIRouter, reader: Reader) -> None:
    frozen: dict[int | str, dict[str, Any]] = {200: {"description": "A capsule.", "content": {"application/zip": {}}}}

    @api.get("/runs/{run_id}/capsules", dependencies=[Covered])
    def capsules(
        run_id: RunId, after: Cursor = "", limit: Annotated[int, Query(ge=1, le=1000)] = 100
    ) -> views.Capsules:
        """Mismatches that can be frozen: both sides' records are still held. Page by page, by step and sample."""
        step, _, sample_id = after.partition("/")
        rows, following = reader.capsules(run_id, (int(step), sample_id) if after else (0, ""), limit)
        return views.Capsules(
            capsules=[views.capsule_view(row) for row in rows],
            next=f"{following[0]}/{following[1]}" if following else None,
        )

    # A sample of any verdict can be frozen; the second name is the one that a list of samples leads to.
    @api.get("/runs/{run_id}/capsules/{step}/{sample_id}", responses=frozen, dependencies=[Covered],
             response_class=Response)  # fmt: skip
    @api.get("/runs/{run_id}/samples/{step}/{sample_id}/capsule", responses=frozen, dependencies=[Covered],
             response_class=Response)  # fmt: skip
    def capsule(run_id: RunId, step: StepNumber, sample_id: RunId) -> Response:
        """One sample frozen in a file, for `python -m auditor.replay`."""
        content = to_bytes(freeze(reader, SampleKey(run_id, step, sample_id)))
        return Response(content, media_type="application/zip")


def _add_health(app: FastAPI, metrics: Metrics, facts: Facts) -> None:
    text: dict[int | str, dict[str, Any]] = {200: {"description": "Well.", "content": {"text/plain": {}}}}

    @app.get("/healthz", responses=text, response_class=Response)
    async def healthz() -> Response:
        """The process answers, whatever the ledger does: no thread is waited for."""
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz", responses={**text, **_NOT_READY}, response_class=Response)
    def readyz() -> Response:
        """The ledger can be read and written; where not, the problem says which of the two."""
        reason = facts.not_ready()
        if reason:
            raise LedgerError(reason)
        return Response("ok\n", media_type="text/plain")

    @app.get("/version", responses=_ERRORS)
    def version_() -> views.Version:
        """The program's version and the contracts that it can hold somebody to."""
        names = sorted(f"{digest} {name}" for digest, name in facts.contracts.items())
        return views.Version(version=facts.version, contracts=names)

    @app.get("/metrics", responses={**text, **_ERRORS}, response_class=Response)
    def metrics_(request: Request) -> Response:
        """For Prometheus. A token of some runs is shown the series of those runs and no others."""
        grant = granted(request)
        shown = metrics.text() if grant.covers_all else metrics.text_of(grant.covers)
        headers = {"Vary": "Accept-Encoding"}
        if gzip_accepted(request.headers.get("accept-encoding", "")):
            # A thousand runs are 3 MB every scrape, and a seventeenth of that.
            shown, headers["Content-Encoding"] = gzip.compress(shown, 1), "gzip"
        return Response(shown, headers=headers, media_type="text/plain; version=0.0.4; charset=utf-8")


def _name_problems(app: FastAPI) -> None:
    """Put the shape of a problem into the schema, which FastAPI does for JSON answers only."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        schema = made()
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        schemas["Problem"] = views.Problem.model_json_schema()
        # Validation errors are problems too; FastAPI's own shapes for them are never sent.
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
