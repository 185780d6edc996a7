"""Who may read what over HTTP: a token's runs, the page's own files, and how many requests a caller has."""

import math
from collections.abc import Awaitable, Callable
from typing import Annotated, Final

from fastapi import Depends, FastAPI, Path, Request, Response

from auditor.errors import AuthError, ForbiddenError, RateError
from auditor.export.page_files import is_page
from auditor.export.problems import problem_of
from auditor.grants import Grant, Grants
from auditor.rates import Rate

# Names that a record can have. No other is looked for: not every database takes any text.
NAME: Final = "[A-Za-z0-9._:@+=-]"
RunId = Annotated[str, Path(min_length=1, max_length=128, pattern=f"^{NAME}+$")]
Call = Callable[[Request], Awaitable[Response]]
_OPEN: Final = ("/healthz", "/readyz")  # and the page's own files, which hold no data


def add_access(app: FastAPI, grants: Grants, reads: Rate) -> None:
    """Ask every request for a token, and note what it opens. reads: requests a second of one caller."""

    @app.middleware("http")
    async def check(request: Request, call: Call) -> Response:
        if request.url.path in _OPEN or is_page(request.url.path):
            return await call(request)
        grant = grants(request.headers.get("authorization", "").encode())
        if grant is None:
            return problem_of(request, AuthError("send the header `Authorization: Bearer TOKEN`"))
        request.state.grant = grant
        host = request.client.host if request.client else "unknown"
        try:
            reads.take(grant.name or host, 1)
        except RateError as error:
            answer = problem_of(request, error)
            answer.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
            return answer
        return await call(request)


def granted(request: Request) -> Grant:
    """What the request's token opens."""
    grant: Grant = request.state.grant
    return grant


def covered(run_id: RunId, request: Request) -> None:
    """ForbiddenError unless the token is for the run that the path names."""
    grant = granted(request)
    if not grant.covers(run_id):
        raise ForbiddenError(f"the token of {grant.name!r} is for runs {', '.join(grant.runs)}, not {run_id!r}")


Covered: Final = Depends(covered)
