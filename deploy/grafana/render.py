"""Draw a dashboard from its JSON and a real Prometheus with matplotlib: for machines without a Grafana, and for tests.

    python -m deploy.grafana.render --prometheus http://127.0.0.1:9090 --minutes 30 --out DIR

What comes out is labelled as drawn by this program. It follows positions, titles, units, stacking and symmetric
logarithms; it is no Grafana.
"""

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, PercentFormatter, SymmetricalLogLocator

FOLDER = Path(__file__).parent / "dashboards"
LABEL = "drawn by deploy/grafana/render.py from the dashboard's JSON and Prometheus; not a Grafana screenshot"
_POINTS = 240
# Inches: of a column and a row of Grafana's grid, of the heading, and of the parts of a panel.
_COLUMN, _ROW, _HEAD = 0.6, 0.36, 0.6
_LEFT, _RIGHT, _TITLE, _TICKS, _LEGEND = 0.75, 0.2, 0.42, 0.3, 0.17
_LEGEND_CHARACTERS = 15  # in an inch of legend
_LEGEND_LINES = 4  # up to which every series is named
Series = Sequence[Mapping[str, Any]]
QueryRange = Callable[[str, float, float, float], Series]
Found = Sequence[tuple[str, Mapping[str, str], Sequence[tuple[float, str]]]]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure, and the titles of the panels for which Prometheus had no series."""

    figure: Figure
    empty: tuple[str, ...]


def expand(
    expression: str, variables: Mapping[str, str], interval: str, span: str = "1h", resolution: str = "1s"
) -> str:
    """The expression with Grafana's variables filled in; `.*` where a variable is not given."""
    filled = expression.replace("$__rate_interval", interval).replace("$__range", span)
    filled = filled.replace("$__interval", resolution)
    for name in ("Cluster", "SessionName", "run"):
        filled = filled.replace(f"${name}", variables.get(name, ".*"))
    return filled


