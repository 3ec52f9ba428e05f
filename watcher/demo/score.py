"""Compares what was injected with what was reported. Pure functions of scenarios, phases as they began, and alerts as
they were received.

A fault is reported correctly if its alert came for its job, after the fault began, with the expected severity, naming
the expected suspects and no other rank, with its evidence, and was still open at the end. Any other alert is a problem.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wattwatch.collectors.simulated.driver import PhaseStarted
from wattwatch.collectors.simulated.scenario import ExpectedAlert, Scenario
from wattwatch.watcher.demo.receiver import ReceivedAlert


@dataclass(frozen=True, slots=True)
class ExpectedAlertResult:
    """The result for one expected alert. Times are None if it did not come."""

    scenario: str
    injected: str
    alert: str
    severity: str
    said: str  # summary of the first message; "" if there was none
    late_seconds: float | None  # scenario time from injection to receipt
    late_intervals: float | None
    real_milliseconds: float | None  # from the second sample that shows only the fault, to the receipt
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DemoScore:
    rows: tuple[ExpectedAlertResult, ...]
    problems: tuple[str, ...]  # all of them: of expected alerts, of unexpected ones, and of states that did not occur

    @property
    def good(self) -> bool:
        return not self.problems


def score_run(
    scenarios: Sequence[Scenario],
    phases: Sequence[PhaseStarted],
    notices: Sequence[ReceivedAlert],
    states: Mapping[str, Sequence[str]],
    interval_seconds: float,
    speed: float,
) -> DemoScore:
    """`states`: by job, every state it went through after the warm-up."""
    began = {(phase.scenario, phase.phase): phase.wall_seconds for phase in phases}
    rows = [
        score_expected(scenario, expected, began, notices, interval_seconds, speed)
        for scenario in scenarios
        for expected in scenario.expected
    ]
    problems = [f"{row.scenario}: {problem}" for row in rows for problem in row.problems]
    problems += [too_many for notice in notices if (too_many := describe_unexpected(scenarios, notice))]
    problems += [
        f"{scenario.name}: the job was never {state}; its states were: "
        f"{', '.join(states.get(scenario.name, ())) or 'none'}"
        for scenario in scenarios
        for state in scenario.states
        if state not in states.get(scenario.name, ())
    ]
    return DemoScore(tuple(rows), tuple(dict.fromkeys(problems)))


def score_expected(
    scenario: Scenario,
    expected: ExpectedAlert,
    began: Mapping[tuple[str, int], float],
    notices: Sequence[ReceivedAlert],
    interval_seconds: float,
    speed: float,
) -> ExpectedAlertResult:
    injected = began.get((scenario.name, expected.phase))
    mine = [notice for notice in notices if notice.job == scenario.name and notice.alert == expected.alert]
    early = [n for n in mine if n.status == "firing" and (injected is None or n.received_seconds < injected)]
    mine = [notice for notice in mine if injected is not None and notice.received_seconds >= injected]
    firing = [notice for notice in mine if notice.status == "firing"]
    late: float | None = None
    after: float | None = None
    problems = [f"{expected.alert} was sent before its fault was injected"] if early else []
    if injected is None:
        problems.append(f"{expected.alert}: its fault was never injected")
    elif not firing:
        problems.append(f"{expected.alert} was not sent")
    else:
        late = firing[0].received_seconds - injected
        after = 1000 * (firing[0].received_seconds - second_clear_sample(injected, interval_seconds)) / speed
        problems += find_problems(expected, mine, firing)
    return ExpectedAlertResult(
        scenario=scenario.name,
        injected=scenario.phases[expected.phase].injects,
        alert=expected.alert,
        severity=expected.severity,
        said=firing[0].annotations.get("summary", "") if firing else "",
        late_seconds=late,
        late_intervals=None if late is None else late / interval_seconds,
        real_milliseconds=after,
        problems=tuple(problems),
    )


def second_clear_sample(injected_seconds: float, interval_seconds: float) -> float:
    """When the second sample ends that shows only the fault.

    Samples end at multiples of the interval. Power is averaged over it, so the first sample after the injection mixes
    before and after; the next two are clear.
    """
    return (math.ceil(injected_seconds / interval_seconds) + 2) * interval_seconds


def find_problems(expected: ExpectedAlert, mine: Sequence[ReceivedAlert], firing: Sequence[ReceivedAlert]) -> list[str]:
    """What is wrong with the alerts that came after the injection."""
    problems = []
    if expected.severity not in [notice.severity for notice in firing]:
        severities = ", ".join(dict.fromkeys(notice.severity for notice in firing))
        problems.append(f"{expected.alert} had severity {severities}, never {expected.severity}")
    last = firing[-1]
    text = last.annotations.get("suspects", "")
    missing = [suspect for suspect in expected.suspects if not re.search(rf"\b{re.escape(suspect)}\b", text)]
    if missing:
        problems.append(f"{expected.alert} does not name {' and '.join(missing)}; it names {text or 'nobody'}")
    if text and not expected.suspects:
        problems.append(f"{expected.alert} names {text}, although no suspect is expected")
    ranks = {int(rank) for rank in re.findall(r"\brank (\d+)\b", text)}
    wanted = {int(rank) for suspect in expected.suspects for rank in re.findall(r"\brank (\d+)\b", suspect)}
    if wanted and ranks - wanted:
        problems.append(f"{expected.alert} also names {', '.join(f'rank {rank}' for rank in sorted(ranks - wanted))}")
    problems += [
        f"{expected.alert} lacks the evidence {word!r}"
        for word in expected.words
        if not re.search(word, last.text, re.IGNORECASE)
    ]
    if mine[-1].status == "resolved":
        problems.append(f"{expected.alert} was resolved while the fault lasted")
    return problems


def describe_unexpected(scenarios: Sequence[Scenario], notice: ReceivedAlert) -> str | None:
    """The problem with an alert that no scenario expects; None if it is expected."""
    if notice.status != "firing":
        return None
    wanted = {(scenario.name, expected.alert) for scenario in scenarios for expected in scenario.expected}
    if (notice.job, notice.alert) in wanted:
        return None
    return f"{notice.job or 'the watcher'}: {notice.alert} was sent, but no such fault was injected: " + (
        notice.annotations.get("summary", "")
    )
