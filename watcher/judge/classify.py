"""One picture of a job -> one verdict. Pure: no clock, no memory, no disk.

Order of the questions: can it be read at all; is a board broken; is anybody at home; does one board hold up the rest;
then power (at the floor: at_rest.py, above it: at_work.py) names the kind and shape says who. Watts alone decide
nothing: bare idle, a checkpoint and a deadlock draw the same (arXiv 2608.05944 s3; B300 idle 135-184 W in public
tables). Where the picture allows two readings the nearer one is said with a low confidence and the other is named.

A confidence is a share of times: what it stands on is said where it is set, and `wattwatch backtest` counts, over
labelled public cases, how often verdicts of that confidence are right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from collectors.samples import HostStatus, Reason
from watcher.judge.advice import ADVICE
from watcher.judge.at_rest import EMPTY, SEEMS_EMPTY, at_rest, nobody_home, nobody_listed, stalled
from watcher.judge.at_work import at_work
from watcher.judge.conclude import conclude, floor_known
from watcher.judge.job_sample import JobSample
from watcher.judge.learned import JobLearned
from watcher.judge.profiles import Profile
from watcher.judge.scene import HELD_BYTES, Scene, fraction_of, scene_of, watts_of
from watcher.judge.scene import ProgressWord as ProgressWord
from watcher.judge.settle import with_settle
from watcher.judge.shape import BUSY_PERCENT, LOW_PERCENT, picture_of
from watcher.judge.unseen import why_in_full
from watcher.judge.upstream import upstream_of
from watcher.judge.verdict import Alternative, PowerState, Shape, Suspect, Verdict

STRAGGLER_POWER_RATIO: Final = 2.0
SLOWDOWNS: Final = frozenset({"hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"})


def classify(
    sample: JobSample,
    profile: Profile | None = None,
    progress: ProgressWord | None = None,
    learned: JobLearned | None = None,
) -> Verdict:
    """What this picture says. `profile` overrides the board's own, `learned` both; `progress` is what is known of the
    steps."""
    verdict = _judged(sample, profile, progress, learned)
    if verdict.state is PowerState.STARVATION:
        upstream = upstream_of(sample)
        verdict = replace(verdict, why=f"{verdict.why} Upstream: {upstream.words}.", advice=upstream.look)
    return with_settle(verdict, sample, told=progress is not None)


def _judged(
    sample: JobSample, profile: Profile | None, progress: ProgressWord | None, learned: JobLearned | None
) -> Verdict:
    if not sample.gpus and not any(node.missing_gpus for node in sample.nodes):
        return _unreadable(sample)
    broken = _broken(sample)
    if broken is not None:
        return broken
    sighted = tuple(g for g in sample.gpus if watts_of(g.gpu) is not None and g.gpu.utilization_percent is not None)
    if len(sighted) < max(1, (len(sample.gpus) + 1) // 2):
        return _half_blind(sample, progress)
    scene = scene_of(sample, sighted, profile, progress, learned)
    if scene.held is False and not any(node.processes for node in sample.nodes):
        return nobody_home(scene, sample.nodes)
    return stalled(scene) or _one_holds_up_the_rest(scene) or _slowed_down(scene) or at_rest(scene) or at_work(scene)


def _unreadable(sample: JobSample) -> Verdict:
    told = [f"{node.node}: {why_in_full(node)}" for node in sample.nodes]
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
        empty = nobody_listed(sample.nodes)
        return Verdict(
            PowerState.IDLE, EMPTY if empty else SEEMS_EMPTY, picture.shape,
            "0 % and no memory held on any board; power cannot be read.", ADVICE[PowerState.IDLE],
            power_fraction=fraction_of(sample.gpus), alternative=None if empty else Alternative(PowerState.HANG, 0.3),
        )  # fmt: skip
    if mig:
        why = "MIG is on: utilisation has no value for the whole board, and its power is shared by all slices."
    else:
        why = f"Power is missing on {no_watts} of {len(gpus)} boards, utilisation on {no_busy}."
    return Verdict(
        PowerState.UNKNOWN, 0.3, picture.shape, why,
        "Give the job's progress (a log or a run directory): without power and utilisation only steps can tell.",
        power_fraction=fraction_of(sample.gpus), alternative=Alternative(PowerState.HANG, 0.3),
    )  # fmt: skip


def _one_holds_up_the_rest(scene: Scene) -> Verdict | None:
    """All busy, but a few draw twice what the others do: those compute, the others spin and wait for them."""
    if scene.picture.shape is not Shape.ALL_BUSY or len(scene.gpus) < 2 or not floor_known(scene):
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
    return conclude(scene, PowerState.STRAGGLER, 0.6 * scene.certain, why, (PowerState.HANG, 0.3), working)


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
    return conclude(scene, PowerState.THROTTLE, 0.8, f"{len(slowed)} boards report {', '.join(reasons)}", None, slowed)
