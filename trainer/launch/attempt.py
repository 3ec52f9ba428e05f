"""SIGINT and SIGTERM to the launcher: once asks the job to save and end, twice ends it now."""

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
from wattwatch.trainer.launch.links import SHUTDOWN_SECONDS, LostNode, NodeLinks, NodeStartError
from wattwatch.trainer.launch.outcome import EXIT_REFUSED, AttemptEvidence, RankFailure, TorchrunExit
from wattwatch.trainer.launch.placement import NodeTransport, Placement
from wattwatch.trainer.launch.protocol import PROTOCOL_VERSION, MessageKind, NodeMessage, StartRequest
from wattwatch.trainer.run_directory import RunDirectory, read_rank_exit


@dataclass(slots=True)
class InterruptCount:
    """How often the user, or the batch system, has asked."""

    count: int = 0
    by: str = ""  # the first signal, as people call it


@contextlib.contextmanager
def count_interrupts() -> Iterator[InterruptCount]:
    """Counts instead of raising, until the block ends."""
    counted = InterruptCount()

    def came(number: int, _frame: object) -> None:
        counted.count += 1
        counted.by = counted.by or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    # SIGHUP too: a terminal that closes is no reason to leave ranks behind, nor to lose what they have not saved
    before = {number: signal.signal(number, came) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield counted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# One attempt: the gate on all nodes, then the ranks on all nodes. What runs is ended on every way out.

POLL_SECONDS: Final = 0.2
# After a node's ranks have failed: time for the others to notice by themselves, to dump what their collectives did
# (a record that is gone once somebody has ended them, marin#7796), and to say how they ended.
PEER_GRACE_SECONDS: Final = 20.0

PrintLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What all attempts of a launch share."""

    places: Placement
    connections: tuple[NodeTransport, ...]
    run: RunDirectory
    interruptions: InterruptCount
    say: PrintLine  # a line to the user
    grace_seconds: float = PEER_GRACE_SECONDS

    def links(
        self,
        commands: tuple[tuple[str, ...], ...],
        environment: Mapping[str, str],
        log: str | None = None,
        ports: tuple[int, ...] = (),
    ) -> NodeLinks:
        """Raises Refusal where ssh or srun is not there."""
        order = StartRequest(PROTOCOL_VERSION, self.places.nodes, None, commands, dict(environment), log, ports)
        try:
            return NodeLinks(self.connections, order)
        except NodeStartError as error:
            raise UserError(f"nothing is started: {error}") from None


@dataclass(frozen=True, slots=True)
class GateOutcome:
    gate_id: str | None  # of a gate that is open
    why: str = ""  # it is not
    interrupted: bool = False
    may_pass: bool = False  # a node that does not answer, a port that is taken: another time they may be well


@dataclass(slots=True)
class RanksOutcome:
    failures: list[RankFailure] = field(default_factory=list)
    lost: list[LostNode] = field(default_factory=list)
    codes: dict[int, int | None] = field(default_factory=dict)  # by node, of torchrun, in the order of their ends
    interrupted: bool = False
    asked: bool = False  # by the launcher's stop file: the ranks are to save and end


def run_gate_on_nodes(
    here: LaunchContext, commands: tuple[tuple[str, ...], ...], environment: Mapping[str, str]
) -> GateOutcome:
    """All gate processes to their end. Rank 0's lines are shown; the others' where rank 0's does not tell."""
    before = read_gate_json(here.run).get("gate_id")
    codes: dict[int, int | None] = {}
    others: list[str] = []
    lost: list[LostNode] = []
    refused = ""
    with contextlib.closing(here.links(commands, environment, ports=here.places.ports)) as links:
        while links.waiting and not lost and not refused and not here.interruptions.count:
            for told in links.hear(POLL_SECONDS):
                if isinstance(told, LostNode):
                    lost.append(told)
                elif told.kind == MessageKind.REFUSED:
                    refused = told.text
                elif told.kind == MessageKind.LINE and told.index == 0:
                    here.say(told.text)
                elif told.kind == MessageKind.LINE:
                    others.append(f"{here.places.nodes[told.index]}: {told.text}")
                elif told.kind == MessageKind.ENDED:
                    codes[told.index] = told.code
    if here.interruptions.count:
        return GateOutcome(None, "interrupted at the gate; nothing was started", interrupted=True)
    if refused:
        return GateOutcome(None, f"{refused}; nothing was started", may_pass=True)
    if lost:
        where = here.places.nodes[lost[0].index]
        return GateOutcome(None, f"{where} cannot be reached: {lost[0].why}; nothing was started", may_pass=True)
    broken = [here.places.nodes[index] for index, code in sorted(codes.items()) if code not in (0, 1, EXIT_REFUSED)]
    if broken or (EXIT_REFUSED in codes.values() and codes.get(0) != EXIT_REFUSED):
        for line in others:
            here.say(line)
    if broken:
        return GateOutcome(None, f"the gate itself broke on {', '.join(broken)}; nothing was started")
    if EXIT_REFUSED in codes.values():
        return GateOutcome(None, "the gate refused the job; nothing was started")
    gate_id = read_gate_json(here.run).get("gate_id")
    if not gate_id or gate_id == before:
        return GateOutcome(
            None, f"{here.run.gate_json} is not the gate's that ran now: this host must see the nodes' {here.run.path}"
        )
    return GateOutcome(str(gate_id))


def read_gate_json(run: RunDirectory) -> dict[str, Any]:
    """Nothing where there is none, or none that can be read."""
    try:
        data = json.loads(run.gate_json.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def run_ranks(
    here: LaunchContext, attempt: int, commands: tuple[tuple[str, ...], ...], environment: Mapping[str, str]
) -> RanksOutcome:
    """torchrun on all nodes to its end, rank 0's log on the way."""
    path = here.run.rank_log(attempt, 0)
    log, people = LogTail(path), TracebackFilter()
    output = str(node_log_path(here.run, attempt, "{node}"))
    with contextlib.closing(here.links(commands, environment, output)) as links:
        watch = _RanksMonitor(here, links)
        while links.waiting and not watch.over():
            for told in links.hear(POLL_SECONDS):
                watch.heard(told)
            for line in filter(people.shown, log.lines()):
                here.say(line)
            watch.look()
        watch.end.lost += [LostNode(index, "it does not answer") for index in sorted(links.waiting)]
    for line in filter(people.shown, log.lines(end=True)):
        here.say(line)
    if people.hidden:
        here.say(f"launch: rank 0's traceback, {people.hidden:,} lines, is in {path}")
    if watch.end.asked:  # it has served, and would stop the next launch
        here.run.stop_file.unlink(missing_ok=True)
    return watch.end


class _RanksMonitor:
    """What is heard of the ranks, and when they are told to end."""

    def __init__(self, here: LaunchContext, links: NodeLinks) -> None:
        self._here, self._links = here, links
        self.end = RanksOutcome()
        self._end_at: float | None = None  # lifelines are cut then
        self._over_at: float | None = None  # nobody is waited for beyond

    def heard(self, told: NodeMessage | LostNode) -> None:
        if isinstance(told, LostNode):
            self.end.lost.append(told)
            self._here.say(f"launch: {self._here.places.nodes[told.index]} is lost: {told.why}")
            self._end_soon()
        elif told.kind == MessageKind.LINE:  # the node program's own: the ranks' go to files
            self._here.say(f"launch: {self._here.places.nodes[told.index]}: {told.text}")
        elif told.kind == MessageKind.ENDED:
            self.end.codes[told.index] = told.code
            self.end.failures += parse_rank_failures(told.text)
            if told.code != 0:
                self._end_soon()

    def _end_soon(self) -> None:
        self._end_at = self._end_at or time.monotonic() + self._here.grace_seconds

    def look(self) -> None:
        """At the user's wishes and the clock."""
        count, now = self._here.interruptions.count, time.monotonic()
        if count and not self.end.asked:
            self.end.asked = True
            self._here.run.stop_file.touch()
            self._here.say("launch: asked the ranks to save and end; once more ends them now, unsaved")
        if count > 1 and not self.end.interrupted:
            self.end.interrupted = True
            self._end_at = now
            self._here.say("launch: ending the ranks now")
        if self._end_at is not None and now >= self._end_at and self._over_at is None:
            self._links.end()
            self._over_at = now + SHUTDOWN_SECONDS

    def over(self) -> bool:
        return self._over_at is not None and time.monotonic() >= self._over_at


# What an attempt has left in the run directory, and what torchrun reports, as data.

ERROR_LINE: Final = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")


def parse_rank_failures(report: str) -> tuple[RankFailure, ...]:
    """What wattwatch.trainer.launch.torchrun wrote; nothing where it could not."""
    try:
        rows = json.loads(report) if report else []
        return tuple(parse_dataclass(RankFailure, row) for row in rows)
    except (ValueError, InvalidDataError):
        return ()


def read_evidence(
    run: RunDirectory,
    attempt: int,
    places: Placement,
    failures: Sequence[RankFailure],
    lost: Sequence[LostNode],
    codes: Mapping[int, int | None],
) -> tuple[AttemptEvidence, tuple[str, ...]]:
    """From the run directory, and what could not be read there. `codes` are torchrun's, by node."""
    endings, ended_at, complaints = {}, {}, []
    for rank in range(places.world):
        path = run.ending(attempt, rank)
        try:
            if (ending := read_rank_exit(path)) is not None:
                endings[rank], ended_at[rank] = ending, path.stat().st_mtime
        except (UserError, OSError) as trouble:
            complaints.append(str(trouble))
    failed = {failure.rank for failure in failures}
    silent = set(range(places.world)) - set(endings)
    beats = {
        rank: beat for rank in failed | silent if (beat := _heartbeat_step(run.heartbeat(rank), attempt)) is not None
    }
    named = {rank // places.ranks_per_node for rank in failed}
    torchruns = tuple(
        TorchrunExit(index, code, _torchrun_error(node_log_path(run, attempt, places.nodes[index])))
        for index, code in codes.items()
        if code != 0 and index not in named
    )
    begun = bool(failed or endings or beats) or any(run.logs(attempt).glob("rank-*.log"))
    logs = {rank: _last_log_message(run, attempt, rank, places.node_of(rank)) for rank in failed - set(endings)}
    traces = AttemptEvidence(tuple(failures), endings, tuple(lost), beats, logs, ended_at, torchruns, begun)
    return traces, tuple(complaints)


def node_log_path(run: RunDirectory, attempt: int, node: str) -> Path:
    """What torchrun said there, and its ranks before they had logs of their own."""
    return run.logs(attempt) / f"node-{node}.log"


def _last_log_message(run: RunDirectory, attempt: int, rank: int, node: str) -> str:
    if line := last_log_line(run.rank_log(attempt, rank)):
        return f"its log ends with: {line}"
    return f"see {node_log_path(run, attempt, node)}"


def _heartbeat_step(path: Path, attempt: int) -> tuple[int, int] | None:
    """An earlier attempt's says nothing of this one."""
    try:
        data = json.loads(path.read_bytes())
        return (int(data["pid"]), int(data["step"])) if data["restart"] == attempt - 1 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def last_log_line(path: Path) -> str | None:
    lines = _read_last_lines(path)
    return lines[-1].strip()[:300] if lines else None


def _torchrun_error(path: Path) -> str | None:
    """The error that ended it, which warnings of what it tidies up may follow; else the last line."""
    lines = _read_last_lines(path)
    return next((line[:300] for line in reversed(lines) if ERROR_LINE.match(line)), lines[-1][:300] if lines else None)


def _read_last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            return file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return []


# A log that another process writes, line by line as it grows.

TRACEBACK_LINE: Final = re.compile(r"Traceback \(most recent call last\):|Exception raised from |frame #\d+: ")
LOG_LINE: Final = re.compile(r"\brank=\d+ ")  # as `wattwatch-train run` begins its lines


class LogTail:
    """The file may come later, or never."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._rest = b""

    def lines(self, end: bool = False) -> list[str]:
        """Whole lines since the last call; at the `end` what stands without a line end too."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            data = b""
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if end and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]


class TracebackFilter:
    """What of a log belongs on a screen: a traceback ends where the rank's own next line begins."""

    def __init__(self) -> None:
        self._inside = False
        self.hidden = 0  # lines

    def shown(self, line: str) -> bool:
        if TRACEBACK_LINE.search(line):
            self._inside = True
        elif LOG_LINE.search(line):
            self._inside = False
        self.hidden += self._inside
        return not self._inside
