"""The witnesses of faults that nodes report: one for each kind. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from watcher.diagnose.diagnosis import Cause
from watcher.diagnose.evidence import Evidence, Fault
from watcher.diagnose.witnesses.witness import (
    FILE_SYSTEM,
    KERNEL_LOG,
    LINKS,
    PROCESSES,
    REACHABILITY,
    THROTTLING,
    Witness,
)

FAULTS: Final = {  # kind -> who tells it, what is to blame, how sure that alone would be
    "gpu": (KERNEL_LOG, Cause.GPU, 0.8),
    "oom": (KERNEL_LOG, Cause.HOST, 0.8),
    "process": (PROCESSES, Cause.RANK, 0.7),
    "host": (REACHABILITY, Cause.HOST, 0.6),  # the node does not answer
    "storage": (FILE_SYSTEM, Cause.STORAGE, 0.6),
    "network": (LINKS, Cause.NETWORK, 0.6),
    "throttle": (THROTTLING, None, 0.15),  # it slows a job, and does not stop it
}


def of_faults(evidence: Evidence) -> tuple[Witness, ...]:
    """One for each kind of fault."""
    seen = evidence.seen
    kinds: dict[str, list[Fault]] = defaultdict(list)
    for fault in seen.faults if seen is not None else ():
        kinds[fault.kind if fault.kind in FAULTS else "process"].append(fault)
    witnesses = []
    for kind, faults in kinds.items():
        source, cause, weight = FAULTS[kind]
        doing = {rank: fault.words for fault in faults for rank in _ranks_of(fault, evidence)}
        exact = all(fault.rank is not None or fault.gpu is not None for fault in faults)
        words = "; ".join(dict.fromkeys(f"{fault.node}: {fault.words}" for fault in faults[:3]))
        witnesses.append(Witness(source, words, frozenset(doing), weight if exact else weight / 2, cause, doing))
    return tuple(witnesses)


def _ranks_of(fault: Fault, evidence: Evidence) -> list[int]:
    """Of its board; of the whole node where a fault of its host names none."""
    if fault.rank is not None:
        return [fault.rank]
    seen = evidence.seen_ranks
    if fault.gpu is not None:
        return [each.rank for each in seen if (each.node, each.gpu) == (fault.node, fault.gpu)]
    if fault.kind in ("storage", "network"):
        return []
    return sorted({each.rank for each in seen if each.node == fault.node})
