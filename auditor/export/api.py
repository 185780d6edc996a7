"""The read API: runs, steps, samples, health, metrics. Nothing here writes."""

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from auditor.capsule import freeze, to_bytes
from auditor.errors import AuditorError, AuthError, LedgerError, NotFoundError
from auditor.export import views
from auditor.export.metrics import Metrics
from auditor.export.page_files import add_page, is_page
from auditor.judge import Verdict
from auditor.records import SampleKey
from auditor.storage.curve import read_curve
from auditor.storage.reader import Reader

_STATUS: Final[dict[type[AuditorError], HTTPStatus]] = {
    NotFoundError: HTTPStatus.NOT_FOUND,
    AuthError: HTTPStatus.UNAUTHORIZED,
    LedgerError: HTTPStatus.SERVICE_UNAVAILABLE,
}
log = logging.getLogger(__name__)
_OPEN: Final = ("/healthz", "/readyz")  # and the page's own files, which hold no data
_MAX_STEP: Final = 2**53
_PROBLEM: Final = "application/problem+json"

RunId = Annotated[str, Path(min_length=1, max_length=128)]
StepNumber = Annotated[int, Path(ge=0, le=_MAX_STEP)]
Call = Callable[[Request], Awaitable[Response]]


def make_api(
    reader: Reader, metrics: Metrics, token: Callable[[], str | None], version: str, contracts: Mapping[str, str]
) -> FastAPI:
    """The application. contracts: digest → name of those that this auditor knows."""
    problem: dict[int | str, dict[str, Any]] = {
        status: {"description": HTTPStatus(status).phrase, "model": views.Problem} for status in (401, 404, 422, 503)
    }
    app = FastAPI(title="auditor", version=version, responses=problem, redoc_url=None)
    _add_errors(app)
    _add_token(app, token)
    _add_runs(app, reader)
    _add_curve(app, reader)
    _add_samples(app, reader)
    _add_capsule(app, reader)
    _add_health(app, reader, metrics, version, contracts)
    add_page(app)
    return app


def _add_runs(app: FastAPI, reader: Reader) -> None:
    @app.get("/api/v1/runs")
    def runs(limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> views.Runs:
        """The runs, the last active first."""
        return views.Runs(runs=[views.run_view(row) for row in reader.runs(limit)])

    @app.get("/api/v1/runs/{run_id}")
    def run(run_id: RunId) -> views.Run:
        """One run."""
        return views.run_view(reader.run(run_id))

    @app.get("/api/v1/runs/{run_id}/steps")
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

    @app.get("/api/v1/runs/{run_id}/steps/{step}")
    def step(run_id: RunId, step: StepNumber) -> views.Step:
        """One step: counts, verdicts, conditions, causes, statistics."""
        return views.step_view(reader.step(run_id, step))


def _add_curve(app: FastAPI, reader: Reader) -> None:
    @app.get("/api/v1/runs/{run_id}/curve")
    def curve(
        run_id: RunId,
        first: Annotated[int, Query(ge=0, le=_MAX_STEP)] = 0,
        last: Annotated[int, Query(ge=0, le=_MAX_STEP)] = _MAX_STEP,
        points: Annotated[int, Query(ge=1, le=2000)] = 400,
    ) -> views.Curve:
        """Mismatches and the largest difference over a run, neighbouring steps merged to at most `points`."""
        return views.Curve(
            points=[views.point_view(point) for point in read_curve(reader, run_id, first, last, points)]
        )


def _add_samples(app: FastAPI, reader: Reader) -> None:
    @app.get("/api/v1/runs/{run_id}/steps/{step}/samples")
    def samples(
        run_id: RunId,
        step: StepNumber,
        after: Annotated[str, Query(max_length=128)] = "",
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        verdict: Verdict | None = None,
    ) -> views.Samples:
        """Samples of a step, page by page."""
        rows = reader.samples(run_id, step, after, limit, verdict)
        following = rows[-1].key.sample_id if len(rows) == limit else None
        return views.Samples(samples=[views.sample_view(row) for row in rows], next=following)

    @app.get("/api/v1/runs/{run_id}/samples/{step}/{sample_id}")
    def sample(run_id: RunId, step: StepNumber, sample_id: RunId) -> views.SampleDetail:
        """One sample: judgement, tokens, both sides' log-probabilities and bits."""
        key = SampleKey(run_id, step, sample_id)
        row = reader.sample(key)
        return views.detail_view(
            row, reader.record(key, "rollout"), reader.record(key, "trainer"), reader.reference(key)
        )


def _add_capsule(app: FastAPI, reader: Reader) -> None:
    @app.get("/api/v1/runs/{run_id}/samples/{step}/{sample_id}/capsule", response_class=Response)
    def capsule(run_id: RunId, step: StepNumber, sample_id: RunId) -> Response:
        """One sample frozen in a file, for `python -m auditor.replay`."""
        content = to_bytes(freeze(reader, SampleKey(run_id, step, sample_id)))
        return Response(content, media_type="application/zip")


def _add_health(app: FastAPI, reader: Reader, metrics: Metrics, version: str, contracts: Mapping[str, str]) -> None:
    @app.get("/healthz", response_class=Response)
    def healthz() -> Response:
        """The process answers."""
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz", response_class=Response)
    def readyz() -> Response:
        """The ledger answers too."""
        if not reader.ready():
            raise LedgerError("the ledger does not answer")
        return Response("ok\n", media_type="text/plain")

    @app.get("/version")
    def version_() -> views.Version:
        """The program's version and the contracts that it can hold somebody to."""
        return views.Version(
            version=version, contracts=sorted(f"{digest} {name}" for digest, name in contracts.items())
        )

    @app.get("/metrics", response_class=Response)
    def metrics_() -> Response:
        """For Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_token(app: FastAPI, token: Callable[[], str | None]) -> None:
    @app.middleware("http")
    async def check(request: Request, call: Call) -> Response:
        expected = token()
        given = request.headers.get("authorization", "").encode()
        if (
            expected is None
            or request.url.path in _OPEN
            or is_page(request.url.path)
            or hmac.compare_digest(given, f"Bearer {expected}".encode())
        ):
            return await call(request)
        return _problem(HTTPStatus.UNAUTHORIZED, "unauthenticated", "send the header `Authorization: Bearer TOKEN`")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(AuditorError)
    def known(_: Request, error: Exception) -> Response:
        assert isinstance(error, AuditorError)
        status = next((s for kind, s in _STATUS.items() if isinstance(error, kind)), HTTPStatus.INTERNAL_SERVER_ERROR)
        return _problem(status, error.code, str(error))

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        detail = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return _problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", detail)

    @app.exception_handler(Exception)
    def unexpected(_: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return _problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", "the auditor failed on this; its log says how")

    @app.exception_handler(HTTPException)
    def http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _problem(HTTPStatus(error.status_code), "http", str(error.detail))


def _problem(status: HTTPStatus, code: str, detail: str) -> JSONResponse:
    body = views.Problem(type="about:blank", title=status.phrase, status=status.value, detail=detail, code=code)
    headers = {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else None
    return JSONResponse(body.model_dump(), status.value, headers, _PROBLEM)
