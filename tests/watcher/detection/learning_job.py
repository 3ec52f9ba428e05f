"""A job of scenes.py whose GPUs are learned as it plays, and that is judged by what was learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tests.watcher.detection.simulated_seconds import BARE, COMPUTE, Activity, Job
from wattwatch.collectors.samples import NodeSample, ProcessSample
from wattwatch.watcher.detection.baselines.baseline import Baseline, BaselineKind, BaselineTable
from wattwatch.watcher.detection.baselines.learner import JobLearner
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.model import JobSample, Verdict

EMPTY = Activity(139, 0, held_bytes=BARE, process=False, phase="")
START_UP = Activity(186, 0, phase="load")
FIRST_KERNEL = replace(COMPUTE, steps=False)


class LearningJob(Job):
    """`limit`: other than the GPU's own; `strangers`: processes of somebody else on the first node."""

    def __init__(self, knowledge: BaselineTable | None = None, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]  # as Job's: a wrong name fails at once
        self.knowledge = BaselineTable() if knowledge is None else knowledge
        self.learner = JobLearner(self.spec, self.knowledge)
        self.limit: float | None = None
        self.energy: float | None = None
        self.driver: str | None = None
        self.strangers: tuple[ProcessSample, ...] = ()
        self.said: dict[str, NodeSample] = {}
        self.lines: list[NodeSample] = []  # all of them

    def judge(self, sample: JobSample) -> Verdict:
        return classify(sample, learned=self.learner.learned(sample))

    def _line(self, place: int, node: str, activity: Activity, ranks: Mapping[int, Activity]) -> NodeSample:
        line = super()._line(place, node, activity, ranks)
        if line.gpus is not None:
            changes: dict[str, object] = {} if self.limit is None else {"power_limit_watts": self.limit}
            changes |= {} if self.energy is None else {"energy_joules": self.energy}
            line = replace(line, gpus=tuple(replace(gpu, **changes) for gpu in line.gpus))  # type: ignore[arg-type]  # fields of GpuSample
            line = replace(line, driver_version=self.driver)
        if place == 0:
            line = replace(line, processes=(*(line.processes or ()), *self.strangers))
        self.said[node] = line
        self.lines.append(line)
        return line

    def _second(
        self, activity: Activity, ranks: Mapping[int, Activity], silent: Sequence[str], slow: Sequence[str]
    ) -> None:
        super()._second(activity, ranks, silent, slow)
        told = self.observed[-1]
        assert self.sample is not None
        self.learner.update(self.sample, told.verdict, told.findings, told.state, self.now, self.said)
        if self.learner.power_limits_changed:
            self.detector.power_limits_changed()

    def known(self, kind: BaselineKind, board: int = 0) -> Baseline | None:
        return self.knowledge.get(("node-1", f"GPU-0-{board}"), kind, self.spec.name)

    def watts(self, kind: BaselineKind) -> float | None:
        value = self.known(kind)
        return None if value is None else value.watts


def working_job(knowledge: BaselineTable | None = None, **settings: object) -> LearningJob:
    """From empty GPUs over a start-up to two steady minutes and more."""
    job = LearningJob(knowledge, step=0, **settings)
    job.play(90, EMPTY)
    job.play(60, START_UP)
    job.play(10, FIRST_KERNEL)
    job.play(180, COMPUTE)
    return job
