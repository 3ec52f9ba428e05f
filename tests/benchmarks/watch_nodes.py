"""What watching costs: CPU seconds per node-second and memory per node, beside a bare paramiko reader of the same.

    python -m tests.benchmarks.watch_nodes [--nodes 100] [--seconds 60] [--reconnects N] [--way bare|fleet|watcher]

Real OpenSSH on loopback, one real session per node; servers and the line source are processes of their own and not
counted. Each way of watching runs in a fresh process that measures itself with getrusage: CPU time, so a busy machine
does not spoil it. The ways run one after the other in one call; compare their ratio, not numbers of two days.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import paramiko

from tests.benchmarks.canned_lines import RUN
from tests.collectors.ssh.real_sshd import RealSshd, descendants, free_port, site
from tests.tools import DEADLINE_SECONDS, require_tool
from wattwatch.collectors.clock import Clock
from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.ssh.fleet import Fleet
from wattwatch.collectors.ssh.model import SshSettings
from wattwatch.watcher.daemon.service import GATHER_SECONDS, IDLE_TICK_INTERVALS

SETTLE_SECONDS: Final = 5.0
TARGET_CORE_PERCENT: Final = 5.0  # for 100 nodes
TARGET_KILOBYTES: Final = 400.0  # a node


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of watching, over `seconds` of steady state."""

    way: str
    nodes: int
    seconds: float
    cpu_seconds: float
    login_seconds: float  # wall, until every node had spoken
    login_cpu_seconds: float
    lines: int
    kilobytes_per_node: float  # resident, beyond the process before its first login
    threads: tuple[int, int]  # at the beginning and the end of the measurement
    files: tuple[int, int]
    kilobytes: tuple[int, int]  # resident
    reconnects: int = 0

    @property
    def core_percent(self) -> float:
        return 100.0 * self.cpu_seconds / self.seconds

    @property
    def cpu_milliseconds_per_node_second(self) -> float:
        return 1000.0 * self.cpu_seconds / self.seconds / self.nodes


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident_kilobytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * (resource.getpagesize() // 1024)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def servers(directory: Path) -> Iterator[RealSshd]:
    """One sshd under as many names as there are nodes; every session is fed with the probe's lines."""
    port = free_port()
    source = subprocess.Popen([sys.executable, "-m", "tests.benchmarks.canned_lines", str(port)])
    bash = require_tool("bash")
    try:
        with site(directory) as made:
            server = made.server(
                "node",
                f"ForceCommand exec {bash} -c 'exec cat </dev/tcp/127.0.0.1/{port}'",
                "MaxStartups 1000",
                "LogLevel QUIET",
            )
            made.config.write_text(made.config.read_text().replace("Host node\n", "Host node*\n"))
            yield server
    finally:
        source.terminate()
        source.wait(10)


class Bare:
    """paramiko as most people use it: a client per node, a selector over the channels, lines counted and dropped."""

    def __init__(self, settings: SshSettings, names: list[str]) -> None:
        assert settings.config_file is not None
        self.config = paramiko.SSHConfig.from_path(str(settings.config_file))
        self.names = names
        self.lines = 0
        self.spoke: set[str] = set()
        self.clients: list[paramiko.SSHClient] = []
        self.selector = selectors.DefaultSelector()

    def start(self) -> None:
        for name in self.names:
            asked = self.config.lookup(name)
            client = paramiko.SSHClient()
            client.load_host_keys(asked["userknownhostsfile"])
            client.connect(
                asked["hostname"],
                int(asked["port"]),
                asked["user"],
                key_filename=asked["identityfile"],
                allow_agent=False,
                look_for_keys=False,
            )
            _, out, _ = client.exec_command("probe")
            self.clients.append(client)
            self.selector.register(out.channel, selectors.EVENT_READ, name)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            for key, _ in self.selector.select(1.0):
                channel = key.fileobj
                assert isinstance(channel, paramiko.Channel)
                data = channel.recv(65536)
                if not data:
                    self.selector.unregister(channel)
                self.lines += data.count(b"\n")
                self.spoke.add(key.data)

    def heard(self) -> int:
        return len(self.spoke)


class OurFleet:
    """The fleet with a thread that takes what it delivers; as the whole watcher, the engine does that."""

    def __init__(self, settings: SshSettings, names: list[str], whole: bool) -> None:
        request = ProbeRequest(run_directories=(RUN,), checkpoint_directories=(f"{RUN}/checkpoints",))
        self.clock = Clock()
        self.fleet = Fleet(dict.fromkeys(names, request), settings, self.clock)
        self.lines = 0
        self.names = names
        self.take: Callable[[], object] = self._engine() if whole else self._drain

    def start(self) -> None:
        self.fleet.start()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        """As the service does: the lines of one round arrive together, and one look takes them all."""
        pause = threading.Event()
        while True:
            self.fleet.wait(IDLE_TICK_INTERVALS)
            self.clock.wait(pause, GATHER_SECONDS)
            self.take()

    def _drain(self) -> None:
        self.lines += len(self.fleet.drain())

    def _engine(self) -> Callable[[], object]:
        """The watcher without receivers: judge, detect, publish."""
        from collections.abc import Mapping, Sequence

        from wattwatch.watcher.detection.model import Finding, JobSpec
        from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence
        from wattwatch.watcher.engine.engine import Engine
        from wattwatch.watcher.engine.snapshot import DeliveryStats, EpisodeView

        class Silent:
            def observe(
                self,
                findings: Sequence[Finding],
                judged_jobs: frozenset[str],
                now: float,
                wall: float,
                witnesses: Mapping[str, RecoveryEvidence],
            ) -> None:
                pass

            def episodes(self) -> tuple[EpisodeView, ...]:
                return ()

            def stats(self) -> DeliveryStats:
                return DeliveryStats()

        spec = JobSpec(
            name="bench",
            nodes=tuple(self.names),
            run_directory=RUN,
            logs=(),
            log_pattern=None,
            checkpoint_directory=f"{RUN}/checkpoints",
            processes=None,
            gpus_per_node=8,
            floor_tokens_per_second=None,
            checkpoint_every_seconds=None,
            stall_limit_seconds=None,
            interval_seconds=1.0,
        )
        return Engine([spec], self.fleet, Silent(), self.clock).tick

    def heard(self) -> int:
        return sum(1 for link in self.fleet.links().values() if link.lines)


def measure(way: str, nodes: int, seconds: float, reconnects: int, site_directory: Path) -> Measured:
    """In a process of its own. Says when the measurement begins: then the parent may begin to kill sessions."""
    names = [f"node{number:04d}" for number in range(nodes)]
    settings = SshSettings(config_file=site_directory / "ssh_config")
    watching = Bare(settings, names) if way == "bare" else OurFleet(settings, names, way == "watcher")
    base, began, cpu = resident_kilobytes(), time.monotonic(), cpu_seconds()
    watching.start()
    while watching.heard() < nodes:
        if time.monotonic() - began > DEADLINE_SECONDS:
            raise SystemExit(f"{way}: only {watching.heard()} of {nodes} nodes answered in {DEADLINE_SECONDS:.0f} s")
        time.sleep(0.05)
    login, login_cpu = time.monotonic() - began, cpu_seconds() - cpu
    time.sleep(SETTLE_SECONDS)
    before = (threading.active_count(), open_files(), resident_kilobytes())
    print("measuring", flush=True)  # noqa: T201 - a message to the parent
    lines, began, cpu = lines_of(watching), time.monotonic(), cpu_seconds()
    time.sleep(seconds)
    spent, took, read = cpu_seconds() - cpu, time.monotonic() - began, lines_of(watching) - lines
    if reconnects:
        time.sleep(SETTLE_SECONDS)
    return Measured(
        way,
        nodes,
        took,
        spent,
        login,
        login_cpu,
        read,
        (before[2] - base) / nodes,
        (before[0], threading.active_count()),
        (before[1], open_files()),
        (before[2], resident_kilobytes()),
        reconnects,
    )


def lines_of(watching: Bare | OurFleet) -> int:
    if isinstance(watching, Bare):
        return watching.lines
    return sum(link.lines for link in watching.fleet.links().values())


def kill_sessions(sshd: int, number: int, seconds: float) -> None:
    """End that many sessions of the server one by one, as crashes would, spread over the time."""
    for turn in range(number):
        time.sleep(seconds / number)
        sessions = sorted(descendants(sshd, "sshd"))
        os.kill(sessions[turn % len(sessions)], signal.SIGKILL)


def run(way: str, asked: argparse.Namespace) -> Measured:
    """One way, with servers of its own."""
    with tempfile.TemporaryDirectory() as directory, servers(Path(directory)) as server:
        assert server.process is not None
        reconnects = 0 if way == "bare" else asked.reconnects  # it would not come back
        command = [sys.executable, "-m", "tests.benchmarks.watch_nodes", "--way", way, "--nodes", str(asked.nodes)]
        command += ["--seconds", str(asked.seconds), "--reconnects", str(reconnects), "--measure", directory]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            if child.stdout.readline():
                kill_sessions(server.process.pid, reconnects, 0.9 * asked.seconds)
            result = child.stdout.read()
        if child.returncode:
            raise SystemExit(child.returncode)
        return Measured(**json.loads(result))


def report(results: list[Measured]) -> Iterator[str]:
    yield f"{'way':9}{'nodes':>6}{'s':>6}{'lines/s':>9}{'CPU %':>8}{'CPU ms/node-s':>15}{'KB/node':>9}{'login s':>9}"
    yield from (
        f"{m.way:9}{m.nodes:6}{m.seconds:6.0f}{m.lines / m.seconds:9.1f}{m.core_percent:8.2f}"
        f"{m.cpu_milliseconds_per_node_second:15.3f}{m.kilobytes_per_node:9.0f}{m.login_seconds:9.1f}"
        for m in results
    )
    yield ""
    for m in results:
        yield (
            f"{m.way}: threads {m.threads[0]} -> {m.threads[1]}, files {m.files[0]} -> {m.files[1]}, "
            f"resident {m.kilobytes[0] // 1024} -> {m.kilobytes[1] // 1024} MB over {m.seconds:.0f} s"
            f" and {m.reconnects} reconnections; {m.login_cpu_seconds / m.nodes * 1000:.1f} ms CPU a login"
        )
    for m in results:
        if m.reconnects:  # at such a pace logins are most of the cost, and not what the target is about
            continue
        held = m.core_percent * 100 / m.nodes < TARGET_CORE_PERCENT and m.kilobytes_per_node < TARGET_KILOBYTES
        target = f"{TARGET_CORE_PERCENT:.0f} % of a core for 100 nodes and {TARGET_KILOBYTES:.0f} KB a node"
        yield f"{m.way}: {'within' if held else 'BEYOND'} the target of {target}"
    bare = next((m for m in results if m.way == "bare"), None)
    for m in results:
        if bare is not None and m is not bare:
            yield f"{m.way} costs {m.cpu_seconds / m.seconds / (bare.cpu_seconds / bare.seconds):.2f} of bare paramiko"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--reconnects", type=int, default=0, help="sessions killed one by one while measuring")
    parser.add_argument("--way", action="append", choices=["bare", "fleet", "watcher"], help="default: all three")
    parser.add_argument("--measure", metavar="DIRECTORY", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    ways = asked.way or ["bare", "fleet", "watcher"]
    if asked.measure:
        found = measure(ways[0], asked.nodes, asked.seconds, asked.reconnects, Path(asked.measure))
        sys.stdout.write(json.dumps({name: getattr(found, name) for name in Measured.__slots__}))
        return
    sys.stdout.write("\n".join(report([run(way, asked) for way in ways])) + "\n")


if __name__ == "__main__":
    main()
