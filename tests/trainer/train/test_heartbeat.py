"""The content of a rank's heartbeat, when it is written, and that a hanging file system does not block training."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.tools import DEADLINE_SECONDS
from wattwatch.collectors.progress import read_heartbeat
from wattwatch.trainer.run_directory import RunDirectory
from wattwatch.trainer.train.heartbeat import HeartbeatWriter, RankPhase, WriteFile, replace_file

FIELDS = (  # the order of the contract
    *("v", "run", "rank", "world", "host", "pid", "restart", "phase", "step", "steps", "micro", "blocks_left"),
    *("tokens_per_second", "data_wait_ms", "loss", "t_wall", "t_step"),
)
AN_HOUR = 3600.0


def heartbeat(
    run: Path, interval_seconds: float = AN_HOUR, write: WriteFile = replace_file, attempt: int = 1
) -> HeartbeatWriter:
    return HeartbeatWriter(
        RunDirectory(run),
        run="tiny",
        rank=3,
        world=4,
        attempt=attempt,
        steps=100,
        interval_seconds=interval_seconds,
        write=write,
    )


def read_heartbeat_file(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "heartbeat" / "rank-00003.json").read_text())
    return loaded


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Recorder:
    """Keeps what is written instead of writing it."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def __call__(self, path: Path, data: bytes) -> None:
        self.records.append(json.loads(data))

    def has(self, phase: str) -> bool:
        return phase in [record["phase"] for record in self.records]


