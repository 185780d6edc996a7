"""The run as a figure: mismatched tokens and the largest difference of each step, as the auditor found them."""

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
    max_abs: Sequence[float],
) -> None:
    """Write a PNG. mismatched, compared: tokens of each step. max_abs: largest |Δlogp| of each step."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title, fontsize=11)
    shares = [100 * differ / max(all_, 1) for differ, all_ in zip(mismatched, compared, strict=True)]
    upper.bar(steps, shares, color="tab:red", width=0.6)
    if not any(mismatched):
        # Bars of no height look like a figure that nothing was drawn in.
        said = f"0 of {sum(compared)} tokens differ" if any(compared) else "nothing was compared"
        upper.text(
            0.5, 0.5, said, transform=upper.transAxes, ha="center", va="center", fontsize=13, backgroundcolor="white"
        )
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
