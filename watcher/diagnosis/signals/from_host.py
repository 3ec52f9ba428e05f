"""Signals from outside the job: power and utilization, heartbeats, processes, and faults that nodes report. Pure."""

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

# All weights here are chosen, not fitted (see combine.py).

# Power and utilization

BUSY_PERCENT: Final = 90.0
IDLE_PERCENT: Final = 10.0
# One rank at 0 % while the rest is pinned at 100 % is the hang of arXiv 2608.05944; rank 0 alone at 0 % is also what a
# checkpoint looks like, so it weighs less.
SHAPE_WEIGHTS: Final = {"one_low_rest_busy": 0.5, "rank0_low_rest_busy": 0.4}
SUSPECT_WEIGHT: Final = 0.3
ALL_BUSY_WEIGHT: Final = 0.4


def power_signal(live: LiveEvidence) -> Signal | None:
    """Names the watcher's suspects; without any, the single idle GPU among busy ones."""
    shares = {each.rank: each.utilization_percent for each in live.ranks if each.utilization_percent is not None}
    low = frozenset(rank for rank, share in shares.items() if share <= IDLE_PERCENT)
    busy = frozenset(rank for rank, share in shares.items() if share >= BUSY_PERCENT)
    named, shape = frozenset(live.suspects), live.shape
    if not named and len(low) == 1 and len(shares) > 2 and low | busy == frozenset(shares):
        named, shape = low, "one_low_rest_busy"
    if named:
        return Signal(POWER, _describe_power(live, named), named, SHAPE_WEIGHTS.get(shape, SUSPECT_WEIGHT))
    if shares and busy == frozenset(shares) and len(shares) > 1:
        text = f"all {len(shares)} GPUs are busy{_format_readings(live.ranks)}"
        return Signal(POWER, text, weight=ALL_BUSY_WEIGHT, all_alike=True)
    return None


def _describe_power(live: LiveEvidence, named: frozenset[int]) -> str:
    odd = [each for each in live.ranks if each.rank in named]
    rest = [each for each in live.ranks if each.rank not in named]
    others = f", the other {format_count(len(rest), 'rank')}{_format_readings(rest)}" if rest else ""
    return f"{format_ranks(named)}{_format_readings(odd)}{others}"


def _format_readings(ranks: Iterable[RankReadings]) -> str:
    """` at 0 % and 190 W`, ` at 98-100 % and 228-232 W`; empty without readings."""
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


# Heartbeats

PHASE_WEIGHT: Final = 0.6
STEP_WEIGHT: Final = 0.5  # less than a phase: a rank one step behind may just be slow to report
# Phases that a rank reaches when its share of the data is used up, while others still train.
PHASES_AFTER_TRAINING: Final = frozenset({"barrier", "save", "eval", "done"})


def heartbeats_signal(live: LiveEvidence) -> Signal | None:
    """Names the ranks in another phase than more than half of the ranks; else those at another step."""
    for field, words, weight in (("phase", "in phase {}", PHASE_WEIGHT), ("step", "at step {:,}", STEP_WEIGHT)):
        values = {each.rank: value for each in live.ranks if (value := getattr(each, field)) is not None}
        common = Counter(values.values()).most_common(1)
        if not common or 2 * common[0][1] <= len(values) or common[0][1] == len(values):
            continue
        usual, count = common[0]
        named = frozenset(rank for rank, value in values.items() if value != usual)
        rank_text = {rank: f"is {words.format(values[rank])}" for rank in named}
        cause, blocks_left = _compare_blocks_left(live, named)
        others_train = field == "phase" and usual == "train"
        if cause is None and others_train and {values[rank] for rank in named} <= PHASES_AFTER_TRAINING:
            cause = HangCause.DATA
        odd = f"{format_ranks(named)} {words.format(values[min(named)])}"
        text = f"{odd}, {count} others {words.format(usual)}{blocks_left}"
        return Signal(HEARTBEATS, text, named, weight, cause, rank_text)
    return None


