"""A stored record that is not what was stored, as after a fault of the disk: named, and no end of the auditor."""

import json
import sqlite3
import urllib.error
from pathlib import Path

import pytest

from auditor.codec import encode
from tests.auditor.processes import running_auditor
from tests.auditor.samples import one_ulp_off, pair
from tests.auditor.test_reference import settled, true_pair, weights_root
from tests.auditor.test_unpaired import send

__all__ = ["weights_root"]


def test_what_a_ledger_holds_and_cannot_be_read_ends_neither_the_reference_nor_the_rows_of_others(
    weights_root: Path, tmp_path: Path
) -> None:
    with running_auditor(tmp_path, "--weights-root", str(weights_root), "--recompute-rate", "1") as auditor:
        pairs = {name: true_pair(weights_root, name) for name in ("sound", "broken", "altered")}
        send(auditor, *(record for both in pairs.values() for record in both))
        auditor.wait_for("/api/v1/runs/run", lambda r: r["samples"] == 3 and settled(r))
    with sqlite3.connect(auditor.ledger) as ledger:
        for name, rot in {"broken": b"\xff" * 9, "altered": encode(one_ulp_off(pairs["altered"][1]))}.items():
            ledger.execute("UPDATE records SET payload = ? WHERE sample_id = ? AND side = 'trainer'", (rot, name))
            (body,) = ledger.execute("SELECT body FROM samples WHERE sample_id = ?", (name,)).fetchone()
            queued = json.dumps({**json.loads(body), "reference": "queued"}, sort_keys=True)
            ledger.execute("UPDATE samples SET reference = 'queued', body = ? WHERE sample_id = ?", (queued, name))
    ledger.close()
    flags = ("--weights-root", str(weights_root), "--evidence", "all", "--evidence-place", str(tmp_path / "rows"))
    with running_auditor(tmp_path, *flags) as again:
        found = again.wait_for(
            "/api/v1/runs/run/steps/0/samples",
            lambda page: all(s["judgement"]["reference"] != "queued" for s in page["samples"]),
        )
        of = {sample["sample_id"]: sample["judgement"] for sample in found["samples"]}
        for name in ("broken", "altered"):
            assert of[name]["reference_error"].startswith("evidence_unreadable: the ledger's evidence of")
            assert of[name]["verdict"] == of["sound"]["verdict"] == "match"
            for where in (f"samples/0/{name}", f"capsules/0/{name}"):
                with pytest.raises(urllib.error.HTTPError) as said:
                    again.get(f"/api/v1/runs/run/{where}")
                assert (said.value.code, json.load(said.value)["code"]) == (500, "evidence_unreadable")
        send(again, pair("later")[0], one_ulp_off(pair("later")[1]))
        again.wait_for("/api/v1/runs/run", lambda r: r["by_reference"].get("failed") == 3)
        name = 'auditor_errors_total{code="evidence_unreadable",part="evidence"}'
        series = again.wait_for_metrics(lambda found: found.get(name) == 2)
        assert again.log.count("has no token rows: the stored content is not what was stored") == 2
        assert series['auditor_recompute_errors_total{code="evidence_unreadable",run_id="run"}'] == 2
        assert series['auditor_errors_total{code="evidence_unreadable",part="http"}'] == 4
    assert list((tmp_path / "rows").iterdir()), "those of the others are written"
