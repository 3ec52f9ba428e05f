"""Simulated nodes behind real SSH: what a login can do, what the real probe reports, and that nothing is left."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import paramiko
import pytest

from tests.tools import DEADLINE_SECONDS
from wattwatch.collectors.probe.payload import LEASE_LINE, probe_command, probe_payload
from wattwatch.collectors.probe.request import LogSource, ProbeRequest
from wattwatch.collectors.simulated.cluster import SimulatedCluster, SimulatedJob
from wattwatch.collectors.simulated.scenario import get_scenario
from wattwatch.collectors.simulated.ssh_server import new_private_key, read_key

Line = dict[str, Any]


@pytest.fixture
def cluster() -> Iterator[SimulatedCluster]:
    with SimulatedCluster([get_scenario("deadlock"), get_scenario("hang")], speed=5) as started:
        yield started
    assert started.left_behind == ()
    assert not started.directory.exists()
    assert not started.live_directory.exists()


def login(
    cluster: SimulatedCluster, node: str, key: paramiko.PKey | None = None, banner_seconds: float = DEADLINE_SECONDS
) -> paramiko.SSHClient:
    config = paramiko.SSHConfig.from_path(str(cluster.ssh_config)).lookup(node)
    client = paramiko.SSHClient()
    client.load_host_keys(config["userknownhostsfile"])
    client.connect(
        config["hostname"],
        int(config["port"]),
        config["user"],
        pkey=key,
        key_filename=None if key else config["identityfile"],
        allow_agent=False,
        look_for_keys=False,
        banner_timeout=banner_seconds,
        auth_timeout=DEADLINE_SECONDS,
    )
    return client


def request_of(job: SimulatedJob) -> ProbeRequest:
    return ProbeRequest(
        interval_seconds=1.0,
        run_directories=() if job.run_directory is None else (str(job.run_directory),),
        logs=tuple(LogSource(str(path)) for path in job.logs),
        checkpoint_directories=(str(job.checkpoint_directory),),
    )


def launch(client: paramiko.SSHClient, request: ProbeRequest) -> paramiko.Channel:
    transport = client.get_transport()
    assert transport is not None
    channel = transport.open_session()
    channel.settimeout(DEADLINE_SECONDS)
    channel.exec_command(probe_command(request))
    channel.sendall(probe_payload(request))
    return channel


def lines_of(channel: paramiko.Channel) -> Iterator[Line]:
    with channel.makefile("rb") as file:
        for line in file:
            channel.sendall(LEASE_LINE)
            yield json.loads(line)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_ssh_config_known_hosts_and_key_are_all_that_a_client_needs(cluster: SimulatedCluster) -> None:
    with login(cluster, "deadlock-2") as client:
        _, out, _ = client.exec_command("cat $WATTWATCH_NODE_ROOT/proc/sys/kernel/hostname; pwd; exit 7")
        assert out.read().decode().split() == ["deadlock-2", str(cluster.live_directory / "nodes/deadlock-2/home")]
        assert out.channel.recv_exit_status() == 7


def test_another_key_is_rejected(cluster: SimulatedCluster) -> None:
    with pytest.raises(paramiko.AuthenticationException):
        login(cluster, "deadlock-1", key=read_key(new_private_key()))


def test_a_command_reads_what_it_is_sent_until_the_channel_ends(cluster: SimulatedCluster) -> None:
    with login(cluster, "deadlock-1") as client:
        stdin, out, _ = client.exec_command("wc -c")
        stdin.write(b"x" * 300_000)
        stdin.channel.shutdown_write()
        assert out.read().strip() == b"300000"


def test_the_real_probe_sees_the_deadlock_through_the_real_pynvml(cluster: SimulatedCluster) -> None:
    job = cluster.jobs[0]
    with login(cluster, "deadlock-1") as client, launch(client, request_of(job)) as channel:
        lines = lines_of(channel)
        hello = next(lines)
        assert hello["hello"]["host"] == "deadlock-1"
        assert hello["gpu"]["src"] == "nvml"
        assert utilization(hello) == [0] * 8  # loading
        assert len(hello["beat"]) == 8  # its own ranks only
        cluster.begin()
        seen = [utilization(line) for line in lines_until(lines, lambda line: low_boards(line) == [3])]
        assert any(len(busy) == 8 and min(busy) >= 97 for busy in seen)  # it computed before
        cluster.wait_for_phase("deadlock", 1, DEADLINE_SECONDS)  # its report may come after what the GPUs show
        assert [began.phase for began in cluster.phases() if began.scenario == "deadlock"] == [0, 1]


def utilization(line: Line) -> list[int]:
    answer = line.get("gpu", {"columns": ["util"], "rows": []})
    place = answer["columns"].index("util")
    return [row[0][place] for row in answer["rows"]]


def low_boards(line: Line) -> list[int]:
    """GPUs at 0 % while another is at 100 %."""
    busy = utilization(line)
    return [gpu for gpu, percent in enumerate(busy) if percent == 0] if 100 in busy else []


def lines_until(lines: Iterator[Line], condition: Callable[[Line], bool]) -> Iterator[Line]:
    deadline = time.monotonic() + DEADLINE_SECONDS
    for line in lines:
        assert time.monotonic() < deadline
        yield line
        if condition(line):
            return


def test_the_node_and_the_watcher_share_one_clock(cluster: SimulatedCluster) -> None:
    began = cluster.clock.wall()
    with login(cluster, "hang-1") as client, launch(client, request_of(cluster.jobs[1])) as channel:
        lines = lines_of(channel)
        for _ in range(3):
            line = next(lines)
            assert began <= line["w"] <= cluster.clock.wall()  # a clock of its own speed would lie minutes away
            assert line["t"] <= cluster.clock.monotonic()


def test_the_pynvml_sent_with_the_probe_works_as_well() -> None:
    with SimulatedCluster([get_scenario("healthy")], preload_pynvml=False) as cluster:
        request = request_of(cluster.jobs[0])
        with login(cluster, "steady-1") as client, launch(client, request) as channel:
            lines = lines_until(lines_of(channel), lambda line: "gpu" in line)
            *_, line = lines
            assert line["gpu"]["src"] == "nvml"
            assert len(line["gpu"]["rows"]) == 8


@pytest.mark.parametrize("end", ["channel", "connection", "socket"])
def test_after_any_disconnect_no_process_is_left_on_the_node(cluster: SimulatedCluster, end: str) -> None:
    client = login(cluster, "deadlock-1")
    channel = launch(client, request_of(cluster.jobs[0]))
    next(lines_of(channel))
    assert cluster.processes() != ()
    transport = client.get_transport()
    assert transport is not None
    if end == "channel":
        channel.close()
    elif end == "connection":
        client.close()
    else:
        raw = transport.sock
        assert isinstance(raw, socket.socket)
        raw.shutdown(socket.SHUT_RDWR)
    assert eventually(lambda: cluster.processes() == ())
    client.close()


def test_a_dropped_node_leaves_no_process_and_takes_new_logins(cluster: SimulatedCluster) -> None:
    with login(cluster, "deadlock-1") as client:
        channel = launch(client, request_of(cluster.jobs[0]))  # closing it would write to a connection that is gone
        next(lines_of(channel))
        cluster.drop("deadlock-1")
        assert eventually(lambda: cluster.processes() == ())
    with login(cluster, "deadlock-1") as client:
        _, out, _ = client.exec_command("nvidia-smi -L")
        assert len(out.read().splitlines()) == 8


def test_a_frozen_node_goes_silent_and_resumes_when_thawed(cluster: SimulatedCluster) -> None:
    with login(cluster, "deadlock-1") as client, launch(client, request_of(cluster.jobs[0])) as channel:
        next(lines_of(channel))
        cluster.freeze("deadlock-1")
        cluster.begin()
        cluster.wait_for_phase("deadlock", 0, DEADLINE_SECONDS)  # commands are run in order: the node is frozen
        assert eventually(lambda: silent(channel))
        with pytest.raises((paramiko.SSHException, EOFError, OSError)):
            login(cluster, "deadlock-1", banner_seconds=3)
        cluster.thaw("deadlock-1")
        channel.settimeout(DEADLINE_SECONDS)
        assert channel.recv(1) != b""


def silent(channel: paramiko.Channel) -> bool:
    channel.settimeout(1.0)  # five intervals of the node
    try:
        channel.recv(1 << 20)
    except TimeoutError:
        return True
    return False


def test_the_cluster_ends_with_its_parent_process(cluster: SimulatedCluster) -> None:
    with login(cluster, "deadlock-1") as client:
        channel = launch(client, request_of(cluster.jobs[0]))  # closing it would write to a connection that is gone
        next(lines_of(channel))
        cluster.stop()
        assert cluster.processes() == ()
