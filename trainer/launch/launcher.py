"""A launch: attempts, one after the other, until the work is done or another attempt would not help.

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

RankProgram = Callable[[JobFile, str | None, str | None], tuple[str, ...]]  # job, resume, smoke -> a rank's command
ANNOUNCED_READ_BYTES: Final = 1e9  # reading a checkpoint of this size takes long enough to say so. Chosen
STOP_FILE: Final = "the stop file"
ATTEMPT_NAME: Final = re.compile(r"attempt-(\d+)")


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The command's options, and what tests replace torch with."""

    smoke: str | None = None
    fresh: bool = False  # do not resume from existing checkpoints
    program: RankProgram = rank_program
    torchrun: str = TORCHRUN_MODULE
    grace_seconds: float = PEER_GRACE_SECONDS


class JobLauncher:
    """One call of `wattwatch-train launch`."""

    def __init__(self, job: JobFile, options: LaunchOptions, interrupts: InterruptCount, print_line: PrintLine) -> None:
        """Raises UserError for invalid node names."""
        self._job, self._options, self._print_line = job, options, print_line
        launch = job.settings.launch
        placement = resolve_placement(launch, os.environ)
        self._run = RunDirectory(Path(job.settings.run))
        self._previous_kind: OutcomeKind | None = None  # how the previous attempt ended
        self._stale_files = StaleFiles(self._run, options.smoke is not None)
        self._context = LaunchContext(
            placement, node_connections(placement, launch), self._run, interrupts, print_line, options.grace_seconds
        )

    def run(self) -> int:
        """Runs attempts to the end. Returns the exit code: 0 done, 2 refused, 4 stopped, 5 failed, 130 interrupted.

        Raises UserError if nothing could be started.
        """
        try:
            self._run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror or error}; nothing was started") from None
        with lock_run_directory(self._run):
            self._prepare()
            return self._run_attempts()

    def _run_attempts(self) -> int:
        settings = self._job.settings.launch
        if (summary := self._already_done()) is not None:
            self._print_line(f"launch: {summary}")
            return EXIT_CODES[NextAction.DONE]
        retry = 0
        while True:
            decision = self._attempt(settings.retries - retry, first=retry == 0)
            self._print_line(f"launch: {decision.line}")
            if decision.action is not NextAction.RETRY:
                return EXIT_CODES[decision.action]
            retry += 1
            seconds = retry_delay_seconds(settings.retry_wait_seconds, retry)
            self._print_line(f"launch: retry {retry} of {settings.retries} starts in {seconds:g} s")
            if (stop := self._wait_for_retry(seconds)) is not None:
                self._print_line(f"launch: {stop.line}")
                return EXIT_CODES[stop.action]

    def _prepare(self) -> None:
        try:
            self._stale_files.remove_before_gate()
            self._make_directories()
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror or error}; nothing was started") from None

    def _make_directories(self) -> None:
        for directory in (self._run.path, self._run.flight, self._run.path / "logs"):
            directory.mkdir(parents=True, exist_ok=True)

    def _remove_stale_files(self) -> None:
        """After the first gate, which has found no live ranks."""
        try:
            if (removed := self._stale_files.remove_after_gate()) is not None:
                self._print_line(f"launch: removed an old stop file: {removed}")
            self._make_directories()
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror or error}; nothing was started") from None

    def _already_done(self) -> str | None:
        """A message if this very job has been trained to its end; None if there may be something to do.

        A job file that has changed since then may ask for more steps; only the gate can tell.
        """
        if self._options.smoke or self._options.fresh:
            return None
        gate, completion = read_gate_json(self._run), find_newest_complete(self._run.checkpoints).completion
        if completion is None or completion.step < completion.steps or gate.get("config_sha256") != self._job.sha256:
            return None
        # A later launch of the same job has another gate id; then the data must still give the same number of steps.
        if gate.get("gate_id") != completion.gate_id and steps_from_gate_record(gate) != completion.step:
            return None
        # Before saying that nothing is to do, read every byte: the checkpoint may have been damaged since.
        if (verified := self._newest_checkpoint().completion) is None or verified.step < completion.step:
            return None
        return f"nothing to do: step {completion.step:,} of {completion.steps:,} is saved"

    def _wait_for_retry(self, seconds: float) -> LaunchDecision | None:
        """Waits; a decision if the user asks for no further attempt."""
        until = time.monotonic() + seconds
        while True:
            if self._context.interrupts.count:
                return LaunchDecision(
                    NextAction.INTERRUPTED, "the launch was interrupted between two attempts; no rank is running"
                )
            if self._run.stop_file.exists():
                return LaunchDecision(
                    NextAction.STOPPED, f"{STOP_FILE}, which was found between two attempts; no rank is running"
                )
            if (left := until - time.monotonic()) <= 0:
                return None
            time.sleep(min(left, POLL_SECONDS))

    def _attempt(self, retries_left: int, first: bool) -> LaunchDecision:
        """Gate, ranks, decision. The gate runs before every attempt: a node may have broken since the last."""
        if read_job_file(self._job.path).sha256 != self._job.sha256:
            why = f"{self._job.path} has changed since this launch began; start a new launch"
            return LaunchDecision(NextAction.REFUSED, why)
        # Determined again before every attempt: the last one may have saved, or its newest checkpoint may be damaged.
        attempt = next_attempt_number(self._run)
        newest = NewestCheckpoint(None) if self._options.smoke else self._newest_checkpoint()
        if first and self._options.fresh:
            newest = NewestCheckpoint(None)
        resume = None if newest.directory is None else str(newest.directory)
        began_at = newest.completion.step if newest.completion else 0
        self._print_line(f"launch: attempt {attempt}, " + (f"from {resume}" if resume else "from the beginning"))
        environment = self._environment(attempt)
        placement = self._context.placement
        gate = run_gate_on_nodes(
            self._context, gate_commands(placement, self._job, str(self._run.path), resume), environment
        )
        if gate.gate_id is None:
            if gate.may_pass_later and not first and retries_left > 0:
                return LaunchDecision(NextAction.RETRY, gate.why)  # it passed for an earlier attempt
            return LaunchDecision(NextAction.INTERRUPTED if gate.interrupted else NextAction.REFUSED, gate.why)
        if first:
            self._remove_stale_files()
        if first and self._options.fresh:
            self._move_checkpoints_aside(attempt)
        # Also for the dumps of NCCL's watchdog, which may not create a directory while it handles a timeout.
        for directory in (self._run.logs(attempt), self._run.flight_records(attempt)):
            directory.mkdir(parents=True, exist_ok=True)
        program = self._options.program(self._job, resume, self._options.smoke)
        commands = rank_commands(
            placement, self._job.settings.launch, run_id(self._run, attempt), program, self._options.torchrun
        )
        ranks = run_ranks(self._context, attempt, commands, environment | {"WATTWATCH_GATE_ID": gate.gate_id})
        decision = decide_next(self._result(attempt, began_at, gate.gate_id, ranks), retries_left)
        if self._options.smoke and decision.action is NextAction.DONE:
            why = f"the last steps and the save after them succeeded; {self._run.path} can be deleted"
            return LaunchDecision(NextAction.DONE, why)
        return decision

    def _newest_checkpoint(self, deep: bool = True) -> NewestCheckpoint:
        """`deep` compares every byte with its checksum, and falls back to an older checkpoint if one differs."""
        newest = find_newest_complete(self._run.checkpoints)
        if deep and newest.completion:
            if (size := sum(file.bytes for file in newest.completion.files.values())) > ANNOUNCED_READ_BYTES:
                self._print_line(f"launch: verifying the checksums of {newest.directory} ({size / 1e9:.1f} GB)")
            newest = find_newest_complete(self._run.checkpoints, deep=True)
        for reason in newest.skipped:
            self._print_line(f"launch: skipped a checkpoint: {reason}")
        return newest

    def _stopped_by(self, ranks: RanksOutcome) -> str:
        if ranks.stop_requested:
            return self._context.interrupts.by or "a signal"
        return STOP_FILE if self._run.stop_file.exists() else ""

    def _environment(self, attempt: int) -> dict[str, str]:
        owner, flight = self._job.settings.launch.environment, nccl_dump_prefix(self._run, attempt)
        return rank_environment(owner, flight, installed_torch_version()) | {
            "WATTWATCH_ATTEMPT": str(attempt),
            "WATTWATCH_NODES": ",".join(self._context.placement.nodes),
            "TORCHELASTIC_RUN_ID": run_id(self._run, attempt),  # the gate uses it as its key
        }

    def _move_checkpoints_aside(self, attempt: int) -> None:
        """--fresh: a retry must not resume from the old checkpoints. Moved, not deleted: they may be all there is."""
        if not self._run.checkpoints.exists() or not os.listdir(self._run.checkpoints):
            return
        aside = self._run.path / f"checkpoints-before-attempt-{attempt:02d}"
        self._run.checkpoints.rename(aside)
        self._run.checkpoints.mkdir()
        self._print_line(f"launch: existing checkpoints were moved to {aside}")

    def _result(self, attempt: int, began_at: int, gate_id: str, ranks: RanksOutcome) -> AttemptResult:
        placement = self._context.placement
        evidence, unreadable = read_evidence(self._run, attempt, placement, ranks.failures, ranks.lost, ranks.codes)
        for line in unreadable:
            self._print_line(f"launch: {line}")
        steps = steps_from_run_record(self._run, attempt)
        completion = self._newest_checkpoint(deep=False).completion
        # run.json may be unreadable while the shared file system has problems; a checkpoint of this gate says the same.
        if steps is None and completion and completion.gate_id == gate_id:
            steps = completion.steps
        if completion and steps and completion.step >= steps:
            completion = self._newest_checkpoint().completion  # verified, before we report that the work is done
        outcome = determine_outcome(evidence, placement)
        same_as_before, self._previous_kind = outcome.kind is self._previous_kind, outcome.kind
        outcome = replace(outcome, sentence=f"attempt {attempt}: {outcome.sentence}")
        if ranks.failures and (silent := ranks_without_evidence(evidence, placement.world)) and not ranks.lost:
            self._print_line(
                f"launch: {silent} recorded no exit reason, probably because torchrun ended all ranks of a node"
            )
        reached = max((rank_exit.step or 0 for rank_exit in evidence.exits.values()), default=0)
        return AttemptResult(
            outcome,
            began_at,
            reached,
            completion.step if completion else 0,
            steps,
            ranks.interrupted,
            same_as_before,
            self._stopped_by(ranks),
        )


