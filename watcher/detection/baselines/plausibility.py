"""What cannot be true is not learned; and what was learned, put in the place of a profile's numbers.

A learned floor is what idling with a context draws; spinning draws up to 35 W more on every board with both figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from wattwatch.watcher.detection.baselines.baseline import (
    LIMIT_TOLERANCE_WATTS,
    Baseline,
    BaselineKind,
    BaselineTable,
    GpuId,
    JobBaseline,
)
from wattwatch.watcher.detection.baselines.profiles import PowerProfile, generic_profile
from wattwatch.watcher.detection.classifier.features import (
    HIGHEST_FLOOR_FRACTION,
    HIGHEST_FLOOR_WATTS,
    MAX_SPIN_ABOVE_IDLE_WATTS,
    MAX_SPIN_TO_IDLE_RATIO,
    OBSERVED_FLOOR_CONFIDENCE,
)
from wattwatch.watcher.detection.model import RankGpu

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
MIN_FLOOR_SHARE: Final = 0.75
MIN_FLOOR_SHARE_GENERIC: Final = 0.5
# Steady work varies by a few per cent from one mean to the next; the lower end of the plateau.
PLATEAU_LOWER_END: Final = 0.85
# From here on there is room between waiting and work, on whatever board.
MIN_PLATEAU_TO_FLOOR: Final = 1.6


def max_spin_watts(rest_watts: float) -> float:
    """The most that a board draws which spins, by what it draws at rest with a context."""
    return min(rest_watts + MAX_SPIN_ABOVE_IDLE_WATTS, MAX_SPIN_TO_IDLE_RATIO * rest_watts)


def implausible_reason(value: Baseline, base: PowerProfile, knowledge: BaselineTable) -> str | None:
    """Why a value cannot be true of this board, given its profile and what else is known of it; None: it may be."""
    board = (value.node, value.board)
    watts = value.watts
    if watts <= 0:
        return "no watts were read"
    named = base.name != generic_profile().name
    plateau = knowledge.get(board, BaselineKind.PLATEAU, value.job)
    if value.kind is BaselineKind.PLATEAU:
        floor = expected_floor_watts(knowledge, board, base)
        if watts < PLATEAU_ABOVE_FLOOR * floor:
            return f"{watts:.0f} W is no plateau: the floor of this board is {floor:.0f} W"
        if value.limit_watts is not None and watts > PLATEAU_ABOVE_LIMIT * value.limit_watts:
            return f"{watts:.0f} W lies above the limit of {value.limit_watts:.0f} W"
        return None
    most = HIGHEST_FLOOR_WATTS if value.limit_watts is None else HIGHEST_FLOOR_FRACTION * value.limit_watts
    if value.kind is BaselineKind.IDLE:
        least, most = (IDLE_SHARES[0] * base.idle_watts, IDLE_SHARES[1] * base.idle_watts) if named else (0.0, most)
    else:
        idle = knowledge.get(board, BaselineKind.IDLE)
        least = 0.0 if idle is None else CONTEXT_ABOVE_IDLE * idle.watts
        most = CONTEXT_ABOVE_FLOOR * base.floor_watts if named else most
    if not least <= watts <= most:
        return f"{watts:.0f} W is no {value.kind.value} floor of this board: expected {least:.0f} to {most:.0f} W"
    if plateau is not None and PLATEAU_ABOVE_FLOOR * max_spin_watts(watts) > plateau.watts:
        return f"{watts:.0f} W leaves no room below the plateau of {plateau.watts:.0f} W"
    return None


def expected_floor_watts(knowledge: BaselineTable, board: GpuId, base: PowerProfile) -> float:
    """At most this when spinning or waiting: as learned, else by the profile, and not less than bare idle tells."""
    context, idle = knowledge.get(board, BaselineKind.CONTEXT), knowledge.get(board, BaselineKind.IDLE)
    if context is not None:
        return max(max_spin_watts(context.watts), _least_floor(base))
    return base.floor_watts if idle is None else max(base.floor_watts, max_spin_watts(idle.watts))


def _least_floor(base: PowerProfile) -> float:
    """The floor guessed of small boards is the highest one; others of that size rest at a tenth of the limit."""
    generic = generic_profile()
    if base.name != generic.name:
        return MIN_FLOOR_SHARE * base.floor_watts
    return MIN_FLOOR_SHARE_GENERIC * min(base.floor_watts, generic.floor_watts / generic.limit_watts * base.limit_watts)


def is_same_limit(value: Baseline, limit_watts: float | None) -> bool:
    if value.limit_watts is None or limit_watts is None:
        return value.limit_watts is limit_watts
    return abs(value.limit_watts - limit_watts) <= LIMIT_TOLERANCE_WATTS


def find_job_baseline(
    knowledge: BaselineTable, job: str, gpus: Sequence[RankGpu], base: PowerProfile
) -> JobBaseline | None:
    """What holds for these boards of a job. `base`: their profile at their limit. None: nothing is learned."""
    floors: dict[GpuId, float] = {}
    contexts: list[Baseline] = []
    idles: list[float] = []
    plateaus: list[float] = []
    for ranked in gpus:
        board = (ranked.node, ranked.gpu.key)
        context, idle = knowledge.get(board, BaselineKind.CONTEXT), knowledge.get(board, BaselineKind.IDLE)
        plateau = knowledge.get(board, BaselineKind.PLATEAU, job)
        if context is not None or idle is not None:
            floors[board] = expected_floor_watts(knowledge, board, base)
        if context is not None:
            contexts.append(context)
        if idle is not None:
            idles.append(idle.watts)
        if plateau is not None and is_same_limit(plateau, ranked.gpu.power_limit_watts):
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
    words = _describe_floor(contexts, floor) if len(contexts) >= most else ""
    return JobBaseline(profile, floors, words, plateau_watts)


def _with_plateau(profile: PowerProfile, watts: float, *, sure: bool) -> PowerProfile:
    """What the job's own compute draws is compute; a band that holds it was measured on other work."""
    communication, starvation = profile.communication, profile.starvation
    return replace(
        profile,
        compute_watts=PLATEAU_LOWER_END * watts,
        communication=None if communication is not None and watts <= communication.high_watts else communication,
        starvation=None if starvation is not None and watts <= starvation.high_watts else starvation,
        certain=max(profile.certain, OBSERVED_FLOOR_CONFIDENCE)
        if sure and watts >= MIN_PLATEAU_TO_FLOOR * profile.floor_watts
        else profile.certain,
    )


def _describe_floor(contexts: Sequence[Baseline], floor: float) -> str:
    where = "this host" if len({value.node for value in contexts}) == 1 else "these hosts"
    samples = round(statistics.median(value.samples for value in contexts))
    each = " a board" if len(contexts) > 1 else ""
    phases = " and ".join(sorted({value.phase.value for value in contexts}))
    return f"floor {floor:.0f} W learned on {where} from {samples} samples{each} {phases}"
