"""The dashboard: generated, up to date, and every query of it answered by a real Prometheus."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from dashboards.generate import DASHBOARD_FILE, GRAFANA_UNITS, dashboard, dashboard_json, metric
from tests.deploy.prometheus_server import PrometheusServer
from wattwatch.watcher.web.metrics import METRICS

PANELS = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def for_everything(expression: str) -> str:
    """The expression that Grafana sends if all jobs and nodes and the last five minutes are selected."""
    chosen = expression.replace("$train_job", ".*").replace("$node", ".*").replace("$__range", "5m")
    assert "$" not in chosen
    return chosen


def test_the_committed_file_is_up_to_date() -> None:
    assert DASHBOARD_FILE.read_text("utf-8") == dashboard_json(), "run: python -m dashboards.generate"


def test_every_query_returns_data(prometheus: PrometheusServer) -> None:
    expressions = [for_everything(target["expr"]) for panel in PANELS for target in panel["targets"]]
    expressions += [for_everything(note["expr"]) for note in dashboard()["annotations"]["list"]]
    assert len(expressions) > 20
    assert prometheus.without_data(expressions) == []


def test_the_variables_list_the_existing_jobs_and_nodes(prometheus: PrometheusServer) -> None:
    offered = {}
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert found is not None
            assert prometheus.without_data([found[1]]) == []
            offered[variable["name"]] = prometheus.label_values(found[1], found[2])
    assert offered["train_job"] == ["checkpoint", "deadlock"]
    assert {"deadlock-1", "deadlock-2"} <= set(offered["node"])


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_each_panel_has_what_a_reader_needs(panel: dict[str, Any]) -> None:
    """The rules of Grafana's dashboard-linter that apply: title, description, unit, templated data source."""
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        for name in re.findall(r"\b(wattwatch_[a-z_]+?)(?:_bucket|_sum|_count)?\b", target["expr"]):
            assert name in METRICS
        for counter in re.findall(r"(\w+_total)(?!\w)", target["expr"]):
            assert re.search(rf"(rate|increase)\({counter}", target["expr"]), f"{counter} is a counter"


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_every_metric_with_jobs_or_nodes_can_be_filtered_by_them() -> None:
    assert metric("gpu_power_watts") == 'wattwatch_gpu_power_watts{train_job=~"$train_job",node=~"$node"}'
    assert metric("node_up") == 'wattwatch_node_up{node=~"$node"}'
    assert metric("blind") == "wattwatch_blind"
    with pytest.raises(KeyError):
        metric("gpu_power_milliwatts")


def test_every_unit_of_the_metric_table_has_a_grafana_unit() -> None:
    assert {row.unit for row in METRICS.values()} == set(GRAFANA_UNITS)


def test_the_dashboard_is_read_only_and_names_no_data_source() -> None:
    exported = json.loads(DASHBOARD_FILE.read_text("utf-8"))
    assert exported["editable"] is False
    assert not {"__inputs", "__requires", "id"} & set(exported)
