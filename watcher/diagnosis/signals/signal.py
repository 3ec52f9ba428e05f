"""A signal: what one source of evidence says about a hang. Data.

Each source names the ranks that it suspects (or none), how likely they are to blame if no other source said anything
(`weight`), and the cause that it points to. `combine.py` turns all signals into one answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from wattwatch.watcher.diagnosis.model import DiagnosisVerdict, HangCause

# The names of the sources, as people read them in alerts, in the report and in diagnosis.json.
FLIGHT_RECORDER: Final = "flight recorder"
NCCL_RAS: Final = "NCCL RAS"
STACKS: Final = "stacks"
PROCESSES: Final = "processes"
EXIT_REPORTS: Final = "endings"
LOGS: Final = "logs"
HEARTBEATS: Final = "heartbeats"
POWER: Final = "power and utilisation"
KERNEL_LOG: Final = "kernel log"
REACHABILITY: Final = "reachability"
FILE_SYSTEM: Final = "file system"
LINKS: Final = "links"
THROTTLING: Final = "throttle reasons"


@dataclass(frozen=True, slots=True)
class Signal:
    source: str  # one of the names above
    text: str  # what the source shows, with numbers
    ranks: frozenset[int] = frozenset()  # the suspects
    weight: float = 0.0  # 0..1, the confidence if this were the only signal
    cause: HangCause | None = None
    rank_text: Mapping[int, str] = field(default_factory=dict)  # completes "rank 3 ..."
    all_alike: bool = False  # it observes all ranks in the same state, which is evidence against blaming one of them
    shows_progress: bool = False  # it observes that the job is not hung
    observed_ranks: frozenset[int] = frozenset()  # with `all_alike`: the ranks that it observed
    verdict: DiagnosisVerdict | None = None  # where the source implies one

    def agrees_with(self, ranks: frozenset[int]) -> bool:
        """Whether it names at least one of `ranks`, and no more other ranks than there are in `ranks`."""
        return bool(self.ranks & ranks) and len(self.ranks - ranks) <= len(ranks)


def source_label(source: str) -> str:
    """The name of a source in running text; the stored names above are older and cannot change."""
    return {EXIT_REPORTS: "exit reports", POWER: "power and utilization"}.get(source, source)