class StaleFiles:
    """Files of earlier launches: a stop file, and for a smoke test everything in its directory, which it owns.

    They are removed only when they cannot belong to a job that is running. All methods raise OSError.
    """

    def __init__(self, run: RunDirectory, smoke: bool) -> None:
        self._run, self._smoke = run, smoke
        self._old_stop_time: int | None = None  # mtime of the stop file that existed when this launch began

    def remove_before_gate(self) -> None:
        """An old smoke test goes before the gate, which checks for free space, unless a rank of it may be alive."""
        heartbeats = find_live_heartbeats(f"{self._run.path}/heartbeat")
        if self._smoke and all(heartbeat.alive is False for heartbeat in heartbeats):
            self._remove_smoke_test()
        self._old_stop_time = self._stop_file_time()

    def remove_after_gate(self) -> str | None:
        """After a gate that passed, which knows from all nodes that no rank is alive.

        Returns the path of the stop file if one was removed. One that was created since this launch began is meant for
        this launch, and stays.
        """
        if self._smoke:
            self._remove_smoke_test()
        elif self._old_stop_time is not None and self._stop_file_time() == self._old_stop_time:
            self._run.stop_file.unlink(missing_ok=True)
            return str(self._run.stop_file)
        return None

    def _remove_smoke_test(self) -> None:
        """Everything but what the gate has just written, and our lock."""
        try:
            names = os.listdir(self._run.path)
        except FileNotFoundError:
            return
        for path in (self._run.path / name for name in names):
            # A link is removed, never what it points to: a user may have linked checkpoints from elsewhere.
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path not in (self._run.gate_json, self._run.launch_lock):
                path.unlink()

    def _stop_file_time(self) -> int | None:
        try:
            return self._run.stop_file.stat().st_mtime_ns
        except FileNotFoundError:
            return None


