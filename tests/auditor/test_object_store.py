"""Weights and evidence in an S3 store: read once and checked, written away whole, or one line that says why not."""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from auditor.capsule import main, read_capsule
from auditor.client import AuditClient
from auditor.errors import ArchiveError, ConfigError, RecomputeError
from auditor.object_store import StoreAccess
from auditor.recompute_worker import Models
from auditor.records import SampleKey
from auditor.retention import Evidence, ParquetArchive
from auditor.storage.chain import digest
from auditor.weights_place import WeightsPlace
from rl_kernel.reference.model import Decoder
from tests.auditor.processes import running_auditor
from tests.auditor.samples import CONTRACT, one_ulp_off, pair
from tests.auditor.stores import Store, running_store
from tests.auditor.test_reference import settled, true_pair, weights_root

__all__ = ["weights_root"]


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch, running_store(patch) as running:
        yield running


def digest_of(root: Path, version: int) -> str:
    return Decoder.open(root / f"v{version:06d}", CONTRACT).weight_digest


def place(store: Store, prefix: str, cache: Path, keep: int = 8) -> WeightsPlace:
    return WeightsPlace(f"s3://bucket/{prefix}", str(cache), keep, StoreAccess(store.endpoint))


def evidence(count: int) -> list[Evidence]:
    return [
        Evidence(i + 1, SampleKey("run", 0, f"{i}"), "rollout", digest(b"%d" % i), b"%d" % i, 1.0) for i in range(count)
    ]


def test_a_version_is_fetched_once_and_then_read_from_the_copy(
    store: Store, weights_root: Path, tmp_path: Path
) -> None:
    for version in (1, 2):
        store.put(weights_root / f"v{version:06d}", f"once/v{version:06d}")
    weights = place(store, "once", tmp_path)
    assert WeightsPlace.from_json(weights.to_json()) == weights
    assert weights.open().versions() == [1, 2]
    digest_1 = digest_of(weights_root, 1)
    assert Models(weights.open()).get(1, digest_1, CONTRACT.digest()).weight_digest == digest_1
    for name in store.names("once/v000001"):
        store.files.delete_file(name)
    assert Models(weights.open()).get(1, digest_1, CONTRACT.digest()).weight_digest == digest_1


