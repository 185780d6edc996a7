"""The auditor's page in a real browser: what a person sees, by mouse, by keyboard and by ear."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.capsule import from_bytes
from auditor.client import AuditClient
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import one_ulp_off, pair
from tests.deploy.browser import browser, needs_chromium

pytestmark = [pytest.mark.slow, needs_chromium]
STEPS = 6
WRONG_STEP = 4
# Step and sample of which a token does not count.
MASKED = (5, 3)
HOSTILE = "<img src=x onerror=alert(1)>"
# A folder to keep screenshots in, to be looked at.
SHOTS = os.environ.get("PAGE_SHOTS")


def shoot(page: Any, name: str) -> None:
    assert not re.search(r"\b(null|undefined)\b|\[object", page.locator("body").inner_text())
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/{name}.png", full_page=True)


@pytest.fixture(scope="module")
def auditor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuditorProcess]:
    """A run of six steps: in one of them a sample mismatches and two are not comparable."""
    folder = tmp_path_factory.mktemp("page")
    with running_auditor(folder) as process:
        client = AuditClient(process.grpc, "run@1:a+b", spool_dir=folder / "spool", queue_size=64)
        for step in range(STEPS):
            for index in range(4):
                rollout, trainer = pair(str(index), step=step, run_id="run@1:a+b")
                if step == WRONG_STEP and index == 1:
                    trainer = one_ulp_off(trainer, 5)
                    values = trainer.logprobs.copy()
                    values[9] -= np.float32(0.25)
                    values[11] = np.nan
                    rollout = replace(rollout, layer_digests=("aa" * 32, "bb" * 32))
                    trainer = replace(trainer, logprobs=values, layer_digests=("aa" * 32, "cc" * 32))
                if step == WRONG_STEP and index == 2:
                    trainer = replace(trainer, weight_version=2)
                if step == WRONG_STEP and index == 3:
                    trainer = replace(trainer, sampling=replace(trainer.sampling, logprobs_mode=HOSTILE))
                if (step, index) == MASKED:
                    mask = np.arange(rollout.response_len) != 3
                    rollout, trainer = replace(rollout, mask=mask), replace(trainer, mask=mask)
                client.submit_rollout(rollout)
                client.submit_trainer(trainer)
        assert client.flush(20).accepted == STEPS * 8
        client.close()
        yield process


def test_from_the_list_of_runs_to_the_tokens_that_differ(auditor: AuditorProcess) -> None:
    with browser() as page:
        page.goto(f"http://{auditor.http}/")
        shoot(page, "runs")
        assert page.get_by_role("heading", level=1).inner_text() == "Runs"
        page.get_by_role("link", name="run@1:a+b").click()
        page.get_by_role("heading", name="Run run@1:a+b").wait_for()
        shoot(page, "run")
        assert page.locator("svg.chart").count() == 2
        assert page.locator("svg.chart text").all_text_contents()[:2] == ["0", "3"]
        assert "samples mismatch" in page.locator("main").inner_text()
        page.get_by_role("link", name="Only mismatching steps").click()
        page.get_by_role("link", name=str(WRONG_STEP), exact=True).click()
        page.get_by_role("heading", name=f"Step {WRONG_STEP} of run").wait_for()
        shoot(page, "step")
        rows = {
            row.split("\t")[0]: row
            for row in page.get_by_role("table", name="Samples").locator("tbody tr").all_inner_texts()
        }
        assert "weights; suspected: stale_weights" in rows["2"]
        page.get_by_role("link", name="1", exact=True).click()
        page.get_by_role("heading", name=f"Sample 1, step {WRONG_STEP}").wait_for()
        shoot(page, "sample")
        began = "Where it began, by the digests of layers (counted from 0): the sides part at layer 1."
        assert began in page.locator("main").inner_text()
        differing = page.locator(".tokens .differs")
        assert differing.count() == 3
        classes = [differing.nth(i).get_attribute("class") for i in range(3)]
        assert [c.split()[0] for c in classes if c] == ["d1", "d4", "d5"]
        differing.first.click()
        detail = auditor.get(f"/api/v1/runs/run%401%3Aa%2Bb/samples/{WRONG_STEP}/1")
        said = page.locator("p.mono[role=status]").inner_text()
        for side in ("rollout", "trainer"):
            assert detail[side]["bits"][5] in said


def test_a_sample_is_saved_as_a_capsule_that_opens(auditor: AuditorProcess, tmp_path: Path) -> None:
    with browser() as page:
        page.goto(f"http://{auditor.http}/#/run/run%401%3Aa%2Bb/sample/{WRONG_STEP}/1")
        with page.expect_download() as download:
            page.get_by_role("button", name="Save as a capsule").click()
        download.value.save_as(tmp_path / "capsule")
    frozen = from_bytes((tmp_path / "capsule").read_bytes())
    assert frozen.judgement.differing == 3


def test_capsules_are_listed_lead_to_their_sample_and_are_saved(auditor: AuditorProcess, tmp_path: Path) -> None:
    with browser() as page:
        page.goto(f"http://{auditor.http}/#/run/run%401%3Aa%2Bb")
        page.get_by_role("heading", name="Capsules").wait_for()
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Save the capsule of sample 1, step {WRONG_STEP}").click()
        download.value.save_as(tmp_path / "capsule")
        assert from_bytes((tmp_path / "capsule").read_bytes()).key == ("run@1:a+b", WRONG_STEP, "1")
        page.get_by_role("link", name=f"step {WRONG_STEP}, 1").click()
        page.get_by_role("heading", name=f"Sample 1, step {WRONG_STEP}").wait_for()
        page.goto(f"http://{auditor.http}/#/run/run%401%3Aa%2Bb/capsules")
        page.get_by_role("heading", name="Capsules of run run@1:a+b").wait_for()
        shoot(page, "capsules")
        (row,) = page.locator("tbody tr").all_inner_texts()
        assert row.startswith(f"step {WRONG_STEP}, 1")
        assert "3 of 32" in row
        with page.expect_download() as download:
            page.get_by_role("button", name="Save the capsule").click()
        download.value.save_as(tmp_path / "listed")
        assert (tmp_path / "listed").read_bytes() == (tmp_path / "capsule").read_bytes()
        page.get_by_role("link", name="run@1:a+b").click()
        page.get_by_role("heading", name="Run run@1:a+b").wait_for()


def test_what_a_record_says_is_text_and_never_markup(auditor: AuditorProcess) -> None:
    with browser() as page:
        page.goto(f"http://{auditor.http}/#/run/run%401%3Aa%2Bb/sample/{WRONG_STEP}/3")
        page.get_by_text(HOSTILE).first.wait_for()
        assert page.locator("img").count() == 0


def test_everything_is_reached_and_said_by_the_keyboard(auditor: AuditorProcess) -> None:
    with browser() as page:
        page.goto(f"http://{auditor.http}/#/run/run%401%3Aa%2Bb")
        chart = page.locator("svg.chart").first
        chart.wait_for()
        assert page.evaluate("document.activeElement.id") == "main"
        for _ in range(20):
            if page.evaluate("document.activeElement.classList.contains('chart')"):
                break
            page.keyboard.press("Tab")
        page.keyboard.press("Home")
        spoken = page.locator("figure p[role=status]").first
        assert "step 0: 0 of 128 tokens mismatched" in spoken.inner_text()
        for _ in range(WRONG_STEP):
            page.keyboard.press("ArrowRight")
        assert f"step {WRONG_STEP}: 3 of 64 tokens mismatched" in spoken.inner_text()
        page.keyboard.press("Enter")
        page.get_by_role("heading", name=f"Step {WRONG_STEP} of run").wait_for()
        page.goto(f"http://{auditor.http}/#/run/run%401%3Aa%2Bb/sample/{WRONG_STEP}/1")
        token = page.locator(".tokens [tabindex='0']")
        token.wait_for()
        token.focus()
        page.keyboard.press("ArrowDown")
        assert "response token 9" in page.locator("p.mono[role=status]").inner_text()


def test_a_screen_reader_finds_landmarks_names_and_headings_in_order(auditor: AuditorProcess) -> None:
    with browser() as page:
        for address in (
            "",
            "#/run/run%401%3Aa%2Bb",
            "#/run/run%401%3Aa%2Bb/capsules",
            f"#/run/run%401%3Aa%2Bb/sample/{WRONG_STEP}/1",
        ):
            page.goto(f"http://{auditor.http}/{address}")
            page.locator("h1").wait_for()
            assert page.get_by_role("main").count() == 1
            assert page.get_by_role("navigation").count() >= 1
            assert page.locator("h1").count() == 1
            unnamed = page.evaluate(
                """() => [...document.querySelectorAll('a,button,input,svg.chart,[role=listbox]')].filter(e =>
                !(e.getAttribute('aria-label') || e.textContent.trim() || (e.labels && e.labels.length))).length"""
            )
            assert unnamed == 0
            assert page.evaluate("[...document.querySelectorAll('table')].every(t => t.caption && t.tHead)")


# Text of less than 4.5:1 on what lies under it, an opacity of its own mixed in.
CONTRAST = """() => {
  const rgb = (c) => c.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const luminance = (c) => { const [r, g, b] = c.map(v => { v /= 255;
    return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!c.endsWith(', 0)')) return rgb(c); } return [255, 255, 255]; };
  const shown = (e, under) => { const { color, opacity } = getComputedStyle(e);
    return rgb(color).map((v, i) => opacity * v + (1 - opacity) * under[i]); };
  return [...document.querySelectorAll('main *')].filter(e => e.childNodes.length && [...e.childNodes].some(n =>
    n.nodeType === 3 && n.textContent.trim()) && !(e instanceof SVGElement))
  .map(e => { const under = ground(e);
    const [a, b] = [luminance(shown(e, under)), luminance(under)].sort((x, y) => y - x);
    return [(a + .05) / (b + .05), e.textContent.slice(0, 40)]; }).filter(([ratio]) => ratio < 4.5);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_keeps_its_contrast_in_light_and_in_dark(auditor: AuditorProcess, scheme: str) -> None:
    with browser(color_scheme=scheme) as page:
        addresses = {"run": "", f"sample-{WRONG_STEP}": f"/sample/{WRONG_STEP}/1", "sample-5": "/sample/5/3"}
        for name, address in addresses.items():
            page.goto(f"http://{auditor.http}/#/run/run%401%3Aa%2Bb{address}")
            heading = name.capitalize().replace("-", ".*step ")
            page.get_by_role("heading", level=1, name=re.compile(heading)).wait_for()
            shoot(page, f"{name}-{scheme}")
            assert page.evaluate(CONTRAST) == []
        assert page.locator(".tokens .masked").count() == 1


def test_a_run_that_goes_on_shows_its_new_steps_by_itself_and_not_under_a_hand(tmp_path: Path) -> None:
    with running_auditor(tmp_path) as process, browser() as page:
        client = AuditClient(process.grpc, "live", spool_dir=tmp_path / "spool", queue_size=8)

        def report(step: int) -> None:
            for record in pair("0", run_id="live", step=step):
                client.submit_rollout(record) if record.side == "rollout" else client.submit_trainer(record)
            assert client.flush(10).queued == 0

        def later(seconds: int = 6) -> None:
            page.clock.fast_forward(1000 * seconds)
            page.wait_for_load_state("networkidle")

        def shown(step: int) -> Any:
            return page.get_by_role("link", name=str(step), exact=True)

        # The page's timers go by a clock that is moved on here, instead of waiting for its seconds.
        page.clock.install()
        page.goto(f"http://{process.http}/")
        page.get_by_text("The ledger is empty").wait_for()
        report(0)
        later()
        page.get_by_role("link", name="live").click()
        shown(0).wait_for()
        report(1)
        later(4)
        assert shown(1).count() == 0
        later(2)
        shown(1).wait_for()
        page.get_by_text("The curves as a table").click()
        report(2)
        for _ in range(3):
            later()
        assert page.locator("details[open]").count() == 1
        assert shown(2).count() == 0
        # Let go of, it goes on; and so it does when somebody comes back to it who looked at something else.
        page.get_by_text("The curves as a table").click()
        page.locator("h1").click()
        later()
        shown(2).wait_for()
        page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
        report(3)
        later()
        later()
        assert shown(3).count() == 0
        page.evaluate("delete document.hidden")
        later()
        shown(3).wait_for()
        client.close()


def test_an_address_that_nobody_wrote_is_no_such_page(auditor: AuditorProcess) -> None:
    with browser() as page:
        for address in ("#/run/%E0%A4%A", "#/runs", "#/run/run%401/step/x"):
            page.goto(f"http://{auditor.http}/{address}")
            page.get_by_role("heading", name="No such page").wait_for()
        page.get_by_role("link", name="All runs").click()
        page.get_by_role("heading", name="Runs").wait_for()


def test_a_token_is_asked_for_and_kept_for_the_tab_only(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("open sesame\n")
    with running_auditor(tmp_path, "--token-file", str(tmp_path / "token")) as process, browser() as page:
        page.goto(f"http://{process.http}/")
        page.get_by_label("Bearer token").fill("open sesame")
        page.get_by_role("button", name="Use for this tab").click()
        page.get_by_text("The ledger is empty").wait_for()
        assert page.evaluate("localStorage.length") == 0
        assert len(page.faults) == 1
        assert "401" in page.faults.pop()
