"""The page for people: static files beside this module, served at `/` and `/page/`; they read the API only."""

from pathlib import Path
from typing import Final

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response
from starlette.types import Scope

FOLDER: Final = Path(__file__).parent / "page"
# Nothing from elsewhere is loaded and nobody may frame it; scripts and styles are files, none is inline.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    """Serve the page where its files are installed."""
    if not (FOLDER / "index.html").is_file():
        return

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        """The page itself."""
        return FileResponse(FOLDER / "index.html", headers=_HEADERS)

    app.mount("/page", _Files(directory=FOLDER), name="page")


def is_page(path: str) -> bool:
    """Whether a URL path is one of the page's files: a browser sends no bearer token with them."""
    return path == "/" or path.startswith("/page/")
