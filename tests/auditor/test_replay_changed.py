"""One op of a side is broken, and no engine has its bits: a replay changes the reference's ops one by one."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from auditor.capsule import Capsule, to_bytes
from auditor.causes.edits import Edit, edited
from auditor.judge import judge_pair
from auditor.replay import __main__ as command
from auditor.replay import engines
from auditor.replay.changed import Bf16Logits
from auditor.replay.engines import load_ops
from auditor.replay.report import Question
from auditor.replay.watch import OPS, Mixed
from rl_kernel.reference.model import Decoder
from rl_kernel.reference.ops import Bits, Reference, narrow
from tests.auditor.samples import CONTRACT, CONTRACTS
from tests.auditor.test_reference import true_pair, weights_root

__all__ = ["weights_root"]


def quarters(plain: Reference, x: Bits, w: Bits, *, segments: int = 1) -> Bits:
    parts = zip(np.split(x, 4, axis=1), np.split(w, 4, axis=1), strict=True)
    a, b, c, d = (plain.gemm_fp32(x.copy(), w.copy()) for x, w in parts)
    return narrow(a + b + c + d)


def head(decoder: Decoder) -> object:
    return Mixed(load_ops("native", decoder, 8)(), decoder.reference, frozenset(OPS) - {"linear_logp"})


BROKEN = {
    "every product in 4 parts": (lambda d: edited(d, Edit("gemm", quarters)).reference, "gemm at layers.0.qkv"),
    "linear_logp of native": (head, "linear_logp at linear_logp"),
    "logits rounded to bf16": (lambda d: Bf16Logits(d.reference), "linear_logp at linear_logp"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "make", "where"), [(name, *of) for name, of in BROKEN.items()])
def test_the_op_that_was_broken_is_named_bit_by_bit(
    weights_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: str,
    make: Callable[[Decoder], object],
    where: str,
) -> None:
    pytest.importorskip("megatron")
    decoder = Decoder.open(weights_root / "v000001", CONTRACT)
    rollout, trainer = true_pair(weights_root, "a")
    question = Question(decoder, rollout.tokens.astype(np.int64), rollout.prompt_len, 1.0)
    wrong, _ = question.run(make(decoder))
    broken = replace(trainer, logprobs=wrong)
    capsule = Capsule(rollout, broken, judge_pair(rollout, broken, CONTRACTS).judgement, None)
    (tmp_path / "capsule").write_bytes(to_bytes(capsule))
    assert command.main([str(tmp_path / "capsule"), "--weights-root", str(weights_root)]) == 1
    said = capsys.readouterr().out
    assert f"trainer: the ops strict but for {change}" in said, said
    assert f"trainer: first to differ on equal inputs: {where}" in said, said
    assert "the difference is gone" in said


def ops_that_fail(decoder: Decoder, prompt_len: int) -> object:
    return Failing(**{field.name: getattr(decoder.reference, field.name) for field in fields(Reference)})


class Failing(Reference):
    """As an engine whose kernels take no such model."""

    def attention(self, *_: object, **__: object) -> Bits:
        raise RuntimeError("Unsupported CPU attention configuration: head_dim=16\nat line 7")


@pytest.mark.parametrize(
    ("ours", "said_of_it"),
    [
        ({"strict": "no_such_module:strict"}, "'strict' cannot be loaded (No module named 'no_such_module')"),
        (
            {"native-vllm": f"{__name__}:ops_that_fail"},
            "the native-vllm ops do not run on this model: Unsupported CPU attention configuration: head_dim=16\n",
        ),
    ],
)
def test_where_no_engine_s_ops_run_the_reference_is_changed_and_the_cause_repeated(
    weights_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ours: dict[str, str],
    said_of_it: str,
) -> None:
    for module in (engines, command):
        monkeypatch.setattr(module, "OURS", ours)
    decoder = Decoder.open(weights_root / "v000001", CONTRACT)
    rollout, trainer = true_pair(weights_root, "a")
    question = Question(decoder, rollout.tokens.astype(np.int64), rollout.prompt_len, 1.0)
    in_parts, _ = question.run(BROKEN["every product in 4 parts"][0](decoder))
    other = true_pair(weights_root, "a", version=2)[0].logprobs
    cause = {"cause": "stale_weights", "score": 1.0, "evidence": "those of version 2"}
    for values, words in ((in_parts, "first to differ on equal inputs: gemm at layers.0.qkv"),
                          (other, "no ops of ours come nearer")):  # fmt: skip
        broken = replace(trainer, logprobs=values)
        judgement = replace(judge_pair(rollout, broken, CONTRACTS).judgement, causes=(cause,))
        (tmp_path / "capsule").write_bytes(to_bytes(Capsule(rollout, broken, judgement, None)))
        assert command.main([str(tmp_path / "capsule"), "--weights-root", str(weights_root)]) == 1
        said = capsys.readouterr().out
        assert said_of_it in said
        assert "none of our engines' ops runs here" in said
        assert "the cause suggested was stale_weights (1.00)" in said
        assert words in said, said
        assert "outside these ops" not in said
