"""How the real demo looks in a terminal, and as JSON. What the hang cost, here and at the paper's size."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.markup import escape

from watcher.demo.real.play import HangCost, RealOutcome
from watcher.demo.screen import COLOURS

# arXiv 2608.05944, sections 5 and 6. That 130 is the hang and an epoch to be trained again is our reading: 48 + 84.
PAPER_GPUS: Final = 16
PAPER_HANG_HOURS: Final = 3.0
PAPER_EPOCH_GPU_HOURS: Final = 84.0
PAPER_COST_GPU_HOURS: Final = 130.0
REAL: Final = (
    "Real: the data, the ranks, their deadlock, SSH, the watcher, its messages. Simulated: the boards (they follow the "
    "ranks' heartbeats with the paper's watts), and the second host."
)


class RealScreen:
    """Prints the story as it happens."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def line(self, seconds: float, text: str, style: str = "") -> None:
        colour = COLOURS.get(style)
        words = escape(text)
        self._console.print(f"{seconds:6.1f} s  " + (f"[{colour}]{words}[/]" if colour else words))

    def sum_up(self, outcome: RealOutcome) -> None:
        self._console.print(f"\n{REAL}", style="dim")
        for problem in outcome.problems:
            self._console.print(f"[red]✗ {escape(problem)}[/]")
        if outcome.good:
            self._console.print("[bold green]✓ The deadlock was named, proved and, with evenness = min, gone.[/]")
        if outcome.cost is not None:
            self._console.print(cost_line(outcome.cost))


def cost_line(cost: HangCost) -> str:
    here = cost.gpus * cost.hung_seconds / 3600
    hang = PAPER_GPUS * PAPER_HANG_HOURS
    told = PAPER_GPUS * cost.told_after_seconds / 3600
    return (
        f"Cost: {cost.gpus} GPUs hung for {cost.hung_seconds:.0f} s = {here:.3f} GPU-hours. The paper's {PAPER_GPUS} "
        f"GPUs hung for {PAPER_HANG_HOURS:.0f} h = {hang:.0f} GPU-hours, and with the epoch that was not saved "
        f"({PAPER_EPOCH_GPU_HOURS:.0f}) it puts one deadlock at about {PAPER_COST_GPU_HOURS:.0f}. Told after "
        f"{cost.told_after_seconds:.0f} s, as here, its hang would have cost {told:.2f}."
    )


def summary(outcome: RealOutcome) -> dict[str, Any]:
    """The same as JSON."""
    cost = outcome.cost
    return {
        "ok": outcome.good,
        "problems": list(outcome.problems),
        "seconds": round(outcome.seconds, 1),
        "events": [asdict(event) for event in outcome.events],
        "blocks": list(outcome.blocks),
        "waits": [asdict(wait) for wait in outcome.waits],
        "gate": None if outcome.gate is None else asdict(outcome.gate),
        "notices": [
            {
                "status": notice.status,
                "alert": notice.alert,
                "severity": notice.severity,
                "suspects": notice.annotations.get("suspects", ""),
                "summary": notice.annotations.get("summary", ""),
            }
            for notice in outcome.notices
        ],
        "cost": None if cost is None else asdict(cost) | {"gpu_hours": cost.gpus * cost.hung_seconds / 3600},
    }
