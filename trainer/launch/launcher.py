"""A launch: attempts until the work is done, or until another would not help.

newest complete checkpoint ──► gate on all nodes ──► ranks on all nodes ──► how did it end? ──► done, or again
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from wattwatch.trainer.checkpoint.complete import NewestCheckpoint, find_newest_complete
from wattwatch.trainer.dataclass_json import InvalidDataError, parse_dataclass
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.launch.attempt import (
    PEER_GRACE_SECONDS,
    POLL_SECONDS,
    InterruptCount,
    LaunchContext,
    PrintLine,
    RanksOutcome,
    read_evidence,
    read_gate_json,
    run_gate_on_nodes,
    run_ranks,
)
from wattwatch.trainer.launch.outcome import (
    EXIT_CODES,
    AttemptResult,
    LaunchDecision,
    NextAction,
    OutcomeKind,
    decide_next,
    determine_outcome,
    ranks_without_evidence,
    retry_delay_seconds,
)
from wattwatch.trainer.launch.placement import (
    TORCHRUN_MODULE,
    gate_commands,
    installed_torch_version,
    node_connections,
    rank_commands,
    rank_environment,
    rank_program,
    resolve_placement,
)
from wattwatch.trainer.run_directory import RunDirectory, RunRecord, find_live_heartbeats
from wattwatch.trainer.settings import JobFile, read_job_file

RankProgram = Callable[[JobFile, str | None, str | None], tuple[str, ...]]  # job, resume, smoke -> what a rank runs
ANNOUNCED_READ_BYTES: Final = 1e9  # a checkpoint that takes a while to read
STOP_FILE: Final = "the stop file"
ATTEMPT_NAME: Final = re.compile(r"attempt-(\d+)")


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The command's options, and what a test puts in torch's place."""

    smoke: str | None = None
    fresh: bool = False  # not from the checkpoints that are there
    program: RankProgram = rank_program
    torchrun: str = TORCHRUN_MODULE  # the module
    grace_seconds: float = PEER_GRACE_SECONDS


