"""A stored record that is none any more, as after a fault of the disk: named, and no end of the auditor."""

import json
import sqlite3
from pathlib import Path

from tests.auditor.processes import running_auditor
from tests.auditor.samples import one_ulp_off, pair
from tests.auditor.test_reference import settled, true_pair, weights_root
from tests.auditor.test_unpaired import send

__all__ = ["weights_root"]


def test_what_a_ledger_holds_and_cannot_be_read_ends_neither_the_reference_nor_the_rows_of_others(
    weights_root: Path, tmp_path: Path
) -> None:
    with running_auditor(tmp_path, "--weights-root", str(weights_root), "--recompute-rate", "1") as auditor:
        send(auditor, *true_pair(weights_root, "sound"), *true_pair(weights_root, "broken"))
        auditor.wait_for("/api/v1/runs/run", lambda r: r["samples"] == 2 and settled(r))
    with sqlite3.connect(auditor.ledger) as ledger:
        ledger.execute("UPDATE records SET payload = ? WHERE sample_id = 'broken' AND side = 'trainer'", (b"\xff" * 9,))
        (body,) = ledger.execute("SELECT body FROM samples WHERE sample_id = 'broken'").fetchone()
        queued = json.dumps({**json.loads(body), "reference": "queued"}, sort_keys=True)
        ledger.execute("UPDATE samples SET reference = 'queued', body = ? WHERE sample_id = 'broken'", (queued,))
    ledger.close()
    flags = ("--weights-root", str(weights_root), "--evidence", "all", "--evidence-place", str(tmp_path / "rows"))
    with running_auditor(tmp_path, *flags) as again:
        found = again.wait_for(
            "/api/v1/runs/run/steps/0/samples",
            lambda page: all(s["judgement"]["reference"] != "queued" for s in page["samples"]),
        )
        of = {sample["sample_id"]: sample["judgement"] for sample in found["samples"]}
        assert of["broken"]["reference_error"].startswith("evidence_unreadable: the ledger's evidence of")
        assert of["broken"]["verdict"] == of["sound"]["verdict"] == "match"
        send(again, pair("later")[0], one_ulp_off(pair("later")[1]))
        again.wait_for("/api/v1/runs/run", lambda r: r["samples"] == 3 and settled(r))
        assert "has no token rows: the stored content is no record" in again.log
    assert list((tmp_path / "rows").iterdir()), "those of the others are written"
