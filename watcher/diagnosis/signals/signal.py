"""What one source says of a hang: whom it names, how sure it would be alone, and what it takes for the cause. Data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from wattwatch.watcher.diagnosis.model import DiagnosisVerdict, HangCause

# The sources, as people read them.
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
    """`clears`: it sees all ranks alike, so it speaks against naming one. `denies`: it sees the job move."""

    source: str
    words: str
    ranks: frozenset[int] = frozenset()
    weight: float = 0.0  # 0..1
    cause: HangCause | None = None
    doing: Mapping[int, str] = field(default_factory=dict)
    all_alike: bool = False
    shows_progress: bool = False
    saw: frozenset[int] = frozenset()  # of one that clears: whom it looked at
    verdict: DiagnosisVerdict | None = None  # where its words tell that too

    def agrees_with(self, ranks: frozenset[int]) -> bool:
        """It names them, or some of them, and not more strangers than there are of them."""
        return bool(self.ranks & ranks) and len(self.ranks - ranks) <= len(ranks)
