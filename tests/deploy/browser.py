"""A real Chromium, headless, driven by playwright; what a page logs or fails to load is kept."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is missing: make ops-tools")


@contextmanager
def browser(**options: Any) -> Iterator[Any]:
    """A page of a fresh context; AssertionError at the end if it logged an error or asked another host."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install '.[ops]'")
    faults: list[str] = []
    with playwright.sync_playwright() as engine:
        chromium = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        context = chromium.new_context(viewport={"width": 1280, "height": 900}, **options)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("console", lambda message: message.type == "error" and faults.append(f"console: {message.text}"))
        page.on("request", lambda request: "://127.0.0.1:" not in request.url and note(faults, request.url))
        page.faults = faults
        try:
            yield page
        finally:
            chromium.close()
    assert faults == []


def note(faults: list[str], url: str) -> None:
    if not url.startswith(("data:", "blob:")):
        faults.append(f"asked {url}")
