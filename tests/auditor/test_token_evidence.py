"""Token rows as Parquet: what is in them, that they are there once at least, and that they are what the chain says."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.config import load_config
from auditor.errors import ArchiveError, ChainError, ConfigError
from auditor.file_place import FilePlace, tables_in
from auditor.judge import ReferenceLogprobs
from auditor.object_store import AMAZON, StoreAccess
from auditor.records import SampleKey
from auditor.retention import Retirement
from auditor.storage.ledger import Ledger
from auditor.storage.reader import Reader
from auditor.storage.unit import Unit
from auditor.token_check import check_rows
from auditor.token_evidence import TokenEvidence, Wanted
from auditor.writer import Writer
from tests.auditor.postgres_server import Open
from tests.auditor.processes import REPOSITORY, AuditorProcess, running_auditor
from tests.auditor.samples import PROMPT, RESPONSE, one_ulp_off, pair, with_logprobs
from tests.auditor.stores import running_store
from tests.auditor.test_ledger import pipeline, receive, wait_until
from tests.auditor.test_unpaired import send

arrow = pytest.importorskip("pyarrow")


@contextmanager
def filled(connect: Open) -> Iterator[tuple[Reader, Writer]]:
    """Samples 0 and 1 agree, 1 and 3 are recomputed, 3 mismatches; 2 waits for the reference."""
    ledger, queue = Ledger(connect(True)), list[SampleKey]()
    receive(ledger, pipeline(), 0)
    receive(ledger, pipeline(queue=queue), 1, 3)
    for key in queue:
        truth = pair(key.sample_id)[0].logprobs
        with ledger.transaction() as unit:
            pipeline().conclude(unit, key, ReferenceLogprobs(truth, truth, "fma32"))
    receive(ledger, pipeline(queue=[]), 2)
    writer = Writer(ledger, lambda unit: None, lambda: None, 32)
    try:
        yield Reader(lambda: connect(False)), writer
    finally:
        writer.close()
        ledger.close()


def exporter(reader: Reader, writer: Writer, place: Path, wanted: Wanted = "all") -> TokenEvidence:
    files = FilePlace("evidence_place", str(place), AMAZON)
    return TokenEvidence(reader, writer, wanted, str(place), files, threading.Event())


def rows_at(place: str, access: StoreAccess = AMAZON) -> list[dict[str, Any]]:
    tables = [table for _, table in tables_in("evidence", place, access, lambda name: name.startswith("tokens-"))]
    return [row for table in tables for row in table.to_pylist()]


@pytest.mark.parametrize(
    ("wanted", "samples"), [("mismatches", ["3"]), ("recomputed", ["1", "3"]), ("all", ["0", "1", "3"])]
)
def test_the_rows_of_what_was_asked_for_have_every_bit_and_what_was_said(
    connect: Open, tmp_path: Path, wanted: Wanted, samples: list[str]
) -> None:
    with filled(connect) as (reader, writer):
        tokens = exporter(reader, writer, tmp_path / "t", wanted)
        tokens.look()
        tokens.look()
        rows = rows_at(str(tmp_path / "t"))
        assert sorted({row["sample_id"] for row in rows}) == samples
        of = [row for row in rows if row["sample_id"] == "3"]
        rollout, trainer = pair("3")
        assert [row["index"] for row in of] == list(range(RESPONSE))
        assert [row["token_id"] for row in of] == rollout.tokens[PROMPT:].tolist()
        assert [row["rollout_bits"] for row in of] == rollout.logprobs.view(np.uint32).tolist()
        assert [row["reference_bits"] for row in of] == rollout.logprobs.view(np.uint32).tolist()
        assert [row["trainer_bits"] for row in of] == one_ulp_off(trainer).logprobs.view(np.uint32).tolist()
        assert [row["trainer_logprob"] for row in of] == one_ulp_off(trainer).logprobs.tolist()
        assert {(row["run_id"], row["step"], row["verdict"], row["side"], row["active"]) for row in of} == {
            ("run", 0, "mismatch", "trainer", True)
        }
        assert all((row["reference_bits"] is None) == (row["sample_id"] == "0") for row in rows)
        found = check_rows(reader, str(tmp_path / "t"), AMAZON)
        assert (found.samples, found.twice, found.compared) == (len(samples), 0, len(samples))
        (file,) = (tmp_path / "t").iterdir()
        file.unlink()
        with pytest.raises(
            ChainError, match=f"the rows of sample '{samples[0]}', step 0 of run 'run'.* are in no file"
        ):
            check_rows(reader, str(tmp_path / "t"), AMAZON)


def test_an_export_that_dies_before_its_mark_writes_again_and_the_doubles_are_seen(
    connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(unit: Unit, name: str, seq: int) -> None:
        raise KeyError("killed")

    with filled(connect) as (reader, writer):
        with monkeypatch.context() as broken:
            broken.setattr(Unit, "export_reaches", dies)
            with pytest.raises(KeyError):
                exporter(reader, writer, tmp_path / "t").look()
        (first,) = (tmp_path / "t").iterdir()
        later = exporter(reader, writer, tmp_path / "t")
        later.look()
        assert [file.name for file in (tmp_path / "t").iterdir()] == [first.name], "the same again is the same file"
        assert check_rows(reader, str(tmp_path / "t"), AMAZON).twice == 0
        again = exporter(reader, writer, tmp_path / "t", "recomputed")
        again.look()
        found = check_rows(reader, str(tmp_path / "t"), AMAZON)
        assert (found.files, found.samples, found.twice) == (2, 3, 2)
        assert reader.exported(f"all {tmp_path / 't'}") == reader.verdicts_after(0, 99)[-1].seq


def test_large_samples_get_files_of_their_own(connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auditor.token_evidence._ROWS", RESPONSE + 1)
    with filled(connect) as (reader, writer):
        exporter(reader, writer, tmp_path / "t").look()
        names = sorted(file.name for file in (tmp_path / "t").iterdir())
        assert len(names) == 3
        ranges = [tuple(map(int, name.split("-")[1:3])) for name in names]
        assert all(last < first for (_, last), (first, _) in pairwise(ranges))
        assert check_rows(reader, str(tmp_path / "t"), AMAZON).samples == 3


def test_nothing_is_retired_before_its_rows_are_written(connect: Open, tmp_path: Path) -> None:
    with filled(connect) as (reader, writer):
        tokens = exporter(reader, writer, tmp_path / "t")
        old = Retirement(
            reader, writer, 1 / 86_400, None, lambda: time.time() + 60, threading.Event(), tokens.unexported
        )
        old.look()
        key = SampleKey("run", 0, "0")
        assert reader.record(key, "rollout") is not None
        tokens.look()
        old.look()
        assert reader.record(key, "rollout") is None
        found = check_rows(reader, str(tmp_path / "t"), AMAZON)
        assert (found.samples, found.compared) == (3, 0), "the chain's digests are there still"
        assert (found.marked, found.retired) == (True, 0)
        (file,) = (tmp_path / "t").iterdir()
        file.unlink()
        assert check_rows(reader, str(tmp_path / "t"), AMAZON).retired == 3
        (tmp_path / "u").mkdir()
        assert not check_rows(reader, str(tmp_path / "u"), AMAZON).marked


@pytest.mark.parametrize("column", ["rollout_bits", "verdict", "trainer_digest", "verdict_seq", "step"])
def test_rows_that_are_not_the_ledgers_are_named(connect: Open, tmp_path: Path, column: str) -> None:
    from pyarrow import parquet

    with filled(connect) as (reader, writer):
        exporter(reader, writer, tmp_path / "t").look()
        (file,) = (tmp_path / "t").iterdir()
        rows = parquet.read_table(file)
        values = rows[column].to_pylist()
        values[5] = f"{values[5]}x" if isinstance(values[5], str) else values[5] + 1
        changed = rows.set_column(
            rows.column_names.index(column), column, arrow.array(values, rows.schema.field(column).type)
        )
        parquet.write_table(changed, file)
        with pytest.raises(ChainError, match=file.name):
            check_rows(reader, str(tmp_path / "t"), AMAZON)
        parquet.write_table(rows.slice(0, 0), file)
        with pytest.raises(ChainError, match="has no rows"):
            check_rows(reader, str(tmp_path / "t"), AMAZON)
        file.write_bytes(b"PAR1")
        with pytest.raises(ArchiveError):
            check_rows(reader, str(tmp_path / "t"), AMAZON)


def verify(auditor: AuditorProcess, place: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "auditor.verify", str(auditor.ledger), "--evidence", place, *flags]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)


def report(auditor: AuditorProcess, step: int) -> None:
    """Two samples, of which the second mismatches, one of its values a NaN."""
    rollout, trainer = pair("1", step=step)
    send(auditor, *pair("0", step=step), with_logprobs(rollout, 2, float("nan")), one_ulp_off(trainer))


def test_an_auditor_writes_them_and_whatever_kills_it_each_is_there_once_at_least(tmp_path: Path) -> None:
    place = str(tmp_path / "t")
    with running_auditor(tmp_path / "a", "--evidence", "mismatches", "--evidence-place", place) as auditor:
        for step in range(8):
            report(auditor, step)
            if step % 3 == 2:
                time.sleep(0.2 * step)
                auditor.kill()
                auditor.start()
        wait_until(lambda: len({row["step"] for row in rows_at(place)}) == 8)
        rows = rows_at(place)
        assert {row["sample_id"] for row in rows} == {"1"}
        assert len({(row["verdict_seq"], row["index"]) for row in rows}) == 8 * RESPONSE
        auditor.wait_for_metrics(lambda m: m.get("auditor_evidence_samples_total") == 8)
        assert auditor.metrics()["auditor_evidence_rows_total"] == 8 * RESPONSE
        done = verify(auditor, place)
        assert done.returncode == 0, done.stderr
        assert "have the token rows of 8 samples (" in done.stdout
        assert auditor.stop() == 0


def test_an_object_store_takes_them_and_one_that_is_away_is_counted_and_caught_up_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_store(monkeypatch) as store:
        flags = ("--evidence", "all", "--evidence-place", "s3://bucket/t", "--store-endpoint", store.endpoint)
        with running_auditor(tmp_path / "a", *flags) as auditor:
            report(auditor, 0)
            wait_until(lambda: bool(store.names("t")))
            done = verify(auditor, "s3://bucket/t", "--store-endpoint", store.endpoint)
            assert done.returncode == 0, done.stderr
            assert "1 files have the token rows of 2 samples" in done.stdout
    place = tmp_path / "t"
    with running_auditor(tmp_path / "b", "--evidence", "all", "--evidence-place", str(place)) as auditor:
        place.rmdir()
        place.write_text("no folder")
        report(auditor, 0)
        name = 'auditor_errors_total{code="archive_unavailable",part="evidence"}'
        auditor.wait_for_metrics(lambda m: m.get(name, 0) >= 1)
        place.unlink()
        place.mkdir()
        wait_until(lambda: len(rows_at(str(place))) == 2 * RESPONSE)


def test_what_is_written_and_where_are_given_together(tmp_path: Path) -> None:
    ledger = str(tmp_path / "l.db")
    for settings in (
        {"evidence": "all"},
        {"evidence_place": str(tmp_path)},
        {"evidence": "some", "evidence_place": "t"},
    ):
        with pytest.raises(ConfigError, match="evidence"):
            load_config(None, {"ledger": ledger, **settings})
    assert load_config(None, {"ledger": ledger, "evidence": "all", "evidence_place": "t"}).evidence == "all"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="evidence_place"):
        FilePlace("evidence_place", str(tmp_path / "file"), AMAZON)
