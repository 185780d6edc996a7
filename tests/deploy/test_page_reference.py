"""What the page shows where the reference has spoken: which side is wrong, why, and the third number of each token."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.client import AuditClient
from tests.auditor.processes import AuditorProcess, running_auditor
from tests.auditor.samples import one_ulp_off
from tests.auditor.test_recompute_queue import root
from tests.auditor.test_reference import settled, true_pair, weights_root
from tests.auditor.test_searches import differ, go_on, searching
from tests.deploy.browser import browser, needs_chromium
from tests.deploy.test_page import shoot

__all__ = ["root", "weights_root"]
pytestmark = [pytest.mark.slow, needs_chromium]
SIDES = ("rollout", "trainer", "reference")


@pytest.fixture(scope="module")
def judged(weights_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuditorProcess]:
    """Three samples: a rollout on stale weights, two sides that each miss the reference by a bit, and a sound one."""
    folder = tmp_path_factory.mktemp("judged")
    stale, fresh = (true_pair(weights_root, "stale", version=version) for version in (1, 2))
    both, sound = true_pair(weights_root, "both"), true_pair(weights_root, "sound")
    pairs = [
        (replace(fresh[0], logprobs=stale[0].logprobs), fresh[1]),
        (one_ulp_off(both[0], 3), one_ulp_off(both[1], 4)),
        sound,
    ]
    with running_auditor(folder, "--weights-root", str(weights_root), "--recompute-rate", "1") as auditor:
        with AuditClient(auditor.grpc, "run", spool_dir=folder / "spool", queue_size=16) as client:
            for rollout, trainer in pairs:
                client.submit_rollout(rollout)
                client.submit_trainer(trainer)
            assert client.flush(20).accepted == 6
        auditor.wait_for("/api/v1/runs/run", lambda run: run["samples"] == 3 and settled(run))
        yield auditor


def table(page: Any, caption: str) -> Any:
    """Texts of the cells of the table with that caption, by row."""
    found = page.get_by_role("table", name=caption, exact=True)
    found.wait_for()
    return found.evaluate("t => [...t.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.textContent.trim()))")


def test_the_run_names_the_sides_and_causes_and_the_step_leads_to_the_sample(judged: AuditorProcess) -> None:
    with browser() as page:
        page.goto(f"http://{judged.http}/#/run/run")
        assert sorted(table(page, "Mismatches by the side that is wrong")) == [["both", "1"], ["rollout", "1"]]
        assert ["stale_weights", "1"] in table(page, "Mismatches by suspected cause")
        page.get_by_role("link", name="0", exact=True).click()
        rows = {row[0]: row for row in table(page, "Samples")}
        assert rows["stale"][1:4] == ["mismatch", "rollout", "stale_weights"]
        assert rows["sound"][1:4] == ["match", "", ""]
        page.get_by_role("link", name="stale", exact=True).click()
        ((cause, score, side, evidence), *_) = table(page, "Suspected causes, the likeliest first")
        assert (cause, score, side) == ("stale_weights", "1", "rollout")
        assert "weight version 1, the first one, where 2 is stated" in evidence
        assert "wrong side: rollout" in page.locator("main").inner_text()
        shoot(page, "sample-cause")


def test_a_sample_whose_causes_are_searched_for_says_so_and_shows_them_by_itself(root: Path, tmp_path: Path) -> None:
    with searching(root, tmp_path / "a") as auditor, browser() as page:
        page.goto(f"http://{auditor.http}/#/run/run/step/0")
        assert table(page, "Samples")[0][1:4] == ["mismatch", "trainer", "cause is searched for"]
        page.goto(f"http://{auditor.http}/#/run/run/sample/0/first")
        page.get_by_text("Why: being searched for").wait_for()
        assert "wrong side: trainer" in page.locator("main").inner_text()
        differ(auditor, root, "second")
        auditor.wait_for("/api/v1/runs/run", lambda run: run["by_cause"].get("undiagnosed") == 1)
        page.goto(f"http://{auditor.http}/#/run/run/sample/0/second")
        page.get_by_text("Why: not searched for").wait_for()
        page.goto(f"http://{auditor.http}/#/run/run/sample/0/first")
        go_on(root)
        assert table(page, "Suspected causes, the likeliest first")[0][0] == "reduction_order"
        assert page.get_by_text("Why: being searched for").count() == 0


@pytest.mark.parametrize("name", ["stale", "both", "sound"])
def test_each_token_has_three_numbers_and_the_bits_of_each(judged: AuditorProcess, name: str) -> None:
    detail = judged.get(f"/api/v1/runs/run/samples/0/{name}")
    bits = {"rollout": detail["rollout"]["bits"], "trainer": detail["trainer"]["bits"]}
    bits["reference"] = detail["reference_bits"]
    values = [detail["rollout"]["logprobs"], detail["trainer"]["logprobs"], detail["reference_logprobs"]]
    with browser() as page:
        page.goto(f"http://{judged.http}/#/run/run/sample/0/{name}")
        rows = table(page, "Response tokens")
        assert page.get_by_role("columnheader").all_inner_texts().count("reference") == 1
        shoot(page, f"sample-{name}")
        strip = page.get_by_role("listbox").locator("li")
        differing = [index for index in range(32) if len({bits[side][index] for side in SIDES}) > 1]
        assert strip.locator("xpath=self::*[contains(@class, 'differs')]").count() == len(differing)
        for index in (differing or [0])[:2]:
            strip.nth(8 + index).click()
            said = page.locator("p.mono[role=status]").inner_text()
            assert all(f"{side} " in said and f"({bits[side][index]})" in said for side in SIDES), said
    assert len(rows) == 32
    for index, row in enumerate(rows):
        shown = [cell.split() for cell in row[2:5]]
        assert [cell[1] for cell in shown] == [bits[side][index] for side in SIDES]
        assert [np.float32(cell[0]) for cell in shown] == [np.float32(side[index]) for side in values]
        # The one that is wrong is marked, for ears too.
        marked = [" differs from the reference" in cell for cell in row[2:5]]
        assert marked == [bits[side][index] != bits["reference"][index] for side in SIDES]
    wanted = {"stale": None, "both": [3, 4], "sound": []}[name]
    assert wanted is None or differing == wanted