def _compare_blocks_left(live: LiveEvidence, named: frozenset[int]) -> tuple[HangCause | None, str]:
    """Shares of the data that end at different steps: the hang of arXiv 2608.05944, where the numbers of packed blocks
    per rank differed by 53."""
    left = {each.rank: each.blocks_left for each in live.ranks if each.blocks_left is not None}
    odd = [left[rank] for rank in named if rank in left]
    rest = [blocks for rank, blocks in left.items() if rank not in named]
    if not odd or not rest or max(odd) >= min(rest):
        return None, ""
    return (
        HangCause.DATA,
        f"; these ranks have at most {format_count(max(odd), 'block')} of data left, the others at least "
        f"{format_count(min(rest), 'block')}",
    )


def median_step(live: LiveEvidence) -> int | None:
    """The step of the job; the median step of its ranks if the job's own is unknown."""
    steps = [each.step for each in live.ranks if each.step is not None]
    return live.step if live.step is not None else (int(statistics.median_low(steps)) if steps else None)


# Processes

# Kernel functions that a process in state D (uninterruptible sleep) waits in, from fs/nfs, net/sunrpc, lustre, ceph,
# fuse, mm/filemap.c and block/ of Linux.
STORAGE_CHANNEL: Final = re.compile(
    r"nfs|rpc_|lustre|^ll_|ptlrpc|cl_sync|ceph|fuse|gpfs|cxi|beegfs|folio_wait|wait_on_page|page_lock|io_schedule|"
    r"jbd2|xfs|ext4|btrfs|blk_|blkdev|request_wait|balance_dirty|wb_wait"
)
DRIVER_CHANNEL: Final = re.compile(r"nvidia|^_?nv_?\d|uvm|os_acquire|rm_")
WHOLE_CORE_PERCENT: Final = 90.0
NO_CORE_PERCENT: Final = 10.0
SPINNING_ALONE_WEIGHT: Final = 0.4
IDLE_ALONE_WEIGHT: Final = 0.35


def processes_signal(evidence: Evidence) -> Signal | None:
    """The worst state that any process is in; names its ranks if they are a minority."""
    known = [*(process for process in evidence.processes if process.rank is not None), *_gone_processes(evidence)]
    # In order: the first row that fits any process decides. The wait channel tells driver from storage; a process in
    # state D that shows neither is the host's problem.
    rows: list[tuple[Callable[[RankProcess], bool], str, HangCause | None, float]] = [
        (lambda p: p.state in (None, "Z", "X", "x"), "gone", HangCause.RANK, 0.8),
        (lambda p: p.state in ("T", "t"), "stopped (state {state})", HangCause.RANK, 0.85),
        (_in_driver, "blocked in the GPU driver (state D, {channel})", HangCause.GPU, 0.65),
        (_in_storage, "blocked on the file system (state D, {channel})", HangCause.STORAGE, 0.65),
        (lambda p: p.state == "D", "in uninterruptible sleep in the kernel (state D)", HangCause.HOST, 0.5),
    ]
    for fits, words, cause, weight in rows:
        named = [process for process in known if fits(process)]
        if named:
            states = {p.rank: words.format(state=p.state, channel=p.wait_channel) for p in named if p.rank is not None}
            few = 2 * len(named) < max(len(known), 2) or len(named) == 1
            return Signal(
                PROCESSES,
                _describe_states(states, len(known)),
                frozenset(states) if few else frozenset(),
                weight,
                cause,
                {rank: f"is {state}" for rank, state in states.items()},
            )
    return _cpu_outlier_signal(known)


def _gone_processes(evidence: Evidence) -> list[RankProcess]:
    """Ranks whose heartbeat names a process that its node does not list any more, as processes without a state."""
    listed = {process.rank for process in evidence.processes}
    ranks = evidence.live_ranks
    if not any(each.alive for each in ranks):
        return []  # if no rank is known to be alive, the listing itself may have failed
    return [
        RankProcess(each.rank, each.node, 0, None if each.alive is False else "S")
        for each in ranks
        if each.alive is not None and each.rank not in listed
    ]


def _in_storage(process: RankProcess) -> bool:
    return process.state == "D" and any(STORAGE_CHANNEL.search(name) for name in _kernel_functions(process))


def _in_driver(process: RankProcess) -> bool:
    return process.state == "D" and any(DRIVER_CHANNEL.search(name) for name in _kernel_functions(process))


