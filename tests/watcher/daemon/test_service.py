"""The daemon as a process: what keeps it from starting, what it sends to systemd, and how it stops."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import pytest
from click.testing import CliRunner

from tests.tools import DEADLINE_SECONDS
from tests.watcher.web.test_metrics import series, value
from wattwatch.collectors.clock import Clock
from wattwatch.watcher.cli.serve import serve_command
from wattwatch.watcher.config.settings import Config, ConfigError, load_config
from wattwatch.watcher.daemon.preflight import ssh_settings, to_user_profile
from wattwatch.watcher.daemon.service import Service, ServiceStartError, failure_kind
from wattwatch.watcher.daemon.systemd import SystemdNotifier
from wattwatch.watcher.engine.snapshot import Snapshot


def write_config(directory: Path, watcher: str = "", rest: str = "") -> Path:
    """One job on a node that refuses connections: everything works except the node."""
    path = directory / "wattwatch.toml"
    path.write_text(
        f"""
[watcher]
listen = "127.0.0.1:0"
state_directory = "{directory / "state"}"
{watcher}
[ssh]
port = 1
known_hosts_file = "/dev/null"
[[jobs]]
name = "pretrain"
nodes = "127.0.0.1"
logs = ["/nowhere/*.log"]
{rest}
""",
        "utf-8",
    )
    return path


def wait_for_tick(service: Service, ticks: int) -> Snapshot:
    """The snapshot with at least this many ticks."""
    pause = threading.Event()
    for _ in range(int(DEADLINE_SECONDS / 0.05)):
        if service.snapshot.tick >= ticks:
            return service.snapshot
        pause.wait(0.05)
    raise AssertionError(f"still at tick {service.snapshot.tick}")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    started = Service(load_config(write_config(tmp_path)), Clock(speed=5.0))
    started.start()
    yield started
    started.stop()


def test_it_serves_once_started_and_leaves_no_thread_when_stopped(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    service = Service(load_config(write_config(tmp_path)), Clock(speed=5.0))
    service.start()
    wait_for_tick(service, 3)
    jobs = httpx.get(f"{service.address}/api/v1/jobs").json()
    nodes = httpx.get(f"{service.address}/api/v1/nodes").json()
    service.stop()
    assert [job["name"] for job in jobs] == ["pretrain"]
    assert (nodes[0]["node"], nodes[0]["status"]) == ("127.0.0.1", "unreachable")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{service.address}/-/healthy")
    left = {thread.name for thread in set(threading.enumerate()) - before if not thread.name.startswith("AnyIO")}
    assert left == set()


def test_only_one_service_uses_the_state_and_the_next_one_can_take_it_over(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path))
    for _ in range(2):
        service = Service(config)
        service.start()
        with pytest.raises(ServiceStartError, match="another wattwatch process is using this file"):
            Service(config).start()
        service.stop()


def test_a_failing_tick_is_counted_reported_and_survived(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = wait_for_tick(service, 2).tick
    failed = threading.Event()
    tick = service._engine.tick

    def fail() -> Snapshot:
        failed.set()
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(service._engine, "tick", fail)
    assert failed.wait(DEADLINE_SECONDS)
    monkeypatch.setattr(service._engine, "tick", tick)
    found: dict[str, object] = {}
    snapshot = service.snapshot
    for more in range(1, 200):
        snapshot = wait_for_tick(service, ticks + more)
        found = {episode.scope: episode for episode in snapshot.episodes if episode.alert == "WatcherDegraded"}
        if "engine" in found:
            break
    assert "ZeroDivisionError in fail: a bug" in str(found["engine"])
    metrics = series(httpx.get(f"{service.address}/metrics").text)
    assert value(metrics, "wattwatch_engine_failures_total", kind="ZeroDivisionError in fail") >= 1.0


def test_a_failure_kind_names_the_function_not_the_value() -> None:
    def fail(text: str) -> str:
        try:
            raise ValueError(text)
        except ValueError as error:
            return failure_kind(error)

    assert fail("a") == fail("b") == "ValueError in fail"


@pytest.mark.parametrize(
    ("watcher", "rest", "says"),
    [
        ('listen = "0.0.0.0:0"', "", "watcher.listen: other machines can reach 0.0.0.0:0"),
        ('listen = "[::]:0"', "", "no token is configured"),
        ('token_file = "/nowhere/token"', "", "watcher.token_file: /nowhere/token cannot be read: No such file"),
        (
            "",
            '[[receivers]]\nname = "a"\ntype = "slack"\nurl_file = "/nowhere/url"',
            "receivers[0].url_file /nowhere/url",
        ),
        (
            "",
            '[[profiles]]\nname = "p"\nmatch = "("\nlimit_watts = 3\nidle_watts = 1\nfloor_watts = 2',
            "profiles[0].match",
        ),
    ],
)
def test_it_does_not_start_with_an_unusable_configuration(tmp_path: Path, watcher: str, rest: str, says: str) -> None:
    path = write_config(tmp_path, watcher, rest)
    if "listen" in watcher:
        path.write_text(path.read_text("utf-8").replace('listen = "127.0.0.1:0"\n', ""), "utf-8")
    result = CliRunner().invoke(serve_command, ["-c", str(path)], standalone_mode=False)
    assert result.return_value == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "state").exists()  # nothing was started


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write_config(
        tmp_path, 'token_file = "/nowhere/token"', '[[receivers]]\nname = "a"\ntype = "slack"\nurl_file = "/x"'
    )
    with pytest.raises(ServiceStartError) as error:
        Service(load_config(path)).start()
    assert len(error.value.problems) == 2


def test_beyond_loopback_it_needs_a_token_or_explicit_permission(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n", "utf-8")
    for setting in (f'token_file = "{tmp_path / "token"}"', "allow_unauthenticated = true"):
        path = write_config(tmp_path, setting)
        path.write_text(path.read_text("utf-8").replace("127.0.0.1:0", "0.0.0.0:0"), "utf-8")
        service = Service(load_config(path))
        service.start()
        status = httpx.get(f"{service.address}/api/v1/jobs").status_code
        service.stop()
        assert status == (401 if "token_file" in setting else 200)


def test_a_port_in_use_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = write_config(tmp_path)
        path.write_text(path.read_text("utf-8").replace("127.0.0.1:0", f"127.0.0.1:{port}"), "utf-8")
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        result = CliRunner().invoke(serve_command, ["-c", str(path)], standalone_mode=False)
    assert result.return_value == 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask, "processes started from now on would ignore SIGTERM"
    assert result.stderr == (
        f"{path}: 127.0.0.1:{port} is in use, perhaps by another wattwatch. "
        "Stop that process, or set another address in watcher.listen\n"
    )


def test_an_invalid_configuration_is_rejected_with_all_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "wattwatch.toml"
    path.write_text('[watcher]\nlisten = "x"\nintervall = "1s"\n[[jobs]]\nname = "a"\nnodes = "n"\n', "utf-8")
    result = run_wattwatch(path)
    _, errors = result.communicate(timeout=DEADLINE_SECONDS)
    assert result.returncode == 2
    assert "watcher.listen" in errors
    assert "did you mean 'interval'?" in errors
    with pytest.raises(ConfigError):
        load_config(tmp_path / "missing.toml")


def run_wattwatch(path: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from wattwatch.watcher.cli.main import main; main()", "serve", "-c", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


@contextlib.contextmanager
def notified() -> Iterator[tuple[socket.socket, str]]:
    """systemd's side: a datagram socket, and its name for $NOTIFY_SOCKET."""
    name = f"\0wattwatch-test-{os.getpid()}-{threading.get_ident()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(name)
        channel.settimeout(DEADLINE_SECONDS)
        yield channel, "@" + name[1:]


