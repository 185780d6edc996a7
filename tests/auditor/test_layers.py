"""Digests of layers: what is hashed, the first layer that differs, and where each side leaves the reference."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.compare import first_layer
from auditor.errors import RecordError
from auditor.facts import layer_digests
from auditor.judge import Verdict, judge_pair
from rl_kernel.reference.model import Decoder
from tests.auditor.processes import running_auditor
from tests.auditor.samples import CONTRACT, CONTRACTS, one_ulp_off, pair
from tests.auditor.test_reference import settled, true_pair, weights_root
from tests.auditor.test_unpaired import send
from tests.models import LLAMA

__all__ = ["weights_root"]
A, B, C = "aa" * 32, "bb" * 32, "cc" * 32
# Every mismatch is searched, none for long: what is found is not looked at.
SHORT = ("--diagnose-per-step", "9", "--diagnose-seconds", "0.2")


def test_what_is_hashed_is_every_layers_bits_row_by_row() -> None:
    rows = np.array([[0x3F80, 0x4000], [0xBF80, 0x0001]], np.uint16)
    written = bytes.fromhex("803f 0040 80bf 0100")
    assert layer_digests([rows, rows.T]) == (
        hashlib.sha256(written).hexdigest(),
        hashlib.sha256(bytes.fromhex("803f 80bf 0040 0100")).hexdigest(),
    )
    for wrong in (rows.astype(np.float32), rows[0]):
        with pytest.raises(RecordError, match="the output of layer 1 is"):
            layer_digests([rows, wrong])


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        ((A, B, C), (A, B, C), 3),
        ((A, B, C), (A, C, C), 1),
        ((B, B), (A, B), 0),
        ((), (), None),
        ((A,), (), None),
        ((A, B), (A,), None),
    ],
)
def test_the_first_layer_that_differs(left: tuple[str, ...], right: tuple[str, ...], found: int | None) -> None:
    assert first_layer(left, right) == first_layer(right, left) == found


@pytest.mark.parametrize(
    ("left", "right", "off", "found"),
    [
        ((A, B), (A, C), True, 1),
        ((A, B), (A, B), True, 2),
        ((A, B), (A, B), False, None),
        ((A, B), (C, B), False, 0),
        ((A, B), (), True, None),
        (("", ""), ("", ""), True, None),
        (("", B), ("", C), True, None),
    ],
)
def test_a_pair_names_it_and_its_verdict_stays_that_of_the_values(
    left: tuple[str, ...], right: tuple[str, ...], off: bool, found: int | None
) -> None:
    rollout, trainer = pair()
    trainer = one_ulp_off(trainer) if off else trainer
    judged = judge_pair(replace(rollout, layer_digests=left), replace(trainer, layer_digests=right), CONTRACTS)
    assert judged.judgement.first_layer == found
    assert judged.judgement.verdict is (Verdict.MISMATCH if off else Verdict.MATCH)


def computed(root: Path, record: Any, altered: str = "") -> Any:
    """A record as its side computes it, one of its tensors other than the weights that it names."""
    decoder = Decoder.open(root / "v000001", CONTRACT)
    if altered:
        tensor = decoder.weights[altered].copy()
        tensor[0] ^= 1
        decoder = replace(decoder, weights={**decoder.weights, altered: tensor})
    layers: list[np.ndarray] = []
    tokens = true_pair(root, record.sample_id)[0].tokens.astype(np.int64)
    (values,) = decoder.logprobs([tokens], [8], layers=lambda _, rows: layers.append(rows[:-1]))
    return replace(record, logprobs=values, layer_digests=layer_digests(layers))


def test_each_side_is_told_the_layer_at_which_it_leaves_the_reference(weights_root: Path, tmp_path: Path) -> None:
    last = LLAMA.layers - 1
    down, head = f"model.layers.{last}.mlp.down_proj.weight", "lm_head.weight"
    altered = {"sound": ("", ""), "trainer": ("", down), "both": ("model.layers.0.self_attn.v_proj.weight", down)}
    altered |= {"head": ("", head)}
    cases = {}
    for name, (of_rollout, of_trainer) in altered.items():
        rollout, trainer = true_pair(weights_root, name)
        cases[name] = computed(weights_root, rollout, of_rollout), computed(weights_root, trainer, of_trainer)
    # One side that reports nothing of its layers is all that most jobs have.
    cases["alone"] = (
        replace(cases["trainer"][0], layer_digests=(), sample_id="alone"),
        replace(cases["trainer"][1], sample_id="alone"),
    )
    cases["silent"] = tuple(replace(one, layer_digests=(), sample_id="silent") for one in cases["trainer"])
    with running_auditor(tmp_path, "--weights-root", str(weights_root), "--recompute-rate", "1", *SHORT) as auditor:
        for one in cases.values():
            send(auditor, *one)
        auditor.wait_for("/api/v1/runs/run", lambda r: r["samples"] == len(cases) and settled(r))
        samples = {name: auditor.get(f"/api/v1/runs/run/samples/0/{name}") for name in cases}
    names = ("first_layer", "rollout_first_layer", "trainer_first_layer")
    assert {name: tuple(sample["judgement"][n] for n in names) for name, sample in samples.items()} == {
        "sound": (None, None, None),
        "trainer": (last, None, last),
        "both": (0, 0, last),
        "head": (LLAMA.layers, None, LLAMA.layers),
        "alone": (None, None, last),
        "silent": (None, None, None),
    }
    said = {name: sample["judgement"]["causes"][0]["evidence"] for name, sample in samples.items() if name != "sound"}
    by = "; by the digests of layers the"
    assert said["both"].endswith(f"{by} rollout leaves the reference at layer 0 and the trainer leaves the reference at"
                                 f" layer {last}")  # fmt: skip
    assert said["alone"].endswith(f"{by} trainer leaves the reference at layer {last}")
    assert said["head"].endswith(f"{by} trainer leaves the reference behind the last layer")
    assert "digests of layers" not in said["silent"]
    assert samples["trainer"]["trainer"]["layer_digests"] == list(cases["trainer"][1].layer_digests)


def test_without_a_reference_the_evidence_says_where_the_sides_part(tmp_path: Path) -> None:
    rollout, trainer = pair()
    with running_auditor(tmp_path) as auditor:
        send(auditor, replace(rollout, layer_digests=(A, B)), replace(one_ulp_off(trainer), layer_digests=(A, C)))
        judged = auditor.wait_for("/api/v1/runs/run/samples/0/0", lambda s: s["judgement"]["causes"])["judgement"]
    assert judged["causes"][0]["evidence"].endswith("; by the digests of layers the sides part at layer 1")
