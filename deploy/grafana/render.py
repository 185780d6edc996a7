"""Draw a dashboard from its JSON and a real Prometheus with matplotlib: for machines without a Grafana, and for tests.

    python -m deploy.grafana.render --prometheus http://127.0.0.1:9090 --minutes 30 --out DIR

What comes out is labelled as drawn by this program. It follows positions, titles, units, stacking and symmetric
logarithms; it is no Grafana.
"""

import argparse
import json
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, PercentFormatter

from deploy.grafana.generate import FOLDER

LABEL = "drawn by deploy/grafana/render.py from the dashboard's JSON and Prometheus; not a Grafana screenshot"
_COLUMNS = 24
_POINTS = 240
Series = Sequence[Mapping[str, Any]]
QueryRange = Callable[[str, float, float, float], Series]


def expand(expression: str, variables: Mapping[str, str], interval: str) -> str:
    """The expression with Grafana's variables filled in; `.*` where a variable is not given."""
    filled = expression.replace("$__rate_interval", interval)
    for name in ("Cluster", "SessionName", "run"):
        filled = filled.replace(f"${name}", variables.get(name, ".*"))
    return filled


def render(
    dashboard: Mapping[str, Any], query: QueryRange, span: tuple[float, float], variables: Mapping[str, str]
) -> Figure:
    """A figure of all panels. span: start and end in Unix seconds."""
    panels = dashboard["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(18, 0.42 * rows + 1), layout=None)
    figure.suptitle(f"{dashboard['title']} — {LABEL}", fontsize=10, y=1 - 0.3 / (0.42 * rows + 1))
    for panel in panels:
        place = panel["gridPos"]
        bottom = 1 - (place["y"] + place["h"] + 1.4) / (rows + 2)
        if panel["type"] == "row":
            figure.text(0.01, bottom, panel["title"], fontsize=11, weight="bold")
            continue
        left, width = place["x"] / _COLUMNS, place["w"] / _COLUMNS
        height = place["h"] / (rows + 2)
        axes = figure.add_axes((left + 0.028, bottom + 0.3 * height, width - 0.036, 0.52 * height))
        axes.set_title(panel["title"], fontsize=8, loc="left")
        _draw(axes, panel, query, span, variables)
    return figure


def _draw(
    axes: Axes, panel: Mapping[str, Any], query: QueryRange, span: tuple[float, float], variables: Mapping[str, str]
) -> None:
    step = max(1.0, (span[1] - span[0]) / _POINTS)
    interval = f"{max(5, round(4 * step))}s"
    found = [
        (_legend(target.get("legendFormat", ""), series["metric"]), series["values"])
        for target in panel["targets"]
        for series in query(expand(target["expr"], variables, interval), span[0], span[1], step)
    ]
    axes.tick_params(labelsize=6)
    if not found:
        axes.text(0.5, 0.5, "no series", ha="center", va="center", fontsize=8, color="grey", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    draw = {"stat": _stat, "heatmap": _heatmap}.get(panel["type"], _lines)
    draw(axes, panel, found, span)


def _stat(axes: Axes, panel: Mapping[str, Any], found: Sequence[tuple[str, Any]], _: tuple[float, float]) -> None:
    value = float(found[0][1][-1][1])
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    colour = [s["color"] for s in steps if s["value"] is None or value >= s["value"]][-1]
    text = _formatter(panel)(value, None)
    axes.text(0.5, 0.4, text, ha="center", va="center", fontsize=16, color={"text": "black"}.get(colour, colour))
    axes.axis("off")


def _heatmap(
    axes: Axes, _panel: Mapping[str, Any], found: Sequence[tuple[str, Any]], span: tuple[float, float]
) -> None:
    ordered = sorted(found, key=lambda one: float(one[0].replace("+Inf", "inf")))
    times = sorted({point[0] for _, values in ordered for point in values})
    cells = np.zeros((len(ordered), len(times)))
    for row, (_name, values) in enumerate(ordered):
        for moment, value in values:
            cells[row, times.index(moment)] = float(value)
    cells = np.diff(cells, axis=0, prepend=0.0).clip(min=0)
    seconds = [moment - span[0] for moment in times]
    axes.pcolormesh(seconds, range(len(ordered)), np.log1p(cells), cmap="Purples", shading="nearest")
    axes.set_yticks(range(len(ordered)), [name for name, _ in ordered], fontsize=5)


def _lines(axes: Axes, panel: Mapping[str, Any], found: Sequence[tuple[str, Any]], span: tuple[float, float]) -> None:
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    base = np.zeros(0)
    for name, values in found:
        at = np.array([float(moment) for moment, _ in values]) - span[0]
        height = np.array([float(value) for _, value in values])
        if stacked and len(base) in (0, len(height)):
            base = base if len(base) else np.zeros(len(height))
            axes.fill_between(at, base, base + height, alpha=0.3)
            height = base = base + height
        axes.plot(at, height, linewidth=1.2, label=name, marker="." if len(at) < 8 else None)
    if custom.get("scaleDistribution", {}).get("type") == "symlog":
        axes.set_yscale("symlog", linthresh=1e-9)
    axes.yaxis.set_major_formatter(_formatter(panel))
    axes.set_xlim(0, span[1] - span[0])
    axes.set_xlabel("seconds", fontsize=6)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=5, loc="upper left", ncols=2)


def _formatter(panel: Mapping[str, Any]) -> Any:
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    if unit == "percentunit":
        return PercentFormatter(1.0)
    if unit in ("s", "bytes", "cps"):
        return EngFormatter(unit={"s": "s", "bytes": "B", "cps": "/s"}[unit])
    return FuncFormatter(lambda value, _: f"{value:,.6g}")


def _legend(template: str, labels: Mapping[str, str]) -> str:
    text = template
    for name, value in labels.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def prometheus(base: str) -> QueryRange:
    """Ask the Prometheus at `base`."""

    def query(expression: str, start: float, end: float, step: float) -> Series:
        data = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": step}).encode()
        with urllib.request.urlopen(f"{base}/api/v1/query_range", data, timeout=60) as answer:
            result: Series = json.loads(answer.read())["data"]["result"]
        return result

    return query


def render_all(query: QueryRange, span: tuple[float, float], out: Path, variables: Mapping[str, str]) -> list[Path]:
    """Draw every dashboard into `out`; the files."""
    mpl.use("Agg")
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for file in sorted(FOLDER.glob("*.json")):
        path = out / f"dashboard-{file.stem}.png"
        render(json.loads(file.read_text("utf-8")), query, span, variables).savefig(path, dpi=90)
        written.append(path)
    return written


def main(arguments: Sequence[str]) -> int:
    """Draw every dashboard as the last minutes were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="base URL")
    parser.add_argument("--minutes", type=float, default=30, help="how far back")
    parser.add_argument("--run", default=".*", help="regular expression of run ids")
    parser.add_argument("--out", type=Path, default=Path("dashboards"), help="folder for the PNGs")
    options = parser.parse_args(arguments)
    now = time.time()
    span = (now - 60 * options.minutes, now)
    for path in render_all(prometheus(options.prometheus), span, options.out, {"run": options.run}):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
