"""The witness of processes, as the kernel sees them: gone, stopped, asleep in a driver or a file system. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from watcher.diagnose.diagnosis import Cause
from watcher.diagnose.evidence import Evidence, RankProcess
from watcher.diagnose.witnesses.witness import PROCESSES, Witness
from watcher.diagnose.words import ranks_in_words

# Functions that a process in state D sleeps in: fs/nfs, net/sunrpc, lustre, ceph, fuse, mm/filemap.c, block/.
STORAGE_CHANNEL: Final = re.compile(
    r"nfs|rpc_|lustre|^ll_|ptlrpc|cl_sync|ceph|fuse|gpfs|cxi|beegfs|folio_wait|wait_on_page|page_lock|io_schedule|"
    r"jbd2|xfs|ext4|btrfs|blk_|blkdev|request_wait|balance_dirty|wb_wait"
)
DRIVER_CHANNEL: Final = re.compile(r"nvidia|^_?nv_?\d|uvm|os_acquire|rm_")
WHOLE_CORE_PERCENT: Final = 90.0  # of one core
NO_CORE_PERCENT: Final = 10.0


def of_processes(evidence: Evidence) -> Witness | None:
    """The worst state that a minority of ranks is in."""
    known = [*(process for process in evidence.processes if process.rank is not None), *_seen_to_be_gone(evidence)]
    looks: list[tuple[Callable[[RankProcess], bool], str, Cause | None, float]] = [
        (lambda p: p.state in (None, "Z", "X", "x"), "gone", Cause.RANK, 0.8),
        (lambda p: p.state in ("T", "t"), "stopped (state {state})", Cause.RANK, 0.85),
        (_in_driver, "asleep in the GPU driver (state D, {channel})", Cause.GPU, 0.65),
        (_in_storage, "waiting for the file system (state D, {channel})", Cause.STORAGE, 0.65),
        (lambda p: p.state == "D", "asleep in the kernel and not to be interrupted (state D)", Cause.HOST, 0.5),
    ]
    for fits, words, cause, weight in looks:
        named = [process for process in known if fits(process)]
        if named:
            told = {p.rank: words.format(state=p.state, channel=p.wait_channel) for p in named if p.rank is not None}
            few = 2 * len(named) < max(len(known), 2) or len(named) == 1
            return Witness(
                PROCESSES,
                _states_in_words(told, len(known)),
                frozenset(told) if few else frozenset(),
                weight,
                cause,
                {rank: f"is {state}" for rank, state in told.items()},
            )
    return _unlike_the_others(known)


def _seen_to_be_gone(evidence: Evidence) -> list[RankProcess]:
    """Ranks whose heartbeat names a process that its node no longer lists."""
    listed = {process.rank for process in evidence.processes}
    seen = evidence.seen_ranks
    if not any(each.alive for each in seen):
        return []
    return [
        RankProcess(each.rank, each.node, 0, None if each.alive is False else "S")
        for each in seen
        if each.alive is not None and each.rank not in listed
    ]


def _in_storage(process: RankProcess) -> bool:
    return process.state == "D" and any(STORAGE_CHANNEL.search(place) for place in _places(process))


def _in_driver(process: RankProcess) -> bool:
    return process.state == "D" and any(DRIVER_CHANNEL.search(place) for place in _places(process))


def _places(process: RankProcess) -> tuple[str, ...]:
    """Where it is in the kernel; the wait channel alone may be a lock that tells nothing."""
    return (process.wait_channel or "", *process.kernel_stack)


def _states_in_words(told: dict[int, str], known: int) -> str:
    """`rank 3 is gone`, `4 of 8 processes: ranks 0-3 are gone`."""
    state = told[min(told)]
    of_how_many = "" if len(told) == 1 else f"{len(told)} of {known} processes: "
    return f"{of_how_many}{ranks_in_words(told)} {'is' if len(told) == 1 else 'are'} {state}"


def _unlike_the_others(known: Sequence[RankProcess]) -> Witness | None:
    """Waiting in NCCL takes a whole core, so it is the odd one that tells, whichever way it is odd."""
    shares = {p.rank: p.cpu_percent for p in known if p.cpu_percent is not None and p.rank is not None}
    spins = frozenset(rank for rank, share in shares.items() if share >= WHOLE_CORE_PERCENT)
    rests = frozenset(rank for rank, share in shares.items() if share <= NO_CORE_PERCENT)
    if len(shares) < 3 or spins | rests != frozenset(shares):
        return None
    if len(spins) == 1:
        words = f"{ranks_in_words(spins)} takes a whole core, the others rest"
        return Witness(PROCESSES, words, spins, 0.4, Cause.RANK, dict.fromkeys(spins, "takes a whole core"))
    if len(rests) == 1:
        words = f"{ranks_in_words(rests)} takes no CPU, the others a whole core each"
        return Witness(PROCESSES, words, rests, 0.35, None, dict.fromkeys(rests, "takes no CPU"))
    return None
