"""What a person sees: a progress bar and one line a step while it runs, a summary and a table at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from services.loop import StepResult
from services.verdicts import Verdicts

HEADER = (
    f"{'step':>4} {'reward':>7} {'compared':>9} {'mismatched':>11} {'max |Δlogp|':>12} {'recomputed':>11}  "
    f"{'verdicts':<26} seconds"
)


@dataclass(frozen=True, slots=True)
class StepLine:
    """A step as the job knows it, and as the auditor judges it (None: the auditor did not answer)."""

    result: StepResult
    verdicts: Verdicts | None

    def __str__(self) -> str:
        seconds = " ".join(f"{phase} {value:.1f}" for phase, value in self.result.seconds.items() if value >= 0.05)
        found = self.verdicts
        if found is None:
            judged = f"{'the auditor does not answer; records wait in the spool':<74}"
        else:
            judged = (
                f"{found.compared_tokens:>9} {found.mismatched_tokens:>11} {difference(found.max_abs):>12} "
                f"{found.recomputed_tokens:>11}  {counts(found.by_verdict):<26}"
            )
        return f"{self.result.step:>4} {self.result.reward:>7.3f} {judged} {seconds}"


class Report:
    """Prints to a terminal or to a log file; a bar that moves only where something can move."""

    def __init__(self, steps: int, first_step: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task("starting", total=steps, completed=first_step)

    def __enter__(self) -> "Report":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """One line above the bar."""
        self.console.print(line, markup=False)

    def begin(self) -> None:
        """Print the header of the step lines."""
        self.say(HEADER)
        self._progress.update(self._task, description="training")

    def waiting(self, what: str) -> None:
        """Say beside the bar what is being waited for."""
        self._progress.update(self._task, description=what)

    def step(self, line: StepLine) -> None:
        """Print a step that is done."""
        self.say(str(line))
        self._progress.update(self._task, advance=1)

    def summary(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print names and values in two columns."""
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.say(f"{name:<{width}}  {value}")


def counts(table: Mapping[str, int]) -> str:
    """`32 match, 1 mismatch`, or a dash for nothing."""
    return ", ".join(f"{n} {name}" for name, n in sorted(table.items()) if n) or "–"


def difference(value: float | None) -> str:
    """A difference of log-probabilities; an exact zero is written as `0`, nothing to take it of as a dash."""
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.3g}"
