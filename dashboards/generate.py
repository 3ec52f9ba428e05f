"""Generates wattwatch.json, the Grafana dashboard.

    python -m dashboards.generate

Panels name metrics through `metric`, which accepts only those that the exporter serves: a renamed metric fails here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from wattwatch.watcher.detection.model import JobState
from wattwatch.watcher.web.metrics import METRICS

DASHBOARD_FILE: Final = Path(__file__).with_name("wattwatch.json")
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
# Units of metrics.toml, and Grafana's names for them.
GRAFANA_UNITS: Final = {
    "watts": "watt",
    "ratio": "percentunit",
    "bytes": "bytes",
    "celsius": "celsius",
    "joules": "joule",
    "seconds": "s",
    "timestamp": "dateTimeFromNow",
    "tokens_per_second": "short",
    "none": "short",
}
STATE_COLORS: Final = {
    JobState.STARTING: "#8ab8ff",
    JobState.COMPUTING: "#37872d",
    JobState.COMMUNICATING: "#3274d9",
    JobState.STARVING: "#e0b400",
    JobState.CHECKPOINTING: "#8f3bb8",
    JobState.WAITING: "#5f7191",
    JobState.IDLE: "#9fa7b3",
    JobState.HUNG: "#c4162a",
    JobState.CRASHED: "#7a0c2e",
    JobState.COMPLETED: "#96d98d",
    JobState.UNKNOWN: "#464c54",
}


@dataclass(frozen=True, slots=True)
class PromQuery:
    """One PromQL expression and the legend of its series."""

    expression: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True, slots=True)
class DashboardPanel:
    """One panel. Its width is in Grafana's grid of 24 columns."""

    title: str
    description: str
    kind: str  # stat, timeseries, state-timeline, table, heatmap
    queries: tuple[PromQuery, ...]
    unit: str
    width: int
    height: int
    options: dict[str, Any]
    defaults: dict[str, Any]


def metric(name: str, matchers: str = "") -> str:
    """A selector of an existing metric, filtered by the dashboard's variables if the metric has their labels."""
    known = METRICS[f"wattwatch_{name}"]
    variables = [f'{label}=~"${label}"' for label in ("train_job", "node") if label in known.labels]
    inside = ",".join([*variables, *([matchers] if matchers else [])])
    return known.name + (f"{{{inside}}}" if inside else "")


def grafana_unit(name: str) -> str:
    return GRAFANA_UNITS[METRICS[f"wattwatch_{name}"].unit]


