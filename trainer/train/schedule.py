"""The learning rate: a warm-up, then a cosine over the steps that all ranks take."""

from __future__ import annotations

import math

from trainer.settings import TrainSettings


def learning_rate(settings: TrainSettings, step: int, steps: int, warm_from: int = 0) -> float:
    """For the step with this number, from 0, of `steps` in all.

    `warm_from` is the step from which the optimizer's moments are new: a weights-only resume warms up again there, and
    meets the cosine where it would have been.
    """
    warmup = min(settings.warmup_steps, steps)
    top, final = settings.learning_rate, settings.learning_rate * settings.final_learning_rate_share
    progress = (step - warmup) / max(1, steps - warmup)
    cosine = final + (top - final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    since = step - warm_from
    return cosine * (since + 1) / warmup if since < warmup else cosine