def render(
    dashboard: Mapping[str, Any], query: QueryRange, span: tuple[float, float], variables: Mapping[str, str]
) -> Picture:
    """All panels in their places. span: start and end in Unix seconds."""
    panels = dashboard["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    size = (24 * _COLUMN, _ROW * rows + _HEAD)
    figure = Figure(figsize=size, layout=None, facecolor="#f4f5f5")
    figure.text(0.01, 1 - 0.3 / size[1], dashboard["title"], fontsize=16, weight="bold")
    figure.text(0.99, 1 - 0.3 / size[1], LABEL, fontsize=9, color="#666666", ha="right")
    empty = []
    for panel in panels:
        place = panel["gridPos"]
        box = (place["x"] * _COLUMN, size[1] - _HEAD - (place["y"] + place["h"]) * _ROW)
        if panel["type"] == "row":
            figure.text(0.01, (box[1] + 0.1) / size[1], panel["title"], fontsize=13, weight="bold")
            continue
        found = _ask(panel, query, span, variables)
        if not found:
            empty.append(panel["title"])
        _panel(figure, panel, box, found, span)
    return Picture(figure, tuple(empty))


def _ask(panel: Mapping[str, Any], query: QueryRange, span: tuple[float, float], variables: Mapping[str, str]) -> Found:
    """Legend, labels and points of every series of a panel."""
    step = max(1.0, (span[1] - span[0]) / _POINTS)
    interval, whole = f"{max(5, round(4 * step))}s", f"{math.ceil(span[1] - span[0])}s"
    start = span[1] if panel["type"] == "xychart" else span[0]
    return [
        (_legend(target.get("legendFormat", ""), series["metric"]), series["metric"], series["values"])
        for target in panel["targets"]
        for series in query(
            expand(target["expr"], variables, interval, whole, f"{math.ceil(step)}s"), start, span[1], step
        )
    ]


def _panel(
    figure: Figure, panel: Mapping[str, Any], box: tuple[float, float], found: Found, span: tuple[float, float]
) -> None:
    """A panel with its lower left corner at `box`, in inches."""
    width, height = panel["gridPos"]["w"] * _COLUMN, panel["gridPos"]["h"] * _ROW
    total = figure.get_size_inches()

    def put(left: float, bottom: float, wide: float, high: float) -> Axes:
        place = ((box[0] + left) / total[0], (box[1] + bottom) / total[1], wide / total[0], high / total[1])
        return figure.add_axes(place)

    frame = put(0.05, 0.05, width - 0.1, height - 0.1)
    frame.set(xticks=[], yticks=[], facecolor="white")
    for side in frame.spines.values():
        side.set_color("#d0d0d0")
    title = panel["title"]
    frame.text(0.1 / width, 1 - 0.24 / height, title, fontsize=10, weight="bold", transform=frame.transAxes)
    draw = {"stat": _stat, "heatmap": _heatmap, "xychart": _by_step}.get(panel["type"], _lines)
    if not found:
        style: dict[str, Any] = {"ha": "center", "va": "center", "color": "#888888"}
        frame.text(0.5, 0.45, "nothing", fontsize=11, transform=frame.transAxes, **style)
        return
    names = [] if draw in (_stat, _heatmap) else _named(found)
    columns = max(1, int((width - 0.3) / (0.55 + max([len(name) for name in names], default=1) / _LEGEND_CHARACTERS)))
    under = (
        _TICKS + (0.15 if draw is _by_step else 0) + (_LEGEND * math.ceil(len(names) / columns) + 0.1 if names else 0)
    )
    left = _LEFT + (0.3 if draw is _heatmap else 0)
    axes = put(left, under, width - left - _RIGHT, max(0.3, height - under - _TITLE))
    axes.tick_params(labelsize=9)
    draw(axes, panel, found, span)
    if names:
        handles = [line for line in axes.get_lines() if line.get_label() in names]
        handles += [Line2D([], [], color="none", label=name) for name in names[len(handles) :]]
        anchor = (box[0] / total[0] + 0.12 / total[0], (box[1] + 0.06) / total[1])
        legend = {"loc": "lower left", "bbox_to_anchor": anchor, "bbox_transform": figure.transFigure, "frameon": False}
        axes.legend(handles=handles, fontsize=8, ncols=columns, borderpad=0, labelspacing=0.25, **legend)


def _named(found: Found) -> list[str]:
    """What the legend says: every series, or where that is too much those that are not zero all the time."""
    names = list(dict.fromkeys(name for name, _, _ in found))
    moving = {name for name, _, values in found if any(float(value) for _, value in values)}
    if len(names) <= _LEGEND_LINES:
        return names
    kept = [name for name in names if name in moving]
    return [*kept, f"{len(names) - len(kept)} more, all at zero"] if len(kept) < len(names) else kept


def _stat(axes: Axes, panel: Mapping[str, Any], found: Found, _: tuple[float, float]) -> None:
    values = [(name, float(points[-1][1])) for name, _, points in found]
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    colour = [s["color"] for s in steps if s["value"] is None or max(value for _, value in values) >= s["value"]][-1]
    shown = {"text": "black", "green": "#1a7f37", "red": "#c4162a"}[colour]
    number = _formatter(panel)
    bare = panel["options"].get("textMode") == "value"
    text = "\n".join(number(v, None) if bare else f"{n}: {number(v, None)}" for n, v in values)
    axes.text(0.42, 0.5, text, ha="center", va="center", fontsize=24 if len(values) == 1 else 15, color=shown)
    axes.axis("off")


def _heatmap(axes: Axes, _panel: Mapping[str, Any], found: Found, span: tuple[float, float]) -> None:
    ordered = sorted(found, key=lambda one: float(one[0].replace("+Inf", "inf")))
    times = sorted({point[0] for _, _, values in ordered for point in values})
    cells = np.zeros((len(ordered), len(times)))
    for row, (_name, _labels, values) in enumerate(ordered):
        for moment, value in values:
            cells[row, times.index(moment)] = float(value)
    cells = np.diff(cells, axis=0, prepend=0.0).clip(min=0)
    seconds = [moment - span[0] for moment in times]
    axes.pcolormesh(seconds, range(len(ordered)), np.log1p(cells), cmap="Purples", shading="nearest")
    axes.set_yticks(
        range(len(ordered)), [f"≤ {float(name):,.0f}" if name != "+Inf" else "more" for name, _, _ in ordered]
    )
    _time_axis(axes, span)


def _lines(axes: Axes, panel: Mapping[str, Any], found: Found, span: tuple[float, float]) -> None:
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    times = sorted({float(moment) for _, _, values in found for moment, _ in values})
    at = np.array(times) - span[0]
    base = np.zeros(len(times))
    # One curve a run: a run has its colour in every panel.
    runs = sorted({labels.get("run_id", "") for _, labels, _ in found})
    for name, labels, values in found:
        given = {float(moment): float(value) for moment, value in values}
        height = np.array([given.get(moment, np.nan) for moment in times])
        if stacked:
            axes.fill_between(at, base, base + height, alpha=0.3)
            height, base = base + height, base + np.nan_to_num(height)
        colour = f"C{runs.index(labels['run_id'])}" if len(runs) == len(found) and "run_id" in labels else None
        axes.plot(at, height, linewidth=1.5, label=name, color=colour, marker="." if len(given) < 8 else None)
    _time_axis(axes, span)
    _value_axis(axes, panel, custom.get("scaleDistribution", {}).get("type") == "symlog")


def _by_step(axes: Axes, panel: Mapping[str, Any], found: Found, _: tuple[float, float]) -> None:
    for run in sorted({name for name, _, _ in found}):
        points = sorted((float(labels["step"]), float(values[-1][1])) for name, labels, values in found if name == run)
        axes.plot(*zip(*points, strict=True), linestyle="none", marker="o", markersize=3, label=run)
    axes.set_xlabel("step", fontsize=9, labelpad=1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    overrides = panel["fieldConfig"].get("overrides", [])
    _value_axis(axes, panel, any("symlog" in str(each["properties"]) for each in overrides))


def _time_axis(axes: Axes, span: tuple[float, float]) -> None:
    axes.set_xlim(0, span[1] - span[0])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:.0f} s"))


def _value_axis(axes: Axes, panel: Mapping[str, Any], symlog: bool) -> None:
    values = np.nan_to_num(np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axes.get_lines()]))
    if symlog:
        axes.set_yscale("symlog", linthresh=1e-9)
        axes.set_ylim(bottom=-3e-10)
        axes.yaxis.set_major_locator(SymmetricalLogLocator(base=1000, linthresh=1e-9))
    elif not values.any():
        axes.set_ylim(-0.05, 1)
    if not symlog and (values == np.round(values)).all():
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.yaxis.set_major_formatter(_formatter(panel))
    axes.grid(alpha=0.3)