@contextmanager
def lock_run_directory(run: RunDirectory) -> Iterator[None]:
    """Locks the run directory, which must exist, until the block ends or this process dies. Raises UserError.

    Two launches that start in the same second would each find no live rank, and end each other's ranks. A file system
    without locks keeps nobody out; then only the gate's search for live ranks remains.
    """
    try:
        # "a+": opening must not truncate the holder's name before we know that we have the lock.
        lock_file = open(run.launch_lock, "a+", encoding="utf-8")  # noqa: SIM115 - closed below, by the with
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror or error}; nothing was started") from None
    with lock_file as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            raise UserError(
                f"{run.path}: another launch is using this run directory ({holder}); nothing was started"
            ) from None
        except OSError:
            yield
            return
        # Only for the message to a second launch; the lock itself is the kernel's, and ends with this process.
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def nccl_dump_prefix(run: RunDirectory, attempt: int) -> str:
    """Path prefix for dumps of NCCL's watchdog; another one than that of the ranks' own records beside them."""
    return str(run.flight_records(attempt) / "nccl-")


def run_id(run: RunDirectory, attempt: int) -> str:
    """Identifies the attempt to gate and torchrun: leftover processes of another job or attempt cannot join."""
    return f"{run.path.name}-{attempt}"


def next_attempt_number(run: RunDirectory) -> int:
    """One more than the highest with logs, so that the logs of earlier launches are kept."""
    found = [int(match[1]) for match in map(ATTEMPT_NAME.fullmatch, _list_names(run.path / "logs")) if match]
    return max(found, default=0) + 1


