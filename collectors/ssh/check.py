"""Check whether a node can be watched: each step on the way to a running probe, what was found and what to fix.

It also notes what a capture of a hung job would find there: worker sockets and their owner, py-spy, processes with a
flight recorder, and whether sshd forwards to NCCL RAS. These notes are informational; nothing is sent to any of them.
"""

from __future__ import annotations

import base64
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import paramiko

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.probe.node_probe import TAIL_BYTES
from wattwatch.collectors.probe.payload import PYTHON_CANDIDATES
from wattwatch.collectors.probe.request import LogSource, ProbeRequest
from wattwatch.collectors.progress import read_progress
from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.channels import NodeChannels
from wattwatch.collectors.ssh.connections import Connector, SshConnection
from wattwatch.collectors.ssh.keys import KeyRing
from wattwatch.collectors.ssh.login import LoginAttempt
from wattwatch.collectors.ssh.model import ConnectionFailure, SshSettings, error_text, unreachable
from wattwatch.collectors.ssh.ssh_config import HostRoute, resolve_host

MAX_ANSWER_BYTES: Final = 256 * 1024
STAGES: Final = 6  # name, TCP, handshake, authentication, session, answer


@dataclass(frozen=True, slots=True)
class CheckStep:
    """One thing checked. `ok` is None where it is missing but not needed."""

    name: str  # "login", "python", "gpu tools", "path /mnt/run"
    ok: bool | None
    detail: str
    advice: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.detail}; {self.advice}" if self.advice else self.detail


@dataclass(frozen=True, slots=True)
class HostCheck:
    """Result for one node: `status` is OK when a probe can run there and read GPUs and paths."""

    node: str
    status: HostStatus
    steps: tuple[CheckStep, ...]
    notes: tuple[str, ...] = ()  # ssh_config directives that are not supported
    capture: tuple[tuple[str, str], ...] = ()  # (job, what a capture of it would find here)

    @property
    def ok(self) -> bool:
        return all(step.ok is not False for step in self.steps)


def check_host(
    node: str,
    settings: SshSettings,
    request: ProbeRequest | None = None,
    clock: Clock | None = None,
    targets: Sequence[CaptureTarget] = (),
) -> HostCheck:
    """Log in and check, within a few times the connect timeout. Writes nothing on the node; never raises."""
    attempt = LoginAttempt(node, clock or Clock(), settings.connect_timeout_seconds)
    notes: tuple[str, ...] = ()
    # paramiko waits without limit for the answer to exec; closing the socket ends that.
    guard = threading.Timer(STAGES * attempt.real_timeout_seconds, attempt.abort)
    guard.daemon = True
    guard.start()
    try:
        resolution = resolve_host(node, settings)
        notes = resolution.notes
        connection = Connector(KeyRing(settings.passphrase)).connect(resolution.route, attempt)
        try:
            answer = run_script(connection, check_script(request or ProbeRequest()) + capture_script(targets), attempt)
            attempt.enter("testing access to NCCL RAS")
            ports = dict.fromkeys(target.ras_port for target in targets)
            ras = {
                port: describe_ras_access(connection.transport, port, attempt.real_timeout_seconds) for port in ports
            }
        finally:
            connection.close()
            connection.join(1.0)
    except ConnectionFailure as failure:
        step = CheckStep("login", False, failure.detail, failure.advice)
        return HostCheck(node, failure.status, (step,), notes)
    finally:
        guard.cancel()
    logs = () if request is None else request.logs
    steps = (CheckStep("login", True, describe_login(resolution.route)), *parse_steps(answer, logs))
    failed = next((step for step in steps if step.ok is False), None)
    status = HostStatus.OK
    if failed is not None:
        status = HostStatus.DRIVER_DOWN if failed.name == "GPU tools" else HostStatus.PARSE_ERROR
    return HostCheck(node, status, steps, notes, capture_notes(answer, targets, ras))


def describe_login(route: HostRoute) -> str:
    through = f" through {route.via.name}" if route.via else ""
    return f"logged in as {route.user}@{route.place}{through}; the host key is known"