class JobLauncher:
    """One call of the command."""

    def __init__(self, job: JobFile, wishes: LaunchOptions, interruptions: InterruptCount, say: PrintLine) -> None:
        """Raises Refusal for nodes that are none."""
        self._job, self._wishes, self._say = job, wishes, say
        launch = job.settings.launch
        here = resolve_placement(launch, os.environ)
        self._run = RunDirectory(Path(job.settings.run))
        self._manner: OutcomeKind | None = None  # how the last attempt ended
        self._leftovers = StaleFiles(self._run, wishes.smoke is not None)
        self._here = LaunchContext(
            here, node_connections(here, launch), self._run, interruptions, say, wishes.grace_seconds
        )

    def run(self) -> int:
        """The exit code: 0 done, 2 refused, 4 stopped, 5 failed, 130 interrupted. Raises Refusal: nothing started."""
        try:
            self._run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror or error}; nothing is started") from None
        with lock_run_directory(self._run):
            self._prepare()
            return self._attempts()

    def _attempts(self) -> int:
        settings = self._job.settings.launch
        if (saved := self._done_before()) is not None:
            self._say(f"launch: {saved}")
            return EXIT_CODES[NextAction.DONE]
        retry = 0
        while True:
            decision = self._attempt(settings.retries - retry, first=retry == 0)
            self._say(f"launch: {decision.line}")
            if decision.next is not NextAction.RETRY:
                return EXIT_CODES[decision.next]
            retry += 1
            seconds = retry_delay_seconds(settings.retry_wait_seconds, retry)
            self._say(f"launch: retry {retry} of {settings.retries} in {seconds:g} s")
            if (unwilling := self._pause(seconds)) is not None:
                self._say(f"launch: {unwilling.line}")
                return EXIT_CODES[unwilling.next]

    def _prepare(self) -> None:
        try:
            self._leftovers.clear_at_once()
            self._make_directories()
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror or error}; nothing is started") from None

    def _make_directories(self) -> None:
        for directory in (self._run.path, self._run.flight, self._run.path / "logs"):
            directory.mkdir(parents=True, exist_ok=True)

    def _clear(self) -> None:
        """After the first gate, which has found nobody alive."""
        try:
            if (removed := self._leftovers.clear()) is not None:
                self._say(f"launch: removed {removed}, left by an earlier stop")
            self._make_directories()
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror or error}; nothing was started") from None

    def _done_before(self) -> str | None:
        """What there is to say where this very job has been trained to its end. A job file that has changed since then
        may want more steps: the gate knows."""
        if self._wishes.smoke or self._wishes.fresh:
            return None
        gate, said = read_gate_json(self._run), find_newest_complete(self._run.checkpoints).completion
        if said is None or said.step < said.steps or gate.get("config_sha256") != self._job.sha256:
            return None
        if gate.get("gate_id") != said.gate_id and steps_from_gate_record(gate) != said.step:
            return None
        if (sure := self._newest().completion) is None or sure.step < said.step:
            return None
        return f"nothing to do: step {said.step:,} of {said.steps:,} is saved"

    def _pause(self, seconds: float) -> LaunchDecision | None:
        """Waits; a reason where the user does not want another attempt."""
        until = time.monotonic() + seconds
        while True:
            if self._here.interruptions.count:
                return LaunchDecision(NextAction.INTERRUPTED, "interrupted between two attempts; nothing runs")
            if self._run.stop_file.exists():
                return LaunchDecision(NextAction.STOPPED, f"{STOP_FILE} between two attempts; nothing runs")
            if (left := until - time.monotonic()) <= 0:
                return None
            time.sleep(min(left, POLL_SECONDS))

    def _attempt(self, retries_left: int, first: bool) -> LaunchDecision:
        if read_job_file(self._job.path).sha256 != self._job.sha256:
            return LaunchDecision(
                NextAction.REFUSED, f"{self._job.path} has changed since this launch began: launch it anew"
            )
        attempt = next_attempt_number(self._run)
        newest = NewestCheckpoint(None) if self._wishes.smoke else self._newest()
        if first and self._wishes.fresh:
            newest = NewestCheckpoint(None)
        resume = None if newest.directory is None else str(newest.directory)
        began_at = newest.completion.step if newest.completion else 0
        self._say(f"launch: attempt {attempt}, " + (f"from {resume}" if resume else "from the start"))
        environment = self._environment(attempt)
        gate = run_gate_on_nodes(
            self._here, gate_commands(self._here.places, self._job, str(self._run.path), resume), environment
        )
        if gate.gate_id is None:
            if gate.may_pass and not first and retries_left > 0:
                return LaunchDecision(NextAction.RETRY, gate.why)  # it was well before, and may be again
            return LaunchDecision(NextAction.INTERRUPTED if gate.interrupted else NextAction.REFUSED, gate.why)
        if first:
            self._clear()
        if first and self._wishes.fresh:
            self._set_aside(attempt)
        for directory in (self._run.logs(attempt), self._run.flight_records(attempt)):
            directory.mkdir(parents=True, exist_ok=True)
        program = self._wishes.program(self._job, resume, self._wishes.smoke)
        commands = rank_commands(
            self._here.places, self._job.settings.launch, run_id(self._run, attempt), program, self._wishes.torchrun
        )
        end = run_ranks(self._here, attempt, commands, environment | {"WATTWATCH_GATE_ID": gate.gate_id})
        decision = decide_next(self._result(attempt, began_at, gate.gate_id, end), retries_left)
        if self._wishes.smoke and decision.next is NextAction.DONE:
            return LaunchDecision(
                NextAction.DONE, f"the last steps and the save after them went well; {self._run.path} can go"
            )
        return decision

    def _newest(self, deep: bool = True) -> NewestCheckpoint:
        """`deep` reads every byte: a checkpoint whose bytes have changed is found so, and an older one taken."""
        newest = find_newest_complete(self._run.checkpoints)
        if deep and newest.completion:
            if (size := sum(fact.bytes for fact in newest.completion.files.values())) > ANNOUNCED_READ_BYTES:
                self._say(f"launch: reading {newest.directory}, {size / 1e9:.1f} GB, against its checksums")
            newest = find_newest_complete(self._run.checkpoints, deep=True)
        for reason in newest.skipped:
            self._say(f"launch: skipped a checkpoint: {reason}")
        return newest

    def _asked_by(self, end: RanksOutcome) -> str:
        if end.asked:
            return self._here.interruptions.by or "a signal"
        return STOP_FILE if self._run.stop_file.exists() else ""

    def _environment(self, attempt: int) -> dict[str, str]:
        owner, flight = self._job.settings.launch.environment, nccl_dump_prefix(self._run, attempt)
        return rank_environment(owner, flight, installed_torch_version()) | {
            "WATTWATCH_ATTEMPT": str(attempt),
            "WATTWATCH_NODES": ",".join(self._here.places.nodes),
            "TORCHELASTIC_RUN_ID": run_id(self._run, attempt),  # the gate's key
        }

    def _set_aside(self, attempt: int) -> None:
        """--fresh: old checkpoints must not be what the next attempt resumes from."""
        if not self._run.checkpoints.exists() or not os.listdir(self._run.checkpoints):
            return
        aside = self._run.path / f"checkpoints-before-attempt-{attempt:02d}"
        self._run.checkpoints.rename(aside)
        self._run.checkpoints.mkdir()
        self._say(f"launch: the checkpoints that were there are now in {aside}")

    def _result(self, attempt: int, began_at: int, gate_id: str, end: RanksOutcome) -> AttemptResult:
        here = self._here.places
        traces, complaints = read_evidence(self._run, attempt, here, end.failures, end.lost, end.codes)
        for line in complaints:
            self._say(f"launch: {line}")
        steps, completion = steps_from_run_record(self._run, attempt), self._newest(deep=False).completion
        if steps is None and completion and completion.gate_id == gate_id:
            steps = completion.steps
        if completion and steps and completion.step >= steps:
            completion = self._newest().completion  # before anybody says that the work is done
        cause = determine_outcome(traces, here)
        again, self._manner = cause.manner is self._manner, cause.manner
        cause = replace(cause, sentence=f"attempt {attempt}: {cause.sentence}")
        if end.failures and (silent := ranks_without_evidence(traces, here.world)) and not end.lost:
            self._say(f"launch: {silent} left no word of their own: ended by torchrun")
        reached = max((ending.step or 0 for ending in traces.endings.values()), default=0)
        return AttemptResult(
            cause,
            began_at,
            reached,
            completion.step if completion else 0,
            steps,
            end.interrupted,
            again,
            self._asked_by(end),
        )


