"""The shipped rules: valid for promtool, each tested to fire, each reading what the exporter really serves."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.deploy.prometheus_server import DEPLOY, PrometheusServer
from tests.tools import DEADLINE_SECONDS, require_tool
from wattwatch.watcher.web.metrics import METRICS

RULES = DEPLOY / "prometheus" / "rules.yml"
CASES = DEPLOY / "prometheus" / "rules_test.yml"
# Has a series only after an internal error: promtool's case alone tests its rule.
NOT_IN_A_HEALTHY_WATCHER = {"wattwatch_engine_failures_total"}
# What must fire at once in the simulated deadlock (rules without `for`, and the expressions of the others).
TRUE_IN_A_DEADLOCK = ("TrainingAlert", "TrainingStandsStill")

ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]
]


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [require_tool("promtool"), *arguments],
        cwd=RULES.parent,
        text=True,
        capture_output=True,
        timeout=DEADLINE_SECONDS,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "rules.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_rules(arguments: tuple[str, ...]) -> None:
    result = promtool(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_rule_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fires: set[str] = set()
    quiet: set[str] = set()
    for case in yaml.safe_load(CASES.read_text("utf-8"))["tests"]:
        for expectation in case["alert_rule_test"]:
            (fires if expectation.get("exp_alerts") else quiet).add(expectation["alertname"])
    names = {rule["alert"] for rule in ALERTS}
    assert fires == names
    assert quiet == names


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_rules_use_existing_metrics_and_say_what_to_do(rule: dict[str, Any]) -> None:
    names = re.findall(r"\bwattwatch_[a-z_]+", rule["expr"])
    assert names
    assert set(names) <= set(METRICS)
    if rule["alert"] != "TrainingAlert":  # that one carries the watcher's own severity
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description"}
    assert "{{" not in rule["annotations"]["summary"]


def test_every_metric_of_the_rules_is_served(prometheus: PrometheusServer) -> None:
    selectors = [
        selector
        for rule in ALERTS
        for selector in re.findall(r"wattwatch_[a-z_]+(?:\{[^}]*\})?", rule["expr"])
        if selector not in NOT_IN_A_HEALTHY_WATCHER
    ]
    assert prometheus.without_data(selectors) == []


def test_the_rules_about_jobs_detect_the_deadlock(prometheus: PrometheusServer) -> None:
    expressions = {rule["alert"]: rule["expr"] for rule in ALERTS}
    assert prometheus.without_data([expressions[name] for name in TRUE_IN_A_DEADLOCK]) == []
    hung = prometheus.query(expressions["TrainingStandsStill"])
    assert [series["metric"] for series in hung] == [{"train_job": "deadlock"}]
    # Unconfirmed it is a warning; it becomes critical once the job's own progress agrees.
    confirmed = 'ALERTS{alertname="TrainingAlert",alert="JobHung",train_job="deadlock",severity="critical"}'
    assert prometheus.without_data([confirmed]) == []


def test_the_readme_explains_every_rule() -> None:
    readme = (DEPLOY / "README.md").read_text("utf-8")
    explained = set(re.findall(r"^\| `([A-Z]\w+)` \|", readme, re.MULTILINE))
    assert explained == {rule["alert"] for rule in ALERTS}
