"""The run as a figure: tokens that are equal and that differ, and the largest difference, of each step."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def write_plot(
    file: Path,
    title: str,
    steps: Sequence[int],
    mismatched: Sequence[int],
    compared: Sequence[int],
    max_abs: Sequence[float | None],
) -> None:
    """Write a PNG. mismatched, compared: tokens of each step. max_abs: largest |Δlogp| of each step, if any."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title, fontsize=11)
    equal = [all_ - differ for differ, all_ in zip(mismatched, compared, strict=True)]
    upper.bar(steps, equal, color="tab:gray", width=0.6, label="equal")
    upper.bar(steps, mismatched, bottom=equal, color="tab:red", width=0.6, label="differ")
    upper.set_ylabel("tokens compared")
    upper.set_ylim(0, max(compared, default=0) * 1.25 or 1)  # room for the legend
    upper.legend(ncols=2, loc="upper right", frameon=False)
    known = [math.nan if value is None else value for value in max_abs]  # a gap
    lower.plot(steps, known, "o-", color="tab:blue")
    lower.set_ylabel("max |Δ logprob|")
    lower.set_ylim(0, max((value or 0.0 for value in max_abs), default=0.0) * 1.15 or 1.0)
    if not any(mismatched):
        # A line on the axis looks like a figure that nothing was drawn in.
        said = f"0 of {sum(compared)} tokens differ" if any(compared) else "nothing was compared"
        lower.text(
            0.5, 0.5, said, transform=lower.transAxes, ha="center", va="center", fontsize=13, backgroundcolor="white"
        )
    lower.set_xlabel("step")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
