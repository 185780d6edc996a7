"""`python -m auditor.replay CAPSULE --weights-root DIR`: which op of which side left the contract, and what removes it.

Each side whose reported values differ from the reference is run again on the ops of our engines, call by call beside
the reference: `strict`, `native` (Megatron-core's), `native-vllm` and `native-vllm-alone` (with no sequence beside
it). Those that give the reported bits are believed; else the reference is tried with one op changed (`changed`), for a
minute at most, and then those that come nearest are taken, where they come much nearer than the reference does: what is
as far from all of them was made by no op. `--rollout-ops` and `--trainer-ops` name the ops
instead: one of these, `none`, or MODULE:NAME of a foreign engine's stand-in: a function that takes the reference
(`rl_kernel.reference.ops.Reference`) and returns an object with its op methods, or a subclass of it. `--causes 60`
first searches for causes, for up to a minute a side: beside a live job a search ends after `diagnose_seconds`, which is
short for a large model.

Exit code 0 where every replayed side agrees with the reference, 1 where one differs, 2 where it cannot be replayed.
"""

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from auditor.capsule import Capsule, read_capsule
from auditor.command import end
from auditor.errors import AuditorError, ConfigError, RecomputeError
from auditor.object_store import StoreAccess
from auditor.recompute_worker import Models, decoder_of, stated_positions, temperature_of
from auditor.records import SIDES, Record
from auditor.replay.causes import search
from auditor.replay.changed import Make, changed
from auditor.replay.engines import OURS, load_ops
from auditor.replay.report import OUTSIDE, Match, Question, apart, distance_between, lines, match, replay
from auditor.weights_place import WeightsPlace
from rl_kernel.compare import compare_bits
from rl_kernel.errors import RlKernelError

Tried = dict[str, tuple[Match, Make]]

# Other weights or another prompt leave all ops equally far away, and chance would say which of them is the nearest.
_MUCH_NEARER: Final = 0.5
_ITS_OWN: Final = 0.1  # so near are the ops of a side's own engine, whatever else stood in its batches
_NO_ENGINE: Final = "none of our engines'"
_SECONDS: Final = 60.0  # for the ops that are changed one by one


