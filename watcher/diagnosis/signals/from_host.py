"""The witnesses of what the watcher saw of each rank: power and utilisation, heartbeats. Pure."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from wattwatch.watcher.common.formatting import format_count, format_ranks
from wattwatch.watcher.diagnosis.model import Evidence, HangCause, LiveEvidence, NodeFault, RankProcess, RankReadings
from wattwatch.watcher.diagnosis.signals.signal import (
    FILE_SYSTEM,
    HEARTBEATS,
    KERNEL_LOG,
    LINKS,
    POWER,
    PROCESSES,
    REACHABILITY,
    THROTTLING,
    Signal,
)

BUSY_PERCENT: Final = 90.0
IDLE_PERCENT: Final = 10.0
SHAPE_WEIGHTS: Final = {"one_low_rest_busy": 0.5, "rank0_low_rest_busy": 0.4}
SUSPECT_WEIGHT: Final = 0.3
# Phases of a heartbeat that a rank comes to when its share of the data is used up, while others still train.
PHASES_AFTER_TRAINING: Final = frozenset({"barrier", "save", "eval", "done"})


def power_signal(seen: LiveEvidence) -> Signal | None:
    """Whoever the watcher suspects; without its word, the one board that rests beside others that spin."""
    shares = {each.rank: each.utilization_percent for each in seen.ranks if each.utilization_percent is not None}
    low = frozenset(rank for rank, share in shares.items() if share <= IDLE_PERCENT)
    busy = frozenset(rank for rank, share in shares.items() if share >= BUSY_PERCENT)
    named, shape = frozenset(seen.suspects), seen.shape
    if not named and len(low) == 1 and len(shares) > 2 and low | busy == frozenset(shares):
        named, shape = low, "one_low_rest_busy"
    if named:
        weight = SHAPE_WEIGHTS.get(shape, SUSPECT_WEIGHT)
        return Signal(POWER, _describe_power(seen, named), named, weight)
    if shares and busy == frozenset(shares) and len(shares) > 1:
        return Signal(
            POWER, f"all {len(shares)} GPUs read busy{_format_readings(seen.ranks)}", weight=0.4, all_alike=True
        )
    return None


def _describe_power(seen: LiveEvidence, named: frozenset[int]) -> str:
    odd = [each for each in seen.ranks if each.rank in named]
    rest = [each for each in seen.ranks if each.rank not in named]
    beside = f", beside {format_count(len(rest), 'rank')}{_format_readings(rest)}" if rest else ""
    return f"{format_ranks(named)}{_format_readings(odd)}{beside}"


def _format_readings(ranks: Iterable[RankReadings]) -> str:
    every = list(ranks)
    parts = []
    for values, unit in (
        ([each.utilization_percent for each in every], "%"),
        ([each.power_watts for each in every], "W"),
    ):
        known = sorted(value for value in values if value is not None)
        if known:
            low, high = f"{known[0]:.0f}", f"{known[-1]:.0f}"
            parts.append(f"{low if low == high else f'{low}-{high}'} {unit}")
    return f" at {' and '.join(parts)}" if parts else ""


def heartbeats_signal(seen: LiveEvidence) -> Signal | None:
    """Ranks in another phase, or at another step, than more than half of them."""
    for field, words, weight in (("phase", "in phase {}", 0.6), ("step", "at step {:,}", 0.5)):
        values = {each.rank: value for each in seen.ranks if (value := getattr(each, field)) is not None}
        common = Counter(values.values()).most_common(1)
        if not common or 2 * common[0][1] <= len(values) or common[0][1] == len(values):
            continue
        usual = common[0][0]
        named = frozenset(rank for rank, value in values.items() if value != usual)
        told = {rank: f"is {words.format(values[rank])}" for rank in named}
        cause, left = _compare_blocks_left(seen, named)
        if (
            cause is None
            and field == "phase"
            and usual == "train"
            and {values[r] for r in named} <= PHASES_AFTER_TRAINING
        ):
            cause = HangCause.DATA
        odd = f"{format_ranks(named)} {words.format(values[min(named)])}"
        sentence = f"{odd}, {common[0][1]} others {words.format(usual)}{left}"
        return Signal(HEARTBEATS, sentence, named, weight, cause, told)
    return None


def _compare_blocks_left(seen: LiveEvidence, named: frozenset[int]) -> tuple[HangCause | None, str]:
    """Shares of the data that do not end together: the paper's hang."""
    left = {each.rank: each.blocks_left for each in seen.ranks if each.blocks_left is not None}
    odd = [left[rank] for rank in named if rank in left]
    rest = [blocks for rank, blocks in left.items() if rank not in named]
    if not odd or not rest or max(odd) >= min(rest):
        return None, ""
    return HangCause.DATA, f"; blocks of data left: {max(odd):,} against {min(rest):,} and more"


