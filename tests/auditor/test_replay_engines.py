"""A capsule of our own engines is replayed without a plug: the op is named, and what removes the difference."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from auditor.capsule import Capsule, to_bytes
from auditor.errors import ConfigError
from auditor.judge import judge_pair
from auditor.records import RolloutRecord, TrainerRecord
from auditor.replay.engines import load_ops
from auditor.replay.report import Question, replay
from rl_kernel.contracts import model_contract
from rl_kernel.reference.model import Decoder
from tests.auditor.processes import REPOSITORY
from tests.auditor.samples import CONTRACT, CONTRACTS, one_ulp_off
from tests.auditor.test_reference import true_pair, under, weights_root

__all__ = ["weights_root"]


@pytest.fixture(scope="module")
def native(weights_root: Path) -> Iterator[np.ndarray]:
    """What stock Megatron-core says of sample `a`: its own modules, not the ops under test."""
    pytest.importorskip("megatron")
    from rl_kernel.integrations.megatron.native import NativeModel
    from rl_kernel.integrations.megatron.packing import Tokens, pack
    from rl_kernel.integrations.megatron.parallel import join_tensor_parallel, leave_tensor_parallel
    from tests.models import LLAMA

    model = NativeModel(weights_root / "v000001", join_tensor_parallel())
    model.load(weights_root / "v000001")
    tokens = tuple(int(token) for token in true_pair(weights_root, "a")[0].tokens)
    packed = pack([Tokens(tokens[:8], tokens[8:])], vocab=LLAMA.vocab, max_position=LLAMA.max_position)
    yield model.logprobs(packed, 1.0).detach().numpy()
    leave_tensor_parallel()


# In a process of its own: an engine changes torch's threads for good.
STOCK_VLLM = """
import json, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from auditor.replay.engines import load_ops
from auditor.replay.report import Question, match, replay
from rl_kernel.reference.model import Decoder
from services.rollout.engine import EngineOptions, RolloutEngine, Sampling
from tests.auditor.samples import CONTRACT
from tests.auditor.test_reference import true_pair
root = Path(sys.argv[1])
decoder, (record, _) = Decoder.open(root / "v000001", CONTRACT), true_pair(root, "a")
engine, found = RolloutEngine(root / "v000001", EngineOptions(numerics="native")), {}
for beside, name in ((7, "native-vllm"), (0, "native-vllm-alone")):
    prompts = [tuple(range(5 + 7 * i, 14 + 9 * i)) for i in range(1 + beside)]
    answer, *_ = engine.generate(prompts, [Sampling(1.0, seed=i, max_new_tokens=24) for i in range(1 + beside)])
    tokens, cut = np.array(prompts[0] + answer.tokens, np.int64), len(prompts[0])
    told = replace(record, tokens=tokens.astype(np.uint32), prompt_len=cut, mask=np.ones(24, np.bool_),
                   logprobs=np.asarray(answer.logprobs, np.float32))
    question = Question(decoder, tokens, cut, 1.0)
    one = replay(question, told, load_ops(name, decoder, cut))
    found[name] = [one.unlike, one.differing, one.call.op, one.call.name]
    found["native beside " + name] = match(question, told, load_ops("native", decoder, cut)).unlike
