"""Prints a run of the demo in a terminal, and its summary as a table or as JSON. All figures come from the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from wattwatch.collectors.simulated.scenario import Scenario
from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.demo.configuration import INTERVAL_SECONDS
from wattwatch.watcher.demo.receiver import ReceivedAlert
from wattwatch.watcher.demo.runner import DemoCost, DemoOutcome
from wattwatch.watcher.demo.score import ExpectedAlertResult

SEVERITY_COLORS: Final = {"critical": "bold red", "warning": "yellow", "info": "green"}
MAX_LINES: Final = 4  # per alert: the summary and its first evidence; the message has all of it
MAX_LINE_LENGTH: Final = 240
INDENT: Final = 24


class TerminalScreen:
    """Prints a run as it happens; times are scenario seconds."""

    def __init__(self, console: Console, speed: float) -> None:
        self._console = console
        self._speed = speed

    def watching(self, page: str, nodes: int) -> None:
        self._console.print(
            f"Watching [bold]{format_count(nodes, 'simulated node')}[/] over SSH on loopback, at "
            f"{self._speed:g} times real time; "
            f"one sample per node every {INTERVAL_SECONDS:g} s.\nLive page during the run: [underline]{page}[/]\n"
        )

    def injected(self, scenario: Scenario, phase: int, seconds: float) -> None:
        what = scenario.phases[phase].injects
        if what:
            self._console.print(f"[dim]{seconds:6.1f} s  {scenario.name:<13} injected: {escape(what)}[/]")

    def alert_received(self, notice: ReceivedAlert, since_injection_seconds: float | None, seconds: float) -> None:
        if notice.status != "firing":
            self._console.print(f"{seconds:6.1f} s  {notice.job:<13} [green]resolved: {notice.alert}[/]")
            return
        late = ""
        if since_injection_seconds is not None:
            intervals = since_injection_seconds / INTERVAL_SECONDS
            late = f"  [cyan]+{since_injection_seconds:.1f} s ({intervals:.1f} samples) after the fault[/]"
        color = SEVERITY_COLORS.get(notice.severity, "bold")
        self._console.print(
            f"{seconds:6.1f} s  {notice.job:<13} [{color}]{notice.severity.upper()} {notice.alert}[/]{late}"
        )
        annotations = notice.annotations
        lines = [annotations.get("summary", ""), *annotations.get("description", "").splitlines()][:MAX_LINES]
        if "diagnosis" in annotations:
            lines.insert(1, f"Diagnosis: {annotations['diagnosis']}")
        for number, line in enumerate(lines):
            text = Text(truncate(line.strip()), style="" if number == 0 else "dim")
            self._console.print(Padding(text, (0, 0, 0, INDENT)))

    def sum_up(self, outcome: DemoOutcome, scenarios: Sequence[Scenario]) -> None:
        self._console.print()
        self._console.print(summary_table(outcome.score.rows))
        for scenario in scenarios:
            if not scenario.expected:
                alerts = {notice.alert for notice in outcome.notices if notice.job == scenario.name}
                verdict = (
                    f"[red]false alarm: {', '.join(sorted(alerts))}[/]" if alerts else "[green]no alert, as expected[/]"
                )
                states = ", ".join(outcome.states.get(scenario.name, ())) or "none"
                self._console.print(f"{scenario.name:<14} {verdict}; states: {states}. {escape(scenario.title)}.")
        self._console.print(demo_cost_line(outcome.cost, self._speed), style="dim")
        if outcome.too_slow:
            self._console.print(
                f"[yellow]This machine was too slow: {outcome.too_slow}. "
                "The machine caused the delays above, not the watcher. Try a lower --speed.[/]"
            )
        for problem in outcome.score.problems:
            self._console.print(f"[red]✗ {escape(problem)}[/]")
        if outcome.left_behind:
            self._console.print(f"[red]✗ Commands left running on nodes: {len(outcome.left_behind)}[/]")
        if outcome.good:
            count = len(outcome.score.rows)
            self._console.print(
                f"[bold green]✓ Every injected fault was reported ({count} of {count}), and nothing else was.[/]"
            )


def truncate(text: str) -> str:
    """Cut at the last space that fits; inside a word only where the text has no space."""
    if len(text) <= MAX_LINE_LENGTH:
        return text
    shown = text[: MAX_LINE_LENGTH - 1]
    return (shown.rpartition(" ")[0] or shown) + " …"


def summary_table(rows: Sequence[ExpectedAlertResult]) -> Table:
    table = Table(
        title="Injected faults, alerts and delays",
        title_justify="left",
        caption="delay: from the injection of the fault to the receipt of the alert, in scenario time. "
        "after 2 samples: from the end of the second sample that lies wholly after the injection to the receipt of "
        "the alert at the webhook, in real time; negative if the alert came before that sample ended.",
        caption_justify="left",
    )
    for heading in ("scenario", "injected", "alert"):
        table.add_column(heading, overflow="fold")
    table.add_column("delay", justify="right")
    table.add_column("after\n2 samples", justify="right")
    for row in rows:
        color = "red" if row.problems else SEVERITY_COLORS.get(row.severity, "bold")
        text = "; ".join(row.problems) if row.problems else row.alert
        table.add_row(
            row.scenario,
            escape(row.injected),
            f"[{color}]{escape(text)}[/]" + ("" if row.problems else f" {escape(row.said)}"),
            "-" if row.late_seconds is None else f"{row.late_seconds:.1f} s\n{row.late_intervals:.1f} samples",
            "-" if row.real_milliseconds is None else f"{row.real_milliseconds:+.0f} ms",
        )
    return table


def demo_cost_line(cost: DemoCost, speed: float) -> str:
    share = cost.cpu_seconds / cost.seconds if cost.seconds else 0.0
    first = cost.first_alert_seconds
    per_node = 1000 * cost.cpu_seconds / (cost.nodes * cost.seconds * speed) if cost.seconds else 0.0
    return (
        f"Cost: the watcher and this screen used {share:.0%} of a CPU core and {cost.memory_bytes / 1e6:.0f} MB "
        f"of memory. They watched {format_count(cost.nodes, 'node')} at {speed / INTERVAL_SECONDS:g} samples a second, "
        f"which took {per_node:.1f} ms of CPU time per node and sample. "
        f"The faults wasted {cost.wasted_gpu_seconds / 3600:.2f} GPU-hours of scenario time."
        + ("" if first is None else f" The first alert was on this screen after {first:.1f} s.")
    )


def demo_summary(outcome: DemoOutcome, speed: float) -> dict[str, Any]:
    """The outcome as a JSON object."""
    cost = outcome.cost
    return {
        "ok": outcome.good,
        "problems": list(outcome.score.problems),
        "speed": speed,
        "interval_seconds": INTERVAL_SECONDS,
        "alerts": [
            {
                "scenario": row.scenario,
                "injected": row.injected,
                "alert": row.alert,
                "severity": row.severity,
                "said": row.said,
                "late_seconds": row.late_seconds,
                "late_intervals": row.late_intervals,
                "after_second_clear_sample_ms": row.real_milliseconds,
                "problems": list(row.problems),
            }
            for row in outcome.score.rows
        ],
        "states": {job: list(states) for job, states in outcome.states.items()},
        "notices": len(outcome.notices),
        "slack_messages": outcome.slack_messages,
        "too_slow": outcome.too_slow or None,
        "left_behind": list(outcome.left_behind),
        "cost": {
            "nodes": cost.nodes,
            "seconds": cost.seconds,
            "first_alert_seconds": cost.first_alert_seconds,
            "cpu_seconds": cost.cpu_seconds,
            "memory_bytes": cost.memory_bytes,
            "wasted_gpu_seconds": cost.wasted_gpu_seconds,
        },
    }
