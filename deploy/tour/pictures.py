"""Pictures of the auditor's page, taken in a headless Chromium."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from deploy.tour.stack import StackError


def take(http: str, run_id: str, sample: tuple[int, str] | None, out: Path) -> Sequence[Path]:
    """The list of runs, the run, and one sample, in light and in dark. http: base URL. StackError without a browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise StackError("chromium is not installed; `make ops-tools` installs it")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  only where pictures are wanted

    views = {"page-runs": "", "page-run": f"#/run/{quote(run_id, safe='')}"}
    if sample is not None:
        views["page-sample"] = f"#/run/{quote(run_id, safe='')}/sample/{sample[0]}/{quote(sample[1], safe='')}"
    taken = []
    with sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
            for name, address in views.items():
                page.goto(f"{http}/{address}")
                page.reload()
                page.locator("h1").wait_for()
                path = out / f"{name}-{scheme}.png"
                page.screenshot(path=str(path), full_page=True)
                taken.append(path)
        browser.close()
    return taken