def _formatter(panel: Mapping[str, Any]) -> Any:
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    if unit == "percentunit":
        return PercentFormatter(1.0)
    if unit in ("s", "bytes", "cps"):
        scaled = EngFormatter(unit={"s": "s", "bytes": "B", "cps": "/s"}[unit])
        return FuncFormatter(lambda value, _: scaled(float(f"{value:.3g}")))
    return FuncFormatter(lambda value, _: f"{value:,.9g}")


def _legend(template: str, labels: Mapping[str, str]) -> str:
    """A label that a series lacks is empty."""
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), template).strip()


def prometheus(base: str) -> QueryRange:
    """Ask the Prometheus at `base`; URLError where it is none."""

    def query(expression: str, start: float, end: float, step: float) -> Series:
        data = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": step}).encode()
        try:
            with urllib.request.urlopen(f"{base}/api/v1/query_range", data, timeout=60) as answer:
                result: Series = json.loads(answer.read())["data"]["result"]
        except (ValueError, LookupError, TypeError) as error:
            raise urllib.error.URLError(error) from None
        return result

    return query


def render_all(
    query: QueryRange, span: tuple[float, float], out: Path, variables: Mapping[str, str]
) -> dict[Path, tuple[str, ...]]:
    """Draw every dashboard into `out`; the files, each with the titles of its panels that have no series."""
    mpl.use("Agg")
    out.mkdir(parents=True, exist_ok=True)
    written = {}
    for file in sorted(FOLDER.glob("*.json")):
        path = out / f"dashboard-{file.stem}.png"
        picture = render(json.loads(file.read_text("utf-8")), query, span, variables)
        picture.figure.savefig(path, dpi=100)
        written[path] = picture.empty
    return written


def main(arguments: Sequence[str]) -> int:
    """Draw every dashboard as the last minutes were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="base URL")
    parser.add_argument("--minutes", type=float, default=30, help="how far back")
    parser.add_argument("--run", default=".*", help="regular expression of run ids")
    parser.add_argument("--out", type=Path, default=Path("dashboards"), help="folder for the PNGs")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes < math.inf:
        parser.error(f"--minutes {options.minutes:g}: a number above 0 is expected")
    now = time.time()
    span = (now - 60 * options.minutes, now)
    try:
        drawn = render_all(prometheus(options.prometheus), span, options.out, {"run": options.run})
    except urllib.error.URLError as error:
        print(f"error: {options.prometheus} does not answer as a Prometheus: {error}", file=sys.stderr)
        return 2
    for path, empty in drawn.items():
        print(path, f"(nothing to show in: {', '.join(empty)})" if empty else "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
