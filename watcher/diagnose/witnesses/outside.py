"""Witnesses from outside the job: processes, power and utilisation, heartbeats, faults of its nodes. Pure."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from watcher.diagnose.diagnosis import Cause
from watcher.diagnose.evidence import Evidence, Fault, RankProcess, RankSeen, Seen
from watcher.diagnose.witnesses.witness import HEARTBEATS, POWER, PROCESSES, Witness
from watcher.diagnose.words import counted, ranks_in_words

# Functions that a process in state D sleeps in: fs/nfs, net/sunrpc, lustre, ceph, fuse, mm/filemap.c, block/.
STORAGE_CHANNEL: Final = re.compile(
    r"nfs|rpc_|lustre|^ll_|ptlrpc|cl_sync|ceph|fuse|gpfs|cxi|beegfs|folio_wait|wait_on_page|page_lock|io_schedule|"
    r"jbd2|xfs|ext4|btrfs|blk_|blkdev|request_wait|balance_dirty|wb_wait"
)
DRIVER_CHANNEL: Final = re.compile(r"nvidia|^_?nv_?\d|uvm|os_acquire|rm_")
BUSY_PERCENT: Final = 90.0
LOW_PERCENT: Final = 10.0
WEIGHT_OF_SHAPE: Final = {"one_low_rest_busy": 0.5, "rank0_low_rest_busy": 0.4}
SUSPECT_WEIGHT: Final = 0.3
# Phases of a heartbeat that a rank comes to when its share of the data is used up, while others still train.
AFTER_TRAINING: Final = frozenset({"barrier", "save", "eval", "done"})
FAULTS: Final = {  # kind -> who tells it, what is to blame, how sure that alone would be
    "gpu": ("kernel log", Cause.GPU, 0.8),
    "oom": ("kernel log", Cause.HOST, 0.8),
    "process": (PROCESSES, Cause.RANK, 0.7),
    "host": ("reachability", Cause.HOST, 0.6),  # the node does not answer
    "storage": ("file system", Cause.STORAGE, 0.6),
    "network": ("links", Cause.NETWORK, 0.6),
    "throttle": ("throttle reasons", None, 0.15),  # it slows a job, and does not stop it
}


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
    spins = frozenset(rank for rank, share in shares.items() if share >= BUSY_PERCENT)
    rests = frozenset(rank for rank, share in shares.items() if share <= LOW_PERCENT)
    if len(shares) < 3 or spins | rests != frozenset(shares):
        return None
    if len(spins) == 1:
        words = f"{ranks_in_words(spins)} takes a whole core, the others rest"
        return Witness(PROCESSES, words, spins, 0.4, Cause.RANK, dict.fromkeys(spins, "takes a whole core"))
    if len(rests) == 1:
        words = f"{ranks_in_words(rests)} takes no CPU, the others a whole core each"
        return Witness(PROCESSES, words, rests, 0.35, None, dict.fromkeys(rests, "takes no CPU"))
    return None


def of_power(seen: Seen) -> Witness | None:
    """Whoever the watcher suspects; without its word, the one board that rests beside others that spin."""
    shares = {each.rank: each.utilization_percent for each in seen.ranks if each.utilization_percent is not None}
    low = frozenset(rank for rank, share in shares.items() if share <= LOW_PERCENT)
    busy = frozenset(rank for rank, share in shares.items() if share >= BUSY_PERCENT)
    named, shape = frozenset(seen.suspects), seen.shape
    if not named and len(low) == 1 and len(shares) > 2 and low | busy == frozenset(shares):
        named, shape = low, "one_low_rest_busy"
    if named:
        weight = WEIGHT_OF_SHAPE.get(shape, SUSPECT_WEIGHT)
        return Witness(POWER, _power_words(seen, named), named, weight)
    if shares and busy == frozenset(shares) and len(shares) > 1:
        return Witness(POWER, f"all {len(shares)} boards read busy{_range(seen.ranks)}", weight=0.4, clears=True)
    return None


def _power_words(seen: Seen, named: frozenset[int]) -> str:
    odd = [each for each in seen.ranks if each.rank in named]
    rest = [each for each in seen.ranks if each.rank not in named]
    beside = f", beside {counted(len(rest), 'rank')}{_range(rest)}" if rest else ""
    return f"{ranks_in_words(named)}{_range(odd)}{beside}"


def _range(ranks: Iterable[RankSeen]) -> str:
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


def of_heartbeats(seen: Seen) -> Witness | None:
    """Ranks in another phase, or at another step, than more than half of them."""
    for field, words, weight in (("phase", "in phase {}", 0.6), ("step", "at step {:,}", 0.5)):
        values = {each.rank: value for each in seen.ranks if (value := getattr(each, field)) is not None}
        common = Counter(values.values()).most_common(1)
        if not common or 2 * common[0][1] <= len(values) or common[0][1] == len(values):
            continue
        usual = common[0][0]
        named = frozenset(rank for rank, value in values.items() if value != usual)
        told = {rank: f"is {words.format(values[rank])}" for rank in named}
        cause, left = _blocks(seen, named)
        if cause is None and field == "phase" and usual == "train" and {values[r] for r in named} <= AFTER_TRAINING:
            cause = Cause.DATA
        odd = f"{ranks_in_words(named)} {words.format(values[min(named)])}"
        sentence = f"{odd}, {common[0][1]} others {words.format(usual)}{left}"
        return Witness(HEARTBEATS, sentence, named, weight, cause, told)
    return None


def _blocks(seen: Seen, named: frozenset[int]) -> tuple[Cause | None, str]:
    """Shares of the data that do not end together: the paper's hang."""
    left = {each.rank: each.blocks_left for each in seen.ranks if each.blocks_left is not None}
    odd = [left[rank] for rank in named if rank in left]
    rest = [blocks for rank, blocks in left.items() if rank not in named]
    if not odd or not rest or max(odd) >= min(rest):
        return None, ""
    return Cause.DATA, f"; blocks of data left: {max(odd):,} against {min(rest):,} and more"


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


def median_step(seen: Seen) -> int | None:
    """Of the ranks that tell it, where the job does not."""
    steps = [each.step for each in seen.ranks if each.step is not None]
    return seen.step if seen.step is not None else (int(statistics.median_low(steps)) if steps else None)
