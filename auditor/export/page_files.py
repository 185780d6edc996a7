"""The page for people: static files beside this module, served at `/` and `/page/`; they read the API only."""

from pathlib import Path
from typing import Final

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

FOLDER: Final = Path(__file__).parent / "page"


def add_page(app: FastAPI) -> None:
    """Serve the page where its files are installed."""
    if not (FOLDER / "index.html").is_file():
        return

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        """The page itself."""
        return FileResponse(FOLDER / "index.html")

    app.mount("/page", StaticFiles(directory=FOLDER), name="page")
