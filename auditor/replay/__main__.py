"""`python -m auditor.replay CAPSULE --weights-root DIR [--rollout-ops MODULE:NAME] [--trainer-ops MODULE:NAME]`.

MODULE:NAME is a function that takes the reference (`rl_kernel.reference.ops.Reference`) and returns an object with its
op methods, or a subclass of it: a stand-in for what that side's engine computes. Without one, the side's reported
values are compared with the reference, and that is all.

Exit code 0 where every replayed side agrees with the reference, 1 where one differs, 2 where it cannot be replayed.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from auditor.capsule import Capsule, read_capsule
from auditor.errors import AuditorError, ConfigError
from auditor.recompute_worker import Models, temperature_of
from auditor.records import Record
from auditor.replay.report import Question, lines, replay
from rl_kernel.compare import compare_bits
from rl_kernel.errors import RlKernelError
from rl_kernel.reference.ops import Reference


def main(arguments: list[str]) -> int:
    """Replay a capsule; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m auditor.replay", description=__doc__)
    parser.add_argument("capsule", type=Path)
    parser.add_argument("--weights-root", type=Path, required=True, help="folder with v000001, v000002, …")
    parser.add_argument("--rollout-ops", default="", metavar="MODULE:NAME")
    parser.add_argument("--trainer-ops", default="", metavar="MODULE:NAME")
    parser.add_argument("--tensors", type=Path, help="where the first differing call's tensors go, as .npz")
    given = parser.parse_args(arguments)
    try:
        capsule = read_capsule(given.capsule)
        models = Models(given.weights_root)
        sides = ((capsule.rollout, given.rollout_ops), (capsule.trainer, given.trainer_ops))
        return max(_side(capsule, models, record, ops, given.tensors) for record, ops in sides)
    except (AuditorError, RlKernelError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2


def _side(capsule: Capsule, models: Models, record: Record, ops_name: str, out: Path | None) -> int:
    rollout = capsule.rollout
    decoder = models.get(record.weight_version, record.weight_digest, record.contract_digest)
    question = Question(decoder, rollout.tokens.astype(np.int64), rollout.prompt_len, temperature_of(rollout))
    truth, _ = question.run(decoder.reference)
    differing = compare_bits(record.logprobs, truth).differing
    print(f"{record.side}: {differing} of {len(truth)} reported values differ from the reference")
    if not ops_name:
        return int(differing > 0)
    replayed = replay(question, record, _load(ops_name, decoder.reference))
    print("\n".join(lines(record.side, replayed)))
    if out is not None and replayed.tensors is not None and replayed.expected is not None:
        arrays: dict[str, Any] = {"output": replayed.tensors.output, "expected": replayed.expected.output}
        arrays |= {f"input_{i}": a for i, a in enumerate(replayed.tensors.inputs) if isinstance(a, np.ndarray)}
        np.savez_compressed(out, **arrays)
        print(f"{record.side}: tensors of that call in {out}")
    return int(differing > 0 or replayed.call is not None)


def _load(name: str, reference: Reference) -> Callable[[], Any]:
    """What makes the ops called MODULE:NAME from the reference."""
    module, _, attribute = name.partition(":")
    try:
        plug = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name!r} cannot be loaded ({error}); it must be MODULE:NAME") from None
    if isinstance(plug, type) and issubclass(plug, Reference):
        settings = {field.name: getattr(reference, field.name) for field in fields(Reference)}
        return lambda: plug(**settings)
    return lambda: plug(reference)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
