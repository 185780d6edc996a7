"""What really served each op in this process: backend, contract digest, calls, and foreign sites (there are none).

An integration takes its functions from `CountingPlan.function`, never from a backend's module, so that a call that
is not counted did not happen. `Evidence.require` turns a count that the model's shape does not imply into an
EvidenceError: an op that something else served leaves a hole in the counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_kernel.errors import EvidenceError
from rl_kernel.plan import Plan


@dataclass(frozen=True, slots=True)
class OpEvidence:
    """One op in one process.

    contract: digest of the op's contract. calls: function name → times called, for every function handed out.
    fallbacks: sites in the model that serve this op by something other than the plan.
    """

    op: str
    backend: str
    device: str
    contract: str
    calls: Mapping[str, int]
    fallbacks: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """Every op of the plan in one process, e.g. one tensor-parallel rank.

    contract: digest of the model contract. foreign: where something else serves an op, as `path: what`.
    """

    engine: str
    rank: int
    contract: str
    ops: tuple[OpEvidence, ...]
    foreign: tuple[str, ...]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Evidence":
        """Restore what `dataclasses.asdict` made of an Evidence, and what a wire made of that."""
        ops = tuple(OpEvidence(**op) for op in fields["ops"])
        return cls(fields["engine"], fields["rank"], fields["contract"], ops, tuple(fields["foreign"]))

    def calls(self) -> dict[str, int]:
        """Function name, qualified by its op (`rms_norm.add_rms_norm`) → times called; zeros left out."""
        return {f"{o.op}.{name}": n for o in self.ops for name, n in o.calls.items() if n}

    def refuse_foreign(self) -> None:
        """Raise EvidenceError if a site in the model is served by something other than the plan."""
        if self.foreign:
            more = f" and {len(self.foreign) - 1} more" if len(self.foreign) > 1 else ""
            raise EvidenceError(
                f"{self.engine}, rank {self.rank}: {self.foreign[0]}{more}; "
                "strict mode needs every op served by the plan"
            )

    def require(self, expected: Mapping[str, int]) -> None:
        """Raise EvidenceError unless nothing foreign was found and the calls are exactly `expected`."""
        self.refuse_foreign()
        where = f"{self.engine}, rank {self.rank}"
        seen, wanted = self.calls(), {name: n for name, n in expected.items() if n}
        for name in sorted(seen.keys() | wanted.keys()):
            if seen.get(name, 0) != wanted.get(name, 0):
                raise EvidenceError(
                    f"{where}: {name} was called {seen.get(name, 0)} times, the model implies {wanted.get(name, 0)}; "
                    "something other than the plan serves this op"
                )


class Tally(Protocol):
    """Counts calls that are being recorded for later: once for each time that the recording is played."""

    def recording(self) -> bool:
        """Whether a call made now is recorded rather than run."""

    def note(self, cell: int) -> None:
        """Count a recorded call in `cell`."""

    def seal(self) -> None:
        """Close what was noted: from here on, playing the recording so far counts it."""

    def read(self) -> Sequence[int]:
        """How often each cell's calls were played; EvidenceError if some recording would play them uncounted."""

    def reset(self) -> None:
        """Count from zero; recordings stay."""


class CountingPlan:
    """A plan whose functions count their calls. One per engine and process.

    tally: where calls are counted that a CUDA graph records and replays; None where nothing is recorded.
    """

    def __init__(self, plan: Plan, *, engine: str, rank: int = 0, tally: Tally | None = None) -> None:
        self.plan = plan
        self._engine = engine
        self._rank = rank
        self._tally = tally
        self._calls: dict[tuple[str, str], list[int]] = {}
        self._foreign: dict[str, list[str]] = {}

    def function(self, op: str, name: str | None = None) -> Callable[..., Any]:
        """Return the plan's function `name` (default: the op's own name) of `op`, counting its calls."""
        name = name or op
        target = self.plan.resolve(op).function(name)
        cell = self._calls.setdefault((op, name), [0])
        place, tally = list(self._calls).index((op, name)), self._tally

        def counted(*args: Any, **kwargs: Any) -> Any:
            if tally is not None and tally.recording():
                tally.note(place)
            else:
                cell[0] += 1
            return target(*args, **kwargs)

        return counted

    def report_foreign(self, op: str, where: str) -> None:
        """Note that `where` in the model serves `op` by something other than the plan."""
        self._foreign.setdefault(op, []).append(where)

    def reset(self) -> None:
        """Forget the calls counted so far; what is foreign stays."""
        for cell in self._calls.values():
            cell[0] = 0
        if self._tally is not None:
            self._tally.reset()

    def evidence(self) -> Evidence:
        """Return what was counted since the last reset."""
        contract = self.plan.contract
        played = self._tally.read() if self._tally is not None else [0] * len(self._calls)
        calls = {key: cell[0] + n for (key, cell), n in zip(self._calls.items(), played, strict=False)}
        ops = tuple(
            OpEvidence(
                op=c.op,
                backend=self.plan.resolve(c.op).name,
                device=self.plan.device,
                contract=c.digest(),
                calls={name: n for (op, name), n in calls.items() if op == c.op},
                fallbacks=len(self._foreign.get(c.op, ())),
            )
            for c in contract.ops
        )
        foreign = tuple(f"{where} serves {op}" for op, sites in self._foreign.items() for where in sites)
        return Evidence(self._engine, self._rank, contract.digest(), ops, foreign)
