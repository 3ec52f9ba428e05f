"""Whether NCCL RAS speaks of this job: its port answers for whichever job holds it, and files get mixed up. Pure.

Hosts are counted, not compared: RAS gives the address of NCCL's own interface, which may be none that others use.
"""

from __future__ import annotations

from dataclasses import replace

from watcher.diagnose.evidence import Evidence
from watcher.diagnose.known_ranks import nodes_of_all, world_of
from watcher.diagnose.ras.report import RasPolls
from watcher.diagnose.words import counted


def with_fitting_ras(evidence: Evidence) -> Evidence:
    """Without reports of another job; `missing` says which and why."""
    judged = [(polls, misfit(polls, evidence)) for polls in evidence.ras]
    foreign = {report.source for polls, why in judged if why is not None for report in polls.reports}
    told = []
    for polls, why in judged:
        if why is not None:
            sources = ", ".join(dict.fromkeys(report.source for report in polls.reports if report.source))
            told.append(f"{sources or polls.node}: NCCL RAS of another job, not used: {why}")
    return replace(
        evidence,
        ras=tuple(polls for polls, why in judged if why is None),
        sources=tuple(source for source in evidence.sources if source not in foreign),
        missing=(*evidence.missing, *told),
    )


def misfit(polls: RasPolls, evidence: Evidence) -> str | None:
    """Why it cannot be this job; None where nothing speaks against it."""
    world = world_of(evidence)
    communicators = [each for report in polls.reports for each in report.communicators]
    largest = max((each.size for each in communicators), default=0)
    if world is not None and largest > world:
        return f"it has a communicator of {counted(largest, 'rank')}, where this job has {world:,}"
    nodes = nodes_of_all(evidence)
    hosts = {rank.host for each in communicators for rank in each.ranks if rank.host}
    if nodes and len(hosts) > len(set(nodes.values())):
        return f"its ranks are on {counted(len(hosts), 'host')}, those of this job on {len(set(nodes.values())):,}"
    return None