def main(arguments: list[str]) -> int:
    """Replay a capsule; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m auditor.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("capsule", type=Path, help="file that `python -m auditor.capsule` or the API gave")
    parser.add_argument("--weights-root", required=True, help="folder or s3:// URL with v000001, v000002, …")
    parser.add_argument("--weights-cache", default="", help="folder for copies, where the root is a URL")
    parser.add_argument("--store-endpoint", default="", help="URL of an S3 service that is not Amazon's")
    parser.add_argument("--causes", type=float, default=0.0, metavar="SECONDS", help="default: 0, no search")
    parser.add_argument("--rollout-ops", default="auto", metavar="NAME", help="default: auto")
    parser.add_argument("--trainer-ops", default="auto", metavar="NAME", help="default: auto")
    parser.add_argument("--tensors", type=Path, help="where the first differing call's tensors go, as .npz")
    given = parser.parse_args(arguments)
    if not given.causes >= 0.0:
        parser.error(f"argument --causes: {given.causes:g} is no number of seconds; it should be 0 or more")
    try:
        capsule = read_capsule(given.capsule)
        place = WeightsPlace(given.weights_root, given.weights_cache, access=StoreAccess(given.store_endpoint))
        models = Models(place.open())
        _require_plain_positions(capsule)
        if given.causes > 0:
            print("\n".join(search(capsule, models, given.causes)), flush=True)
        sides = ((capsule.rollout, given.rollout_ops), (capsule.trainer, given.trainer_ops))
        return max(_side(capsule, models, record, ops, given.tensors) for record, ops in sides)
    except (AuditorError, RlKernelError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2


def _require_plain_positions(capsule: Capsule) -> None:
    rollout, trainer, length = capsule.rollout.positions, capsule.trainer.positions, len(capsule.rollout.tokens)
    places = (
        stated_positions(rollout, trainer, length),
        stated_positions(trainer, rollout, capsule.trainer.token_count),
    )
    for side, found in zip(SIDES, places, strict=True):
        if found is not None:
            said = f"ops are replayed at positions 0, 1, …; the {side}'s begin with {found[:3].tolist()}"
            raise RecomputeError(said, "positions_unsupported")


def _side(capsule: Capsule, models: Models, record: Record, ops: str, out: Path | None) -> int:
    tokens = _tokens(capsule, record)
    decoder = decoder_of(models, record, tokens, record.contract_digest)
    question = Question(decoder, tokens.astype(np.int64), record.prompt_len, temperature_of(record))
    truth, _ = question.run(decoder.reference)
    differing = compare_bits(record.logprobs, truth).differing
    print(f"{record.side}: {differing} of {len(truth)} reported values differ from the reference")
    if ops == "none" or (ops == "auto" and differing == 0):
        return int(differing > 0)
    away = distance_between(truth, record.logprobs)
    name, make = _nearest(question, record, away) if ops == "auto" else (ops, _loaded(question, ops))
    _tell_reported(capsule, record, decoder.config.layers)
    if make is None:
        print(
            f"{record.side}: no ops of ours come nearer to the reported values than the reference, {apart(away)} away"
        )
        if name != _NO_ENGINE:
            print(f"{record.side}: {OUTSIDE}")
        return 1
    replayed = replay(question, record, make)
    print("\n".join(lines(record.side, name, replayed)))
    if out is not None and replayed.tensors is not None and replayed.expected is not None:
        arrays: dict[str, Any] = {"output": replayed.tensors.output, "expected": replayed.expected.output}
        arrays |= {f"input_{i}": a for i, a in enumerate(replayed.tensors.inputs) if isinstance(a, np.ndarray)}
        np.savez_compressed(out, **arrays)
        print(f"{record.side}: tensors of that call in {out}")
    return int(differing > 0 or replayed.call is not None)


def _tokens(capsule: Capsule, record: Record) -> np.ndarray:
    """What this side worked on: where the two are not comparable, it may be something else than the other side did."""
    if record.tokens is not None:
        return record.tokens
    if record.tokens_digest != capsule.rollout.tokens_digest:
        raise ConfigError(f"the {record.side} was given other tokens than the rollout, and did not send them")
    return capsule.rollout.tokens


def _nearest(question: Question, record: Record, away: float | None) -> tuple[str, Make | None]:
    """Name and maker of the ops that give the reported bits or come nearest.

    Whole engines of ours first, then the reference with one op changed. away: the reference's distance; None, where
    no two values are finite, tells of none which is nearer. Where none comes much nearer: the strict ones, or None
    where they do not run here; `_NO_ENGINE` where no engine's do.
    """
    found: Tried = {}
    refused: list[str] = []
    for name in OURS:
        try:
            make = _loaded(question, name)
            found[name] = match(question, record, make), make
        except ConfigError as error:
            refused.append(str(error))
            continue
        except (RuntimeError, RlKernelError) as error:  # an engine's kernels do not take every shape
            refused.append(_does_not_run(f"the {name} ops do", error))
            continue
        if found[name][0].unlike == 0:
            break
    for reason in refused:
        print(f"{record.side}: {reason}")
    engines = bool(found)
    if not engines:
        print(f"{record.side}: none of our engines' ops runs here, for which torch and an engine have to be installed;"
              " the reference with one op changed is all that is tried")  # fmt: skip
    if away is not None and min((one.away for one, _ in found.values()), default=math.inf) > _ITS_OWN * away:
        _try_changes(question, record, found, away)
    limit = -math.inf if away is None else _MUCH_NEARER * away
    near = [name for name, (one, _) in found.items() if one.unlike == 0 or one.away <= limit]
    if not near:
        return ("strict", found["strict"][1] if "strict" in found else None) if engines else (_NO_ENGINE, None)
    best = min(near, key=lambda each: (found[each][0].unlike > 0, found[each][0].away))
    return best, found[best][1]


def _try_changes(question: Question, record: Record, found: Tried, away: float) -> None:
    """Add the reference with one op changed, until one has the bits or the time is over."""
    deadline = time.monotonic() + _SECONDS
    for change, make in changed(question.decoder, question.prompt_len, away):
        name = f"strict but for {change}"
        try:
            found[name] = match(question, record, make), make
        except (RuntimeError, RlKernelError) as error:
            print(f"{record.side}: {_does_not_run(f'{name} does', error)}")
            continue
        if found[name][0].unlike == 0 or time.monotonic() > deadline:
            return


def _does_not_run(what: str, error: Exception) -> str:
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return f"{what} not run on this model: {first}"


def _loaded(question: Question, name: str) -> Make:
    return load_ops(name, question.decoder, question.prompt_len)


def _tell_reported(capsule: Capsule, record: Record, layers: int) -> None:
    """What the verdict had of where and why: said besides the ops, and instead of them where none is found."""
    judgement = capsule.judgement
    at = judgement.rollout_first_layer if record.side == "rollout" else judgement.trainer_first_layer
    if at is not None:
        where = (
            f"at layer {at}" if at < layers else "behind the last layer: in the norm, the output layer or its logits"
        )
        print(f"{record.side}: by the digests of its layers it leaves the reference {where}")
    if judgement.causes:
        first = judgement.causes[0]
        print(f"capsule: the cause suggested was {first['cause']} ({first['score']:.2f}): {first['evidence']}")


if __name__ == "__main__":
    end("replay", main)
