"""The program that the launcher starts on every node (`python -m wattwatch.trainer.launch.node`).

It runs one command, reports how it ended, and terminates it when the launcher or the connection is gone. It is the same
for a local node, over SSH and under srun. Once it has reported an end it exits with 0, whatever the exit code of the
command: under `srun --kill-on-bad-exit` another code would kill the other nodes before they have written their flight
records.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Final

from wattwatch.trainer.dataclass_json import InvalidDataError
from wattwatch.trainer.launch.processes import adopt_orphans, kill_descendants
from wattwatch.trainer.launch.protocol import (
    PROTOCOL_VERSION,
    REPORT_VARIABLE,
    MessageKind,
    NodeMessage,
    StartRequest,
    encode_message,
    parse_request,
)
from wattwatch.trainer.ranks import RANK_VARIABLES, WORLD_VARIABLES

STDIN: Final = 0
TERMINATE_SECONDS: Final = 40.0  # after SIGTERM torchrun waits up to 30 s for its ranks, then sends SIGKILL
POLL_SECONDS: Final = 0.1
KILL_SECONDS: Final = 5.0
SLURM_NODE_VARIABLES: Final = ("SLURMD_NODENAME",)
# srun sets these for the node program: they count node programs, not ranks, and torchrun must not inherit them.
SRUN_RANK_VARIABLES: Final = (*WORLD_VARIABLES, *RANK_VARIABLES, "LOCAL_RANK", "SLURM_LOCALID")


class LauncherPipe:
    """Standard input: one line with the request, then nothing until it ends, which means "terminate".

    SIGTERM, SIGHUP and SIGINT mean the same: sshd or srun may send them before the pipe closes.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self.closed = False
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.closed = True

    def first_line(self) -> bytes | None:
        """Waits for the request; None if the pipe closes before."""
        while b"\n" not in self._buffer and not self.closed:
            self.read()
        return self._buffer.partition(b"\n")[0] if b"\n" in self._buffer else None

    def read(self) -> None:
        # Python restarts os.read after a signal handler (PEP 475), so an idle pipe would hide the signal: poll instead.
        if select.select([STDIN], [], [], POLL_SECONDS)[0]:
            data = os.read(STDIN, 65536)
            self._buffer += data
            self.closed = self.closed or not data


class NodeProgram:
    """The command of this node as a process, with its output and its report."""

    def __init__(self, request: StartRequest, index: int) -> None:
        """Raises OSError if it cannot be started."""
        name = request.nodes[index]
        self._report_reader, report_writer = os.pipe()
        inherited = {key: value for key, value in os.environ.items() if key not in SRUN_RANK_VARIABLES}
        environment = inherited | request.environment | {"WATTWATCH_NODE": name, REPORT_VARIABLE: str(report_writer)}
        with contextlib.ExitStack() as stack:
            # Our copy of the writing end: while it is open, the reading end would never see the end of the report.
            stack.callback(os.close, report_writer)
            output: int | IO[bytes] = subprocess.PIPE
            if request.log is not None:
                path = Path(request.log.replace("{node}", name))
                path.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(path.open("ab"))
            self.process = subprocess.Popen(
                request.commands[index],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                # Signals of a terminal or a session then reach only this program, which terminates the command itself.
                start_new_session=True,
                pass_fds=(report_writer,),
            )

    def report(self) -> str:
        """What the program wrote to the report descriptor. Call it after all descendants have ended."""
        os.set_blocking(self._report_reader, False)  # one that cannot be killed keeps its end of the pipe open
        with contextlib.suppress(BlockingIOError):
            return os.read(self._report_reader, 65536).decode("utf-8", "replace")
        return ""