def nccl_dump_prefix(run: RunDirectory, attempt: int) -> str:
    """Prefix of what NCCL's own watchdog dumps: another than that of the ranks' records, which lie beside."""
    return str(run.flight_records(attempt) / "nccl-")


def run_id(run: RunDirectory, attempt: int) -> str:
    """Keeps processes of another job or attempt, that are somehow still there, out of gate and store."""
    return f"{run.path.name}-{attempt}"


def next_attempt_number(run: RunDirectory) -> int:
    """One above what has left logs: an earlier launch's are not written over."""
    found = [int(match[1]) for match in map(ATTEMPT_NAME.fullmatch, _list_names(run.path / "logs")) if match]
    return max(found, default=0) + 1


def _list_names(directory: Path) -> Iterable[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def steps_from_gate_record(gate: Mapping[str, Any]) -> int | None:
    """Of the whole job, by gate.json."""
    steps, settings = gate.get("steps"), gate.get("settings")
    epochs = settings.get("epochs") if isinstance(settings, dict) else None
    return steps * epochs if isinstance(steps, int) and isinstance(epochs, int) else None


def steps_from_run_record(run: RunDirectory, attempt: int) -> int | None:
    """Of run.json, where this attempt's rank 0 wrote it."""
    try:
        record = parse_dataclass(RunRecord, json.loads(run.run_json.read_bytes()))
    except (OSError, ValueError, InvalidDataError):
        return None
    return record.steps if record.attempt == attempt else None


def plan_lines(job: JobFile, wishes: LaunchOptions) -> list[str]:
    """--print: what would be run, and nothing of it."""
    launch, run = job.settings.launch, RunDirectory(Path(job.settings.run))
    here = resolve_placement(launch, os.environ)
    newest = NewestCheckpoint(None) if wishes.smoke or wishes.fresh else find_newest_complete(run.checkpoints)
    resume = None if newest.directory is None else str(newest.directory)
    attempt = next_attempt_number(run)
    lines = [f"# attempt {attempt}, {'from ' + resume if resume else 'from the start'}"]
    environment = rank_environment(launch.environment, nccl_dump_prefix(run, attempt), installed_torch_version())
    lines += [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    for connection in node_connections(here, launch):
        names = ", ".join(here.nodes[index] for index in connection.indices)
        lines.append(f"# {names}: {shlex.join(connection.command)}")
    for title, commands in (
        ("gate", gate_commands(here, job, str(run.path), resume)),
        ("ranks", rank_commands(here, launch, run_id(run, attempt), wishes.program(job, resume, wishes.smoke))),
    ):
        for index, command in enumerate(commands):
            lines += [f"# {title} on {here.nodes[index]}", shlex.join(command)]
    return lines


# One launch in a run directory: two that start in one second would each find nobody, and end each other's ranks.


@contextmanager
def lock_run_directory(run: RunDirectory) -> Iterator[None]:
    """Holds the run directory, which must exist, until the block ends or this process dies. Raises Refusal.

    On a file system without locks nobody is kept out: the gate still looks for living ranks.
    """
    try:
        held = open(run.launch_lock, "a+", encoding="utf-8")  # noqa: SIM115 - closed below, by the with
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror or error}; nothing is started") from None
    with held as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            raise UserError(f"{run.path}: {holder} launches there already; nothing is started") from None
        except OSError:
            yield
            return
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


# What earlier launches left in a run directory, taken away only where it cannot be a living job's.


class StaleFiles:
    """An old stop file; of a smoke test the whole directory, which is its own. All methods raise OSError."""

    def __init__(self, run: RunDirectory, smoke: bool) -> None:
        self._run, self._smoke = run, smoke
        self._old_stop: int | None = None  # when the stop file was made that was there at first

    def clear_at_once(self) -> None:
        """Before the gate, which looks how much room there is: an old smoke test, where no heartbeat is young."""
        beats = find_live_heartbeats(f"{self._run.path}/heartbeat")
        if self._smoke and all(beat["alive"] is False for beat in beats):
            self._clear_smoke()
        self._old_stop = self._stop_made_at()

    def clear(self) -> str | None:
        """After a gate that is open: it knows, from all nodes, that nobody is alive.

        The stop file's path, where one was removed. One that came since this launch began is meant for it, and stays.
        """
        if self._smoke:
            self._clear_smoke()
        elif self._old_stop is not None and self._stop_made_at() == self._old_stop:
            self._run.stop_file.unlink(missing_ok=True)
            return str(self._run.stop_file)
        return None

    def _clear_smoke(self) -> None:
        """Not what the gate has just written."""
        try:
            names = os.listdir(self._run.path)
        except FileNotFoundError:
            return
        for path in (self._run.path / name for name in names):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path not in (self._run.gate_json, self._run.launch_lock):
                path.unlink()

    def _stop_made_at(self) -> int | None:
        try:
            return self._run.stop_file.stat().st_mtime_ns
        except FileNotFoundError:
            return None