engine.close()
print("FOUND", json.dumps(found))
"""


def test_what_a_stock_vllm_reports_is_given_by_its_kernels_outside_of_it(weights_root: Path) -> None:
    """Its engine generates, alone or beside others; the ops, called one by one, have its bits and say where it left."""
    pytest.importorskip("vllm")
    command = [sys.executable, "-c", STOCK_VLLM, str(weights_root)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.rpartition("FOUND ")[2])
    for name in ("native-vllm", "native-vllm-alone"):
        unlike, differing, *where = found[name]
        assert (unlike, where) == (0, ["rope", "layers.0.rope"])
        assert differing > 20
        assert found[f"native beside {name}"] > 20, "Megatron's kernels are others"


def command(root: Path, folder: Path, rollout: RolloutRecord, trainer: TrainerRecord, *flags: str) -> tuple[int, str]:
    capsule = Capsule(rollout, trainer, judge_pair(rollout, trainer, CONTRACTS).judgement, None)
    (folder / "capsule").write_bytes(to_bytes(capsule))
    arguments = [sys.executable, "-m", "auditor.replay", str(folder / "capsule"), "--weights-root", str(root), *flags]
    done = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_native_trainer_is_replayed_bit_by_bit_and_its_first_op_and_the_swaps_are_named(
    weights_root: Path, native: np.ndarray, tmp_path: Path
) -> None:
    rollout, trainer = true_pair(weights_root, "a")
    code, said = command(weights_root, tmp_path, rollout, replace(trainer, logprobs=native))
    assert code == 1, said
    assert "rollout: 0 of 32 reported values differ from the reference" in said
    assert "rollout: the ops" not in said, "a side that is right is not run again"
    assert "trainer: the ops native reproduce the reported bits" in said
    assert "trainer: first to differ on equal inputs:" in said
    assert sum("with the reference's" in line for line in said.splitlines()) == 8
    assert "together: the difference is gone" in said


def test_swapping_every_op_of_a_native_trainer_at_once_removes_the_difference(
    weights_root: Path, native: np.ndarray
) -> None:
    """Each op alone leaves some; the smallest set that removes it is named."""
    decoder = Decoder.open(weights_root / "v000001", CONTRACT)
    rollout, trainer = true_pair(weights_root, "a")
    question = Question(decoder, rollout.tokens.astype(np.int64), 8, 1.0)
    found = replay(question, replace(trainer, logprobs=native), load_ops("native", decoder, 8))
    assert found.reproduced
    assert found.call is not None
    assert 0 < found.differing <= 32
    assert min(found.swaps.values()) > 0
    assert len(found.together) >= 2
    assert {"gemm", "attention"} <= set(found.together)


def test_our_strict_ops_give_the_bits_of_the_reference_and_find_no_op(weights_root: Path) -> None:
    decoder = Decoder.open(weights_root / "v000001", CONTRACT)
    rollout, _ = true_pair(weights_root, "a")
    question = Question(decoder, rollout.tokens.astype(np.int64), 8, 1.0)
    found = replay(question, rollout, load_ops("strict", decoder, 8))
    assert (found.unlike, found.differing, found.call) == (0, 0, None)


def test_a_difference_that_no_op_makes_is_said_to_lie_outside_of_them(weights_root: Path, tmp_path: Path) -> None:
    rollout, trainer = true_pair(weights_root, "a")
    code, said = command(weights_root, tmp_path, one_ulp_off(rollout), trainer)
    assert code == 1
    assert "rollout: the ops strict do NOT give 1 reported values" in said
    assert "0 tokens differ from the reference" in said
    assert "the fault lies outside these ops" in said


def test_the_nearest_ops_are_taken_where_none_reproduces_and_are_said_not_to_be_the_sides_own(
    weights_root: Path, native: np.ndarray, tmp_path: Path
) -> None:
    """As an engine whose kernels are near to torch's: every value a little off."""
    rollout, trainer = true_pair(weights_root, "a")
    code, said = command(weights_root, tmp_path, replace(rollout, logprobs=native + np.float32(1e-4)), trainer)
    assert code == 1
    assert "rollout: the ops native do NOT give 32 reported values, from which they are 0.0001 away in the mean" in said
    assert "rollout: these ops are the nearest of ours, not the side's own" in said


def test_no_op_is_named_where_other_weights_leave_all_of_them_equally_far_away(
    weights_root: Path, tmp_path: Path
) -> None:
    """Which of them is nearest by a hair is chance. Under a GPU's contract no strict ops run here that would say so."""
    rollout, trainer = true_pair(weights_root, "a")
    stale = true_pair(weights_root, "a", version=2)[0].logprobs
    of_gpu = replace(under("sm90", weights_root, rollout), logprobs=stale)
    code, said = command(weights_root, tmp_path, of_gpu, replace(trainer, logprobs=stale))
    assert code == 1
    assert "first to differ" not in said, said
    assert "rollout: no ops of ours come nearer to the reported values than the reference" in said
    assert "trainer: the ops strict do NOT give 32 reported values" in said
    assert all(f"{side}: so the fault lies outside these ops: in weights" in said for side in ("rollout", "trainer"))


def test_a_contract_that_no_cpu_op_serves_is_one_line(weights_root: Path) -> None:
    decoder = Decoder.open(weights_root / "v000001", model_contract("sm90", segments=2))
    with pytest.raises(ConfigError, match="the strict ops do not run here: no backend serves"):
        load_ops("strict", decoder, 8)
