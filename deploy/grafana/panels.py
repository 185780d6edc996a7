"""The few kinds of panels and variables that the dashboards are made of."""

import string
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries, xychart
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import prometheus as model_prometheus
from grafana_foundation_sdk.models import xychart as model_xychart
from grafana_foundation_sdk.models.dashboard import DataSourceRef

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
# Runs of the auditor, and what the job says of itself through Ray.
AUDITOR = 'cluster=~"$Cluster", run_id=~"$run"'
RAY = 'cluster=~"$Cluster", SessionName=~"$SessionName", run_id=~"$run"'
# There from a run's first record on, or from its first step where it reports to no auditor.
_ANY_RUN = '__name__=~"auditor_newest_step|ray_rl_step"'


@dataclass(frozen=True, slots=True)
class Query:
    """An expression and the legend of its series."""

    expression: str
    legend: str = "{{run_id}} {{cluster}}"


def board(uid: str, title: str, description: str) -> dashboard.Dashboard:
    """An empty dashboard with the variables that Ray's own dashboards have too, and the run."""
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["rl-kernel"])
        .readonly()
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("Cluster", f"label_values({{{_ANY_RUN}}}, cluster)"))
        .with_variable(_variable("SessionName", 'label_values(ray_rl_step{cluster=~"$Cluster"}, SessionName)'))
        .with_variable(_variable("run", f'label_values({{{_ANY_RUN}, cluster=~"$Cluster"}}, run_id)'))
        .link(dashboard.DashboardLink("rl-kernel").type(model.DashboardLinkType.DASHBOARDS).tags(["rl-kernel"]))
    )


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .query(query)
        .datasource(DATASOURCE)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def lines(
    title: str,
    queries: Sequence[Query],
    description: str,
    unit: str = "short",
    span: int = 12,
    log: bool = False,
    stacked: bool = False,
) -> timeseries.Panel:
    """Curves over time. log: a symmetric logarithm, which has a place for zero."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(8)
        .line_width(1.5)
        .fill_opacity(20 if stacked else 0)
        .legend(common.VizLegendOptions().show_legend(True).display_mode(common_model.LegendDisplayMode.LIST))
    )
    if log:
        panel = panel.scale_distribution(_symlog())
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL))
    for index, query in enumerate(queries):
        panel = panel.with_target(_target(query, string.ascii_uppercase[index]))
    return panel


def by_step(title: str, metric: str, description: str, log: bool = False, span: int = 12) -> xychart.Panel:
    """One point a step of each run, over its own steps, so that runs of different hours lie on one another.

    metric: an expression with one series for each cluster and run. The value is the one that it had when the step was
    the last complete; it is looked at as often as the panel has points, however long the range.
    """
    step = f'(count_values by (cluster, run_id) ("step", auditor_step{{{AUDITOR}}}) > bool 0)'
    value = f"({metric}) * on (cluster, run_id) group_right () {step}"
    target = _target(Query(f"last_over_time(({value})[$__range:$__interval])"))
    transformations: tuple[tuple[str, dict[str, object]], ...] = (
        ("convertFieldType", {"conversions": [{"targetField": "step", "destinationType": "number"}], "fields": {}}),
        (
            "organize",
            {"excludeByName": {"Time": True}, "indexByName": {"step": 0, "Value": 1, "run_id": 2, "cluster": 3}},
        ),
        ("sortBy", {"sort": [{"field": "step"}]}),
        ("partitionByValues", {"fields": ["run_id", "cluster"], "keepFields": False}),
    )
    panel = (
        xychart.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(span)
        .height(9)
        .mapping(model_xychart.SeriesMapping.AUTO)
        .show(model_xychart.XYShowMode.POINTS)
        .legend(common.VizLegendOptions().show_legend(True).display_mode(common_model.LegendDisplayMode.LIST))
        .with_target(target.instant().format(model_prometheus.PromQueryFormat.TABLE))
    )
    for identifier, options in transformations:
        panel = panel.with_transformation(model.DataTransformerConfig(id_val=identifier, options=options))
    if log:
        # Of the value only: a step is no quantity for a logarithm.
        scale = model.DynamicConfigValue(id_val="custom.scaleDistribution", value=_symlog().build().to_json())
        panel = panel.override_by_name("Value", [scale])
    return panel


def _symlog() -> common.ScaleDistributionConfig:
    scale = common.ScaleDistributionConfig().type(common_model.ScaleDistribution.SYMLOG).log(10)
    return scale.linear_threshold(1e-9)


def number(
    title: str,
    what: str | Sequence[Query],
    description: str,
    unit: str = "short",
    bad_from: float | None = None,
    span: int = 4,
) -> stat.Panel:
    """One number a query; red from `bad_from` up. No series is said as such and is not a zero.

    what: the expression, where there is one and it needs no name; else each number is shown with its legend.
    """
    steps = [model.Threshold(value=None, color="green" if bad_from is not None else "text")]
    if bad_from is not None:
        steps.append(model.Threshold(value=bad_from, color="red"))
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(4)
        .no_value("nothing")
        .color_mode(common_model.BigValueColorMode.VALUE)
        .text_mode(_text_mode(what))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    )
    for index, query in enumerate([Query(what, title)] if isinstance(what, str) else what):
        panel = panel.with_target(_target(query, string.ascii_uppercase[index]))
    return panel


def _text_mode(what: str | Sequence[Query]) -> common_model.BigValueTextMode:
    return (
        common_model.BigValueTextMode.VALUE if isinstance(what, str) else common_model.BigValueTextMode.VALUE_AND_NAME
    )


def distribution(title: str, expression: str, description: str, span: int = 12) -> heatmap.Panel:
    """Buckets of a histogram over time."""
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(span)
        .height(8)
        .with_target(_target(Query(expression, "{{le}}")).format(model_prometheus.PromQueryFormat.HEATMAP))
    )


def _target(query: Query, ref_id: str = "A") -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref_id).expr(query.expression).legend_format(query.legend)
    return target.datasource(DATASOURCE)
