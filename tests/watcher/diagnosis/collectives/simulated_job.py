"""A job of tensor, pipeline and data parallel ranks that runs until a fault stops it, and the flight records it leaves.

Hosts launch operations ahead of their GPUs. GPUs execute them in order: a collective once the GPU of every member has
reached it, a send once its receiver has. Time is not modeled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from wattwatch.watcher.diagnosis.flight_recorder.model import (
    GroupRecord,
    Operation,
    OperationLaunch,
    ProcessGroup,
    RankRecord,
)

ELEMENTS = 64


class Fault(StrEnum):
    HOST_STOPS = "host_stops"  # endless loop, lock, data loader: launches nothing more
    GPU_STOPS = "gpu_stops"  # its completions are never seen again, and it executes a few more operations
    DIES = "dies"  # its GPU executes nothing more, and its host launches only this operation
    OTHER_COLLECTIVE = "other_collective"
    OTHER_SIZE = "other_size"
    SKIPS_ONE = "skips_one"  # a branch not taken on one rank: all of its later operations come one too early
    LINK_FAILS = "link_fails"  # an operation that all ranks have joined never ends


@dataclass(frozen=True, slots=True)
class Step:
    group: ProcessGroup
    operation: Operation


@dataclass(slots=True)
class SimulatedRank:
    rank: int
    program: list[Step]
    launched: int = 0
    done: int = 0
    seen_done: int = 0  # completions that its own recorder noticed
    slots: list[int] = field(default_factory=list)  # of each step of the program

    @property
    def head(self) -> Step | None:
        return self.program[self.done] if self.done < self.launched else None


def groups_of(tensor: int, pipeline: int, data: int) -> dict[str, list[ProcessGroup]]:
    """Ranks in the usual order: tensor fastest, then data, then pipeline."""
    world = tensor * pipeline * data

    def rank(t: int, d: int, p: int) -> int:
        return t + tensor * (d + data * p)

    names = iter(range(1000))
    groups = {"default_pg": [ProcessGroup(str(next(names)), tuple(range(world)), "default_pg")]}
    kinds = {
        "TENSOR": [tuple(rank(t, d, p) for t in range(tensor)) for p in range(pipeline) for d in range(data)],
        "DATA": [tuple(rank(t, d, p) for d in range(data)) for p in range(pipeline) for t in range(tensor)],
        "PIPELINE": [tuple(rank(t, d, p) for p in range(pipeline)) for d in range(data) for t in range(tensor)],
    }
    for kind, members in kinds.items():
        groups[kind] = [ProcessGroup(str(next(names)), ranks, f"{kind}_GROUP") for ranks in members if len(ranks) > 1]
    return groups


def program_of(rank: int, groups: Mapping[str, list[ProcessGroup]], steps: int) -> list[Step]:
    """Per step: receive from the previous stage, tensor-parallel work, send on, reduce over data; at times over all."""

    def mine(kind: str) -> ProcessGroup | None:
        return next((group for group in groups[kind] if rank in group.members), None)

    tensor, data, stages = mine("TENSOR"), mine("DATA"), mine("PIPELINE")
    program: list[Step] = []
    for step in range(steps):
        place = stages.members.index(rank) if stages else 0
        if stages and place > 0:
            program.append(Step(stages, peer("recv", place - 1, place)))
        if tensor:
            program += [
                Step(tensor, collective("_all_gather_base", 1, len(tensor.members))),
                Step(tensor, collective("_reduce_scatter_base", len(tensor.members), 1)),
            ]
        if stages and place + 1 < len(stages.members):
            program.append(Step(stages, peer("send", place, place + 1)))
        if data:
            program.append(Step(data, collective("all_reduce", 1, 1)))
        if step % 2:
            program.append(Step(groups["default_pg"][0], collective("all_reduce", 2, 2)))
    return program


def collective(name: str, inputs: int, outputs: int) -> Operation:
    sizes = ((inputs * ELEMENTS,),), ((outputs * ELEMENTS,),)
    return Operation("nccl", name, *sizes, ("Float",), ("Float",))


def peer(name: str, source: int, destination: int) -> Operation:
    return Operation("nccl", name, ((ELEMENTS,),), ((ELEMENTS,),), ("Float",), ("Float",), source, destination)


@dataclass(slots=True)
class SimulatedJob:
    """`at`: the step of the culprit's program at which the fault begins."""

    ranks: list[SimulatedRank]
    fault: Fault | None = None  # None: the programs themselves do not match
    culprit: int = 0
    at: int = 0
    ahead: int = 8

    def run(self) -> None:
        self._inject_fault()
        while self._launch() | self._execute():
            pass

    def _inject_fault(self) -> None:
        rank = self.ranks[self.culprit]
        step = rank.program[self.at]
        if self.fault is Fault.SKIPS_ONE:
            del rank.program[self.at]
        if self.fault is Fault.OTHER_COLLECTIVE:
            rank.program[self.at] = Step(step.group, Operation("nccl", "barrier"))
        if self.fault is Fault.OTHER_SIZE:
            rank.program[self.at] = Step(step.group, collective(step.operation.name, 3, 3))
        for each in self.ranks:
            counts: dict[tuple[ProcessGroup, bool], int] = defaultdict(int)
            for step in each.program:
                counts[step.group, step.operation.point_to_point] += 1
                each.slots.append(counts[step.group, step.operation.point_to_point])

    def _launch(self) -> bool:
        moved = False
        for each in self.ranks:
            until = min(len(each.program), each.done + self.ahead)
            if self.fault is Fault.HOST_STOPS and each.rank == self.culprit:
                until = min(until, self.at)
            if self.fault is Fault.DIES and each.rank == self.culprit:
                until = min(until, self.at + 1)
            moved |= until > each.launched
            each.launched = max(each.launched, until)
        return moved

    def _execute(self) -> bool:
        moved = False
        for each in self.ranks:
            step = each.head
            if step is None or self._stopped(each):
                continue
            partners = self._partners(each, step)
            if partners is not None:
                moved = True
                for partner in partners:
                    self._finish(partner)
        return moved

    def _stopped(self, rank: SimulatedRank) -> bool:
        if self.fault is Fault.DIES:
            return rank.rank == self.culprit and rank.done >= self.at
        return self.fault is Fault.GPU_STOPS and rank.rank == self.culprit and rank.done >= self.at + 2

    def _finish(self, rank: SimulatedRank) -> None:
        rank.done += 1
        unseen = self.fault is Fault.GPU_STOPS and rank.rank == self.culprit and rank.done > self.at
        if not unseen:
            rank.seen_done = rank.done

    def _partners(self, rank: SimulatedRank, step: Step) -> list[SimulatedRank] | None:
        """All ranks of the operation, once all have reached it and agree; None: it cannot run yet."""
        operation, members = step.operation, step.group.members
        places = (operation.source, operation.destination) if operation.point_to_point else range(len(members))
        partners = [self.ranks[members[place]] for place in places if place is not None]
        slot = rank.slots[rank.done]
        for partner in partners:
            head = partner.head
            if head is None or self._stopped(partner) or head.group != step.group:
                return None
            other = head.operation
            if operation.point_to_point:
                if (other.source, other.destination) != (operation.source, operation.destination):
                    return None
            elif other != operation or partner.slots[partner.done] != slot:
                return None
        if self.fault is Fault.LINK_FAILS and any(p.rank == self.culprit and p.done == self.at for p in partners):
            return None
        return partners

    def records(self, only_pending: bool, timing: bool = False) -> list[RankRecord]:
        return [self._record(each, only_pending, timing) for each in self.ranks]

    def _record(self, rank: SimulatedRank, only_pending: bool, timing: bool) -> RankRecord:
        launches: dict[ProcessGroup, list[OperationLaunch]] = {step.group: [] for step in rank.program}
        last: dict[ProcessGroup, list[int]] = {group: [0, 0] for group in launches}
        for number, step in enumerate(rank.program[: rank.launched]):
            done = number < rank.seen_done
            last[step.group][0] = rank.slots[number]
            if done:
                last[step.group][1] = rank.slots[number]
            if not (only_pending and done):
                started = number <= rank.seen_done if timing else None
                launches[step.group].append(
                    OperationLaunch(number, rank.slots[number], step.operation, started, done, done)
                )
        parts = tuple(
            GroupRecord(group, last[group][0], None, last[group][1], tuple(each)) for group, each in launches.items()
        )
        return RankRecord(rank.rank, f"_dump_{rank.rank}", "2.10", "2.27.5", parts)


def simulated_job(
    tensor: int, pipeline: int, data: int, fault: Fault, culprit: int, at: int, ahead: int
) -> SimulatedJob:
    groups = groups_of(tensor, pipeline, data)
    world = tensor * pipeline * data
    ranks = [SimulatedRank(rank, program_of(rank, groups, steps=4)) for rank in range(world)]
    job = SimulatedJob(ranks, fault, culprit, at, ahead)
    job.run()
    return job
