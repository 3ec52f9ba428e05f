"""`wattwatch demo` as it is typed: what it lists, what it refuses, and when it fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from wattwatch.collectors.simulated.scenario import SCENARIOS, ExpectedAlert, get_scenario
from wattwatch.watcher.cli import demo
from wattwatch.watcher.cli.demo import demo_command


def test_list_names_every_scenario_and_its_expected_alerts() -> None:
    answer = CliRunner().invoke(demo_command, ["--list"])
    assert answer.exit_code == 0
    for scenario in SCENARIOS.values():
        (line,) = [line for line in answer.output.splitlines() if line.split()[:1] == [scenario.name]]
        assert all(expected.alert in line for expected in scenario.expected)


def test_list_as_json() -> None:
    rows = json.loads(CliRunner().invoke(demo_command, ["--list", "--json"]).output)
    assert [row["name"] for row in rows] == list(SCENARIOS)


def test_an_unknown_scenario_is_an_error_that_lists_the_existing_ones() -> None:
    answer = CliRunner().invoke(demo_command, ["--scenario", "dedlock"])
    assert answer.exit_code == 2
    assert "there is no scenario 'dedlock'; choose from healthy, deadlock, hang" in answer.output


def test_an_unusable_listen_address_is_one_sentence() -> None:
    answer = CliRunner().invoke(demo_command, ["--scenario", "healthy", "--listen", "nowhere"])
    assert answer.exit_code == 1
    assert "watcher.listen: expected \"host:port\", got 'nowhere'" in answer.output
    assert "Traceback" not in answer.output


def test_the_demo_fails_if_an_expected_alert_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = ExpectedAlert(alert="JobHung", phase=0, severity="critical", suspects=("rank 0",))
    quiet = replace(get_scenario("healthy"), duration_seconds=6.0, expected=(claim,), states=())
    monkeypatch.setattr(demo, "SCENARIOS", {"healthy": quiet})
    answer = CliRunner().invoke(demo_command, ["--json"], standalone_mode=False)
    assert answer.return_value == 1
    result = json.loads(answer.output)
    assert result["ok"] is False
    assert result["problems"] == ["healthy: JobHung was not sent"]
    assert result["alerts"][0]["late_seconds"] is None
    assert result["cost"]["nodes"] == 1
