"""Errors over HTTP: RFC 9457 problem documents, each with a stable code, each counted."""

import difflib
import logging
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from auditor.errors import AuditorError, AuthError, ForbiddenError, LedgerError, NotFoundError, RateError
from auditor.export.views import Problem

log = logging.getLogger(__name__)
MEDIA_TYPE: Final = "application/problem+json"
# The most derived class that fits decides.
_STATUS: Final[dict[type[AuditorError], HTTPStatus]] = {
    NotFoundError: HTTPStatus.NOT_FOUND,
    ForbiddenError: HTTPStatus.FORBIDDEN,
    AuthError: HTTPStatus.UNAUTHORIZED,
    RateError: HTTPStatus.TOO_MANY_REQUESTS,
    LedgerError: HTTPStatus.SERVICE_UNAVAILABLE,
}


def responses(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """What OpenAPI says of these errors."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {int(s): {"description": s.phrase, "content": {MEDIA_TYPE: {"schema": schema}}} for s in statuses}


def known_query(request: Request) -> None:
    """Refuse a parameter that the route does not have, or that is there twice: a filter must not be left out unseen."""
    known = [parameter.alias for parameter in request.scope["route"].dependant.query_params]
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)
            said = f"no such parameter; the nearest is {near[0]!r}" if near else "this route has no parameters"
            raise RequestValidationError([{"loc": ("query", name), "msg": said}])
        if count > 1:
            raise RequestValidationError([{"loc": ("query", name), "msg": "given more than once"}])


def add_problems(app: FastAPI, on_error: Callable[[str], None]) -> None:
    """Answer every error with a problem document. on_error: told the code."""
    app.state.on_error = on_error

    @app.exception_handler(AuditorError)
    def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, AuditorError)
        return problem_of(request, error)

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        said = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        # The route and its access check both ask for the run.
        detail = "; ".join(dict.fromkeys(said))
        return _problem(request, HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", detail)

    @app.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        detail = "the auditor failed on this; its log says how"
        return _problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, AuditorError.code, detail)

    @app.exception_handler(HTTPException)
    def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        answer = _problem(request, HTTPStatus(error.status_code), "http", str(error.detail))
        answer.headers.update(error.headers or {})
        if answer.headers.get("Allow") == "GET":
            answer.headers["Allow"] = "GET, HEAD"
        return answer


def problem_of(request: Request, error: AuditorError) -> Response:
    """The document for an error of ours."""
    status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), HTTPStatus.INTERNAL_SERVER_ERROR)
    return _problem(request, status, error.code, str(error))


def _problem(request: Request, status: HTTPStatus, code: str, detail: str) -> JSONResponse:
    request.app.state.on_error(code)
    body = Problem(type="about:blank", title=status.phrase, status=status.value, detail=detail, code=code)
    headers = {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else None
    return JSONResponse(body.model_dump(), status.value, headers, MEDIA_TYPE)
