"""Features and a conclusion -> a `Verdict` that carries its numbers and the next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from wattwatch.watcher.common.formatting import capitalize_first
from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.baselines.profiles import describe_widened_range
from wattwatch.watcher.detection.classifier.features import PowerFeatures, StepProgress, model_without_profile
from wattwatch.watcher.detection.model import (
    AlertName,
    Alternative,
    PowerState,
    RankGpu,
    Suspect,
    Verdict,
)

# Live, the step counter can be read. `wattwatch triage` replaces this by its own option.
PROVIDE_PROGRESS: Final = "Provide the job's progress (a log or a run directory)"

GIVE_BOTH: Final = "Give output that contains power and utilization, such as that of `nvidia-smi` without options"

# What makes the power of unnamed GPUs mean something.
NAME_THE_MODEL: Final = (
    "Add the columns name and power.limit to the query, or pass --board MODEL (such as --board B300)"
)
NAME_THE_LIMIT: Final = (
    "Add the column power.limit to the query, or measure this GPU model with `wattwatch calibrate` and give the result "
    "with --profile"
)

MAX_CONFIDENCE: Final = 0.99  # one sample is never proof

NO_ACTION: Final = "No action needed"
LIKELY_ALTERNATIVE: Final = 0.25  # a hang of this confidence is not answered with "no action needed"
COLLECT_EVIDENCE: Final = (
    "collect flight recorder dumps and stacks before anyone or the NCCL watchdog ends the job. (`wattwatch serve` "
    "collects them by itself unless `capture = false`.) Then restart the job from the last checkpoint."
)

# The next step, by state. Its reader was asleep a minute ago.
ADVICE: Final[dict[PowerState, str]] = {
    PowerState.COMPUTE: f"{NO_ACTION}.",
    PowerState.COMMUNICATION: f"{NO_ACTION}. If tokens per second have dropped, check the network links.",
    PowerState.STARVATION: ALERT_KINDS[AlertName.JOB_STARVING].advice,
    PowerState.CHECKPOINT: "Wait for the save to finish. If no file in the checkpoint directory grows, check its file "
    "system.",
    PowerState.HANG: "Check whether the job's step counter is moving. If it is not, " + COLLECT_EVIDENCE,
    PowerState.IDLE: "The GPUs were idle or nearly idle in this sample. If a job should be running here, check "
    "whether it has ended or has stopped making progress.",
    PowerState.GPU_FAULT: ALERT_KINDS[AlertName.GPU_FAULT].advice,
    PowerState.STRAGGLER: ALERT_KINDS[AlertName.STRAGGLER].advice,
    PowerState.THROTTLE: ALERT_KINDS[AlertName.GPU_THROTTLED].advice,
    PowerState.WAITING: "Check the job's step counter: a job that is starting up or evaluating looks the same as a job "
    "that gets no input.",
    PowerState.UNKNOWN: f"{PROVIDE_PROGRESS} so that the state can be determined.",
}


def make_verdict(
    features: PowerFeatures,
    state: PowerState,
    confidence: float,
    why: str,
    alternative: tuple[PowerState, float] | None = None,
    suspects: Sequence[RankGpu] = (),
) -> Verdict:
    """The verdict `state`, with the numbers of `features` behind `why` (a clause without a full stop)."""
    widened = describe_widened_range(features.profile, state.value, features.median_watts)
    numbers = features.description if widened is None else f"{features.description}; {widened}"
    advice = ADVICE[state]
    if state is PowerState.HANG and features.progress is StepProgress.STALLED:
        advice = capitalize_first(COLLECT_EVIDENCE)  # it is known that the step counter does not move
    likely_hang = alternative is not None and alternative[0] is PowerState.HANG and alternative[1] >= LIKELY_ALTERNATIVE
    if advice.startswith(NO_ACTION) and likely_hang:
        advice = f"{NO_ACTION} if the job's step counter is moving. If it is not, {COLLECT_EVIDENCE}"
    if state is PowerState.UNKNOWN and not features.profile_known:
        model = model_without_profile(features.gpus)
        advice = f"{NAME_THE_MODEL if model is None else NAME_THE_LIMIT}. {advice}"
    return Verdict(
        state=state,
        confidence=round(min(MAX_CONFIDENCE, confidence), 2),
        pattern=features.match.pattern,
        why=f"{why} ({numbers}).",
        advice=advice,
        suspects=tuple(Suspect(g.node, g.gpu.index, g.rank) for g in suspects),
        power_fraction=features.power_fraction,
        alternative=None if alternative is None else Alternative(alternative[0], round(alternative[1], 2)),
        at_floor=features.at_floor,
    )