def median_step(seen: LiveEvidence) -> int | None:
    """Of the ranks that tell it, where the job does not."""
    steps = [each.step for each in seen.ranks if each.step is not None]
    return seen.step if seen.step is not None else (int(statistics.median_low(steps)) if steps else None)


# The witness of processes, as the kernel sees them: gone, stopped, asleep in a driver or a file system. Pure.

# Functions that a process in state D sleeps in: fs/nfs, net/sunrpc, lustre, ceph, fuse, mm/filemap.c, block/.
STORAGE_CHANNEL: Final = re.compile(
    r"nfs|rpc_|lustre|^ll_|ptlrpc|cl_sync|ceph|fuse|gpfs|cxi|beegfs|folio_wait|wait_on_page|page_lock|io_schedule|"
    r"jbd2|xfs|ext4|btrfs|blk_|blkdev|request_wait|balance_dirty|wb_wait"
)
DRIVER_CHANNEL: Final = re.compile(r"nvidia|^_?nv_?\d|uvm|os_acquire|rm_")
WHOLE_CORE_PERCENT: Final = 90.0  # of one core
NO_CORE_PERCENT: Final = 10.0


def processes_signal(evidence: Evidence) -> Signal | None:
    """The worst state that a minority of ranks is in."""
    known = [*(process for process in evidence.processes if process.rank is not None), *_gone_processes(evidence)]
    looks: list[tuple[Callable[[RankProcess], bool], str, HangCause | None, float]] = [
        (lambda p: p.state in (None, "Z", "X", "x"), "gone", HangCause.RANK, 0.8),
        (lambda p: p.state in ("T", "t"), "stopped (state {state})", HangCause.RANK, 0.85),
        (_in_driver, "asleep in the GPU driver (state D, {channel})", HangCause.GPU, 0.65),
        (_in_storage, "waiting for the file system (state D, {channel})", HangCause.STORAGE, 0.65),
        (lambda p: p.state == "D", "asleep in the kernel and not to be interrupted (state D)", HangCause.HOST, 0.5),
    ]
    for fits, words, cause, weight in looks:
        named = [process for process in known if fits(process)]
        if named:
            told = {p.rank: words.format(state=p.state, channel=p.wait_channel) for p in named if p.rank is not None}
            few = 2 * len(named) < max(len(known), 2) or len(named) == 1
            return Signal(
                PROCESSES,
                _describe_states(told, len(known)),
                frozenset(told) if few else frozenset(),
                weight,
                cause,
                {rank: f"is {state}" for rank, state in told.items()},
            )
    return _cpu_outlier_signal(known)


def _gone_processes(evidence: Evidence) -> list[RankProcess]:
    """Ranks whose heartbeat names a process that its node no longer lists."""
    listed = {process.rank for process in evidence.processes}
    seen = evidence.live_ranks
    if not any(each.alive for each in seen):
        return []
    return [
        RankProcess(each.rank, each.node, 0, None if each.alive is False else "S")
        for each in seen
        if each.alive is not None and each.rank not in listed
    ]


def _in_storage(process: RankProcess) -> bool:
    return process.state == "D" and any(STORAGE_CHANNEL.search(place) for place in _kernel_functions(process))