class NodeSupervisor:
    """Watches the program and the launcher's pipe until the program has ended."""

    def __init__(self, program: NodeProgram, index: int, pipe: LauncherPipe) -> None:
        self._program, self._index, self._pipe = program, index, pipe
        self._buffer = b""
        self._kill_at: float | None = None

    def run(self) -> None:
        process = self._program.process
        self._send(MessageKind.STARTED, str(process.pid))
        with selectors.DefaultSelector() as selector:
            selector.register(STDIN, selectors.EVENT_READ, self._pipe.read)
            if process.stdout is not None:
                os.set_blocking(process.stdout.fileno(), False)
                selector.register(process.stdout, selectors.EVENT_READ, self._forward_output)
            while process.poll() is None and not self._deadline_passed():
                # With a timeout: neither the end of the process nor a signal makes a descriptor readable.
                for key, _ in selector.select(POLL_SECONDS):
                    if key.data() and key.fileobj is process.stdout:
                        selector.unregister(process.stdout)
                if self._pipe.closed and self._kill_at is None:
                    with contextlib.suppress(KeyError):
                        selector.unregister(STDIN)
                    process.terminate()
                    self._kill_at = time.monotonic() + TERMINATE_SECONDS
        if process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)
        # A torchrun that was killed leaves its ranks behind, and a killed rank its data loaders.
        left = kill_descendants(KILL_SECONDS)
        self._forward_output()
        if self._buffer:
            self._send_line(self._buffer)
        if left:
            self._send(
                MessageKind.LINE, f"cannot kill processes that hang in the kernel: pid {', '.join(map(str, left))}"
            )
        self._send(MessageKind.ENDED, self._program.report(), process.poll())

    def _deadline_passed(self) -> bool:
        return self._kill_at is not None and time.monotonic() > self._kill_at

    def _forward_output(self) -> bool:
        """Sends the output so far, line by line; True at its end."""
        stdout = self._program.process.stdout
        if stdout is None:
            return True
        with contextlib.suppress(BlockingIOError):
            while data := os.read(stdout.fileno(), 65536):
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                for line in lines:
                    self._send_line(line)
            return True
        return False

    def _send_line(self, line: bytes) -> None:
        self._send(MessageKind.LINE, line.decode("utf-8", "replace"))

    def _send(self, kind: MessageKind, text: str, code: int | None = None) -> None:
        send_message(NodeMessage(PROTOCOL_VERSION, self._index, kind, text, code))


def send_message(message: NodeMessage) -> None:
    """Errors are ignored: if the launcher is gone, its end of the pipe closes too, and that is handled."""
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(encode_message(message))
        sys.stdout.buffer.flush()


def find_node_index(request: StartRequest) -> int:
    """This node's index. Raises InvalidDataError if Slurm started us on a node that the launcher did not name."""
    if request.index is not None:
        return request.index
    name = next((os.environ[key] for key in SLURM_NODE_VARIABLES if key in os.environ), "")
    if name not in request.nodes:
        raise InvalidDataError(f"this node, {name!r}, is not one of the job's nodes ({', '.join(request.nodes)})")
    return request.nodes.index(name)


def port_problem(port: int, node: str) -> str | None:
    """Why nothing can listen on `port`; None if it is free.

    On all addresses, as torch's store listens: a port that is in use on one of them makes torchrun exit with an
    EADDRINUSE in a traceback, before any rank has started.
    """
    dual = socket.has_dualstack_ipv6()
    try:
        socket.create_server(
            ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
        ).close()
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        return f"port {port} on {node} {reason}; set launch.port to a free port"
    return None


def main() -> None:
    # Before anything is started, so that no descendant can escape to init.
    adopt_orphans()
    pipe = LauncherPipe()
    line = pipe.first_line()
    if line is None:
        return
    index = -1
    try:
        request = parse_request(line)
        index = find_node_index(request)
        # Only the first node listens on these ports.
        for problem in (port_problem(port, request.nodes[0]) for port in request.ports if index == 0):
            if problem is not None:
                send_message(NodeMessage(PROTOCOL_VERSION, index, MessageKind.REFUSED, problem))
                return
        program = NodeProgram(request, index)
    except (InvalidDataError, OSError) as error:
        send_message(NodeMessage(PROTOCOL_VERSION, index, MessageKind.TROUBLE, str(error)))
        return
    NodeSupervisor(program, index, pipe).run()


if __name__ == "__main__":
    main()
