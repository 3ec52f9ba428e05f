"""One attempt: the gate on all nodes, then the ranks on all nodes, then the evidence that they left.

Whatever was started is terminated on every way out of these functions.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from wattwatch.trainer.dataclass_json import InvalidDataError, parse_dataclass
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.formatting import format_count
from wattwatch.trainer.launch.links import SHUTDOWN_SECONDS, LostNode, NodeLinks, NodeStartError
from wattwatch.trainer.launch.outcome import AttemptEvidence, RankFailure, TorchrunExit
from wattwatch.trainer.launch.placement import NodeTransport, Placement
from wattwatch.trainer.launch.protocol import PROTOCOL_VERSION, MessageKind, NodeMessage, StartRequest
from wattwatch.trainer.run_directory import RankExitCode, RunDirectory, read_rank_exit

POLL_SECONDS: Final = 0.2
# After the first node's ranks have failed: time for the others to notice it themselves, to dump their flight recorders
# (a record that is gone once the rank has been killed, marin#7796), and to write their exit files. Chosen.
PEER_GRACE_SECONDS: Final = 20.0
LOG_TAIL_BYTES: Final = 8192
MAX_QUOTED_CHARACTERS: Final = 300
ERROR_LINE: Final = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")

PrintLine = Callable[[str], None]


@dataclass(slots=True)
class InterruptCount:
    """How often the user, or the batch system, has asked the launcher to stop."""

    count: int = 0
    by: str = ""  # the first signal: "Ctrl-C", "SIGTERM" or "SIGHUP"


@contextlib.contextmanager
def count_interrupts() -> Iterator[InterruptCount]:
    """Counts SIGINT, SIGTERM and SIGHUP until the block ends, instead of raising an exception somewhere in it.

    One asks the job to save and stop, a second one ends it at once.
    """
    interrupts = InterruptCount()

    def on_signal(number: int, _frame: object) -> None:
        interrupts.count += 1
        interrupts.by = interrupts.by or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    # SIGHUP too: when a terminal closes, ranks must neither keep the GPUs nor lose what they have not saved.
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What all attempts of a launch share."""

    placement: Placement
    transports: tuple[NodeTransport, ...]
    run: RunDirectory
    interrupts: InterruptCount
    print_line: PrintLine  # a line to the user
    grace_seconds: float = PEER_GRACE_SECONDS

    def start_on_nodes(
        self,
        commands: tuple[tuple[str, ...], ...],
        environment: Mapping[str, str],
        log: str | None = None,
        ports: tuple[int, ...] = (),
    ) -> NodeLinks:
        """Raises UserError if ssh, srun or the interpreter does not exist."""
        nodes = self.placement.nodes
        request = StartRequest(PROTOCOL_VERSION, nodes, None, commands, dict(environment), log, ports)
        try:
            return NodeLinks(self.transports, request)
        except NodeStartError as error:
            raise UserError(f"nothing was started: {error}") from None


@dataclass(frozen=True, slots=True)
class GateOutcome:
    gate_id: str | None  # None: the gate did not let the job pass
    why: str = ""
    interrupted: bool = False
    may_pass_later: bool = False  # a node that does not respond, or a port in use, may be fine the next time


@dataclass(slots=True)
class RanksOutcome:
    failures: list[RankFailure] = field(default_factory=list)
    lost: list[LostNode] = field(default_factory=list)
    codes: dict[int, int | None] = field(default_factory=dict)  # of torchrun, by node, in the order of their ends
    interrupted: bool = False
    stop_requested: bool = False  # the launcher created the stop file


def run_gate_on_nodes(
    context: LaunchContext, commands: tuple[tuple[str, ...], ...], environment: Mapping[str, str]
) -> GateOutcome:
    """Runs all gate processes to their end.

    Rank 0's output is shown; the others' only if theirs differs from it, or if the gate itself failed.
    """
    nodes = context.placement.nodes
    # A gate.json that was there before must not be taken for the result of this gate.
    id_before = read_gate_json(context.run).get("gate_id")
    codes: dict[int, int | None] = {}
    other_lines: list[str] = []
    lost: list[LostNode] = []
    refused = ""
    with contextlib.closing(context.start_on_nodes(commands, environment, ports=context.placement.ports)) as links:
        # One node that is lost or refuses decides the outcome: the others would only wait for it at the gather.
        while links.running and not lost and not refused and not context.interrupts.count:
            for message in links.receive(POLL_SECONDS):
                if isinstance(message, LostNode):
                    lost.append(message)
                elif message.kind == MessageKind.REFUSED:
                    refused = message.text
                elif message.kind == MessageKind.LINE and message.index == 0:
                    context.print_line(message.text)
                elif message.kind == MessageKind.LINE:
                    other_lines.append(f"{nodes[message.index]}: {message.text}")
                elif message.kind == MessageKind.ENDED:
                    codes[message.index] = message.code
    if context.interrupts.count:
        return GateOutcome(None, "the launch was interrupted during the gate; no rank was started", interrupted=True)
    if refused:
        return GateOutcome(None, f"{refused}; no rank was started", may_pass_later=True)
    if lost:
        node = nodes[lost[0].index]
        return GateOutcome(
            None, f"the gate did not complete on {node}: {lost[0].why}; no rank was started", may_pass_later=True
        )
    gate_refused = RankExitCode.REFUSED  # the gate uses the same code: 0 passed, 1 warnings, 2 refused
    broken = [nodes[index] for index, code in sorted(codes.items()) if code not in (0, 1, gate_refused)]
    if broken or (gate_refused in codes.values() and codes.get(0) != gate_refused):
        for line in other_lines:
            context.print_line(line)
    if broken:
        return GateOutcome(None, f"the gate process failed on {', '.join(broken)}; no rank was started")
    if gate_refused in codes.values():
        return GateOutcome(None, "the gate refused the job; no rank was started")
    gate_id = read_gate_json(context.run).get("gate_id")
    # The launcher reads checkpoints and exit files here: if it cannot see gate.json, it will not see those either.
    if not gate_id or gate_id == id_before:
        return GateOutcome(
            None,
            f"{context.run.gate_json} was not written by the gate that just ran: this host and the nodes must share "
            f"{context.run.path}",
        )
    return GateOutcome(str(gate_id))