class Hanging:
    """A file system that hangs until it is released."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()
        self.written = 0

    def __call__(self, path: Path, data: bytes) -> None:
        self.entered.set()
        assert self.released.wait(DEADLINE_SECONDS)
        self.written += 1


def test_the_file_has_the_fields_of_the_contract_in_its_order(tmp_path: Path) -> None:
    before = time.time()
    with heartbeat(tmp_path, attempt=2) as writer:
        writer.update(
            RankPhase.TRAIN, 7, micro=3, blocks_left=21, tokens_per_second=52e3, data_wait_ms=1.5, loss=1.25, steps=50
        )
    written = read_heartbeat_file(tmp_path)
    assert tuple(written) == FIELDS
    assert before <= written.pop("t_step") <= written.pop("t_wall") <= time.time()
    assert written == {
        "v": 1,
        "run": "tiny",
        "rank": 3,
        "world": 4,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "restart": 1,
        "phase": "train",
        "step": 7,
        "steps": 50,
        "micro": 3,
        "blocks_left": 21,
        "tokens_per_second": 52e3,
        "data_wait_ms": 1.5,
        "loss": 1.25,
    }
    assert [path.name for path in (tmp_path / "heartbeat").iterdir()] == ["rank-00003.json"]


def test_the_watcher_reads_it(tmp_path: Path) -> None:
    with heartbeat(tmp_path) as writer:
        writer.update(RankPhase.SAVE, 9, loss=0.5)
    path = tmp_path / "heartbeat" / "rank-00003.json"
    sample = read_heartbeat(path.read_text(), str(path))
    assert (sample.step, sample.total_steps, sample.phase, sample.rank, sample.world) == (9, 100, "save", 3, 4)
    assert (sample.pid, sample.restart, sample.loss) == (os.getpid(), 0, 0.5)


def test_a_loss_that_is_not_finite_is_valid_json_and_the_watcher_sees_it(tmp_path: Path) -> None:
    for loss, text in ((math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")):
        with heartbeat(tmp_path) as writer:
            writer.update(RankPhase.TRAIN, 1, loss=loss)
        assert read_heartbeat_file(tmp_path)["loss"] == text
        seen = read_heartbeat((tmp_path / "heartbeat" / "rank-00003.json").read_text(), "").loss
        assert seen is not None
        assert repr(seen) == repr(loss)


def test_the_phase_is_load_before_the_first_update(tmp_path: Path) -> None:
    with heartbeat(tmp_path):
        wait_until((tmp_path / "heartbeat" / "rank-00003.json").exists)
        assert (read_heartbeat_file(tmp_path)["phase"], read_heartbeat_file(tmp_path)["step"]) == ("load", 0)


def test_a_change_of_phase_is_written_at_once_and_a_step_waits_for_the_interval(tmp_path: Path) -> None:
    recorder = Recorder()
    with heartbeat(tmp_path, AN_HOUR, recorder) as writer:
        for phase in (RankPhase.TRAIN, RankPhase.BARRIER, RankPhase.SAVE):
            writer.update(phase, 5)
            wait_until(partial(recorder.has, phase))
        writer.update(step=6)
        writer.update(step=7)
        assert [written["step"] for written in recorder.records if written["phase"] == "save"] == [5]
    assert [written["step"] for written in recorder.records if written["phase"] == "save"] == [
        5,
        7,
    ]  # the last, at close


def test_steps_are_written_once_per_interval(tmp_path: Path) -> None:
    recorder = Recorder()
    with heartbeat(tmp_path, 0.05, recorder) as writer:
        began = time.monotonic()
        for step in range(1, 2001):
            writer.update(RankPhase.TRAIN, step)
            time.sleep(0.0001)
        lasted = time.monotonic() - began
    assert 2 <= len(recorder.records) <= lasted / 0.05 + 4  # the first, a change of phase, and the last at close
    assert recorder.records[-1]["step"] == 2000


def test_t_step_does_not_change_while_the_step_does_not(tmp_path: Path) -> None:
    recorder = Recorder()
    with heartbeat(tmp_path, AN_HOUR, recorder) as writer:
        writer.update(RankPhase.TRAIN, 5)
        wait_until(partial(recorder.has, "train"))
        writer.update(RankPhase.BARRIER)
        wait_until(partial(recorder.has, "barrier"))
    train, barrier = (next(b for b in recorder.records if b["phase"] == phase) for phase in ("train", "barrier"))
    assert barrier["step"] == 5
    assert barrier["t_step"] == train["t_step"]
    assert barrier["t_wall"] >= train["t_wall"]


def test_a_file_system_that_hangs_blocks_neither_the_loop_nor_the_end(tmp_path: Path) -> None:
    hanging = Hanging()
    writer = heartbeat(tmp_path, 0.0, hanging)
    assert hanging.entered.wait(DEADLINE_SECONDS)
    for step in range(100_000):  # with a loop that waits for one write, this would not come to its end
        writer.update(RankPhase.TRAIN, step)
    assert hanging.written == 0
    assert not writer.close(wait_seconds=0.05)
    hanging.released.set()
    assert writer.close(DEADLINE_SECONDS)
    assert hanging.written == 2  # what was skipped is not caught up: the first and the newest


def test_a_process_ends_while_its_file_system_hangs(tmp_path: Path) -> None:
    """A named pipe without a reader: opening it to write takes for ever, as a file on a dead server does."""
    (tmp_path / "heartbeat").mkdir()
    os.mkfifo(tmp_path / "heartbeat" / "rank-00003.json.tmp")
    program = (
        "from pathlib import Path; from wattwatch.trainer.train.heartbeat import HeartbeatWriter; "
        "from wattwatch.trainer.run_directory import RunDirectory\n"
        f"with HeartbeatWriter(RunDirectory(Path({str(tmp_path)!r})), run='r', rank=3, world=4, attempt=1) as writer:\n"
        "    writer.update('train', 1)\n"
        "print('trained')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=DEADLINE_SECONDS, check=True)
    assert done.stdout == b"trained\n"


def test_a_directory_that_cannot_be_written_stops_nothing_and_is_reported(tmp_path: Path) -> None:
    (tmp_path / "heartbeat").write_text("a file where the directory should be")
    with heartbeat(tmp_path) as writer:
        writer.update(RankPhase.TRAIN, 1)
        wait_until(lambda: bool(writer.problem))
    assert "heartbeat" in writer.problem


def test_no_torch_is_imported() -> None:
    program = "import sys, wattwatch.trainer.train.heartbeat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
