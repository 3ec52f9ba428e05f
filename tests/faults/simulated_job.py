"""The simulated job: what each node's probe would say of it at each sample, as NodeSamples. No SSH, no sleeping."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.faults.gpus import BOARDS, Board
from tests.faults.plan import ACTIVITIES, Activity, Phase, Setting
from tests.faults.progress import Counter, Save
from wattwatch.collectors.samples import (
    CheckpointSample,
    GpuSample,
    HostStatus,
    HungCall,
    KernelEvent,
    NodeSample,
    ProcessSample,
    ProgressSample,
    ReadingStatus,
)

RUN_DIRECTORY: Final = "/runs/a"
CHECKPOINTS: Final = "/ckpt/a"
LOG: Final = "/runs/a/train.log"
TOKENS_PER_STEP: Final = 262_144
NO_NODES: Final[frozenset[str]] = frozenset()
SILENT: Final = frozenset({"silent", "refused"})
BLIND: Final = {
    "blind": (HostStatus.SAMPLER_TIMEOUT, "nvidia-smi has not returned for 12 s"),
    "driver": (HostStatus.DRIVER_DOWN, "Driver/library version mismatch"),
    "garbled": (HostStatus.PARSE_ERROR, "nothing of the answer could be read"),
}


@dataclass(slots=True)
class SimulatedJob:
    """One job on its nodes; `tell` moves it to a moment and gives the lines of that moment."""

    setting: Setting
    now: float = 10_000.0
    wall: float = 1.7e9
    restart: int = 0
    loss: float = 2.5
    saves: list[Save] = field(default_factory=list)
    sequence: int = 0
    first_pid: int = 4000
    started: float = 500.0
    board: Board = field(init=False)
    draw: random.Random = field(init=False)
    counter: Counter = field(init=False)
    kernel: dict[str, list[KernelEvent]] = field(default_factory=dict)
    logged_step: int | None = None
    logged_seconds: float = 0.0
    log_interval: float | None = None
    log_away: bool = False
    beat_phase: dict[int, str] = field(default_factory=dict)
    beat_seconds: dict[int, float] = field(default_factory=dict)
    site: float = 1.0
    cpu_seconds: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.setting.seed)
        self.board = BOARDS[self.setting.board]
        self.counter = Counter(self.setting.first_step, self.setting.step_seconds, self.now)
        self.site = self.draw.uniform(0.97, 1.02)

    # What happens

    def begin(self, phase: Phase) -> None:
        """The effects of a phase that begins now."""
        setting, victim_node = self.setting, self.node_of(self.setting.victim)
        board = self.setting.victim % self.setting.gpus
        if phase.board:
            self.board = BOARDS[phase.board]
        if phase.save_seconds is not None:
            self.saves.append(
                Save(self.counter.step, self.now, phase.save_seconds, phase.save_bytes, phase.save_stops, self.now)
            )
            del self.saves[:-3]
        if phase.restart is not None:
            kept = [save for save in self.saves if save.complete]
            back = kept[-1].step if kept else setting.first_step
            self.counter.step = self.counter.step - int(phase.restart * (self.counter.step - back))
            self.counter.left_seconds, self.counter.changed = setting.step_seconds, self.now
            self.restart, self.first_pid, self.started = self.restart + 1, self.first_pid + 1000, self.now
            self.beat_phase.clear()
            self.cpu_seconds.clear()
            if self.logged_step is not None:
                self.logged_step = self.counter.step
        if phase.killed_by:
            pid = self.first_pid + setting.victim
            text = {
                "oom": f"Out of memory: Killed process {pid} (python3)",
                "segfault": f"python3[{pid}]: segfault at 0 ip 0 sp 0 error 4",
                "xid": f"NVRM: Xid (PCI:{self.pci(board)}): 13, pid={pid}, name=python3, Graphics Exception",
            }[phase.killed_by]
            xid = 13 if phase.killed_by == "xid" else None
            self.kernel.setdefault(victim_node, []).append(KernelEvent(phase.killed_by, text, 0.5, xid, None, pid))
        if phase.xid is not None:
            bus = self.pci(board)
            text = f"NVRM: Xid (PCI:{bus}): {phase.xid}, pid='<unknown>'"
            self.kernel.setdefault(victim_node, []).append(KernelEvent("xid", text, 0.5, phase.xid, bus))
        if phase.loss is not None:
            self.loss = phase.loss
        self.wall += phase.wall_jump_seconds
        self.log_away = self.log_away or phase.log == "rotated"

    def tell(self, phase: Phase, seconds: float) -> list[NodeSample]:
        """`seconds` of the phase go by; what each node that speaks says then."""
        self.now += seconds
        self.wall += seconds
        self.sequence += 1
        doing = self.doing(phase)
        if all(activity.steps for activity in doing.values()):
            before = self.counter.changed
            steps = self.counter.run(
                seconds, self.now, self.draw, self.setting.step_seconds * phase.pace, self.setting.noise
            )
            if steps:
                self._log(before)
        silent = self.node_of(self.setting.victim) if phase.node_state in SILENT else None
        return [
            self._line(place, node, phase, doing)
            for place, node in enumerate(self.setting.node_names)
            if node != silent
        ]

    def _log(self, before: float) -> None:
        every = self.setting.log_every
        if self.logged_step is None or self.counter.step >= self.logged_step + every:
            self.logged_step = self.counter.step - self.counter.step % every
            if self.logged_seconds:
                self.log_interval = self.counter.changed - self.logged_seconds
            self.logged_seconds = self.counter.changed
            self.log_away = False

    def doing(self, phase: Phase) -> dict[int, Activity]:
        """Rank -> activity."""
        usual = ACTIVITIES[self.setting.work if phase.activity == "train" else phase.activity]
        doing = dict.fromkeys(range(self.setting.world), usual)
        for who, what in phase.ranks.items():
            for rank in self._ranks(who):
                doing[rank] = ACTIVITIES[what]
        return doing

    def _ranks(self, who: str) -> tuple[int, ...]:
        world = self.setting.world
        if who == "victim":
            return (self.setting.victim,)
        if who == "group":
            return tuple(range(world - self.setting.gpus, world))
        if who == "last":
            return (world - 1,)
        return (int(who),)

    # What is seen

    def node_of(self, rank: int) -> str:
        return self.setting.node_names[rank // self.setting.gpus]

    def pci(self, board: int) -> str:
        return f"00000000:{0x1A + board:02X}:00.0"

    def _line(self, place: int, node: str, phase: Phase, doing: Mapping[int, Activity]) -> NodeSample:
        mine = [(place * self.setting.gpus + i, i) for i in range(self.setting.gpus)]
        here = node == self.node_of(self.setting.victim)
        status, detail = BLIND.get(phase.node_state, (HostStatus.OK, "")) if here else (HostStatus.OK, "")
        boards = [
            self._board(place, i, doing[rank], phase)
            for rank, i in mine
            if not (phase.lose_board and rank == self.setting.victim)
        ] + [self._neighbour(place, self.setting.gpus + i) for i in range(self.setting.neighbours)]
        slow = here and phase.node_state == "slow"
        return NodeSample(
            node=node,
            status=status,
            detail=detail,
            sequence=self.sequence,
            node_seconds=self.now,
            wall_seconds=self.wall,
            received_seconds=self.now,
            gpus=tuple(boards) if status is HostStatus.OK else None,
            gpus_age_seconds=0.8 * self.setting.interval_seconds if slow else 0.0,
            processes=tuple(self._process(rank, i, doing[rank]) for rank, i in mine if doing[rank].process),
            progress=self._progress(place, mine, phase, doing),
            checkpoints=(CheckpointSample(CHECKPOINTS, tuple(save.at(self.now) for save in self.saves), 0.5),),
            kernel_events=tuple(self.kernel.pop(node, ())),
            hung_calls=(HungCall(phase.hung_call, 30.0),) if here and phase.hung_call else (),
        )

    def _process(self, rank: int, i: int, doing: Activity) -> ProcessSample:
        named = rank if self.setting.progress == "heartbeat" else None
        self.cpu_seconds[rank] = self.cpu_seconds.get(rank, 0.0) + doing.cores * self.setting.interval_seconds
        return ProcessSample(
            self.first_pid + rank, "python3", doing.state, self.started, self.cpu_seconds[rank], (i,), named
        )

    def _board(self, place: int, i: int, doing: Activity, phase: Phase) -> GpuSample:
        draw, reasons = self.draw, dict[str, ReadingStatus]()
        watts: float | None = None
        busy: float | None = draw.uniform(*doing.busy)
        if doing.watts:
            watts = (
                draw.uniform(*self.board.watts[doing.watts]) * self.site * (1.0 + 0.01 * ((i * 7 + place) % 4 - 1.5))
            )
            watts *= phase.scale if doing.watts in ("work", "link", "light", "starve") else 1.0
        if doing.reason:
            watts = busy = None
            reasons = {"power_watts": ReadingStatus(doing.reason), "utilization_percent": ReadingStatus(doing.reason)}
        if phase.mig:
            busy, reasons = None, {"utilization_percent": ReadingStatus.MIG}
        if phase.node_state == "unnamed":
            watts, reasons = None, {"power_watts": ReadingStatus.UNSUPPORTED}
        return GpuSample(
            index=i,
            uuid=f"GPU-{self.board.clock_mhz:.0f}-{place}-{i}",
            pci_bus_id=self.pci(i),
            name=self.board.name,
            power_watts=watts,
            power_limit_watts=self.board.limit_watts * phase.limit_share,
            utilization_percent=None if busy is None else float(round(busy)),
            memory_utilization_percent=None if busy is None else float(round(draw.uniform(*doing.memory_busy))),
            memory_used_bytes=0.7 * self.board.memory_bytes if doing.held else 8e6,
            memory_total_bytes=self.board.memory_bytes,
            sm_clock_mhz=self.board.clock_mhz * doing.clock,
            throttle_reasons=frozenset(doing.throttle),
            mig=phase.mig,
            reasons=reasons,
        )

    def _neighbour(self, place: int, i: int) -> GpuSample:
        """A GPU beside the job's own, that nobody uses."""
        return GpuSample(
            index=i, uuid=f"GPU-{self.board.clock_mhz:.0f}-{place}-{i}", pci_bus_id=self.pci(i), name=self.board.name,
            power_watts=self.draw.uniform(*self.board.watts["bare"]), power_limit_watts=self.board.limit_watts,
            utilization_percent=0.0, memory_utilization_percent=0.0, memory_used_bytes=8e6,
            memory_total_bytes=self.board.memory_bytes, sm_clock_mhz=210.0, throttle_reasons=frozenset({"gpu_idle"}),
        )  # fmt: skip

    def _progress(
        self, place: int, mine: list[tuple[int, int]], phase: Phase, doing: Mapping[int, Activity]
    ) -> tuple[ProgressSample, ...]:
        setting, step = self.setting, self.counter.step
        rate = TOKENS_PER_STEP / (setting.step_seconds * phase.pace)
        if setting.progress == "heartbeat":
            return tuple(self._beat(rank, doing[rank], step, rate) for rank, _ in mine)
        if setting.progress != "log" or place != 0 or self.logged_step is None or self.log_away:
            return ()
        cut = phase.log == "torn"
        return (
            ProgressSample(
                LOG, "torchtitan", None if cut else self.logged_step, total_steps=setting.total_steps,
                loss=None if cut else self.loss, tokens_per_second=None if cut else rate,
                line_interval_seconds=self.log_interval, age_seconds=self.now - self.logged_seconds,
            ),
        )  # fmt: skip

    def _beat(self, rank: int, doing: Activity, step: int, rate: float) -> ProgressSample:
        """A rank writes when it has done a step or its phase changes; one that is gone or stuck wrote last before."""
        told = self.beat_phase.get(rank)
        if told != doing.phase and doing.process:
            self.beat_phase[rank], self.beat_seconds[rank] = doing.phase, self.now
        at = max(self.beat_seconds.get(rank, self.counter.changed), self.counter.changed)
        return ProgressSample(
            f"{RUN_DIRECTORY}/rank_{rank}.json", "heartbeat", step, total_steps=self.setting.total_steps,
            loss=self.loss, tokens_per_second=rate, age_seconds=max(0.0, self.now - at), rank=rank,
            world=self.setting.world, pid=self.first_pid + rank, restart=self.restart,
            phase=self.beat_phase.get(rank, doing.phase), data_wait_ms=self._wait(doing),
        )  # fmt: skip

    def _wait(self, doing: Activity) -> float:
        return self.draw.uniform(2000.0, 6000.0) if doing.watts == "starve" else self.draw.uniform(2.0, 30.0)
