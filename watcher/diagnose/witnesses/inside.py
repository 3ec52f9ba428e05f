"""Witnesses from inside the job: stacks of its Python code, and how its ranks ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from watcher.diagnose.diagnosis import Cause
from watcher.diagnose.evidence import Evidence, RankEnding
from watcher.diagnose.known_ranks import known_ranks
from watcher.diagnose.traces.activity import OWN_CODE, ActivityGroup, RankActivity, grouped, outliers, rank_activities
from watcher.diagnose.traces.failures import kind_of_words
from watcher.diagnose.traces.stacks import frame_in_words
from watcher.diagnose.witnesses.witness import ENDINGS, STACKS, Witness
from watcher.diagnose.words import ranks_in_words

# Ranks that wait for others are in one of these; whoever is not, may be whom they wait for.
WAITING: Final = frozenset({"collective", "gpu_wait", "backward", "process_group_end", "process_group_start"})
CAUSE_OF_ACTIVITY: Final = {
    "data": Cause.DATA,
    "checkpoint": Cause.STORAGE,
    "file": Cause.STORAGE,
    "compile": Cause.RANK,
    "tokenize": Cause.DATA,
    "subprocess": Cause.RANK,
    "network_read": Cause.RANK,
    "lock": Cause.RANK,
    OWN_CODE: Cause.RANK,
}
STACKS_WEIGHT: Final = 0.6
TIED_WEIGHT: Final = 0.35  # as many wait as do not: a line of own code may wait for its GPU, which no frame tells
ALIKE_WEIGHT: Final = 0.3
NO_STACKS_WEIGHT: Final = 0.2  # too little to name anybody alone
ENDING_WEIGHT: Final = 0.8
SILENT_WEIGHT: Final = 0.6
STOPPED_ON_REQUEST: Final = 4  # of `wattwatch-train run`


def of_stacks(evidence: Evidence) -> Witness | None:
    active = rank_activities(evidence.stacks)
    if not active:
        return None
    groups = grouped(active)
    odd, weight = _odd(active, groups)
    doing = {each.rank: activity_in_words(each) for each in active}
    if not odd:
        same = len(groups) == 1 and len(active) > 2
        words = "; ".join(_group_words(group) for group in groups[:3])
        saw = frozenset(doing)
        silent = known_ranks(evidence) - saw
        if same and 0 < len(silent) < len(saw):
            doing |= dict.fromkeys(silent, "gave no stacks")
            words = f"{ranks_in_words(silent)} gave none, {words}"
            return Witness(STACKS, words, silent, NO_STACKS_WEIGHT, None, doing)
        return Witness(STACKS, words, weight=ALIKE_WEIGHT if same else 0.0, doing=doing, clears=same, saw=saw)
    named = frozenset(rank for group in odd for rank in group.ranks)
    rest = [group for group in groups if group not in odd]
    words = f"{'; '.join(_group_words(group) for group in odd[:3])}, beside {_group_words(rest[0])}"
    causes = {CAUSE_OF_ACTIVITY.get(group.activity) for group in odd}
    return Witness(STACKS, words, named, weight, causes.pop() if len(causes) == 1 else None, doing)


def _odd(active: Sequence[RankActivity], groups: Sequence[ActivityGroup]) -> tuple[tuple[ActivityGroup, ...], float]:
    busy = tuple(group for group in groups if group.activity not in WAITING)
    number = sum(len(group.ranks) for group in busy)
    if busy and 2 * number <= len(active):
        return busy, STACKS_WEIGHT if 2 * number < len(active) else TIED_WEIGHT
    odd = outliers(groups)
    return odd, STACKS_WEIGHT if len(odd) == 1 else TIED_WEIGHT


def activity_in_words(active: RankActivity) -> str:
    return active.words if active.frame is None else f"{active.words}: {frame_in_words(active.frame)}"


def _group_words(group: ActivityGroup) -> str:
    where = "" if group.frame is None else f" at {frame_in_words(group.frame)}"
    who = ranks_in_words(group.ranks)
    words = group.words if len(group.ranks) == 1 else _plural(group.words)
    return f"{who} {words}{where}"


def _plural(words: str) -> str:
    first, _, rest = words.partition(" ")
    several = {"is": "are"}.get(first, first.removesuffix("s"))
    return f"{several} {rest.replace('its ', 'their ')}".strip()


def of_endings(evidence: Evidence) -> Witness | None:
    """Ranks that ended by themselves first; where none did, those that were killed, or hung, and left no word."""
    if not evidence.endings:
        return None
    ended = {ending.rank: ending for ending in evidence.endings}
    world = frozenset(evidence.node_of_rank) | frozenset(ended)
    failed = [each for each in ended.values() if each.code not in (0, STOPPED_ON_REQUEST) and not each.follows]
    if failed and 2 * len(failed) <= len(world):
        named = frozenset(each.rank for each in failed)
        kinds = {None if kind is None else kind.cause for kind in map(kind_of_words, (each.why for each in failed))}
        cause = (kinds.pop() if len(kinds) == 1 else None) or Cause.RANK
        doing = {each.rank: f"ended with code {each.code}" for each in failed}
        return Witness(ENDINGS, _ending_words(failed), named, ENDING_WEIGHT, cause, doing)
    silent = world - frozenset(ended)
    if silent and 2 * len(silent) < len(world):
        words = f"{ranks_in_words(silent)} left no word of an end, {len(ended)} others did: killed, or still hanging"
        return Witness(ENDINGS, words, silent, SILENT_WEIGHT, Cause.RANK, dict.fromkeys(silent, "left no word"))
    return Witness(ENDINGS, _ending_words(list(ended.values())))


def _ending_words(endings: Sequence[RankEnding]) -> str:
    first = min(endings, key=lambda each: each.rank)
    after = "" if first.step is None else f" after step {first.step:,}"
    more = f" ({len(endings) - 1} more)" if len(endings) > 1 else ""
    return f"rank {first.rank} ended with code {first.code}{after}: {first.why}{more}"