def check_script(request: ProbeRequest) -> str:
    """POSIX shell that prints "name<TAB>verdict<TAB>text" lines. Paths are quoted; a pattern must match a file."""
    lines = [
        'say() { printf \'%s\\t%s\\t%s\\n\' "$1" "$2" "$3"; }',
        'PATH="$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/nvidia/bin"',
        f'for p in {PYTHON_CANDIDATES}; do "$p" -c "import sys;sys.exit(sys.version_info<(3,8))" >/dev/null 2>&1 && '
        'python="$p: $("$p" --version 2>&1)" && break; done; say python "${python:+yes}" "$python"',
        "smi=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>&1) && "
        'say smi yes "$(echo "$smi" | sort | uniq -c | tr -s " \\n" " ")" || say smi no "$(echo "$smi" | head -n 1)"',
    ]
    for directory in (*request.run_directories, *request.checkpoint_directories):
        path = shlex.quote(directory)
        lines.append(
            f"if [ ! -e {path} ]; then say {path} absent ''; elif [ -r {path} ] && [ -x {path} ]; "
            f"then say {path} yes ''; else say {path} no ''; fi"
        )
    for source in request.logs:
        # The shell expands the pattern, so everything but its wildcards is quoted.
        pattern = "".join(c if c in "*?[]" else shlex.quote(c) for c in source.path)
        name = shlex.quote(source.path)
        lines.append(
            f'set -- {pattern}; if [ ! -e "$1" ]; then say {name} absent \'\'; elif [ -r "$1" ]; '
            f'then say {name} yes "$(ls -t -- "$@" | head -n 1 | while IFS= read -r newest; do '
            f'tail -c {TAIL_BYTES} -- "$newest" | base64 2>/dev/null | tr -d "\\n"; done)"; else say {name} no \'\'; fi'
        )
    return "\n".join(lines) + "\n"


def run_script(connection: SshConnection, text: str, attempt: LoginAttempt) -> str:
    """Run the script in the node's shell; its output. Raises ConnectionFailure."""
    attempt.enter("running the check in the node's shell")
    ends = time.monotonic() + attempt.real_timeout_seconds
    try:
        channel = connection.transport.open_session(timeout=attempt.real_timeout_seconds)
        channel.settimeout(attempt.real_timeout_seconds)
        channel.exec_command("exec /bin/sh -s")
        try:
            channel.sendall(text.encode("utf-8", "surrogateescape"))
            channel.shutdown_write()
        except TimeoutError:
            raise
        except OSError:
            pass  # the command ended before it read the script, as a forced command does: its output says more
        answer = b""
        while len(answer) < MAX_ANSWER_BYTES:
            channel.settimeout(max(0.05, ends - time.monotonic()))
            data = channel.recv(65536)
            if not data:
                break
            answer += data
    except TimeoutError:
        raise unreachable(
            f"logged in, but the node's shell did not answer within {attempt.timeout_seconds:.0f} s",
            "possible causes: a hung nvidia-smi, a hung file system, or a slow ~/.bashrc (pyenv, conda); "
            f"try `ssh {shlex.quote(attempt.node)} true`",
        ) from None
    except paramiko.ChannelException as error:
        raise unreachable(
            f"logged in, but the node refused a session: {error.text}", "check MaxSessions in sshd_config on the node"
        ) from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise unreachable(f"logged in, but could not run a command: {error_text(error)}") from None
    return answer.decode("utf-8", "replace")


def parse_steps(answer: str, logs: Sequence[LogSource] = ()) -> Iterator[CheckStep]:
    """The script's output as steps; one failed step if it did not run. `logs`: those of the request."""
    patterns = {source.path: source.pattern for source in logs}
    rows = [row.split("\t") for row in answer.splitlines()]
    found = [(row[0], row[1], row[2]) for row in rows if len(row) == 3 and not row[0].startswith(CAPTURE_PREFIX)]
    if not any(name == "python" for name, _, _ in found):
        yield CheckStep(
            "shell",
            False,
            f"the node does not run commands; it answered {answer[:80]!r}",
            "check for a forced command in authorized_keys, or a login shell such as nologin",
        )
        return
    for name, verdict, text in found:
        if name == "python":
            yield _python_step(verdict, text)
        elif name == "smi":
            yield _smi_step(verdict, text)
        elif verdict == "yes" and name in patterns:
            yield _log_step(name, text, patterns[name])
        elif verdict == "yes":
            yield CheckStep(f"path {name}", True, f"{name} can be read")
        elif verdict == "absent":
            yield CheckStep(
                f"path {name}",
                None,
                f"{name} does not exist on the node",
                "this is normal only if the job has never been started",
            )
        else:
            yield CheckStep(f"path {name}", False, f"{name} cannot be read", "give the login user read access")


def _log_step(name: str, encoded: str, pattern: str | None) -> CheckStep:
    """A log that can be read but shows no step is no source of progress."""
    try:
        data = base64.b64decode(encoded, validate=True)
    except ValueError:
        data = b""
    if not data:
        return CheckStep(f"path {name}", True, f"{name} can be read; its content was not checked")
    sample = read_progress(data.decode("utf-8", "replace"), name, pattern, cut=len(data) == TAIL_BYTES)
    if sample.step is None:
        return CheckStep(
            f"path {name}",
            None,
            f"{name} can be read, but its last {len(data):,} bytes show no step: {sample.why}",
            "set log_pattern for this job, or ignore this if the job has not reached its first step",
        )
    return CheckStep(f"path {name}", True, f"{name} can be read: {sample.why}")


def _python_step(verdict: str, text: str) -> CheckStep:
    if verdict == "yes":
        return CheckStep("python", True, text)
    return CheckStep(
        "python",
        None,
        "Python 3.8 or later was not found",
        "the shell probe will be used; it cannot read NVML, logs or checkpoints",
    )


