"""One picture of a job -> one verdict. Pure: no clock, no memory, no disk.

Order of the questions: can it be read at all; is a board broken; is anybody at home; does one board hold up the rest;
then power (at the floor or above it) names the kind and shape says who. Watts alone decide nothing: bare idle, a
checkpoint and a deadlock draw the same (arXiv 2608.05944 s3; B300 idle 135-184 W in public tables). Where the picture
allows two readings the nearer one is said with a low confidence and the other is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from collectors.samples import HostStatus, Reason
from watcher.judge.advice import ADVICE
from watcher.judge.job_sample import JobSample, RankGpu
from watcher.judge.profiles import Profile
from watcher.judge.scene import (
    CERTAIN_ENOUGH,
    HELD_BYTES,
    HIGHEST_FLOOR_WATTS,
    Scene,
    fraction_of,
    scene_of,
    watts_of,
)
from watcher.judge.scene import ProgressWord as ProgressWord
from watcher.judge.shape import BUSY_PERCENT, LOW_PERCENT, picture_of
from watcher.judge.verdict import Alternative, PowerState, Shape, Suspect, Verdict

STRAGGLER_POWER_RATIO: Final = 2.0
BARELY: Final = 1 / 3  # of the way from floor to plateau: moving jobs over poor links lie here (0.26 of the limit)
SLOWDOWNS: Final = frozenset({"hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"})
UNREADABLE_STATES: Final = {
    HostStatus.DRIVER_DOWN: "the driver cannot be asked",
    HostStatus.SAMPLER_TIMEOUT: "the GPU query does not return",
    HostStatus.NO_DEVICES: "the driver sees no board",
    HostStatus.PARSE_ERROR: "the output cannot be read",
}


def classify(sample: JobSample, profile: Profile | None = None, progress: ProgressWord | None = None) -> Verdict:
    """What this picture says. `profile` overrides the board's own; `progress` is what is known of the steps."""
    if not sample.gpus and not any(node.missing_gpus for node in sample.nodes):
        return _unreadable(sample)
    broken = _broken(sample)
    if broken is not None:
        return broken
    sighted = tuple(g for g in sample.gpus if watts_of(g.gpu) is not None and g.gpu.utilization_percent is not None)
    if len(sighted) < max(1, (len(sample.gpus) + 1) // 2):
        return _half_blind(sample, progress)
    scene = scene_of(sample, sighted, profile, progress)
    if scene.held is False and not any(node.processes for node in sample.nodes):
        return _nobody_home(scene)
    return (
        _stalled(scene)
        or _one_holds_up_the_rest(scene)
        or _slowed_down(scene)
        or _at_the_floor(scene)
        or _above_the_floor(scene)
    )


def _unreadable(sample: JobSample) -> Verdict:
    told = [
        f"{node.node}: {UNREADABLE_STATES.get(node.status, node.status.value)} ({node.detail})" for node in sample.nodes
    ]
    lost = any(node.status in (HostStatus.DRIVER_DOWN, HostStatus.NO_DEVICES) for node in sample.nodes)
    return Verdict(
        state=PowerState.UNKNOWN,
        confidence=0.9 if lost else 0.5,
        shape=Shape.UNKNOWN,
        why="No board could be read. " + "; ".join(told[:4]),
        advice="The job may be well: look at the node itself." + (" A driver was replaced or lost." if lost else ""),
    )


def _broken(sample: JobSample) -> Verdict | None:
    """A board that is lost, wants a reset, or does not say what it should: that comes before any other reading."""
    told: list[str] = []
    suspects: list[Suspect] = []
    for node in sample.nodes:
        for missing in node.missing_gpus:
            told.append(f"{node.node}: {missing.text}")
            suspects.append(Suspect(node.node, missing.index))
    for ranked in sample.gpus:
        fault = ranked.gpu.fault
        if fault is not None:
            fields = sorted(name for name, reason in ranked.gpu.reasons.items() if reason is fault)
            told.append(
                f"{ranked.node} GPU {ranked.gpu.key}: {fault.value.replace('_', ' ')} ({', '.join(fields[:4])})"
            )
            suspects.append(Suspect(ranked.node, ranked.gpu.index, ranked.rank))
    if not told:
        return None
    return Verdict(
        state=PowerState.GPU_FAULT,
        confidence=0.9,
        shape=picture_of(sample.gpus).shape,
        why="; ".join(told[:6]),
        advice=ADVICE[PowerState.GPU_FAULT],
        suspects=tuple(suspects),
        power_fraction=fraction_of(sample.gpus),
    )


def _half_blind(sample: JobSample, progress: ProgressWord | None) -> Verdict:
    """Boards answer, but power or utilisation is missing: no band, no shape."""
    if progress is ProgressWord.STALLED:
        why = "Steps stand; power or utilisation cannot be read on most boards."
        return Verdict(
            PowerState.HANG, 0.7, picture_of(sample.gpus).shape, why, ADVICE[PowerState.HANG],
            power_fraction=fraction_of(sample.gpus), alternative=Alternative(PowerState.WAITING, 0.2),
        )  # fmt: skip
    gpus = [g.gpu for g in sample.gpus]
    mig = any(g.mig or g.reasons.get("utilization_percent") is Reason.MIG for g in gpus)
    free = all(g.memory_used_bytes is not None and g.memory_used_bytes < HELD_BYTES for g in gpus)
    quiet = all(g.utilization_percent is not None and g.utilization_percent <= LOW_PERCENT for g in gpus)
    no_watts = sum(watts_of(g) is None for g in gpus)
    no_busy = sum(g.utilization_percent is None for g in gpus)
    picture = picture_of(sample.gpus)
    if free and quiet and not mig:
        return Verdict(
            PowerState.IDLE, 0.8, picture.shape, "0 % and no memory held on any board; power cannot be read.",
            ADVICE[PowerState.IDLE], power_fraction=fraction_of(sample.gpus),
        )  # fmt: skip
    if mig:
        why = "MIG is on: utilisation has no value for the whole board, and its power is shared by all slices."
    else:
        why = f"Power is missing on {no_watts} of {len(gpus)} boards, utilisation on {no_busy}."
    return Verdict(
        PowerState.UNKNOWN, 0.3, picture.shape, why,
        "Give the job's progress (a log or a run directory): without power and utilisation only steps can tell.",
        power_fraction=fraction_of(sample.gpus),
    )  # fmt: skip


def _verdict(
    scene: Scene,
    state: PowerState,
    confidence: float,
    why: str,
    alternative: tuple[PowerState, float] | None = None,
    suspects: Sequence[RankGpu] = (),
) -> Verdict:
    return Verdict(
        state=state,
        confidence=round(min(0.99, confidence), 2),
        shape=scene.picture.shape,
        why=f"{why} ({scene.words}).",
        advice=ADVICE[state],
        suspects=tuple(Suspect(g.node, g.gpu.index, g.rank) for g in suspects),
        power_fraction=scene.fraction,
        alternative=None if alternative is None else Alternative(alternative[0], round(alternative[1], 2)),
        at_floor=scene.at_floor,
    )


def _nobody_home(scene: Scene) -> Verdict:
    """No memory held: nothing runs, whatever utilisation says. An idle board that is woken by the query itself reads
    100 % with 0 MiB (persistence off), and so does one left behind by a kill."""
    if scene.progress is ProgressWord.STALLED:
        why = "Steps stand and no board holds a context: the job stands before it reaches the boards, or has left them"
        return _verdict(scene, PowerState.HANG, 0.55, why, (PowerState.IDLE, 0.4))
    ghost = scene.picture.shape is not Shape.ALL_LOW
    why = "No board holds a context" + ("; utilisation without memory or process is a ghost" if ghost else "")
    return _verdict(scene, PowerState.IDLE, 0.75 if ghost else 0.95, why, None if ghost else (PowerState.HANG, 0.05))


def _one_holds_up_the_rest(scene: Scene) -> Verdict | None:
    """All busy, but a few draw twice what the others do: those compute, the others spin and wait for them."""
    if scene.picture.shape is not Shape.ALL_BUSY or len(scene.gpus) < 2 or not _floor_known(scene):
        return None
    floor = scene.profile.floor_watts
    working = [g for g in scene.gpus if (watts_of(g.gpu) or 0.0) > floor]
    waiting = [g for g in scene.gpus if (watts_of(g.gpu) or 0.0) <= floor]
    if not working or not waiting or len(working) > len(waiting):
        return None
    ratio = min(watts_of(g.gpu) or 0.0 for g in working) / max(watts_of(g.gpu) or 1.0 for g in waiting)
    if ratio < STRAGGLER_POWER_RATIO:
        return None
    why = (
        f"{len(working)} of {len(scene.gpus)} busy boards work, at {ratio:.1f} times the power of the others, who wait"
    )
    return _verdict(scene, PowerState.STRAGGLER, 0.6 * scene.certain, why, (PowerState.HANG, 0.3), working)


def _floor_known(scene: Scene) -> bool:
    return scene.known and scene.profile.certain >= CERTAIN_ENOUGH


def _slowed_down(scene: Scene) -> Verdict | None:
    """The board itself says that heat or power supply holds it back, while it is busy."""
    slowed = [
        g
        for g in scene.gpus
        if g.gpu.throttle_reasons
        and g.gpu.throttle_reasons & SLOWDOWNS
        and (g.gpu.utilization_percent or 0.0) >= BUSY_PERCENT
    ]
    if not slowed or scene.at_floor:
        return None
    reasons = sorted(set().union(*(g.gpu.throttle_reasons or frozenset() for g in slowed)) & SLOWDOWNS)
    return _verdict(scene, PowerState.THROTTLE, 0.8, f"{len(slowed)} boards report {', '.join(reasons)}", None, slowed)


def _stalled(scene: Scene) -> Verdict | None:
    """The steps stand: that decides. Power and shape only say how sure, and who."""
    if scene.progress is not ProgressWord.STALLED:
        return None
    shape = scene.picture.shape
    who = _left_behind(scene)
    if shape is Shape.RANK0_LOW_REST_BUSY and scene.at_floor:
        why = "Steps stand and rank 0 alone is low at the power floor: a save that does not end, or a deadlock in it"
        return _verdict(scene, PowerState.HANG, 0.65, why, (PowerState.CHECKPOINT, 0.35), who)
    confidence = 0.95 if scene.at_floor else 0.6
    why = "Steps stand at the power floor" if scene.at_floor else "Steps stand although power is above the floor"
    return _verdict(scene, PowerState.HANG, confidence, why, (PowerState.WAITING, 0.1), who)


def _left_behind(scene: Scene) -> tuple[RankGpu, ...]:
    lone = (Shape.ONE_LOW_REST_BUSY, Shape.RANK0_LOW_REST_BUSY, Shape.ONE_BUSY_REST_LOW)
    return scene.picture.standing_out if scene.picture.shape in lone else ()


def _at_the_floor(scene: Scene) -> Verdict | None:
    """Idle with a context, checkpoint and deadlock draw the same here: the shape separates them, never surely."""
    if not scene.at_floor:
        return None
    shape, sure = scene.picture.shape, scene.certain
    # A step counted some seconds ago does not outweigh what is seen now; somebody who says that they advance does.
    if scene.told and scene.progress is ProgressWord.ADVANCING and shape is not Shape.RANK0_LOW_REST_BUSY:
        return _slowly_moving(scene)
    if shape is Shape.RANK0_LOW_REST_BUSY:
        why = "Rank 0 alone is low and the rest spins at the power floor: rank 0 gathers and writes"
        return _verdict(scene, PowerState.CHECKPOINT, 0.75 * sure, why, (PowerState.HANG, 0.25))
    if shape is Shape.ONE_LOW_REST_BUSY:
        if len(scene.gpus) < 3:
            why = "One of two boards is low and the other spins at the power floor"
            return _verdict(scene, PowerState.HANG, 0.5 * sure, why, (PowerState.CHECKPOINT, 0.4), _left_behind(scene))
        why = "One rank is low and all others spin at the power floor: it is not in the collective that they wait in"
        return _verdict(scene, PowerState.HANG, 0.85 * sure, why, (PowerState.CHECKPOINT, 0.15), _left_behind(scene))
    if shape is Shape.ALL_BUSY:
        why = "All boards read busy and none draws more than spinning does"
        return _verdict(scene, PowerState.HANG, 0.65 * sure, why, (PowerState.WAITING, 0.3))
    if shape is Shape.ALL_LOW:
        held = "memory is held" if scene.held else "memory is unknown"
        why = f"No board works and {held}: start-up, a pause between phases, or processes that no longer feed them"
        return _verdict(scene, PowerState.IDLE, 0.5, why, (PowerState.HANG, 0.35))
    if shape is Shape.ONE_BUSY_REST_LOW:
        why = "One board spins at the power floor, the rest is low: it waits in a collective that the others are not in"
        return _verdict(scene, PowerState.HANG, 0.5 * sure, why, (PowerState.WAITING, 0.4), _left_behind(scene))
    if shape is Shape.TWO_GROUPS:
        why = "Two groups at the power floor: some ranks spin in a collective that the others are not in"
        return _verdict(scene, PowerState.HANG, 0.5 * sure, why, (PowerState.WAITING, 0.4), scene.picture.standing_out)
    why = "Utilisation scatters near the power floor: boards are fed now and then"
    return _verdict(scene, PowerState.STARVATION, 0.45, why, (PowerState.WAITING, 0.35))


def _slowly_moving(scene: Scene) -> Verdict:
    """Steps advance at the floor: busy boards wait for each other, boards that rest wait for data."""
    if scene.picture.shape in (Shape.ALL_LOW, Shape.SCATTER):
        why = "Steps advance while the boards rest most of the time near the power floor: they wait for data"
        return _verdict(scene, PowerState.STARVATION, 0.6, why, (PowerState.COMMUNICATION, 0.2))
    why = "Steps advance although power is near the floor: light work, or a poor link"
    return _verdict(scene, PowerState.COMMUNICATION, 0.5, why, (PowerState.COMPUTE, 0.3))


def _above_the_floor(scene: Scene) -> Verdict:
    """Real work of some kind: bands where the board has them, else the share of the limit. In no band is an answer."""
    shape = scene.picture.shape
    if not _floor_known(scene) and shape is not Shape.ALL_LOW and scene.watts < _surely_work(scene):
        return _nothing_to_measure_by(scene)
    if shape is Shape.ALL_BUSY:
        return _evenly_busy(scene)
    if shape is Shape.SCATTER:
        return _unevenly_busy(scene)
    if shape is Shape.ALL_LOW:
        return _resting_above_the_floor(scene)
    if scene.watts >= scene.profile.compute_watts:
        why = "Most boards draw the power of plain compute; some read low at this moment"
        return _verdict(scene, PowerState.COMPUTE, 0.5, why, (PowerState.STARVATION, 0.3), _left_behind(scene))
    why = "Boards work unevenly and draw more than spinning does: in no band"
    return _verdict(scene, PowerState.UNKNOWN, 0.35, why, (PowerState.STARVATION, 0.3), _left_behind(scene))


def _surely_work(scene: Scene) -> float:
    """Watts that no board draws without working: by the profile, or above every floor ever seen."""
    return scene.profile.compute_watts if scene.known else HIGHEST_FLOOR_WATTS


def _nothing_to_measure_by(scene: Scene) -> Verdict:
    """A board without name and limit, or one whose spinning and working draw the same."""
    lack = "spinning and working draw nearly the same on this board" if scene.known else "this board's floor is unknown"
    if scene.progress is ProgressWord.ADVANCING:
        state = PowerState.COMMUNICATION if scene.known else PowerState.COMPUTE
        return _verdict(scene, state, 0.5, f"Steps advance; {lack}", (PowerState.COMPUTE, 0.3))
    why = f"Boards are busy and {lack}: watts cannot tell work from waiting"
    return _verdict(scene, PowerState.UNKNOWN, 0.3, why, (PowerState.HANG, 0.3), _left_behind(scene))


def _evenly_busy(scene: Scene) -> Verdict:
    profile, watts = scene.profile, scene.watts
    advancing = scene.progress is ProgressWord.ADVANCING
    if profile.communication is not None and watts in profile.communication:
        why = "All ranks are evenly busy in the band of communication"
        return _verdict(scene, PowerState.COMMUNICATION, 0.75 * profile.certain, why, (PowerState.COMPUTE, 0.2))
    if watts >= profile.compute_watts:
        confidence = 0.9 if scene.known else 0.6
        return _verdict(scene, PowerState.COMPUTE, confidence, "All ranks are busy at the power of plain compute")
    light = any(watts in band for band in profile.light)
    if advancing and not light and watts < profile.floor_watts + BARELY * (profile.compute_watts - profile.floor_watts):
        why = "Steps advance, and all ranks are evenly busy at little more than what spinning draws"
        return _verdict(scene, PowerState.COMMUNICATION, 0.5, why, (PowerState.COMPUTE, 0.35))
    if advancing or light:
        why = "All ranks are evenly busy below the compute plateau, as light healthy training of this board is"
        return _verdict(scene, PowerState.COMPUTE, 0.7 if advancing else 0.45, why, (PowerState.COMMUNICATION, 0.3))
    if watts <= profile.floor_watts:
        why = "Some boards spin at the floor, some do not"
        return _verdict(scene, PowerState.UNKNOWN, 0.3, why, (PowerState.HANG, 0.3))
    why = "All ranks are evenly busy, well above the floor and below the compute plateau"
    return _verdict(scene, PowerState.COMMUNICATION, 0.45, why, (PowerState.COMPUTE, 0.4))


def _unevenly_busy(scene: Scene) -> Verdict:
    profile, watts = scene.profile, scene.watts
    if watts >= profile.compute_watts:
        why = "Power of plain compute; utilisation dips on some ranks"
        return _verdict(scene, PowerState.COMPUTE, 0.65, why, (PowerState.STARVATION, 0.25))
    in_band = profile.starvation is not None and watts in profile.starvation
    why = "Utilisation scatters over the ranks at middling power: the bottleneck lies upstream of the boards"
    return _verdict(scene, PowerState.STARVATION, 0.75 if in_band else 0.55, why, (PowerState.COMPUTE, 0.25))


def _resting_above_the_floor(scene: Scene) -> Verdict:
    """0 % says that no kernel runs; clocks that are still up, or a mean over the last second, explain the watts."""
    if scene.watts >= scene.profile.compute_watts:
        why = "Utilisation reads low at the power of plain compute: a moment between two kernels"
        return _verdict(scene, PowerState.UNKNOWN, 0.3, why, (PowerState.COMPUTE, 0.3))
    why = "No kernel runs although clocks are up: start-up, or a pause between phases"
    return _verdict(scene, PowerState.IDLE, 0.4, why, (PowerState.CHECKPOINT, 0.3))
