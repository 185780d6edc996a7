"""The run as a figure: mismatched tokens and the largest difference of each step, as the auditor found them."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def write_plot(
    file: Path, title: str, steps: Sequence[int], mismatched_share: Sequence[float], max_abs: Sequence[float]
) -> None:
    """Write a PNG. mismatched_share: mismatched of all compared tokens, 0 to 1. max_abs: largest |Δlogp|."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title, fontsize=11)
    upper.bar(steps, [100 * share for share in mismatched_share], color="tab:red", width=0.6)
    upper.set_ylabel("tokens that differ, %")
    upper.set_ylim(0, 100)
    lower.plot(steps, max_abs, "o-", color="tab:blue")
    lower.set_ylabel("max |Δ logprob|")
    lower.set_ylim(0, max(max_abs, default=0.0) * 1.15 or 1.0)
    lower.set_xlabel("step")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