def _kernel_functions(process: RankProcess) -> tuple[str, ...]:
    """The wait channel and the kernel stack: the channel alone may be a lock that says nothing about what it guards."""
    return (process.wait_channel or "", *process.kernel_stack)


def _describe_states(states: dict[int, str], known: int) -> str:
    """`rank 3 is gone`, `4 of 8 processes: ranks 0-3 are gone`."""
    state = states[min(states)]
    share = "" if len(states) == 1 else f"{len(states)} of {known} processes: "
    return f"{share}{format_ranks(states)} {'is' if len(states) == 1 else 'are'} {state}"


def _cpu_outlier_signal(known: Sequence[RankProcess]) -> Signal | None:
    """Names the one rank whose CPU use differs from all others.

    Waiting in NCCL takes a whole core, waiting elsewhere takes none, so the odd rank is suspicious either way.
    """
    shares = {p.rank: p.cpu_percent for p in known if p.cpu_percent is not None and p.rank is not None}
    spinning = frozenset(rank for rank, share in shares.items() if share >= WHOLE_CORE_PERCENT)
    idle = frozenset(rank for rank, share in shares.items() if share <= NO_CORE_PERCENT)
    if len(shares) < 3 or spinning | idle != frozenset(shares):
        return None
    if len(spinning) == 1:
        rank_text = dict.fromkeys(spinning, "uses a whole CPU core")
        text = f"{format_ranks(spinning)} uses a whole CPU core; the others are idle"
        return Signal(PROCESSES, text, spinning, SPINNING_ALONE_WEIGHT, HangCause.RANK, rank_text)
    if len(idle) == 1:
        rank_text = dict.fromkeys(idle, "uses no CPU")
        text = f"{format_ranks(idle)} uses no CPU; the others use a whole core each"
        return Signal(PROCESSES, text, idle, IDLE_ALONE_WEIGHT, None, rank_text)
    return None


# Faults that nodes report

FAULT_KINDS: Final = {  # kind of a NodeFault -> source, what is to blame, weight
    "gpu": (KERNEL_LOG, HangCause.GPU, 0.8),
    "oom": (KERNEL_LOG, HangCause.HOST, 0.8),
    "process": (PROCESSES, HangCause.RANK, 0.7),
    "host": (REACHABILITY, HangCause.HOST, 0.6),  # the node does not answer
    "storage": (FILE_SYSTEM, HangCause.STORAGE, 0.6),
    "network": (LINKS, HangCause.NETWORK, 0.6),
    "throttle": (THROTTLING, None, 0.15),  # throttling slows a job down, it does not stop it
}
MAX_FAULTS_DESCRIBED: Final = 3


def fault_signals(evidence: Evidence) -> tuple[Signal, ...]:
    """One signal for each kind of fault. It weighs half if a fault cannot be tied to a rank or a GPU."""
    by_kind: dict[str, list[NodeFault]] = defaultdict(list)
    for fault in evidence.live.faults if evidence.live is not None else ():
        by_kind[fault.kind if fault.kind in FAULT_KINDS else "process"].append(fault)
    signals = []
    for kind, faults in by_kind.items():
        source, cause, weight = FAULT_KINDS[kind]
        rank_text = {
            rank: f"is affected by: {fault.words}" for fault in faults for rank in _affected_ranks(fault, evidence)
        }
        exact = all(fault.rank is not None or fault.gpu is not None for fault in faults)
        text = "; ".join(dict.fromkeys(f"{fault.node}: {fault.words}" for fault in faults[:MAX_FAULTS_DESCRIBED]))
        signals.append(Signal(source, text, frozenset(rank_text), weight if exact else weight / 2, cause, rank_text))
    return tuple(signals)


def _affected_ranks(fault: NodeFault, evidence: Evidence) -> list[int]:
    """The rank of the fault or of its GPU; all ranks of the node if a fault of the host names neither.

    A file system or a link serves all nodes: such a fault names no rank.
    """
    if fault.rank is not None:
        return [fault.rank]
    ranks = evidence.live_ranks
    if fault.gpu is not None:
        return [each.rank for each in ranks if (each.node, each.gpu) == (fault.node, fault.gpu)]
    if fault.kind in ("storage", "network"):
        return []
    return sorted({each.rank for each in ranks if each.node == fault.node})
