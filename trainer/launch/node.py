"""What the launcher starts on every node: runs one program, tells how it ends, and ends it with the lifeline.

`python -m wattwatch.trainer.launch.node`; local, over SSH and under srun alike. It always exits with 0 once it has told of an
end: under `srun --kill-on-bad-exit` another code would kill the other nodes before they have saved what they know.
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
TERMINATE_SECONDS: Final = 40.0  # torchrun gives its ranks 30 s between SIGTERM and SIGKILL
POLL_SECONDS: Final = 0.1
KILL_SECONDS: Final = 5.0
NODE_NAME_VARIABLES: Final = ("SLURMD_NODENAME",)
# srun counts node programs, not ranks: what it says of them must not be taken for a rank and a world.
SRUN_RANK_VARIABLES: Final = (*WORLD_VARIABLES, *RANK_VARIABLES, "LOCAL_RANK", "SLURM_LOCALID")


class LauncherPipe:
    """Standard input: one line, then nothing until it ends. A signal says the same as its end."""

    def __init__(self) -> None:
        self._buffer = b""
        self.cut = False
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: object) -> None:
        self.cut = True

    def first_line(self) -> bytes | None:
        while b"\n" not in self._buffer and not self.cut:
            self.read()
        return self._buffer.partition(b"\n")[0] if b"\n" in self._buffer else None

    def read(self) -> None:
        # A signal does not interrupt os.read, so a silent launcher must not hold us in it.
        if select.select([STDIN], [], [], POLL_SECONDS)[0]:
            data = os.read(STDIN, 65536)
            self._buffer += data
            self.cut = self.cut or not data


class NodeProgram:
    """The program of this node, its output and its report."""

    def __init__(self, order: StartRequest, index: int) -> None:
        """Raises OSError where it cannot be started."""
        name = order.nodes[index]
        self.report_end, report = os.pipe()
        inherited = {key: value for key, value in os.environ.items() if key not in SRUN_RANK_VARIABLES}
        environment = inherited | order.environment | {"WATTWATCH_NODE": name, REPORT_VARIABLE: str(report)}
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, report)
            output: int | IO[bytes] = subprocess.PIPE
            if order.log is not None:
                path = Path(order.log.replace("{node}", name))
                path.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(path.open("ab"))
            self.process = subprocess.Popen(
                order.commands[index],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # what a terminal or a session sends reaches us, and we decide
                pass_fds=(report,),
            )

    def report(self) -> str:
        """Whatever it wrote; nobody else holds the other end once all have ended."""
        os.set_blocking(self.report_end, False)
        with contextlib.suppress(BlockingIOError):
            return os.read(self.report_end, 65536).decode("utf-8", "replace")
        return ""


class NodeSupervisor:
    """Watches the program and the lifeline until the program has ended."""

    def __init__(self, program: NodeProgram, index: int, lifeline: LauncherPipe) -> None:
        self._program, self._index, self._lifeline = program, index, lifeline
        self._buffer = b""
        self._kill_at: float | None = None

    def run(self) -> None:
        process = self._program.process
        send_message(NodeMessage(PROTOCOL_VERSION, self._index, MessageKind.STARTED, str(process.pid)))
        with selectors.DefaultSelector() as selector:
            selector.register(STDIN, selectors.EVENT_READ, self._lifeline.read)
            if process.stdout is not None:
                os.set_blocking(process.stdout.fileno(), False)
                selector.register(process.stdout, selectors.EVENT_READ, self._output)
            while process.poll() is None and not self._over():
                for key, _ in selector.select(POLL_SECONDS):
                    if key.data() and key.fileobj is process.stdout:
                        selector.unregister(process.stdout)
                if self._lifeline.cut and self._kill_at is None:
                    with contextlib.suppress(KeyError):
                        selector.unregister(STDIN)
                    process.terminate()
                    self._kill_at = time.monotonic() + TERMINATE_SECONDS
        # torchrun killed by hand leaves its ranks; a rank leaves its loaders
        if process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)
        left = kill_descendants(KILL_SECONDS)
        self._output()
        if self._buffer:
            self._line(self._buffer)
        if left:
            send_message(
                NodeMessage(
                    PROTOCOL_VERSION,
                    self._index,
                    MessageKind.LINE,
                    f"processes {left} do not end: they hang in the kernel",
                )
            )
        send_message(
            NodeMessage(PROTOCOL_VERSION, self._index, MessageKind.ENDED, self._program.report(), process.poll())
        )

    def _over(self) -> bool:
        return self._kill_at is not None and time.monotonic() > self._kill_at

    def _output(self) -> bool:
        """Passes on what has come; True at its end."""
        stdout = self._program.process.stdout
        if stdout is None:
            return True
        with contextlib.suppress(BlockingIOError):
            while data := os.read(stdout.fileno(), 65536):
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                for line in lines:
                    self._line(line)
            return True
        return False

    def _line(self, line: bytes) -> None:
        send_message(NodeMessage(PROTOCOL_VERSION, self._index, MessageKind.LINE, line.decode("utf-8", "replace")))


def send_message(word: NodeMessage) -> None:
    """A launcher that has gone hears nothing; its end of the lifeline tells us."""
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(encode_message(word))
        sys.stdout.buffer.flush()


def find_node_index(order: StartRequest) -> int:
    """Raises NotPlain where Slurm names a node that the launcher did not mean."""
    if order.index is not None:
        return order.index
    name = next((os.environ[key] for key in NODE_NAME_VARIABLES if key in os.environ), "")
    if name not in order.nodes:
        raise InvalidDataError(f"this node is {name!r}, and the job's are {', '.join(order.nodes)}")
    return order.nodes.index(name)


def port_problem(port: int, node: str) -> str | None:
    """Why nobody can listen there; None where one can. torch listens on all addresses, so one that is taken is enough:
    torchrun then dies before any rank, of an EADDRINUSE."""
    dual = socket.has_dualstack_ipv6()
    try:
        socket.create_server(
            ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
        ).close()
    except OSError as error:
        said = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror}"
        return f"port {port} of {node} {said}; set launch.port"
    return None


def main() -> None:
    adopt_orphans()
    lifeline = LauncherPipe()
    line = lifeline.first_line()
    if line is None:
        return
    index = -1
    try:
        order = parse_request(line)
        index = find_node_index(order)
        for trouble in (port_problem(port, order.nodes[0]) for port in order.ports if index == 0):
            if trouble is not None:
                send_message(NodeMessage(PROTOCOL_VERSION, index, MessageKind.REFUSED, trouble))
                return
        program = NodeProgram(order, index)
    except (InvalidDataError, OSError) as error:
        send_message(NodeMessage(PROTOCOL_VERSION, index, MessageKind.TROUBLE, str(error)))
        return
    NodeSupervisor(program, index, lifeline).run()


if __name__ == "__main__":
    main()
