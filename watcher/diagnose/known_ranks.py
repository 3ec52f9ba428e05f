"""Which ranks the evidence knows of, how many there are, and on which nodes: by whichever source tells. Pure."""

from __future__ import annotations

from watcher.diagnose.evidence import Evidence
from watcher.diagnose.flight.record import DEFAULT_GROUP


def nodes_of_ranks(evidence: Evidence) -> dict[int, str]:
    """Those that any source places."""
    nodes = {process.rank: process.node for process in evidence.processes if process.rank is not None}
    nodes |= {each.rank: each.node for each in evidence.seen_ranks if each.node}
    return nodes | dict(evidence.node_of_rank)


def known_ranks(evidence: Evidence) -> frozenset[int]:
    """Ranks that records, the watcher, nodes or processes name; not those of stacks, endings and logs alone."""
    members = (rank for record in evidence.records for part in record.groups for rank in part.group.members)
    return (
        frozenset(members)
        | frozenset(record.rank for record in evidence.records)
        | frozenset(evidence.node_of_rank)
        | frozenset(each.rank for each in evidence.seen_ranks)
        | frozenset(process.rank for process in evidence.processes if process.rank is not None)
    )


def world_of(evidence: Evidence) -> int | None:
    """Ranks of the whole job, where its default group tells: other groups may leave some out."""
    return max(
        (
            len(part.group.members)
            for record in evidence.records
            for part in record.groups
            if part.group.members and DEFAULT_GROUP in (part.group.description, part.group.name)
        ),
        default=None,
    )


def nodes_of_all(evidence: Evidence) -> dict[int, str]:
    """By rank; nothing where the node of any rank that may be there is not known."""
    nodes, world = nodes_of_ranks(evidence), world_of(evidence)
    return nodes if world is not None and known_ranks(evidence) <= nodes.keys() else {}