def next_message(channel: socket.socket, word: str) -> str:
    """The next message that contains this text."""
    while True:
        message = channel.recv(4096).decode()
        if word in message:
            return message


def address_in(log: IO[str]) -> str:
    ready, _, _ = select.select([log], [], [], DEADLINE_SECONDS)
    assert ready
    line = log.readline()
    assert " at http://127.0.0.1:" in line
    return line.rsplit(" ", 1)[1].strip()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_on_a_signal_despite_an_open_stream_and_notifies_systemd_of_each_step(
    tmp_path: Path, ending: signal.Signals
) -> None:
    with notified() as (channel, name):
        process = run_wattwatch(write_config(tmp_path), NOTIFY_SOCKET=name, WATCHDOG_USEC="2000000")
        try:
            assert process.stderr is not None
            address = address_in(process.stderr)
            assert (
                next_message(channel, "READY=1")
                == "READY=1\nSTATUS=1 job, 0 of 1 node answering, 0 open alerts, 0 undelivered messages"
            )
            assert "STATUS=1 job" in next_message(channel, "WATCHDOG=1")
            with httpx.stream("GET", f"{address}/api/v1/events", timeout=DEADLINE_SECONDS) as stream:
                assert next(stream.iter_lines())
                process.send_signal(ending)
                assert process.wait(DEADLINE_SECONDS) == 0
                assert next_message(channel, "STOPPING=1")
        finally:
            process.kill()
            _, errors = process.communicate()
    assert f"stopping on {ending.name}" in errors
    assert "exiting now" not in errors  # the timer that exits after 5 s did not fire
    assert "Traceback" not in errors


