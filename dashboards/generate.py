"""Writes wattwatch.json, the Grafana dashboard: plain data in, plain JSON out.

    python -m dashboards.generate

Panels name metrics through `metric`, which knows only those that the exporter serves, so a renamed metric fails here.
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
# Units of the table -> Grafana's names of them.
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
    """One PromQL expression, and how its series are named."""

    expression: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True, slots=True)
class DashboardPanel:
    """One panel; the width is in Grafana's 24 columns."""

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
    """A selector of a metric that exists, narrowed by the dashboard's variables as far as it has their labels."""
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
    """Curves over time."""
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
    """One figure, coloured by thresholds."""
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
                "steps": [{"value": value, "color": colour} for value, colour in steps],
            }
        },
    )


def state_number_query() -> str:
    """The job's state as its number in the list of states: all states are always there, one of them with 1."""
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
            "Alert episodes that people are told about, over the chosen jobs and the watcher itself.",
            'sum(wattwatch_alerts_firing{train_job=~"$train_job|"}) or vector(0)',
            "short",
            GREEN_THEN_RED,
        ),
        stat_panel(
            "Jobs hung or crashed",
            "Jobs whose state is hung or crashed now.",
            "sum(" + metric("job_state", 'state=~"hung|crashed"') + ")",
            "short",
            GREEN_THEN_RED,
        ),
        stat_panel(
            "Nodes not answering",
            "Nodes whose probe cannot be heard over SSH.",
            f"sum({metric('node_up')} == bool 0)",
            "short",
            GREEN_THEN_RED,
        ),
        stat_panel(
            "GPU-hours lost",
            "GPU time without useful work in the chosen range, by all causes the watcher names.",
            f"sum(increase({metric('job_wasted_gpu_seconds_total')}[$__range])) / 3600 or vector(0)",
            "short",
            [(None, "green"), (1, "orange"), (10, "red")],
        ),
        stat_panel(
            "Watcher blind",
            "1: most nodes went silent together, so nothing is concluded about any job.",
            "max(" + metric("blind") + ")",
            "short",
            GREEN_THEN_RED,
        ),
        stat_panel(
            "Oldest message waiting",
            "How long the oldest alert message has not reached its receiver.",
            "max(" + metric("outbox_oldest_seconds") + ")",
            "s",
            [(None, "green"), (60, "orange"), (300, "red")],
        ),
        DashboardPanel(
            "State of each job",
            "One band a job. Power and shape say which state, progress says whether it is one to worry about.",
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
            "Board power, rank by rank",
            "Compute is high and even, a hang is flat at the floor. Compare with utilisation beside it.",
            (PromQuery(metric("gpu_power_watts"), "{{node}} {{gpu}} rank {{rank}}"),),
            grafana_unit("gpu_power_watts"),
        ),
        time_series_panel(
            "Utilisation, rank by rank",
            "Reads 100 % in a hung collective too: that is why power is watched.",
            (PromQuery(metric("gpu_utilization_ratio"), "{{node}} {{gpu}} rank {{rank}}"),),
            grafana_unit("gpu_utilization_ratio"),
            max=1,
        ),
        time_series_panel(
            "Spread of utilisation over ranks",
            "Standard deviation: near 0 when all ranks do the same, high when they starve for data.",
            (PromQuery(f"stddev by (train_job) ({metric('gpu_utilization_ratio')})", "{{train_job}}"),),
            "percentunit",
        ),
        time_series_panel(
            "Tokens per second",
            "As the job itself reports it.",
            (PromQuery(metric("job_tokens_per_second"), "{{train_job}}"),),
            grafana_unit("job_tokens_per_second"),
        ),
        time_series_panel(
            "Time since the last step",
            "A sawtooth while the job advances; a ramp when it does not.",
            (PromQuery(metric("job_progress_age_seconds"), "{{train_job}}"),),
            grafana_unit("job_progress_age_seconds"),
        ),
        time_series_panel(
            "Share of planned steps done",
            "Step over planned steps.",
            (PromQuery(f"{metric('job_step')} / {metric('job_steps_planned')}", "{{train_job}}"),),
            "percentunit",
        ),
        time_series_panel(
            "Age of the newest complete checkpoint",
            "What a crash at this moment would lose.",
            (PromQuery(metric("job_checkpoint_age_seconds"), "{{train_job}}"),),
            grafana_unit("job_checkpoint_age_seconds"),
        ),
        time_series_panel(
            "GPUs lost to each cause",
            "Boards that do no useful work, averaged over 5 min, by the alert that says why.",
            (
                PromQuery(
                    f"sum by (train_job, alert) (rate({metric('job_wasted_gpu_seconds_total')}[5m]))",
                    "{{train_job}} {{alert}}",
                ),
            ),
            "short",
        ),
        time_series_panel(
            "Power drawn for nothing",
            "What those boards draw, averaged over 5 min, by the alert that says why; of boards that are read.",
            (
                PromQuery(
                    f"sum by (train_job, alert) (rate({metric('job_wasted_energy_joules_total')}[5m]))",
                    "{{train_job}} {{alert}}",
                ),
            ),
            grafana_unit("gpu_power_watts"),
        ),
        time_series_panel(
            "Memory in use",
            "Highest and lowest board of each job.",
            (
                PromQuery(f"max by (train_job) ({metric('gpu_memory_used_bytes')})", "{{train_job}} highest"),
                PromQuery(f"min by (train_job) ({metric('gpu_memory_used_bytes')})", "{{train_job}} lowest"),
            ),
            grafana_unit("gpu_memory_used_bytes"),
        ),
        time_series_panel(
            "Energy per job",
            "From the boards' own energy counters: watts averaged over 5 min, summed over boards.",
            (PromQuery(f"sum by (train_job) (rate({metric('gpu_energy_joules_total')}[5m]))", "{{train_job}}"),),
            "watt",
        ),
    ]