def read_gate_json(run: RunDirectory) -> dict[str, Any]:
    """gate.json; {} if it does not exist or cannot be read."""
    try:
        data = json.loads(run.gate_json.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def run_ranks(
    context: LaunchContext, attempt: int, commands: tuple[tuple[str, ...], ...], environment: Mapping[str, str]
) -> RanksOutcome:
    """Runs torchrun on all nodes to its end, and shows rank 0's log in the meantime."""
    path = context.run.rank_log(attempt, 0)
    log, tracebacks = LogTail(path), TracebackFilter()
    output = str(node_log_path(context.run, attempt, "{node}"))
    with contextlib.closing(context.start_on_nodes(commands, environment, output)) as links:
        monitor = _RanksMonitor(context, links)
        while links.running and not monitor.gave_up():
            for message in links.receive(POLL_SECONDS):
                monitor.handle(message)
            # The log is read as a file, not through the node: rank 0 writes it into the run directory, and what it
            # printed before it was killed is there too.
            for line in filter(tracebacks.is_shown, log.lines()):
                context.print_line(line)
            monitor.check_deadlines()
        monitor.outcome.lost += [LostNode(index, "it does not respond") for index in sorted(links.running)]
    for line in filter(tracebacks.is_shown, log.lines(end=True)):
        context.print_line(line)
    if tracebacks.hidden_lines:
        context.print_line(f"launch: rank 0's traceback ({format_count(tracebacks.hidden_lines, 'line')}) is in {path}")
    if monitor.outcome.stop_requested:  # left behind, it would stop the next launch
        context.run.stop_file.unlink(missing_ok=True)
    return monitor.outcome


class _RanksMonitor:
    """Collects how the ranks end, and decides when they are terminated."""

    def __init__(self, context: LaunchContext, links: NodeLinks) -> None:
        self._context, self._links = context, links
        self.outcome = RanksOutcome()
        self._terminate_at: float | None = None
        self._give_up_at: float | None = None  # a node that has not reported its end by then is lost

    def handle(self, message: NodeMessage | LostNode) -> None:
        node = self._context.placement.nodes[message.index]
        if isinstance(message, LostNode):
            self.outcome.lost.append(message)
            self._context.print_line(f"launch: {node} is lost: {message.why}")
            self._terminate_soon()
        elif message.kind == MessageKind.LINE:  # from the node program itself: the ranks' output goes to files
            self._context.print_line(f"launch: {node}: {message.text}")
        elif message.kind == MessageKind.ENDED:
            self.outcome.codes[message.index] = message.code
            self.outcome.failures += parse_rank_failures(message.text)
            # After a failure torchrun ends only its own node's ranks; those of other nodes wait in a collective.
            if message.code != 0:
                self._terminate_soon()

    def _terminate_soon(self) -> None:
        # Counted from the first failure: further ones must not extend it.
        self._terminate_at = self._terminate_at or time.monotonic() + self._context.grace_seconds

    def check_deadlines(self) -> None:
        """Acts on the user's interrupts and on the clock."""
        count, now = self._context.interrupts.count, time.monotonic()
        if count and not self.outcome.stop_requested:
            self.outcome.stop_requested = True
            # Not a signal: torchrun answers SIGTERM by ending its ranks, and all ranks must save at the same step.
            self._context.run.stop_file.touch()
            self._context.print_line(
                "launch: asked the ranks to save and stop; interrupt again to end them now, without saving"
            )
        if count > 1 and not self.outcome.interrupted:
            self.outcome.interrupted = True
            self._terminate_at = now
            self._context.print_line("launch: terminating the ranks now")
        if self._terminate_at is not None and now >= self._terminate_at and self._give_up_at is None:
            self._links.terminate()
            self._give_up_at = now + SHUTDOWN_SECONDS

    def gave_up(self) -> bool:
        return self._give_up_at is not None and time.monotonic() >= self._give_up_at


# The evidence in the run directory


def parse_rank_failures(report: str) -> tuple[RankFailure, ...]:
    """What wattwatch.trainer.launch.torchrun reported; () if it was killed before, or in the middle of it."""
    try:
        rows = json.loads(report) if report else []
        return tuple(parse_dataclass(RankFailure, row) for row in rows)
    except (ValueError, InvalidDataError):
        return ()


def read_evidence(
    run: RunDirectory,
    attempt: int,
    placement: Placement,
    failures: Sequence[RankFailure],
    lost: Sequence[LostNode],
    codes: Mapping[int, int | None],
) -> tuple[AttemptEvidence, tuple[str, ...]]:
    """The evidence of an attempt, and what could not be read. `codes` are torchrun's exit codes, by node."""
    exits, exit_times, unreadable = {}, {}, []
    for rank in range(placement.world):
        path = run.exit_file(attempt, rank)
        try:
            if (rank_exit := read_rank_exit(path)) is not None:
                exits[rank], exit_times[rank] = rank_exit, path.stat().st_mtime
        except (UserError, OSError) as error:
            unreadable.append(str(error))
    failed = {failure.rank for failure in failures}
    without_exit = set(range(placement.world)) - set(exits)
    heartbeats = {
        rank: found
        for rank in failed | without_exit
        if (found := _heartbeat_pid_and_step(run.heartbeat(rank), attempt)) is not None
    }
    # A torchrun whose ranks failed has said which; its own last line would only repeat it.
    nodes_with_failures = {rank // placement.ranks_per_node for rank in failed}
    torchruns = tuple(
        TorchrunExit(index, code, _torchrun_error(node_log_path(run, attempt, placement.nodes[index])))
        for index, code in codes.items()
        if code != 0 and index not in nodes_with_failures
    )
    begun = bool(failed or exits or heartbeats) or any(run.logs(attempt).glob("rank-*.log"))
    logs = {rank: _last_log_message(run, attempt, rank, placement.node_of(rank)) for rank in failed - set(exits)}
    evidence = AttemptEvidence(tuple(failures), exits, tuple(lost), heartbeats, logs, exit_times, torchruns, begun)
    return evidence, tuple(unreadable)


def node_log_path(run: RunDirectory, attempt: int, node: str) -> Path:
    """Output of torchrun on that node, and of its ranks before they had logs of their own."""
    return run.logs(attempt) / f"node-{node}.log"


def _last_log_message(run: RunDirectory, attempt: int, rank: int, node: str) -> str:
    lines = _read_last_lines(run.rank_log(attempt, rank))
    if lines and (line := lines[-1].strip()[:MAX_QUOTED_CHARACTERS]):
        return f"the last line of its log is: {line}"
    return f"see {node_log_path(run, attempt, node)}"


def _heartbeat_pid_and_step(path: Path, attempt: int) -> tuple[int, int] | None:
    """None for a heartbeat of an earlier attempt: that rank did not write one in this attempt."""
    try:
        data = json.loads(path.read_bytes())
        return (int(data["pid"]), int(data["step"])) if data["restart"] == attempt - 1 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _torchrun_error(path: Path) -> str | None:
    """The last line that names an exception, since warnings of its cleanup may follow it; else the last line."""
    lines = [line[:MAX_QUOTED_CHARACTERS] for line in _read_last_lines(path)]
    return next((line for line in reversed(lines) if ERROR_LINE.match(line)), lines[-1] if lines else None)


def _read_last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return []


# Rank 0's log on the launcher's terminal

TRACEBACK_LINE: Final = re.compile(r"Traceback \(most recent call last\):|Exception raised from |frame #\d+: ")
LOG_LINE: Final = re.compile(r"\brank=\d+ ")  # our own log format, see wattwatch.trainer.train.rank


class LogTail:
    """The lines of a file that another process writes. The file may be created later, or never."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def lines(self, end: bool = False) -> list[str]:
        """Complete lines since the last call; with `end` also an incomplete last one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            data = b""
        self._offset += len(data)
        # Split as bytes: a character may be cut in two between two reads.
        *lines, self._rest = (self._rest + data).split(b"\n")
        if end and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]


class TracebackFilter:
    """Hides tracebacks: they are for developers, and in the log file. One ends at the next line in our log format."""

    def __init__(self) -> None:
        self._inside = False
        self.hidden_lines = 0

    def is_shown(self, line: str) -> bool:
        if TRACEBACK_LINE.search(line):
            self._inside = True
        elif LOG_LINE.search(line):
            self._inside = False
        self.hidden_lines += self._inside
        return not self._inside
