"""`check_host` says of each thing that stands in the way what it is and what to fix."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

from tests.collectors.ssh.real_sshd import Site, free_port
from wattwatch.collectors.probe.request import LogSource, ProbeRequest
from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.check import CaptureTarget, HostCheck, capture_notes, check_host
from wattwatch.collectors.ssh.model import SshSettings


def step(found: HostCheck, name: str) -> tuple[bool | None, str]:
    return next((step.ok, step.sentence) for step in found.steps if step.name == name)


def tool(directory: Path, text: str) -> str:
    """A directory with an nvidia-smi, as a line of sshd_config that puts it on the PATH."""
    (directory / "bin").mkdir()
    script = directory / "bin" / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    return f"SetEnv PATH={directory}/bin:/usr/local/bin:/usr/bin:/bin"


def test_a_healthy_node_passes_and_each_path_is_checked(here: Site) -> None:
    here.server("node", tool(here.directory, "printf 'NVIDIA B300\\nNVIDIA B300\\n'"))
    run, log = here.directory / "run dir", here.directory / "a $log.txt"
    run.mkdir()
    log.touch()
    request = ProbeRequest(
        run_directories=(str(run),),
        logs=(LogSource(f"{here.directory}/a $l*.txt"), LogSource("/absent/*.log")),
        checkpoint_directories=("/absent/it's",),
    )
    found = check_host("node", here.settings(), request)
    assert found.ok, found
    assert found.status is HostStatus.OK
    assert step(found, "GPU tools") == (True, "nvidia-smi lists 2 NVIDIA B300")
    assert step(found, "python")[0] is True
    assert step(found, f"path {run}") == (True, f"{run} can be read")
    assert step(found, f"path {here.directory}/a $l*.txt")[0] is True
    assert step(found, "path /absent/*.log")[0] is None
    assert step(found, "path /absent/it's")[0] is None


def test_what_a_capture_would_find_is_a_note(here: Site) -> None:
    here.server("node", tool(here.directory, "echo NVIDIA B300"))
    worker = here.directory / "run dir" / "worker"
    worker.mkdir(parents=True)
    listening = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as ras:
        for rank, each in enumerate(listening):
            each.bind(str(worker / f"rank-{rank:05d}.sock"))
        (worker / "other").touch()
        targets = [
            CaptureTarget("train", str(worker.parent), ras.getsockname()[1]),
            CaptureTarget("it's", "/absent/it's", free_port()),
            CaptureTarget("logs", None, free_port()),
        ]
        found = check_host("node", here.settings(), targets=targets)
    for each in listening:
        each.close()
    assert found.ok
    assert all("capture" not in step.name for step in found.steps)
    said = dict(found.capture)
    assert said["train"].startswith(f"worker sockets: 2, owned by {getpass.getuser()};")
    assert said["train"].endswith(": reachable")
    assert "TORCH_FR_BUFFER_SIZE" in said["train"] or "the flight recorder is enabled in" in said["train"]
    assert "py-spy" in said["train"]
    assert said["it's"].startswith("there are no worker sockets in /absent/it's/worker yet")
    assert "forwarding works, but nothing listens" in said["it's"]
    assert said["logs"].startswith("no run_directory")
    assert check_host("node", here.settings()).capture == ()


def test_forbidden_forwarding_to_ras_says_what_to_allow(here: Site) -> None:
    here.server("node", "AllowTcpForwarding no")
    ((_, words),) = check_host("node", here.settings(), targets=[CaptureTarget("train", None, 28028)]).capture
    assert 'the key needs port-forwarding and permitopen="127.0.0.1:28028" in authorized_keys' in words


def test_sockets_of_another_user_say_which_user_to_log_in_as() -> None:
    answer = "capture user\tyes\t1001 wattwatch\ncapture 0\tno\ttrainer 0\n"
    ((_, words),) = capture_notes(answer, [CaptureTarget("train", "/run", 1)], {})
    assert words.startswith(
        "only trainer can access the worker sockets, but the login user is wattwatch: log in as trainer or"
    )


def test_a_driver_that_is_down_is_reported(here: Site) -> None:
    here.server(
        "node", tool(here.directory, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    )
    found = check_host("node", here.settings())
    assert found.status is HostStatus.DRIVER_DOWN
    assert "Driver/library version mismatch" in step(found, "GPU tools")[1]


def test_each_obstacle_is_one_sentence(here: Site) -> None:
    node = here.server("node", "ForceCommand echo go away")
    found = check_host("node", here.settings())
    assert (found.status, found.ok) == (HostStatus.PARSE_ERROR, False)
    assert "'go away" in step(found, "shell")[1]
    node.authorized_keys.write_text("")
    assert check_host("node", here.settings()).status is HostStatus.AUTH_FAILED
    here.known_hosts.write_text("")
    found = check_host("node", here.settings())
    assert found.status is HostStatus.HOST_KEY_CHANGED
    assert "unknown" in step(found, "login")[1]
    found = check_host("127.0.0.1", SshSettings(config_file=here.config, port=free_port()))
    assert found.status is HostStatus.UNREACHABLE
    assert "connection refused" in step(found, "login")[1]


def test_a_shell_that_never_answers_times_out(here: Site) -> None:
    here.server("node", tool(here.directory, "exec sleep 6000"))
    for seconds in (1.0, 10.0, 100.0):  # a slow machine needs more to come as far as the shell
        found = check_host("node", here.settings(connect_timeout_seconds=seconds))
        assert found.status is HostStatus.UNREACHABLE
        if "bashrc" in step(found, "login")[1]:
            break
    assert f"did not answer within {seconds:.0f} s" in step(found, "login")[1]
    assert "or a slow ~/.bashrc (pyenv, conda); try `ssh node true`" in step(found, "login")[1]


def test_a_log_that_shows_no_step_does_not_pass(here: Site) -> None:
    here.server("node")
    logs = {
        "known.log": "step: 10  loss:  1.5  tps: 100\n",
        "unknown.log": "".join(f"sprocket {number} turned\n" for number in range(9)),
        "empty.log": "",
    }
    for name, text in logs.items():
        (here.directory / name).write_text(text)
    sources = tuple(LogSource(str(here.directory / name)) for name in logs)
    found = check_host("node", here.settings(), ProbeRequest(logs=sources))
    known, unknown, empty = (step(found, f"path {source.path}") for source in sources)
    assert known[0] is True
    assert known[1].startswith(f"{sources[0].path} can be read: torchtitan: step 10; ")
    assert unknown[0] is None
    assert "its last 162 bytes show no step: no line has a known format (10 lines read)" in unknown[1]
    assert r"with log_pattern = 'sprocket\s+(?P<step>\d+)', wattwatch would read step 8" in unknown[1]
    assert empty == (True, f"{sources[2].path} can be read; its content was not checked")
