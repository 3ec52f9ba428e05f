"""What judging costs: CPU share of one core for 8,000 GPUs looked at once a second.

    python -m tests.benchmarks.detection [--nodes 1000] [--GPUs 8] [--jobs 10] [--rounds 20]

Node samples are made beforehand and not counted: GPUs with all readings, a process each, a heartbeat a rank on the
first node of a job. Counted is what the engine does with them: assemble, classify, detect, learn. Process CPU time, the
collector of garbage included, so a busy machine does not spoil it. One job in five saves (rank 0 low), one hangs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from wattwatch.collectors.samples import GpuSample, HostStatus, NodeSample, PowerSource, ProcessSample, ProgressSample
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.assembler import JobAssembler
from wattwatch.watcher.detection.baselines.baseline import BaselineTable
from wattwatch.watcher.detection.baselines.learner import JobLearner
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.detector import JobDetector
from wattwatch.watcher.detection.model import JobSpec

TARGET_CORE_PERCENT: Final = 15.0
WARM_ROUNDS: Final = 3
BOARD: Final = "NVIDIA H100 80GB HBM3"
STAGES: Final = ("assemble", "classify", "detect", "learn")


@dataclass(slots=True)
class Desk:
    """One job."""

    spec: JobSpec
    assembler: JobAssembler
    detector: JobDetector
    learner: JobLearner
    kind: str  # what its GPUs do


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds for each second of watching, by stage."""

    boards: int
    stages: dict[str, float]

    @property
    def core_percent(self) -> float:
        return 100 * sum(self.stages.values())


def desks_of(nodes: int, jobs: int) -> list[Desk]:
    each = max(1, nodes // jobs)
    names = [f"node-{i:04}" for i in range(each * jobs)]
    desks = []
    knowledge = BaselineTable()
    for j in range(jobs):
        spec = JobSpec(f"job-{j}", tuple(names[j * each : (j + 1) * each]), run_directory=f"/run/{j}", gpus_per_node=8)
        kind = {1: "saves", 2: "hangs"}.get(j % 5, "works")
        desks.append(Desk(spec, JobAssembler(spec), JobDetector(spec), JobLearner(spec, knowledge), kind))
    return desks


def lines(desk: Desk, boards: int, second: int, chance: random.Random) -> Iterator[NodeSample]:
    """One round of a job's nodes."""
    works = desk.kind == "works" or second < WARM_ROUNDS
    for n, node in enumerate(desk.spec.nodes):
        gpus = []
        for i in range(boards):
            low = not works and n == 0 and i == (0 if desk.kind == "saves" else 3)
            watts, busy = (chance.gauss(560, 15), chance.randint(88, 99)) if works else (chance.gauss(149, 3), 100)
            gpus.append(
                GpuSample(
                    index=i, uuid=f"GPU-{node}-{i}", pci_bus_id=f"00000000:{i:02X}:00.0", name=BOARD,
                    power_watts=watts, power_source=PowerSource.ENERGY_COUNTER, power_limit_watts=700.0,
                    utilization_percent=0.0 if low else float(busy), memory_utilization_percent=40.0,
                    memory_used_bytes=61e9, memory_total_bytes=85e9, temperature_celsius=55.0, sm_clock_mhz=1700.0,
                    energy_joules=1e9 + 560.0 * second, throttle_reasons=frozenset(), performance_state="P0", mig=False,
                )
            )  # fmt: skip
        yield NodeSample(
            node, HostStatus.OK, "", second, float(second), 1e9 + second, second + 0.01, "nvml", tuple(gpus),
            processes=tuple(ProcessSample(1000 + i, "python", "R", 10.0, 50.0, (i,), n * 8 + i) for i in range(boards)),
            progress=tuple(
                ProgressSample(
                    f"{desk.spec.run_directory}/heartbeat-{i}.json", "heartbeat", second if works else WARM_ROUNDS,
                    10_000, age_seconds=0.2, rank=i, world=8, pid=1000 + i, phase="train",
                )
                for i in range(boards)
            )
            if n == 0
            else (),
        )  # fmt: skip


def measure(nodes: int, boards: int, jobs: int, rounds: int) -> Cost:
    desks = desks_of(nodes, jobs)
    links = {node: NodeLink(node, HostStatus.OK, "") for desk in desks for node in desk.spec.nodes}
    chance = random.Random(1)
    spent = dict.fromkeys(STAGES, 0.0)
    for second in range(WARM_ROUNDS + rounds):
        made = [(desk, list(lines(desk, boards, second, chance))) for desk in desks]
        took = dict.fromkeys(STAGES, 0.0)
        said = {sample.node: sample for _, samples in made for sample in samples}
        for desk, samples in made:
            start = time.process_time()
            for sample in samples:
                desk.assembler.add(sample)
            job_sample = desk.assembler.assemble(links, second + 0.1, 1e9 + second)
            assembled = time.process_time()
            learned = desk.learner.learned(job_sample)
            known = time.process_time()
            verdict = classify(job_sample, learned=learned)
            classified = time.process_time()
            findings = desk.detector.observe(verdict, job_sample, second + 0.1)
            detected = time.process_time()
            desk.learner.update(job_sample, verdict, findings, desk.detector.state, second + 0.1, said)
            took["learn"] += time.process_time() - detected + known - assembled
            took["assemble"] += assembled - start
            took["classify"] += classified - known
            took["detect"] += detected - classified
        if second >= WARM_ROUNDS:
            spent = {stage: spent[stage] + took[stage] for stage in STAGES}
    return Cost(len(links) * boards, {stage: seconds / rounds for stage, seconds in spent.items()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--boards", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    cost = measure(options.nodes, options.boards, options.jobs, options.rounds)
    words = ", ".join(f"{stage} {100 * seconds:.1f} %" for stage, seconds in cost.stages.items())
    eight = 1e6 * 8 * cost.core_percent / 100 / cost.boards
    sys.stdout.write(
        f"{cost.boards:,} boards in {options.jobs} jobs, once a second: {cost.core_percent:.1f} % of a core ({words}); "
        f"{eight:.0f} us for 8 boards; target {TARGET_CORE_PERCENT:.0f} %\n"
    )
    return 0 if cost.core_percent < TARGET_CORE_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
