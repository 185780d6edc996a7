"""`python -m auditor.faults`: break a job on purpose in every way of the suite and print what the auditor says.

`--list` takes other faults: `strangers`, `reported` and `held-out` were thought of, and read in threads of other
frameworks' users, before any cause was written for them; those that begin with `blind` are by judges who had read no
cause, all but the first of them kept back until they were run, and no cause was changed for them before.

With `--engines` the faults are put into vLLM and Megatron-core themselves: a small job on them goes wrong in the midst
of its steps, its records go to an auditor of its own over gRPC, and what is counted are the answers of its API.

Exit code 1 where a fault is missed, a clean sample is flagged, or less than nine in ten get a right cause first (of the
lists that are only counted, as many as may be).
"""

import argparse
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import track

from auditor.command import end
from auditor.errors import ConfigError
from auditor.faults.blind_fifth import FIFTH_BLIND
from auditor.faults.blind_fourth import FOURTH_BLIND
from auditor.faults.blind_model import BLIND
from auditor.faults.blind_second import SECOND_BLIND
from auditor.faults.blind_sixth import SIXTH_BLIND
from auditor.faults.blind_third import THIRD_BLIND
from auditor.faults.engines import break_engines
from auditor.faults.held_out import FOURTH
from auditor.faults.matrix import SUITE, AnyFault, flagged_clean, outcomes, table
from auditor.faults.reported import THIRD
from auditor.faults.strangers import FIRST, SECOND
from auditor.faults.world import World
from rl_kernel.errors import ModelError

LISTS: Final[Mapping[str, tuple[AnyFault, ...]]] = {
    "suite": SUITE,
    "strangers": (*FIRST, *SECOND),
    "reported": THIRD,
    "held-out": FOURTH,
    "blind": BLIND,
    "blind-second": SECOND_BLIND,
    "blind-third": THIRD_BLIND,
    "blind-fourth": FOURTH_BLIND,
    "blind-fifth": FIFTH_BLIND,
    "blind-sixth": SIXTH_BLIND,
}

_SECONDS: Final = 120.0  # of a search in an auditor's own process, which others may want the cores of


def main(arguments: list[str]) -> int:
    """Run the suite; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m auditor.faults", description=__doc__)
    parser.add_argument("--model", type=Path, help="Hugging Face folder to break; a tiny random model by default")
    parser.add_argument("--each", type=int, default=4, help="samples a fault (default: 4)")
    parser.add_argument("--clean", type=int, default=1000, help="sound samples to judge (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    parser.add_argument("--evidence", action="store_true", help="print every suggestion with its evidence")
    parser.add_argument("--list", choices=LISTS, default="suite", help="which faults (default: suite)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="spent on the causes of a sample at most (default: no limit; 120)",
    )
    parser.add_argument("--engines", action="store_true", help="break vLLM and Megatron-core, not the reference")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a fault or kind of --engines")
    parser.add_argument("--out", type=Path, help="folder for ledger, weights and capsules of --engines (default: none)")
    given = parser.parse_args(arguments)
    for name, least in (("each", 1), ("clean", 0), ("seed", 0)):
        if (number := getattr(given, name)) < least:
            parser.error(f"argument --{name}: {number} is less than {least}")
    if not given.seconds > 0.0:
        parser.error(f"argument --seconds: {given.seconds:g} is no number of seconds above 0")
    if given.engines:
        return _engines(parser, given)
    if given.only or given.out:
        parser.error("arguments --only and --out need --engines")
    started = time.monotonic()
    try:
        world = World(given.model, given.seed)
    except ModelError as error:
        print(f"faults: {error}", file=sys.stderr)
        return 2
    found = []
    said = Console(stderr=True)
    judged = outcomes(LISTS[given.list], world, given.each, given.seconds)
    total = len(LISTS[given.list]) * given.each
    for outcome in track(judged, "broken samples", total, console=said, transient=True, disable=not said.is_terminal):
        found.append(outcome)
        if given.evidence:
            for cause, score, evidence in outcome.causes:
                print(f"  {outcome.fault} [{outcome.side}]: {cause} {score:.2f}: {evidence}")
    print(table(found))
    right = sum(outcome.correct for outcome in found) / len(found)
    missed = sum(outcome.missed for outcome in found)
    flagged = flagged_clean(world, given.clean)
    print(
        f"\n{right:.1%} of {len(found)} injected faults get a right cause first, {missed} are missed, {flagged} of"
        f" {given.clean} clean samples are flagged; {time.monotonic() - started:.0f} s"
    )
    enough = right >= 0.9 or given.list == "held-out" or given.list.startswith("blind")
    return 0 if enough and missed == 0 and flagged == 0 else 1


def _engines(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    for name in ("list", "clean", "seed"):
        if getattr(given, name) != parser.get_default(name):
            parser.error(f"argument --{name} does not go with --engines")
    given.seconds = _SECONDS if math.isinf(given.seconds) else given.seconds
    try:
        return break_engines(given)
    except ConfigError as error:
        print(f"faults: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    end("faults", main)
