"""A probe started as sshd starts it: `sh -c <command>`, the payload on stdin, stdin left open for the lease."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tests.tools import DEADLINE_SECONDS
from wattwatch.collectors.probe.payload import probe_command, probe_payload
from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.probe_reader import ProbeReader
from wattwatch.collectors.samples import NodeSample

T = TypeVar("T")

TWO_BOARDS = """\
0, GPU-aaaaaaaa-0000-0000-0000-000000000000, 00000000:19:00.0, NVIDIA H100 80GB HBM3, 640.12, 700.00, 100, 61, \
70123, 81559, 61, 1980, P0, 0x0000000000000000, Disabled, 0, 640.12, 655.00
1, GPU-bbbbbbbb-0000-0000-0000-000000000000, 00000000:3B:00.0, NVIDIA H100 80GB HBM3, 118.40, 700.00, 0, 0, \
70123, 81559, 40, 1980, P0, 0x0000000000000001, Disabled, 3, 118.40, 118.00
"""


class Node:
    """A directory that stands for a node: its PATH, its /proc, its files."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.root = directory / "root"
        self.bin.mkdir()
        (self.root / "proc").mkdir(parents=True)
        (self.root / "dev").mkdir()
        (self.root / "dev" / "kmsg").write_text("")
        for tool in ("sh", "tr", "sed", "date", "sleep", "setsid", "cat"):
            self.link(tool)

    def link(self, tool: str) -> None:
        found = shutil.which(tool)
        assert found is not None
        (self.bin / tool).symlink_to(found)

    def with_python(self, executable: str = sys.executable) -> None:
        self.script("python3", f'exec {executable} "$@"')

    def with_fast_python(self, speed: float) -> None:
        """Python whose clock and sleep run `speed` times as fast, as on a simulated node."""
        patch = (
            f"import time as _t;_m,_w,_s=_t.monotonic,_t.time,_t.sleep;"
            f"_t.monotonic=lambda:_m()*{speed};_t.time=lambda:_w()*{speed};_t.sleep=lambda s:_s(s/{speed})"
        )
        self.script("python3", f'for last; do :; done\nexec {sys.executable} -u -c "{patch}\n$last"')

    def with_nvidia_smi(self, answer: str = TWO_BOARDS) -> None:
        (self.root / "answer").write_text(answer)
        self.script(
            "nvidia-smi",
            f'case "$*" in *compute-apps*) cat {self.root}/holders 2>/dev/null; exit 0;; esac\n'
            f"echo query >>{self.root}/queries\nexec cat {self.root}/answer",
        )

    def script(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def process(self, pid: int, name: str, state: str = "R") -> None:
        folder = self.root / "proc" / str(pid)
        folder.mkdir(exist_ok=True)
        rest = " ".join(["0"] * 10 + ["150", "50"] + ["0"] * 6 + ["4200"] + ["0"] * 10)
        (folder / "stat").write_text(f"{pid} ({name}) {state} {rest}\n")
        (folder / "comm").write_text(f"{name}\n")


class RunningProbe:
    def __init__(self, node: Node, request: ProbeRequest, read_stdout: bool = True) -> None:
        self.mark = f"WATTWATCH_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        environment = {"PATH": str(node.bin), "WATTWATCH_NODE_ROOT": str(node.root), name: value}
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", probe_command(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        self.reader = ProbeReader("gpu-01", request)
        self.lines: list[bytes] = []
        self.samples: list[NodeSample] = []
        self._feeder = threading.Thread(target=self._feed, args=(probe_payload(request),), daemon=True)
        self._feeder.start()
        if read_stdout:
            threading.Thread(target=self._read, daemon=True).start()

    def _feed(self, data: bytes) -> None:
        assert self.process.stdin is not None
        while data:
            data = data[self.process.stdin.write(data) or 0 :]

    def _read(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        while data := self.process.stdout.read(65536):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self.lines.append(line)
                sample = self.reader.read(line, time.monotonic())
                if sample is not None:
                    self.samples.append(sample)

    def renew(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def close_stdin(self) -> None:
        self._feeder.join(DEADLINE_SECONDS)
        assert self.process.stdin is not None
        self.process.stdin.close()

    def sample(self, fits: Callable[[NodeSample], bool]) -> NodeSample:
        """The first sample that fits, waiting for it."""
        return wait_until(lambda: next((sample for sample in list(self.samples) if fits(sample)), None), self.lines)

    def survivors(self) -> list[str]:
        return processes_with(self.mark)

    def is_gone(self) -> None:
        self.process.wait(DEADLINE_SECONDS)
        wait_until(lambda: not self.survivors() or None, self.survivors())


def processes_with(mark: str) -> list[str]:
    """`stat` of the processes that carry this `NAME=value` in their environment and are no zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() not in (folder / "environ").read_bytes():
                continue
            stat = (folder / "stat").read_text()
        except OSError:
            continue
        if stat.rpartition(")")[2].split()[0] not in "ZX":
            found.append(stat)
    return found


def wait_until(look: Callable[[], T | None], shown: object = "") -> T:
    end = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < end:
        found = look()
        if found is not None:
            return found
        time.sleep(0.02)
    raise AssertionError(f"nothing fits in {DEADLINE_SECONDS} s: {shown!r}")


@contextlib.contextmanager
def running_probe(node: Node, request: ProbeRequest, read_stdout: bool = True) -> Iterator[RunningProbe]:
    probe = RunningProbe(node, request, read_stdout)
    try:
        yield probe
    finally:
        assert probe.process.stdin is not None
        probe.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            probe.process.wait(DEADLINE_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # what a failed test left
            os.killpg(probe.process.pid, signal.SIGKILL)
        probe.process.wait(DEADLINE_SECONDS)
        for stream in (probe.process.stdin, probe.process.stdout, probe.process.stderr):
            assert stream is not None
            stream.close()