def time_series_panel(
    title: str,
    description: str,
    queries: tuple[PromQuery, ...],
    unit: str,
    width: int = 12,
    height: int = 8,
    **custom: Any,
) -> DashboardPanel:
    """A panel of curves over time."""
    return DashboardPanel(
        title,
        description,
        "timeseries",
        queries,
        unit,
        width,
        height,
        {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        {"custom": {"lineWidth": 1, "fillOpacity": 0, "showPoints": "never", "spanNulls": False, **custom}},
    )


def stat_panel(
    title: str, description: str, expression: str, unit: str, steps: list[tuple[float | None, str]]
) -> DashboardPanel:
    """A panel of one number, colored by thresholds."""
    return DashboardPanel(
        title,
        description,
        "stat",
        (PromQuery(expression, instant=True),),
        unit,
        4,
        4,
        {"colorMode": "background", "graphMode": "none", "reduceOptions": {"calcs": ["lastNotNull"]}},
        {
            "thresholds": {
                "mode": "absolute",
                "steps": [{"value": value, "color": color} for value, color in steps],
            }
        },
    )


def state_number_query() -> str:
    """PromQL for the position of a job's state in `JobState`. Every state has a series; the current one is 1."""
    terms = []
    for i, state in enumerate(JobState, start=1):
        selector = metric("job_state", f'state="{state.value}"')
        terms.append(f"{i} * max by (train_job) ({selector})")
    return " + ".join(terms)


GREEN_THEN_RED: Final[list[tuple[float | None, str]]] = [(None, "green"), (1, "red")]


def overview_panels() -> list[DashboardPanel]:
    return [
        stat_panel(
            "Open alerts",
            "Open alerts that are reported to receivers, about the selected jobs and about the watcher itself.",
            'sum(wattwatch_alerts_firing{train_job=~"$train_job|"}) or vector(0)',
            "short",
            GREEN_THEN_RED,
        ),
        stat_panel(
            "Jobs hung or crashed",
            "Jobs that are hung or crashed now.",
            "sum(" + metric("job_state", 'state=~"hung|crashed"') + ")",
            "short",
            GREEN_THEN_RED,
        ),
        stat_panel(
            "Nodes not answering",
            "Nodes that do not answer over SSH.",
            f"sum({metric('node_up')} == bool 0)",
            "short",
            GREEN_THEN_RED,
        ),
        stat_panel(
            "GPU-hours lost",
            "GPU time without useful work in the selected time range, summed over all alerts.",
            f"sum(increase({metric('job_wasted_gpu_seconds_total')}[$__range])) / 3600 or vector(0)",
            "short",
            [(None, "green"), (1, "orange"), (10, "red")],
        ),
        stat_panel(
            "Watcher lost its network",
            "1 if the watcher lost contact with most nodes at the same time. Jobs on these nodes are not evaluated.",
            "max(" + metric("blind") + ")",
            "short",
            GREEN_THEN_RED,
        ),
        stat_panel(
            "Oldest undelivered message",
            "How long the oldest alert message has been waiting for delivery.",
            "max(" + metric("outbox_oldest_seconds") + ")",
            "s",
            [(None, "green"), (60, "orange"), (300, "red")],
        ),
        DashboardPanel(
            "State of each job",
            "One band per job. Power and utilization show the state; progress shows whether the state is a problem.",
            "state-timeline",
            (PromQuery(state_number_query(), "{{train_job}}"),),
            "short",
            24,
            8,
            {"mergeValues": True, "showValue": "auto", "rowHeight": 0.8, "legend": {"displayMode": "list"}},
            {
                "mappings": [
                    {
                        "type": "value",
                        "options": {
                            str(i): {"text": state.value, "color": STATE_COLORS[state], "index": i}
                            for i, state in enumerate(JobState, start=1)
                        },
                    }
                ],
                "custom": {"fillOpacity": 85, "lineWidth": 0},
            },
        ),
    ]


def job_panels() -> list[DashboardPanel]:
    return [
        time_series_panel(
            "GPU power by rank",
            "Power is high and even while a job computes, and low and flat in a hang. Compare it with utilization.",
            (PromQuery(metric("gpu_power_watts"), "{{node}} {{gpu}} rank {{rank}}"),),
            grafana_unit("gpu_power_watts"),
        ),
        time_series_panel(
            "GPU utilization by rank",
            "Utilization is 100 % in a hung collective too. This is why power is monitored.",
            (PromQuery(metric("gpu_utilization_ratio"), "{{node}} {{gpu}} rank {{rank}}"),),
            grafana_unit("gpu_utilization_ratio"),
            max=1,
        ),
        time_series_panel(
            "Spread of utilization over ranks",
            "Standard deviation over ranks: near 0 if all ranks do the same, high if some ranks wait for data.",
            (PromQuery(f"stddev by (train_job) ({metric('gpu_utilization_ratio')})", "{{train_job}}"),),
            "percentunit",
        ),
        time_series_panel(
            "Tokens per second",
            "Throughput as the job itself reports it.",
            (PromQuery(metric("job_tokens_per_second"), "{{train_job}}"),),
            grafana_unit("job_tokens_per_second"),
        ),
        time_series_panel(
            "Time since the last step",
            "The curve is a sawtooth while the job makes steps. It rises steadily if the job makes no steps.",
            (PromQuery(metric("job_progress_age_seconds"), "{{train_job}}"),),
            grafana_unit("job_progress_age_seconds"),
        ),
        time_series_panel(
            "Progress",
            "Current step divided by planned steps.",
            (PromQuery(f"{metric('job_step')} / {metric('job_steps_planned')}", "{{train_job}}"),),
            "percentunit",
        ),
        time_series_panel(
            "Age of the newest complete checkpoint",
            "If the job crashed now, the work since this checkpoint would be lost.",
            (PromQuery(metric("job_checkpoint_age_seconds"), "{{train_job}}"),),
            grafana_unit("job_checkpoint_age_seconds"),
        ),
        time_series_panel(
            "GPUs without useful work",
            "Number of GPUs without useful work, averaged over 5 min, by alert.",
            (
                PromQuery(
                    f"sum by (train_job, alert) (rate({metric('job_wasted_gpu_seconds_total')}[5m]))",
                    "{{train_job}} {{alert}}",
                ),
            ),
            "short",
        ),
        time_series_panel(
            "Power drawn without useful work",
            "Power of GPUs without useful work, averaged over 5 min, by alert. Counts only GPUs whose power was read.",
            (
                PromQuery(
                    f"sum by (train_job, alert) (rate({metric('job_wasted_energy_joules_total')}[5m]))",
                    "{{train_job}} {{alert}}",
                ),
            ),
            grafana_unit("gpu_power_watts"),
        ),
        time_series_panel(
            "GPU memory used",
            "For each job, the highest and the lowest memory use of its GPUs.",
            (
                PromQuery(f"max by (train_job) ({metric('gpu_memory_used_bytes')})", "{{train_job}} highest"),
                PromQuery(f"min by (train_job) ({metric('gpu_memory_used_bytes')})", "{{train_job}} lowest"),
            ),
            grafana_unit("gpu_memory_used_bytes"),
        ),
        time_series_panel(
            "Power per job",
            "Power of all GPUs of the job, from their energy counters, averaged over 5 min.",
            (PromQuery(f"sum by (train_job) (rate({metric('gpu_energy_joules_total')}[5m]))", "{{train_job}}"),),
            "watt",
        ),
    ]


def watcher_panels() -> list[DashboardPanel]:
    return [
        time_series_panel(
            "Age of each node's data",
            "The probe on each node sends a line every interval. If a curve rises, that node has stopped sending.",
            (PromQuery(metric("probe_age_seconds"), "{{node}}"),),
            grafana_unit("probe_age_seconds"),
        ),
        time_series_panel(
            "Nodes by status",
            "Number of nodes in each status, such as ok, unreachable or driver down.",
            (PromQuery(f"sum by (status) ({metric('node_status')})", "{{status}}"),),
            "short",
            fillOpacity=30,
            stacking={"mode": "normal"},
        ),
        time_series_panel(
            "Detection delay",
            "Time from the beginning of a problem to its alert: median and 95th percentile over the last hour.",
            tuple(
                PromQuery(
                    f"histogram_quantile({share}, sum by (le) (rate(wattwatch_detection_delay_seconds_bucket[1h])))",
                    name,
                )
                for share, name in (("0.5", "median"), ("0.95", "95th percentile"))
            ),
            "s",
        ),
        time_series_panel(
            "Alert messages",
            "Messages accepted by receivers, and failed delivery attempts, per minute.",
            (
                PromQuery(
                    f"sum by (receiver) (rate({metric('notifications_total')}[5m])) * 60", "{{receiver}} accepted"
                ),
                PromQuery(
                    f"sum by (receiver, reason) (rate({metric('notification_failures_total')}[5m])) * 60",
                    "{{receiver}} failed: {{reason}}",
                ),
            ),
            "short",
        ),
        time_series_panel(
            "Tick duration",
            "Duration of ticks that evaluated a job (95th percentile), delay of the last tick, age of the snapshot.",
            (
                PromQuery(
                    "histogram_quantile(0.95, sum by (le) (rate(wattwatch_tick_duration_seconds_bucket[5m])))",
                    "95th percentile",
                ),
                PromQuery(metric("tick_late_seconds"), "started late"),
                PromQuery(metric("snapshot_age_seconds"), "snapshot age"),
            ),
            "s",
        ),
        time_series_panel(
            "Resources of the watcher",
            "CPU cores used, and number of threads.",
            (
                PromQuery("rate(process_cpu_seconds_total[5m]) and on(instance) wattwatch_build_info", "CPU cores"),
                PromQuery(metric("threads"), "threads"),
            ),
            "short",
        ),
    ]


SECTIONS: Final = (("Now", overview_panels), ("Jobs", job_panels), ("Nodes and watcher", watcher_panels))


def dashboard() -> dict[str, Any]:
    """The dashboard in the JSON that Grafana imports."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, section in SECTIONS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            }
        )
        y += 1
        x = row_height = 0
        for panel in section():
            if x + panel.width > 24:
                x, y, row_height = 0, y + row_height, 0
            panels.append(render_panel(panel, len(panels) + 1, x, y))
            x, row_height = x + panel.width, max(row_height, panel.height)
        y += row_height
    return {
        "uid": "wattwatch",
        "title": "wattwatch",
        "description": "Multi-node GPU training, monitored by wattwatch. Generated by dashboards/generate.py.",
        "tags": ["wattwatch", "gpu", "training"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "annotations": {"list": [alert_annotation()]},
        "templating": {"list": variables()},
        "panels": panels,
    }


def render_panel(panel: DashboardPanel, panel_id: int, x: int, y: int) -> dict[str, Any]:
    return {
        "id": panel_id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend or "__auto",
                "instant": query.instant,
                "range": not query.instant,
            }
            for i, query in enumerate(panel.queries)
        ],
        "options": panel.options,
        "fieldConfig": {"defaults": {"unit": panel.unit, **panel.defaults}, "overrides": []},
    }


def variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0},
        label_variable("train_job", "Job", METRICS["wattwatch_job_state"].name),
        label_variable("node", "Node", METRICS["wattwatch_node_up"].name),
    ]


def label_variable(label: str, title: str, name: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": title,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({name}, {label})", "refId": label},
        "definition": f"label_values({name}, {label})",
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "sort": 1,
        "current": {"text": "All", "value": "$__all"},
    }


def alert_annotation() -> dict[str, Any]:
    """Marks the times of open alerts in all panels."""
    return {
        "name": "alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": f"max by (train_job, alert) ({metric('alerts_firing')}) > 0",
        "titleFormat": "{{alert}}",
        "textFormat": "{{train_job}}",
        "step": "30s",
    }


def dashboard_json() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Overwrite wattwatch.json."""
    DASHBOARD_FILE.write_text(dashboard_json(), "utf-8")


if __name__ == "__main__":
    main()
