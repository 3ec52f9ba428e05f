"""The witnesses of what the watcher saw of each rank: power and utilisation, heartbeats. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Final

from watcher.diagnose.diagnosis import Cause
from watcher.diagnose.evidence import RankSeen, Seen
from watcher.diagnose.witnesses.witness import HEARTBEATS, POWER, Witness
from watcher.diagnose.words import counted, ranks_in_words

BUSY_PERCENT: Final = 90.0
LOW_PERCENT: Final = 10.0
WEIGHT_OF_SHAPE: Final = {"one_low_rest_busy": 0.5, "rank0_low_rest_busy": 0.4}
SUSPECT_WEIGHT: Final = 0.3
# Phases of a heartbeat that a rank comes to when its share of the data is used up, while others still train.
AFTER_TRAINING: Final = frozenset({"barrier", "save", "eval", "done"})


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
        return Witness(POWER, f"all {len(shares)} GPUs read busy{_range(seen.ranks)}", weight=0.4, clears=True)
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


def median_step(seen: Seen) -> int | None:
    """Of the ranks that tell it, where the job does not."""
    steps = [each.step for each in seen.ranks if each.step is not None]
    return seen.step if seen.step is not None else (int(statistics.median_low(steps)) if steps else None)
