"""Weights by version and digest: whole or not there, never rewritten, and confirmed by bytes."""

import errno
import json
import shutil

import pytest

from rl_kernel.reference.weights import weight_digest
from services.errors import PublishError
from services.weights import WeightStore, confirm
from tests.models import TinyModel, write_tiny_model


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def store(tmp_path):
    return WeightStore(tmp_path / "weights", keep=2)


def test_what_is_published_can_be_received_with_the_same_digest(store, model):
    published = store.import_model(1, model)
    assert published == store.receive(1)
    assert published.digest == weight_digest(model)
    assert json.loads((published.folder / "manifest.json").read_text()) == {
        "weight_version": 1,
        "weight_digest": published.digest,
    }


def test_one_flipped_bit_on_disk_is_noticed(store, model):
    folder = store.import_model(1, model).folder
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(PublishError, match="weight digest is"):
        store.receive(1)


def test_a_manifest_that_announces_other_weights_is_noticed(store, model):
    folder = store.import_model(1, model).folder
    (folder / "manifest.json").write_text(json.dumps({"weight_version": 1, "weight_digest": "00" * 32}))
    with pytest.raises(PublishError, match="announced was 0000"):
        store.receive(1)


def test_a_folder_under_another_version_s_name_is_noticed(store, model):
    store.import_model(1, model).folder.rename(store.folder(2))
    with pytest.raises(PublishError, match="says that it is version 1"):
        store.receive(2)


def test_a_version_that_is_not_there_is_named(store):
    with pytest.raises(PublishError, match="weight version 7 is not in"):
        store.receive(7)


def test_a_version_is_never_rewritten_but_the_same_bits_may_come_again(store, model, tmp_path):
    first = store.import_model(1, model)
    assert store.import_model(1, model) == first
    other = write_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(PublishError, match="exists already"):
        store.import_model(1, other)
    assert store.receive(1) == first


def test_a_writer_whose_memory_differs_from_what_it_wrote_publishes_nothing(store, model):
    def write(folder):
        write_tiny_model(folder)
        return "00" * 32

    with pytest.raises(PublishError, match="the trainer holds 0000"):
        store.publish(1, write)
    assert list(store.root.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing_half_made(store):
    def write(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(PublishError, match="disk full: weight version 3 does not fit"):
        store.publish(3, write)
    assert list(store.root.iterdir()) == []


def test_an_engine_that_holds_other_weights_is_named_with_both_digests(store, model):
    published = store.import_model(1, model)
    confirm(published, "the trainer", published.digest)
    with pytest.raises(PublishError, match=f"the rollout engine holds weights 11aa after .* {published.digest}"):
        confirm(published, "the rollout engine", "11aa")


def test_pruning_touches_nothing_that_is_no_version(store, model):
    for version in range(1, 5):
        store.import_model(version, model)
    for name in ("vision", "v2", "notes"):
        (store.root / name).mkdir()
    store.prune(newest=4, oldest_needed=4)
    assert {p.name for p in store.root.iterdir()} == {"v000003", "v000004", "vision", "v2", "notes"}


def test_a_disk_that_is_really_full_keeps_the_versions_that_it_has(make_disk, tmp_path):
    small_disk = make_disk("256k")
    tiny = write_tiny_model(tmp_path / "tiny", TinyModel(layers=1, hidden=32, intermediate=64, vocab=128))
    store = WeightStore(small_disk / "weights", keep=2)
    version = 1
    while shutil.disk_usage(small_disk).free > 2 * (tiny / "model.safetensors").stat().st_size:
        store.import_model(version, tiny)
        version += 1
    assert version > 2
    (small_disk / "something else").write_bytes(bytes((tiny / "model.safetensors").stat().st_size))
    with pytest.raises(
        PublishError, match=rf"disk full: weight version {version} does not fit into .* lower weights\.keep$"
    ):
        store.import_model(version, tiny)
    assert sorted(p.name for p in store.root.iterdir()) == [f"v{v:06d}" for v in range(1, version)]
    assert store.receive(version - 1).digest == weight_digest(tiny)
    store.prune(newest=version - 1, oldest_needed=version - 1, keep=1)
    store.import_model(version, tiny)


def test_pruning_keeps_the_newest_and_what_is_still_needed(store, model):
    for version in range(1, 6):
        store.import_model(version, model)
    store.prune(newest=5, oldest_needed=3)
    assert [p.name for p in sorted(store.root.iterdir())] == ["v000003", "v000004", "v000005"]
    store.prune(newest=5, oldest_needed=5)
    assert [p.name for p in sorted(store.root.iterdir())] == ["v000004", "v000005"]