def _in_driver(process: RankProcess) -> bool:
    return process.state == "D" and any(DRIVER_CHANNEL.search(place) for place in _kernel_functions(process))


def _kernel_functions(process: RankProcess) -> tuple[str, ...]:
    """Where it is in the kernel; the wait channel alone may be a lock that tells nothing."""
    return (process.wait_channel or "", *process.kernel_stack)


def _describe_states(told: dict[int, str], known: int) -> str:
    """`rank 3 is gone`, `4 of 8 processes: ranks 0-3 are gone`."""
    state = told[min(told)]
    of_how_many = "" if len(told) == 1 else f"{len(told)} of {known} processes: "
    return f"{of_how_many}{format_ranks(told)} {'is' if len(told) == 1 else 'are'} {state}"


def _cpu_outlier_signal(known: Sequence[RankProcess]) -> Signal | None:
    """Waiting in NCCL takes a whole core, so it is the odd one that tells, whichever way it is odd."""
    shares = {p.rank: p.cpu_percent for p in known if p.cpu_percent is not None and p.rank is not None}
    spins = frozenset(rank for rank, share in shares.items() if share >= WHOLE_CORE_PERCENT)
    rests = frozenset(rank for rank, share in shares.items() if share <= NO_CORE_PERCENT)
    if len(shares) < 3 or spins | rests != frozenset(shares):
        return None
    if len(spins) == 1:
        words = f"{format_ranks(spins)} takes a whole core, the others rest"
        return Signal(PROCESSES, words, spins, 0.4, HangCause.RANK, dict.fromkeys(spins, "takes a whole core"))
    if len(rests) == 1:
        words = f"{format_ranks(rests)} takes no CPU, the others a whole core each"
        return Signal(PROCESSES, words, rests, 0.35, None, dict.fromkeys(rests, "takes no CPU"))
    return None


# The witnesses of faults that nodes report: one for each kind. Pure.

FAULT_KINDS: Final = {  # kind -> who tells it, what is to blame, how sure that alone would be
    "gpu": (KERNEL_LOG, HangCause.GPU, 0.8),
    "oom": (KERNEL_LOG, HangCause.HOST, 0.8),
    "process": (PROCESSES, HangCause.RANK, 0.7),
    "host": (REACHABILITY, HangCause.HOST, 0.6),  # the node does not answer
    "storage": (FILE_SYSTEM, HangCause.STORAGE, 0.6),
    "network": (LINKS, HangCause.NETWORK, 0.6),
    "throttle": (THROTTLING, None, 0.15),  # it slows a job, and does not stop it
}


def fault_signals(evidence: Evidence) -> tuple[Signal, ...]:
    """One for each kind of fault."""
    seen = evidence.seen
    kinds: dict[str, list[NodeFault]] = defaultdict(list)
    for fault in seen.faults if seen is not None else ():
        kinds[fault.kind if fault.kind in FAULT_KINDS else "process"].append(fault)
    witnesses = []
    for kind, faults in kinds.items():
        source, cause, weight = FAULT_KINDS[kind]
        doing = {rank: fault.words for fault in faults for rank in _affected_ranks(fault, evidence)}
        exact = all(fault.rank is not None or fault.gpu is not None for fault in faults)
        words = "; ".join(dict.fromkeys(f"{fault.node}: {fault.words}" for fault in faults[:3]))
        witnesses.append(Signal(source, words, frozenset(doing), weight if exact else weight / 2, cause, doing))
    return tuple(witnesses)


def _affected_ranks(fault: NodeFault, evidence: Evidence) -> list[int]:
    """Of its board; of the whole node where a fault of its host names none."""
    if fault.rank is not None:
        return [fault.rank]
    seen = evidence.live_ranks
    if fault.gpu is not None:
        return [each.rank for each in seen if (each.node, each.gpu) == (fault.node, fault.gpu)]
    if fault.kind in ("storage", "network"):
        return []
    return sorted({each.rank for each in seen if each.node == fault.node})