def test_the_watchdog_is_not_fed_while_the_engine_hangs(tmp_path: Path) -> None:
    with notified() as (channel, name):
        service = Service(load_config(write_config(tmp_path)))
        stuck = threading.Event()
        service.start()
        wait_for_tick(service, 2)
        service._engine.tick = lambda: (stuck.wait(DEADLINE_SECONDS), service.snapshot)[1]  # type: ignore[method-assign]
        feeder = threading.Thread(
            target=service._wait_for_signal,
            args=(SystemdNotifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "400000"}),),
            daemon=True,
        )
        feeder.start()
        next_message(channel, "READY=1")
        channel.settimeout(0.5)
        fed = 0
        with contextlib.suppress(TimeoutError):
            while fed < 20:
                next_message(channel, "WATCHDOG=1")
                fed += 1
        assert fed < 20
        channel.settimeout(DEADLINE_SECONDS)
        stuck.set()
        assert next_message(channel, "WATCHDOG=1")
        service._web.begin_stop()  # the thread that feeds the watchdog ends with the web server
        feeder.join(DEADLINE_SECONDS)
        service.stop()


def test_without_systemd_nothing_is_sent_and_nothing_fails() -> None:
    SystemdNotifier({}).ready("x")
    SystemdNotifier({"NOTIFY_SOCKET": "/nowhere/notify"}).stopping()
    assert SystemdNotifier({"WATCHDOG_USEC": "x"}).watchdog_seconds is None
    assert SystemdNotifier({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}).watchdog_seconds is None
    assert SystemdNotifier({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}).watchdog_seconds == 30.0


def test_settings_reach_the_components_that_need_them(tmp_path: Path) -> None:
    (tmp_path / "phrase").write_text("open sesame\n", "utf-8")
    config = Config.model_validate(
        {
            "ssh": {"user": "w", "passphrase_file": str(tmp_path / "phrase"), "identity_files": ["~/k"]},
            "jobs": [{"name": "a", "nodes": "n"}],
            "profiles": [
                {
                    "name": "p",
                    "match": "B9",
                    "limit_watts": 1000,
                    "idle_watts": 90,
                    "floor_watts": 200,
                    "communication_watts": 600,
                }
            ],
        }
    )
    settings = ssh_settings(config.ssh)
    assert (settings.user, settings.passphrase) == ("w", "open sesame")
    assert settings.identity_files == (Path("~/k").expanduser(),)
    own = to_user_profile(config.profiles[0])
    assert own.matches("NVIDIA B9")
    profile = own.profile_for_gpu("NVIDIA B9")
    assert profile.communication is not None
    assert 600.0 in profile.communication
    assert profile.floor_watts < profile.compute_watts <= 1000.0