def _list_names(directory: Path) -> Iterable[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def steps_from_gate_record(gate: Mapping[str, Any]) -> int | None:
    """Steps of the whole job, according to gate.json."""
    steps, settings = gate.get("steps"), gate.get("settings")
    epochs = settings.get("epochs") if isinstance(settings, dict) else None
    return steps * epochs if isinstance(steps, int) and isinstance(epochs, int) else None


def steps_from_run_record(run: RunDirectory, attempt: int) -> int | None:
    """Steps of the whole job, according to run.json; None if rank 0 of this attempt has not written it."""
    try:
        record = parse_dataclass(RunRecord, json.loads(run.run_json.read_bytes()))
    except (OSError, ValueError, InvalidDataError):
        return None
    return record.steps if record.attempt == attempt else None


def plan_lines(job: JobFile, options: LaunchOptions) -> list[str]:
    """`launch --print`: what would be run. Starts nothing."""
    launch, run = job.settings.launch, RunDirectory(Path(job.settings.run))
    placement = resolve_placement(launch, os.environ)
    start_anew = options.smoke or options.fresh
    newest = NewestCheckpoint(None) if start_anew else find_newest_complete(run.checkpoints)
    resume = None if newest.directory is None else str(newest.directory)
    attempt = next_attempt_number(run)
    lines = [f"# attempt {attempt}, {'from ' + resume if resume else 'from the beginning'}"]
    environment = rank_environment(launch.environment, nccl_dump_prefix(run, attempt), installed_torch_version())
    lines += [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    for transport in node_connections(placement, launch):
        names = ", ".join(placement.nodes[index] for index in transport.indices)
        lines.append(f"# {names}: {shlex.join(transport.command)}")
    program = options.program(job, resume, options.smoke)
    for title, commands in (
        ("gate", gate_commands(placement, job, str(run.path), resume)),
        ("ranks", rank_commands(placement, launch, run_id(run, attempt), program)),
    ):
        for index, command in enumerate(commands):
            lines += [f"# {title} on {placement.nodes[index]}", shlex.join(command)]
    return lines
