"""What cannot be true is not learned; and what was learned, put in the place of a profile's numbers.

A learned floor is what idling with a context draws; spinning draws up to 35 W more on every board with both figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from watcher.judge.job_sample import RankGpu
from watcher.judge.learned import SAME_LIMIT_WATTS, Board, JobLearned, Kind, Knowledge, Learned
from watcher.judge.profiles import Profile, generic_profile
from watcher.judge.scene import (
    HIGHEST_FLOOR_FRACTION,
    HIGHEST_FLOOR_WATTS,
    SHOWN,
    SPIN_ABOVE_LOW_SHARE,
    SPIN_ABOVE_LOW_WATTS,
)

# Sites of one model idle up to a third apart; a board that rests with its clocks up lies below the profile's floor.
IDLE_SHARES: Final = (0.4, 2.0)
CONTEXT_ABOVE_FLOOR: Final = 1.25
# A context takes nothing away: less than this share of bare idle is another reading, not a floor.
CONTEXT_ABOVE_IDLE: Final = 0.8
# Work draws this much more than waiting does; above the limit by more than this is no reading of this board.
PLATEAU_ABOVE_FLOOR: Final = 1.25
PLATEAU_ABOVE_LIMIT: Final = 1.15
# Boards that rest at low clocks (P8) draw far less than when they spin, and not each tool tells the clocks: a learned
# floor lowers that of a board's own profile by this much at most, the generic one by more.
LOWEST_SHARE: Final = 0.75
LOWEST_SHARE_GENERIC: Final = 0.5
# Steady work varies by a few per cent from one mean to the next; the lower end of the plateau.
PLATEAU_LOWER_END: Final = 0.85
# From here on there is room between waiting and work, on whatever board.
ROOM: Final = 1.6


def spin_watts(rest_watts: float) -> float:
    """The most that a board draws which spins, by what it draws at rest with a context."""
    return min(rest_watts + SPIN_ABOVE_LOW_WATTS, SPIN_ABOVE_LOW_SHARE * rest_watts)


def refusal(value: Learned, base: Profile, knowledge: Knowledge) -> str | None:
    """Why a value cannot be true of this board, given its profile and what else is known of it; None: it may be."""
    board = (value.node, value.board)
    watts = value.watts
    if watts <= 0:
        return "no watts were read"
    named = base.name != generic_profile().name
    plateau = knowledge.get(board, Kind.PLATEAU, value.job)
    if value.kind is Kind.PLATEAU:
        floor = floor_of(knowledge, board, base)
        if watts < PLATEAU_ABOVE_FLOOR * floor:
            return f"{watts:.0f} W is no plateau: the floor of this board is {floor:.0f} W"
        if value.limit_watts is not None and watts > PLATEAU_ABOVE_LIMIT * value.limit_watts:
            return f"{watts:.0f} W lies above the limit of {value.limit_watts:.0f} W"
        return None
    most = HIGHEST_FLOOR_WATTS if value.limit_watts is None else HIGHEST_FLOOR_FRACTION * value.limit_watts
    if value.kind is Kind.IDLE:
        least, most = (IDLE_SHARES[0] * base.idle_watts, IDLE_SHARES[1] * base.idle_watts) if named else (0.0, most)
    else:
        idle = knowledge.get(board, Kind.IDLE)
        least = 0.0 if idle is None else CONTEXT_ABOVE_IDLE * idle.watts
        most = CONTEXT_ABOVE_FLOOR * base.floor_watts if named else most
    if not least <= watts <= most:
        return f"{watts:.0f} W is no {value.kind.value} floor of this board: expected {least:.0f} to {most:.0f} W"
    if plateau is not None and PLATEAU_ABOVE_FLOOR * spin_watts(watts) > plateau.watts:
        return f"{watts:.0f} W leaves no room below the plateau of {plateau.watts:.0f} W"
    return None


def floor_of(knowledge: Knowledge, board: Board, base: Profile) -> float:
    """At most this when spinning or waiting: as learned, else by the profile, and not less than bare idle tells."""
    context, idle = knowledge.get(board, Kind.CONTEXT), knowledge.get(board, Kind.IDLE)
    if context is not None:
        return max(spin_watts(context.watts), _least_floor(base))
    return base.floor_watts if idle is None else max(base.floor_watts, spin_watts(idle.watts))


def _least_floor(base: Profile) -> float:
    """The floor guessed of small boards is the highest one; others of that size rest at a tenth of the limit."""
    generic = generic_profile()
    if base.name != generic.name:
        return LOWEST_SHARE * base.floor_watts
    return LOWEST_SHARE_GENERIC * min(base.floor_watts, generic.floor_watts / generic.limit_watts * base.limit_watts)


def same_limit(value: Learned, limit_watts: float | None) -> bool:
    if value.limit_watts is None or limit_watts is None:
        return value.limit_watts is limit_watts
    return abs(value.limit_watts - limit_watts) <= SAME_LIMIT_WATTS


def learned_of(knowledge: Knowledge, job: str, gpus: Sequence[RankGpu], base: Profile) -> JobLearned | None:
    """What holds for these boards of a job. `base`: their profile at their limit. None: nothing is learned."""
    floors: dict[Board, float] = {}
    contexts: list[Learned] = []
    idles: list[float] = []
    plateaus: list[float] = []
    for ranked in gpus:
        board = (ranked.node, ranked.gpu.key)
        context, idle = knowledge.get(board, Kind.CONTEXT), knowledge.get(board, Kind.IDLE)
        plateau = knowledge.get(board, Kind.PLATEAU, job)
        if context is not None or idle is not None:
            floors[board] = floor_of(knowledge, board, base)
        if context is not None:
            contexts.append(context)
        if idle is not None:
            idles.append(idle.watts)
        if plateau is not None and same_limit(plateau, ranked.gpu.power_limit_watts):
            plateaus.append(plateau.watts)
    if not floors and not plateaus:
        return None
    most = len(gpus) / 2
    floor = statistics.median(floors.values()) if len(floors) >= most else base.floor_watts
    plateau_watts = statistics.median(plateaus) if len(plateaus) >= most else None
    if plateau_watts is not None and plateau_watts < PLATEAU_ABOVE_FLOOR * floor:
        plateau_watts = None
    profile = replace(base, floor_watts=floor, idle_watts=statistics.median(idles) if idles else base.idle_watts)
    if base.name == generic_profile().name and len(contexts) >= most:
        # Their own floor is better than any that is guessed from a limit, and that one may leave no room.
        profile = replace(profile, certain=max(base.certain, generic_profile().certain))
    if plateau_watts is not None:
        profile = _with_plateau(profile, plateau_watts, sure=len(contexts) >= most)
    words = _words(contexts, floor) if len(contexts) >= most else ""
    return JobLearned(profile, floors, words, plateau_watts)


def _with_plateau(profile: Profile, watts: float, *, sure: bool) -> Profile:
    """What the job's own compute draws is compute; a band that holds it was measured on other work."""
    communication, starvation = profile.communication, profile.starvation
    return replace(
        profile,
        compute_watts=PLATEAU_LOWER_END * watts,
        communication=None if communication is not None and watts <= communication.high_watts else communication,
        starvation=None if starvation is not None and watts <= starvation.high_watts else starvation,
        certain=max(profile.certain, SHOWN) if sure and watts >= ROOM * profile.floor_watts else profile.certain,
    )


def _words(contexts: Sequence[Learned], floor: float) -> str:
    where = "this host" if len({value.node for value in contexts}) == 1 else "these hosts"
    samples = round(statistics.median(value.samples for value in contexts))
    each = " a board" if len(contexts) > 1 else ""
    phases = " and ".join(sorted({value.phase.value for value in contexts}))
    return f"floor {floor:.0f} W learned on {where} from {samples} samples{each} {phases}"