def test_bytes_that_are_not_what_the_manifest_says_are_refused_and_not_kept(
    store: Store, weights_root: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(weights_root / "v000001", broken)
    content = bytearray((broken / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (broken / "model.safetensors").write_bytes(content)
    store.put(broken, "broken/v000001")
    models = Models(place(store, "broken", tmp_path / "cache").open())
    with pytest.raises(RecomputeError, match="the record names") as refused:
        models.get(1, digest_of(weights_root, 1), CONTRACT.digest())
    assert refused.value.code == "weights_digest"
    assert list((tmp_path / "cache").glob("v*")) == []


def test_a_version_of_another_digest_is_not_even_fetched(store: Store, weights_root: Path, tmp_path: Path) -> None:
    store.put(weights_root / "v000001", "other/v000001")
    with pytest.raises(RecomputeError, match=r"holds weights .*, the record names 00") as refused:
        place(store, "other", tmp_path).open().folder(1, "00" * 32)
    assert refused.value.code == "weights_digest"
    assert list(tmp_path.glob("v*")) == []


def test_a_version_without_its_manifest_is_not_there_yet(store: Store, weights_root: Path, tmp_path: Path) -> None:
    store.put(weights_root / "v000001", "half/v000001")
    store.files.delete_file("bucket/half/v000001/manifest.json")
    weights = place(store, "half", tmp_path).open()
    with pytest.raises(RecomputeError) as refused:
        weights.folder(1, digest_of(weights_root, 1))
    assert refused.value.code == "weights_missing"
    store.put(weights_root / "v000001", "half/v000001")
    assert (weights.folder(1, digest_of(weights_root, 1)) / "config.json").is_file()


def test_the_copies_used_last_stay(store: Store, weights_root: Path, tmp_path: Path) -> None:
    for version, of in ((1, 1), (2, 2), (3, 1)):
        store.put(weights_root / f"v{of:06d}", f"keep/v{version:06d}")
    weights = place(store, "keep", tmp_path, keep=1).open()
    old = weights.folder(1, digest_of(weights_root, 1))
    kept = weights.folder(2, digest_of(weights_root, 2))
    assert sorted(tmp_path.glob("v*")) == [old, kept], "it may not be mapped yet"
    os.utime(old, (0, 0))
    assert weights.folder(3, digest_of(weights_root, 1)) != old
    assert not old.exists()


def test_a_cache_that_was_tidied_away_is_made_again(store: Store, weights_root: Path, tmp_path: Path) -> None:
    store.put(weights_root / "v000001", "tidied/v000001")
    cache, digest_1 = tmp_path / "cache", digest_of(weights_root, 1)
    weights = place(store, "tidied", cache).open()
    copy = weights.folder(1, digest_1)
    (copy / "model.safetensors").unlink()
    with pytest.raises(RecomputeError, match="holds no"):
        Models(weights).get(1, digest_1, CONTRACT.digest())
    assert Models(weights).get(1, digest_1, CONTRACT.digest()).weight_digest == digest_1, "half a copy is not kept"
    shutil.rmtree(cache)
    assert Models(weights).get(1, digest_1, CONTRACT.digest()).weight_digest == digest_1
    shutil.rmtree(cache)
    cache.touch()
    with pytest.raises(RecomputeError, match=f"weights_cache {cache}: ") as refused:
        weights.folder(1, digest_1)
    assert refused.value.code == "weights_unreachable", "and is tried again"


def test_an_auditor_recomputes_from_the_store_and_finds_the_stale_version_in_it(
    store: Store, weights_root: Path, tmp_path: Path
) -> None:
    for version in (1, 2):
        store.put(weights_root / f"v{version:06d}", f"run/v{version:06d}")
    flags = ("--weights-root", "s3://bucket/run", "--weights-cache", str(tmp_path / "copies"))
    flags += ("--store-endpoint", store.endpoint, "--recompute-rate", "1")
    with (
        running_auditor(tmp_path / "a", *flags) as auditor,
        AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client,
    ):
        stale, (rollout, trainer) = true_pair(weights_root, "a", version=1), true_pair(weights_root, "a", version=2)
        from dataclasses import replace

        client.submit_rollout(replace(rollout, logprobs=stale[0].logprobs))
        client.submit_trainer(trainer)
        for record in true_pair(weights_root, "b", version=2):
            (client.submit_rollout if record.side == "rollout" else client.submit_trainer)(record)  # type: ignore[arg-type]
        client.flush(10)
        run = auditor.wait_for("/api/v1/runs/run", lambda r: r["samples"] == 2 and settled(r))
        assert (run["by_side"], run["by_cause"]) == ({"rollout": 1}, {"stale_weights": 1})
        assert run["by_reference"] == {"done": 2}
        assert auditor.stop() == 0


def test_evidence_goes_to_the_store_whole_and_is_dropped_then(store: Store, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    flags = ("--retain-days", "0.00001", "--retain-look-s", "0.2")
    flags += ("--archive", "s3://bucket/evidence", "--store-endpoint", store.endpoint)
    with running_auditor(tmp_path, *flags) as auditor:
        with AuditClient(auditor.grpc, "run", spool_dir=tmp_path / "s") as client:
            for i in range(20):
                rollout, trainer = pair(f"{i}")
                client.submit_rollout(rollout)
                client.submit_trainer(one_ulp_off(trainer) if i == 3 else trainer)
            assert client.flush(10).accepted == 40
        auditor.wait_for("/api/v1/runs/run/samples/0/19", lambda sample: sample["trainer"] is None)
        auditor.wait_for("/api/v1/runs/run/samples/0/0", lambda sample: sample["trainer"] is None)
        assert auditor.metrics()["auditor_retired_records_total"] == 40
        assert auditor.get("/api/v1/runs/run")["by_verdict"] == {"match": 19, "mismatch": 1}
        assert auditor.stop() == 0
    rows = [
        row for name in store.names("evidence") for row in parquet.read_table(name, filesystem=store.files).to_pylist()
    ]
    assert {(row["sample_id"], row["side"]) for row in rows} == {
        (f"{i}", side) for i in range(20) for side in ("rollout", "trainer")
    }
    assert all(digest(row["payload"]) == row["digest"] for row in rows)
    arguments = [str(auditor.ledger), "run", "0", "3", "--out", str(tmp_path / "capsule")]
    assert main(arguments) == 2, "the ledger holds nothing of it any more"
    assert main([*arguments, "--archive", "s3://bucket/evidence", "--store-endpoint", store.endpoint]) == 0
    assert read_capsule(tmp_path / "capsule").trainer.logprobs.tobytes() == one_ulp_off(pair("3")[1]).logprobs.tobytes()


def test_a_store_that_goes_away_fails_the_write_and_takes_it_later(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, running_store(patch) as store:
        archive = ParquetArchive("s3://bucket/a", StoreAccess(store.endpoint))
        store.files.delete_dir("bucket")
        with pytest.raises(ArchiveError, match=r"archive bucket/a"):
            archive.write(evidence(3))
        store.files.create_dir("bucket")
        archive.write(evidence(3))
        (name,) = store.names("a")
        assert re.fullmatch(r"bucket/a/evidence-000000000001-000000000003-[0-9a-f]{16}\.parquet", name)


@pytest.mark.parametrize(
    ("archive", "endpoint", "said"),
    [
        ("s3://bucket/a", "ftp://127.0.0.1:1", "is no http:// or https:// URL"),
        ("nowhere://bucket/a", "", "archive nowhere://bucket/a: "),
    ],
)
def test_a_place_that_cannot_be_had_is_one_line(archive: str, endpoint: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        ParquetArchive(archive, StoreAccess(endpoint))
    assert "\n" not in str(refused.value)


def test_a_local_archive_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = ParquetArchive(str(tmp_path / "a"))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("os.fsync", full)
        with pytest.raises(ArchiveError, match="No space left"):
            archive.write(evidence(2))
    assert list((tmp_path / "a").glob("*.parquet")) == []
    archive.write(evidence(2))
    assert len(list((tmp_path / "a").glob("evidence-000000000001-000000000002-*.parquet"))) == 1


def test_two_ledgers_on_one_place_keep_both_their_evidence(tmp_path: Path) -> None:
    """Their entries have the same numbers; a batch written twice, after a crash, is still one file."""
    parquet = pytest.importorskip("pyarrow.parquet")
    archive = ParquetArchive(str(tmp_path / "a"))
    ours = evidence(2)
    theirs = [replace(one, received_at=one.received_at + 1.0) for one in ours]
    for batch in (ours, theirs, ours):
        archive.write(batch)
    files = list((tmp_path / "a").iterdir())
    held = {row["received_at"] for file in files for row in parquet.read_table(file).to_pylist()}
    assert (len(files), held) == (2, {one.received_at for one in ours + theirs})
