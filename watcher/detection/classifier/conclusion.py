"""What to do next, one sentence a state. The person who reads it was asleep a minute ago."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from wattwatch.watcher.detection.classifier.features import MIN_FLOOR_CONFIDENCE, SINGLE_OUTLIER_PATTERNS, PowerFeatures
from wattwatch.watcher.detection.model import Alternative, PowerState, RankGpu, Suspect, Verdict

ADVICE: Final[dict[PowerState, str]] = {
    PowerState.COMPUTE: "Nothing to do.",
    PowerState.COMMUNICATION: "If tokens per second fell, look at the links; else nothing to do.",
    PowerState.STARVATION: "Look upstream: data loading, tokenising, the file system, host CPU.",
    PowerState.CHECKPOINT: "Wait for the save; look at the checkpoint directory if its files do not grow.",
    PowerState.HANG: "Look at the step counter. If it stands: before the watchdog or anybody ends the job, have its "
    "flight records and stacks (`wattwatch serve` collects them by itself where capture is on); then restart from the "
    "last checkpoint.",
    PowerState.IDLE: "Nothing runs here. If a job should, look for why it ended.",
    PowerState.GPU_FAULT: "Read the kernel log for Xid lines, drain the node, reset or replace the board.",
    PowerState.STRAGGLER: "Compare clocks, temperature and throttle reasons of the boards that work with the others.",
    PowerState.THROTTLE: "Look at cooling and power supply of the named boards.",
    PowerState.WAITING: "Look at the step counter: start-up and evaluation look like this, and so does a job that lost "
    "its feed.",
    PowerState.UNKNOWN: "Give the job's progress (a log or a run directory) to settle it.",
}


# A scene and what was concluded of it -> a `Verdict` that carries the numbers.

MAX_CONFIDENCE: Final = 0.99  # no picture is proof


def make_verdict(
    scene: PowerFeatures,
    state: PowerState,
    confidence: float,
    why: str,
    alternative: tuple[PowerState, float] | None = None,
    suspects: Sequence[RankGpu] = (),
) -> Verdict:
    return Verdict(
        state=state,
        confidence=round(min(MAX_CONFIDENCE, confidence), 2),
        pattern=scene.picture.pattern,
        why=f"{why} ({scene.words}).",
        advice=ADVICE[state],
        suspects=tuple(Suspect(g.node, g.gpu.index, g.rank) for g in suspects),
        power_fraction=scene.fraction,
        alternative=None if alternative is None else Alternative(alternative[0], round(alternative[1], 2)),
        at_floor=scene.at_floor,
    )


def single_outlier(scene: PowerFeatures) -> tuple[RankGpu, ...]:
    """The one rank that stands out, where it is one."""
    return scene.picture.outliers if scene.picture.pattern in SINGLE_OUTLIER_PATTERNS else ()


def is_floor_known(scene: PowerFeatures) -> bool:
    """The profile is of this board, or scaled by its limit, and leaves room between rest and work."""
    return scene.known and scene.profile.certain >= MIN_FLOOR_CONFIDENCE
