"""Days on which nothing is wrong, as a stream of phases: work, and every pause that healthy jobs make."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.faults.plan import Phase, Setting
from tests.faults.suite import BOARD_NAMES, SHAPES
from tests.faults.watched_job import RecordedEpisode, WatchedJob
from wattwatch.watcher.detection.model import AlertName, Severity

NEVER: Final = frozenset({AlertName.JOB_HUNG, AlertName.JOB_CRASHED, AlertName.GPU_FAULT})
SECONDS_A_DAY: Final = 86_400.0
Draw = random.Random


def healthy_setting(seed: int) -> Setting:
    """A job of some kind."""
    draw = Draw(f"healthy {seed}")
    nodes, gpus = SHAPES[seed % 2] if seed % 5 else SHAPES[2]
    step_seconds = draw.choice((0.4, 1.0, 2.5, 5.0, 8.0, 15.0, 30.0))
    progress = ("heartbeat", "log", "heartbeat", "log", "none")[seed % 5 if seed % 10 < 5 else seed % 4]
    return Setting(
        seed=seed,
        board=BOARD_NAMES[seed % 3],
        nodes=nodes,
        gpus=gpus,
        step_seconds=step_seconds,
        noise=draw.choice((0.01, 0.03, 0.08, 0.15)),
        progress=progress,
        log_every=draw.choice((1, 5, 10)) if step_seconds <= 5 else 1,
        interval_seconds=draw.choice((5.0, 10.0)),
        total_steps=None if seed % 7 == 3 else 10_000_000,
        victim=draw.randrange(1, nodes * gpus),
        work="light" if seed % 4 == 3 else "train",
    )


def gathered_save(draw: Draw, setting: Setting) -> Iterator[Phase]:
    seconds = draw.uniform(20, 300)
    yield Phase(seconds, "await_save", ranks={"0": "save"}, save_seconds=0.95 * seconds)


def slow_save(draw: Draw, setting: Setting) -> Iterator[Phase]:
    """To an NFS server that others fill: healthy saves of 394 s and over 400 s are reported."""
    seconds = draw.uniform(300, 550)
    yield Phase(seconds, "await_save", ranks={"0": "save"}, save_seconds=0.97 * seconds)


def sharded_save(draw: Draw, setting: Setting) -> Iterator[Phase]:
    seconds = draw.uniform(10, 120)
    yield Phase(seconds, "save", save_seconds=0.95 * seconds)


def background_save(draw: Draw, setting: Setting) -> Iterator[Phase]:
    yield Phase(draw.uniform(1, 15), "save")
    seconds = draw.uniform(60, 600)
    yield Phase(seconds, "train", pace=draw.uniform(1.0, 1.08), save_seconds=0.9 * seconds)


def evaluation(draw: Draw, setting: Setting) -> Iterator[Phase]:
    """Where nobody announces it, it is known by its power alone."""
    longest = 900 if setting.progress == "heartbeat" else 300
    yield Phase(draw.uniform(30, longest), draw.choice(("evaluate", "generate")))


def restart(draw: Draw, setting: Setting) -> Iterator[Phase]:
    yield Phase(draw.uniform(20, 200), "load", restart=draw.choice((0.0, 1.0)))
    yield Phase(draw.uniform(20, 600), "compile")


def announced_restart(draw: Draw, setting: Setting) -> Iterator[Phase]:
    """Saved, left, started again: where ranks say that they are done."""
    if setting.progress == "heartbeat":
        yield from gathered_save(draw, setting)
        yield Phase(10.0, "done_waiting")
        yield Phase(draw.uniform(10, 300), "ended")
    yield from restart(draw, setting)


def recompilation(draw: Draw, setting: Setting) -> Iterator[Phase]:
    """One rank compiles a kernel, the rest waits: on every sample a deadlock (TensorRT-LLM#17286)."""
    yield Phase(draw.uniform(5, 28), "spin", ranks={"victim": "compile"})


def rest(draw: Draw, setting: Setting) -> Iterator[Phase]:
    """The start of an epoch, a garbage collection: all ranks for a while without work."""
    yield Phase(draw.uniform(5, 28), "pause")


def watcher_away(draw: Draw, setting: Setting) -> Iterator[Phase]:
    yield Phase(60.0, "train", skip_seconds=draw.uniform(20, 900))


def node_away(draw: Draw, setting: Setting) -> Iterator[Phase]:
    """One or two lines of one node are lost."""
    yield Phase(setting.interval_seconds, "train", node_state="silent")


def clock_jump(draw: Draw, setting: Setting) -> Iterator[Phase]:
    yield Phase(60.0, "train", wall_jump_seconds=draw.choice((-86_400.0, -3600.0, -2.0, 2.0, 3600.0, 1e6)))


def log_rotation(draw: Draw, setting: Setting) -> Iterator[Phase]:
    yield Phase(10.0, "train", log="torn")
    yield Phase(60.0, "train", log="rotated")


def slow_queries(draw: Draw, setting: Setting) -> Iterator[Phase]:
    yield Phase(120.0, "train", node_state="slow")


def program_error_lines(draw: Draw, setting: Setting) -> Iterator[Phase]:
    """Kernel lines of a program's own doing, of somebody else's test."""
    yield Phase(60.0, "train", xid=draw.choice((13, 31, 43)))


def longer_steps(draw: Draw, setting: Setting) -> Iterator[Phase]:
    """Longer sequences for a while."""
    yield Phase(draw.uniform(60, 250), "train", pace=draw.uniform(1.0, 1.3))


Event = Callable[[Draw, Setting], Iterator[Phase]]
# Event -> times a day.
EVENTS: Final[Mapping[Event, float]] = {
    gathered_save: 12,
    slow_save: 2,
    sharded_save: 8,
    background_save: 8,
    evaluation: 10,
    restart: 1.5,
    announced_restart: 1,
    recompilation: 0.5,
    rest: 6,
    watcher_away: 3,
    node_away: 10,
    clock_jump: 3,
    log_rotation: 3,
    slow_queries: 4,
    program_error_lines: 1,
    longer_steps: 4,
}


@dataclass(slots=True)
class Day:
    """What was said on healthy time."""

    seed: int
    setting: Setting
    seconds: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    said: list[tuple[float, str, RecordedEpisode]] = field(default_factory=list)  # seconds, during what, what

    @property
    def forbidden(self) -> list[tuple[float, str, RecordedEpisode]]:
        """What must never be said of healthy time. A suspicion of a hang is a warning, and counts as such."""
        return [entry for entry in self.said if entry[2].alert in NEVER and entry[2].worst is Severity.CRITICAL]

    @property
    def warnings(self) -> int:
        return sum(said.worst is not Severity.INFO for _, _, said in self.said)


def live(seed: int, seconds: float, *, every_kind: bool = False) -> Day:
    """`seconds` of healthy operation. `every_kind`: each kind of event once, in some order, however short the time."""
    setting = healthy_setting(seed)
    watch, day = WatchedJob(setting), Day(seed, setting)
    told = 0
    for name, phase in healthy_phases(setting, every_kind):
        if name != "train":
            day.events[name] += 1
        watch.play(phase)
        day.said += [(said.opened - 10_000.0, name, said) for said in watch.said[told:]]
        told = len(watch.said)
        day.seconds = watch.job.now - 10_000.0
        if day.seconds >= seconds:
            break
    return day


def healthy_phases(setting: Setting, every_kind: bool) -> Iterator[tuple[str, Phase]]:
    """For ever."""
    draw = Draw(f"phases {setting.seed}")
    for phase in restart(draw, setting):
        yield "start", phase
    kinds = list(EVENTS)
    for _ in iter(int, 1):
        if every_kind:
            draw.shuffle(kinds)
            chosen, between = kinds, 100.0
        else:
            chosen = draw.choices(kinds, weights=list(EVENTS.values()), k=20)
            between = SECONDS_A_DAY / sum(EVENTS.values())
        for event in chosen:
            least = max(30.0, 4 * setting.step_seconds * setting.log_every)
            yield "train", Phase(max(least, draw.expovariate(1 / between)), "train")
            for phase in event(draw, setting):
                yield event.__name__, phase