def watcher_panels() -> list[DashboardPanel]:
    return [
        time_series_panel(
            "Age of each node's last line",
            "The probe speaks once an interval; a rising line is a node that went silent.",
            (PromQuery(metric("probe_age_seconds"), "{{node}}"),),
            grafana_unit("probe_age_seconds"),
        ),
        time_series_panel(
            "Nodes by status",
            "Why nodes cannot be read: unreachable, driver down, a query that hangs, and so on.",
            (PromQuery(f"sum by (status) ({metric('node_status')})", "{{status}}"),),
            "short",
            fillOpacity=30,
            stacking={"mode": "normal"},
        ),
        time_series_panel(
            "From condition to alert",
            "Half and 95 % of alerts came within this time of what they name, over the last hour.",
            tuple(
                PromQuery(
                    f"histogram_quantile({share}, sum by (le) (rate(wattwatch_detection_delay_seconds_bucket[1h])))",
                    name,
                )
                for share, name in (("0.5", "half"), ("0.95", "95 %"))
            ),
            "s",
        ),
        time_series_panel(
            "Messages",
            "Taken by receivers, and attempts that failed, per minute.",
            (
                PromQuery(f"sum by (receiver) (rate({metric('notifications_total')}[5m])) * 60", "{{receiver}} taken"),
                PromQuery(
                    f"sum by (receiver, reason) (rate({metric('notification_failures_total')}[5m])) * 60",
                    "{{receiver}} failed: {{reason}}",
                ),
            ),
            "short",
        ),
        time_series_panel(
            "How long a tick takes",
            "95 % of the ticks that judged something; and how late the last one began.",
            (
                PromQuery(
                    "histogram_quantile(0.95, sum by (le) (rate(wattwatch_tick_duration_seconds_bucket[5m])))",
                    "95 % of ticks",
                ),
                PromQuery(metric("tick_late_seconds"), "late"),
                PromQuery(metric("snapshot_age_seconds"), "age of what is served"),
            ),
            "s",
        ),
        time_series_panel(
            "The watcher's own cost",
            "Share of one CPU core, and threads.",
            (
                PromQuery("rate(process_cpu_seconds_total[5m]) and on(instance) wattwatch_build_info", "CPU cores"),
                PromQuery(metric("threads"), "threads"),
            ),
            "short",
        ),
    ]


SECTIONS: Final = (("Now", overview_panels), ("Jobs", job_panels), ("Nodes and the watcher", watcher_panels))


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana stores it."""
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
        "description": "Multi-node GPU training as the watcher sees it. Generated by dashboards/generate.py.",
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


def render_panel(panel: DashboardPanel, number_: int, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number_,
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
    """A mark where alerts are open, over all curves."""
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
    DASHBOARD_FILE.write_text(dashboard_json(), "utf-8")


if __name__ == "__main__":
    main()
