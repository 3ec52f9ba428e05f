"""The one table of metrics (metrics.toml), typed. Exporter, dashboards, rules and tests read names from here."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Final, Literal

Group = Literal["gpu", "snapshot", "own"]
Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series, as in metrics.toml."""

    name: str
    group: Group
    type: Kind
    unit: str
    labels: tuple[str, ...]
    help: str
    reads: str = ""  # field of GpuSample, for group "gpu"
    divide_by: float = 1.0
    buckets: tuple[float, ...] = ()

    @property
    def header(self) -> str:
        """The two comment lines before its series in the text format."""
        return f"# HELP {self.name} {self.help}\n# TYPE {self.name} {self.type}\n"


def read_table() -> dict[str, Metric]:
    text = (resources.files("watcher.serve") / "metrics.toml").read_text("utf-8")
    return {
        name: Metric(
            name=name,
            group=row["group"],
            type=row["type"],
            unit=row["unit"],
            labels=tuple(row["labels"]),
            help=row["help"],
            reads=row.get("reads", ""),
            divide_by=float(row.get("divide_by", 1.0)),
            buckets=tuple(float(edge) for edge in row.get("buckets", ())),
        )
        for name, row in tomllib.loads(text).items()
    }


METRICS: Final = read_table()
