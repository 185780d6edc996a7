"""Positions and visible keys as the sides say them: compared token by token, followed by the reference or refused."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor import codec
from auditor.dumps import read_dump
from auditor.errors import RecomputeError, RecordError
from auditor.ingest.limits import Limits, admit_batch
from auditor.judge import judge_pair
from auditor.pipeline import Incoming, Refused
from auditor.positions import Positions, first_keys_of, ids_of, position_ids_digest
from auditor.preconditions import Condition, first_failure
from auditor.proto import audit_pb2 as pb
from auditor.recompute_worker import stated_positions
from auditor.records import RolloutRecord, TrainerRecord
from rl_kernel.errors import ShapeError
from rl_kernel.reference.model import Decoder
from tests.auditor.processes import running_auditor
from tests.auditor.samples import CONTRACT, CONTRACTS, one_ulp_off, pair
from tests.auditor.test_commands import row_of, run
from tests.auditor.test_reference import both, settled, true_pair, weights_root
from tests.auditor.test_unpaired import send

__all__ = ["weights_root"]
ROPE = "02" * 32
N = 40
# Two documents in one sequence, each counted from 0, and what a row of the second sees.
PACKED = np.r_[np.arange(25), np.arange(15)].astype(np.uint32)
OWN_KEYS = np.r_[np.zeros(25), np.full(15, 25)].astype(np.uint32)


def at(**said: Any) -> Positions:
    return Positions(ROPE, **said)


def failure(rollout: Positions, trainer: Positions) -> tuple[str, str, str] | None:
    left, right = pair()
    found = first_failure(replace(left, positions=rollout), replace(right, positions=trainer), CONTRACTS)
    assert found is None or found.condition is Condition.POSITIONS
    return None if found is None else (found.field, found.rollout, found.trainer)


def test_a_side_that_says_no_more_than_it_did_sends_the_bytes_that_it_did() -> None:
    digests = [hashlib.sha256(codec.encode(record)).hexdigest()[:16] for record in pair()]
    assert digests == ["4e695b8cf853f87b", "27f0bca325ce3710"]


@pytest.mark.parametrize(
    ("rollout", "trainer", "found"),
    [
        (at(), at(ids=np.arange(N)), None),
        (at(offset=7), at(ids=np.arange(7, N + 7)), None),
        (at(offset=-1), at(ids=np.r_[2**32 - 1, np.arange(N - 1)]), ("positions.ids[0]", "-1", str(2**32 - 1))),
        (
            at(offset=-1),
            at(ids_digest=position_ids_digest(np.r_[2**32 - 1, np.arange(N - 1)])),
            (
                "positions.ids_digest",
                "of -1..38, which are no uint32",
                position_ids_digest(np.r_[2**32 - 1, np.arange(N - 1)]),
            ),
        ),
        (at(ids=PACKED), at(ids_digest=position_ids_digest(PACKED)), None),
        (at(ids_digest=position_ids_digest(PACKED)), at(ids_digest=position_ids_digest(PACKED)), None),
        (at(window=N), at(), None),
        (at(window=10), at(first_keys=np.maximum(0, np.arange(N) - 9)), None),
        (at(left_padding=5), at(left_padding=9), None),
        (at(), at(offset=7), ("positions.offset", "0", "7")),
        (at(offset=-1), at(ids=np.arange(N)), ("positions.ids[0]", "-1", "0")),
        (at(), at(ids=PACKED), ("positions.ids[25]", "25", "0")),
        (at(), at(ids_digest="77" * 32), ("positions.ids_digest", position_ids_digest(np.arange(N)), "77" * 32)),
        (at(ids_digest="66" * 32), at(ids_digest="77" * 32), ("positions.ids_digest", "66" * 32, "77" * 32)),
        (at(), at(window=10), ("positions.first_keys[10]", "0", "1")),
        (at(window=16), at(window=12), ("positions.first_keys[12]", "0", "1")),
        (at(first_keys=OWN_KEYS), at(), ("positions.first_keys[25]", "25", "0")),
        (at(left_padding=5, padding_seen=True), at(), ("positions.left_padding", "5 seen", "0 seen")),
    ],
)
def test_the_first_token_that_stands_or_sees_otherwise_is_named(
    rollout: Positions, trainer: Positions, found: tuple[str, str, str] | None
) -> None:
    assert failure(rollout, trainer) == found
    assert failure(trainer, rollout) == (found and (found[0], found[2], found[1]))


@pytest.mark.parametrize(
    ("trainer", "cause"),
    [
        (at(ids=PACKED), "position_offset"),
        (at(ids_digest="77" * 32), "position_offset"),
        (at(window=10), "attention_mask"),
        (at(left_padding=5, padding_seen=True), "attention_mask"),
    ],
)
def test_what_differs_suggests_a_cause(trainer: Positions, cause: str) -> None:
    left, right = pair()
    judged = judge_pair(left, replace(right, positions=trainer), CONTRACTS).judgement
    assert (judged.condition, judged.cause, judged.causes[0]["cause"]) == ("positions", cause, cause)
    assert judged.field in judged.causes[0]["evidence"]


@pytest.mark.parametrize(
    "said",
    [
        at(ids=PACKED),
        at(ids=PACKED, ids_digest=position_ids_digest(PACKED)),
        at(ids_digest="77" * 32),
        at(first_keys=OWN_KEYS, left_padding=3),
        at(window=8, left_padding=3, padding_seen=True),
    ],
)
def test_positions_survive_the_wire_and_are_what_the_ledger_holds(said: Positions) -> None:
    for plain in pair():
        record = replace(plain, positions=said)
        assert codec.decode(codec.encode(record)).positions == said != plain.positions
        (item,) = admit_batch(pb.Batch(records=[codec.to_wire(record)]), Limits())
        assert isinstance(item, Incoming)
        assert item.payload == codec.encode(record)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"ids": np.arange(N - 1)}, "positions.ids has 39 values; 40 tokens need as many"),
        ({"ids": [-1] * N}, "positions.ids holds -1"),
        ({"ids": [0.5] * N}, "positions.ids is float64"),
        ({"ids": np.arange(N), "offset": 3}, "positions.offset is 3 beside ids"),
        ({"ids": np.arange(N), "ids_digest": "77" * 32}, "is not that of the ids given"),
        ({"first_keys": np.arange(N) + 1}, "positions.first_keys[0] is 1; a row sees itself at least"),
        ({"first_keys": np.zeros(3, np.uint32)}, "positions.first_keys has 3 values"),
        ({"first_keys": OWN_KEYS, "window": 3}, "positions.window is 3 beside first_keys"),
        ({"left_padding": -1}, "positions.left_padding is -1"),
        ({"padding_seen": 1}, "positions.padding_seen is 1; it must be true or false"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_said(said: dict[str, Any], named: str) -> None:
    with pytest.raises(RecordError) as error:
        replace(pair()[0], positions=Positions(ROPE, **said))
    assert named in str(error.value)


def test_ids_are_bounded_before_they_are_read_and_digests_are_digests() -> None:
    record = codec.to_wire(replace(pair()[0], positions=at(ids=PACKED)))
    for limits, batch in (
        (Limits(tokens=39), record),
        (Limits(), codec.to_wire(replace(pair()[0], positions=at(ids_digest="AB" * 32)))),
    ):
        (item,) = admit_batch(pb.Batch(records=[batch]), limits)
        assert isinstance(item, Refused)
        assert item.code == ("too_large" if limits.tokens == 39 else "bad_digest")


def test_an_auditor_of_before_reads_what_it_knew() -> None:
    """The fields are new ones: what stood there before is where it was."""
    old = pb.Positions(rope_digest=ROPE, offset=3, attention="causal")
    assert old.SerializeToString() == b"\x0a\x40" + ROPE.encode() + b"\x10\x03\x1a\x06causal"


def moved(root: Path, sample: str, said: Positions, counted: np.ndarray) -> tuple[RolloutRecord, TrainerRecord]:
    """Both sides as the contract has it at these positions."""
    rollout, trainer = true_pair(root, sample)
    decoder = Decoder.open(root / "v000001", CONTRACT)
    tokens = rollout.tokens.astype(np.int64)
    (values,) = decoder.logprobs([tokens], [8], 1.0, [counted.astype(np.int64)])
    said = replace(said, rope_digest=decoder.config.rope_digest)
    return both((rollout, trainer), positions=said, logprobs=values)


def test_the_reference_recomputes_at_the_positions_that_both_sides_state(weights_root: Path, tmp_path: Path) -> None:
    plain = true_pair(weights_root, "packed")[0].logprobs
    packed = moved(weights_root, "packed", at(ids=PACKED), PACKED)
    assert packed[0].logprobs.tobytes() != plain.tobytes()
    digest = replace(packed[0].positions, ids=None, ids_digest=position_ids_digest(PACKED))
    cases = {
        "packed": (packed[0], replace(packed[1], positions=digest)),
        "offset": moved(weights_root, "offset", at(offset=9), np.arange(9, N + 9)),
    }
    rollout, trainer = moved(weights_root, "off", at(ids=PACKED), PACKED)
    cases["off"] = (rollout, one_ulp_off(trainer))
    seen = {"window": at(window=10), "pads": at(left_padding=2, padding_seen=True), "full": at(attention="full")}
    cases |= {name: moved(weights_root, name, said, np.arange(N)) for name, said in seen.items()}
    cases["digest"] = both(cases["packed"], positions=digest, sample_id="digest")
    with running_auditor(tmp_path, "--weights-root", str(weights_root), "--recompute-rate", "1") as auditor:
        for one in cases.values():
            send(auditor, *one)
        auditor.wait_for("/api/v1/runs/run", lambda r: r["samples"] == len(cases) and settled(r))
        found = {name: auditor.get(f"/api/v1/runs/run/samples/0/{name}") for name in cases}
        judged = {name: sample["judgement"] for name, sample in found.items()}
        assert {name: judged[name]["reference"] for name in judged if name in ("packed", "offset", "off")} == {
            name: "done" for name in ("packed", "offset", "off")
        }
        assert {name: (judged[name]["verdict"], judged[name]["side"]) for name in ("packed", "offset", "off")} == {
            "packed": ("match", "none"), "offset": ("match", "none"), "off": ("mismatch", "trainer"),
        }  # fmt: skip
        assert judged["off"]["cause"] not in ("position_offset", "undiagnosed", "searching")
        for name, said in (
            ("window", "row 10, which sees nothing before token 1,"),
            ("pads", "a sample that sees 2 pads"),
            ("full", "attention 'full'"),
            ("digest", "a digest of positions without the positions"),
        ):
            assert judged[name]["reference_error"] == f"positions_unsupported: {said} has no reference"
        assert found["packed"]["rollout"]["positions"]["ids"] == PACKED.tolist()
        assert found["packed"]["trainer"]["positions"].keys() == {"rope_digest", "offset", "attention", "ids_digest"}
        assert found["window"]["rollout"]["positions"]["window"] == 10


def test_the_reference_has_no_positions_but_its_own(weights_root: Path) -> None:
    decoder = Decoder.open(weights_root / "v000001", CONTRACT)
    last = decoder.config.max_position
    for wrong in (np.arange(-1, 3), np.arange(last - 3, last + 1), np.arange(5), np.arange(4, dtype=np.int32)):
        with pytest.raises(ShapeError, match="positions"):
            decoder.logprobs([np.arange(4)], [1], 1.0, [wrong])


def test_dumps_say_positions_too(tmp_path: Path) -> None:
    rows = []
    for record in pair("0"):
        row = row_of(record, bits=False)
        row["positions"] = {**asdict(at()), "ids": PACKED.tolist(), "first_keys": OWN_KEYS.tolist()}
        rows.append(row)
    rows[1] |= {"positions": None, "positions.rope_digest": ROPE, "positions.ids": list(range(N))}
    rows[1]["positions.attention"] = "causal"
    file = tmp_path / "d.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    first, second = read_dump(file, {"run_id": "run"})
    assert first.positions == at(ids=PACKED, first_keys=OWN_KEYS)
    assert second.positions == at(ids=np.arange(N))
    with running_auditor(tmp_path / "a") as auditor:
        done = run("auditor.submit", str(file), "--address", auditor.grpc, "--run", "dumped")
        assert done.returncode == 0, done.stdout
        judged = auditor.get("/api/v1/runs/dumped/samples/0/0")["judgement"]
    assert (judged["field"], judged["rollout_value"], judged["trainer_value"]) == ("positions.ids[25]", "0", "25")


def test_what_is_not_said_is_plain() -> None:
    assert np.array_equal(ids_of(at(offset=4), 3), [4, 5, 6])
    assert np.array_equal(ids_of(at(ids_digest=position_ids_digest([0, 1, 2])), 3), [0, 1, 2])
    assert ids_of(at(ids_digest="77" * 32), 3) is None
    assert first_keys_of(at(window=2), 4).tolist() == [0, 0, 1, 2]
    assert first_keys_of(at(), 4).tolist() == [0, 0, 0, 0]


def test_an_offset_beyond_any_position_which_an_older_ledger_may_hold_is_compared_and_not_followed() -> None:
    beyond = at(offset=2**63 - 1)
    assert failure(beyond, beyond) is None
    found = failure(beyond, at(ids=np.arange(N)))
    assert found is not None
    assert found[0] == "positions.ids[0]"
    with pytest.raises(RecomputeError) as error:
        stated_positions(beyond, beyond, N)
    assert error.value.code == "positions_unsupported"