def _smi_step(verdict: str, text: str) -> CheckStep:
    if verdict == "yes":
        return CheckStep("GPU tools", True, f"nvidia-smi lists {text.strip()}")
    return CheckStep("GPU tools", False, f"nvidia-smi fails: {text.strip()}", "install or repair the driver")


# What a capture would find ------------------------------------------------------------------------------------------

CAPTURE_PREFIX: Final = "capture "
FLIGHT_RECORDER_SET: Final = "'^TORCH_(FR|NCCL_TRACE)_BUFFER_SIZE=[1-9]'"


@dataclass(frozen=True, slots=True)
class CaptureTarget:
    """What a capture of this job would look for on a node."""

    job: str
    run_directory: str | None
    ras_port: int


def capture_script(targets: Sequence[CaptureTarget]) -> str:
    """POSIX shell to append to `check_script`, which defines `say`."""
    if not targets:
        return ""
    lines = [
        f'say "{CAPTURE_PREFIX}user" yes "$(id -u) $(id -un)"',
        f'say "{CAPTURE_PREFIX}py-spy" yes "$(command -v py-spy)"',
        # The environments of other users' processes cannot be read: such a recorder is not counted.
        f'say "{CAPTURE_PREFIX}recorders" yes '
        f'"$(grep -lzsE {FLIGHT_RECORDER_SET} /proc/[0-9]*/environ 2>/dev/null | wc -l)"',
    ]
    for number, target in enumerate(targets):
        if target.run_directory is None:
            continue
        path = shlex.quote(f"{target.run_directory}/worker")
        lines.append(
            f"if [ -d {path} ]; then if [ -r {path} ] && [ -x {path} ]; then open=yes; else open=no; fi; "
            f'say "{CAPTURE_PREFIX}{number}" $open "$(stat -c %U {path}) '
            f"$(ls {path} 2>/dev/null | grep -c '^rank-[0-9]*[.]sock$')\"; "
            f'else say "{CAPTURE_PREFIX}{number}" absent ""; fi'
        )
    return "\n".join(lines) + "\n"


def capture_notes(answer: str, targets: Sequence[CaptureTarget], ras: dict[int, str]) -> tuple[tuple[str, str], ...]:
    """(job, sentence) from the script's output; `ras`: sentence by port."""
    rows = [row.split("\t") for row in answer.splitlines()]
    found = {name: (verdict, text.strip()) for name, verdict, text in (row for row in rows if len(row) == 3)}
    if f"{CAPTURE_PREFIX}user" not in found:
        return ()
    user = found[f"{CAPTURE_PREFIX}user"][1].partition(" ")[2]
    spy = "py-spy is installed" if found.get(f"{CAPTURE_PREFIX}py-spy", ("", ""))[1] else "py-spy is not installed"
    notes = []
    for number, target in enumerate(targets):
        sockets = _sockets(target, found.get(f"{CAPTURE_PREFIX}{number}"), user)
        notes.append((target.job, "; ".join((sockets, _recorders(found), spy, ras.get(target.ras_port, "")))))
    return tuple(notes)


def _sockets(target: CaptureTarget, found_worker: tuple[str, str] | None, user: str) -> str:
    if target.run_directory is None or found_worker is None:
        return (
            "no run_directory is configured, so a capture cannot use worker sockets; "
            "it can use only existing dumps, NCCL RAS and processes"
        )
    verdict, text = found_worker
    if verdict == "absent":
        return (
            f"there are no worker sockets in {target.run_directory}/worker yet; "
            "this is normal only if the job has never been started"
        )
    owner, _, number = text.partition(" ")
    if verdict == "no":
        return f"only {owner} can access the worker sockets, but the login user is {user}: log in as {owner} or root"
    return f"worker sockets: {number}, owned by {owner}" + ("" if owner == user else f", but the login user is {user}")


def _recorders(found: dict[str, tuple[str, str]]) -> str:
    number = found.get(f"{CAPTURE_PREFIX}recorders", ("", ""))[1]
    if number in ("", "0"):
        return (
            "wattwatch found no process with a flight recorder: set TORCH_FR_BUFFER_SIZE when starting the job "
            "(before torch 2.8: TORCH_NCCL_TRACE_BUFFER_SIZE)"
        )
    return f"the flight recorder is enabled in {number} process{'' if number == '1' else 'es'}"


def describe_ras_access(transport: paramiko.Transport, port: int, timeout_seconds: float) -> str:
    """Whether a channel to NCCL RAS opens; it is closed at once."""
    place = f"NCCL RAS at 127.0.0.1:{port}"
    try:
        NodeChannels("", lambda: transport).connect(port, timeout_seconds).close()
    except ConnectionRefusedError:
        return f"{place}: forwarding works, but nothing listens there: no NCCL job is running, or RAS uses another port"
    except OSError as error:
        return f"{place}: {error}"
    return f"{place}: reachable"
