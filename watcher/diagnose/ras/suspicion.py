"""A suspicion against ranks of one communicator, and how ranks are named in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from watcher.diagnose.ras.findings import Device, RasFinding, RasSuspect
from watcher.diagnose.ras.report import RasCommunicator, RasRank
from watcher.diagnose.ras.views import CommunicatorView

_LISTED = 6  # ranks named in a sentence


@dataclass(frozen=True, slots=True)
class Suspicion:
    finding: RasFinding
    ranks: Sequence[int]
    why: str
    confidence: float
    tied: Sequence[Sequence[int]] = ()


def place(communicator: RasCommunicator, rank: RasRank, job_ranks: Mapping[Device, int]) -> RasSuspect:
    job_rank = None if rank.host is None or rank.pid is None else job_ranks.get((rank.host, rank.pid, rank.gpu))
    return RasSuspect(rank.rank, communicator.identity, rank.host, rank.pid, rank.gpu, job_rank)


def name_of(communicator: RasCommunicator) -> str:
    """Short: the first hash; communicators that the text form does not tell apart are counted."""
    size = f"{communicator.size} ranks" if communicator.size else "size not told"
    if communicator.identity.startswith("group "):  # the text form: healthy ones have no names
        return f"{'a communicator' if communicator.alike == 1 else f'{communicator.alike} communicators'} of {size}"
    return f"communicator {communicator.identity.split(' ')[0]} ({size})"


def placed_in_words(ranks: Sequence[RasRank]) -> str:
    """`rank 3 (process 40003 on 10.0.0.11, GPU 3)`: ranks of a communicator are known by where they are."""
    ordered = sorted(ranks, key=lambda rank: rank.rank)
    listed = ", ".join(_rank_in_words(rank) for rank in ordered[:_LISTED])
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {listed}{more}"


def _rank_in_words(rank: RasRank) -> str:
    parts = [] if rank.pid is None else [f"process {rank.pid}"]
    if rank.host is not None:
        parts.append(f"on {rank.host}")
    where = " ".join(parts)
    if rank.gpu is not None:
        where = f"{where}, GPU {rank.gpu}" if where else f"GPU {rank.gpu}"
    return f"{rank.rank} ({where})" if where else str(rank.rank)


def still(view: CommunicatorView) -> str:
    return "" if view.apart_seconds is None else f" over {view.apart_seconds:g} s"
