"""The process of one rank, from its first line of log to its exit code (`wattwatch-train run`)."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from wattwatch.trainer.errors import UserError
from wattwatch.trainer.formatting import format_all
from wattwatch.trainer.run_directory import RankExit, RankExitCode, RunDirectory
from wattwatch.trainer.settings import JobFile, read_job_file, smoke_test_job

if TYPE_CHECKING:
    from wattwatch.trainer.train.heartbeat import HeartbeatWriter
    from wattwatch.trainer.train.process_groups import RankInfo
    from wattwatch.trainer.train.start import AttemptOptions

RESERVED_SUFFIX: Final = ".reserved"
RESERVED_BYTES: Final = 4000  # chosen: a whole exit file with a long message fits, in one 4 KiB block

log = logging.getLogger("wattwatch.train")


def run_rank_process(job: str, resume: str | None, smoke: bool) -> NoReturn:
    """Trains this rank, writes its exit file, and ends the process with a RankExitCode. Raises UserError before that.

    The attempt number, the rank and the rest come from the environment that the launcher and torchrun set.
    """
    job_file = read_job_file(job)
    if smoke:
        job_file = smoke_test_job(job_file)
    attempt = int(os.environ.get("WATTWATCH_ATTEMPT") or 0)  # 0: started by hand with torchrun, without our launcher
    rank = int(os.environ.get("RANK") or 0)
    directory = RunDirectory(Path(job_file.settings.run))
    if attempt:
        redirect_output(directory.rank_log(attempt, rank))
        reserve_exit_file(directory.exit_file(attempt, rank))
    # To standard output, which is the log file by now, so that log lines and tracebacks stay in order.
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format=f"%(asctime)s rank={rank} %(message)s")
    rank_exit = run_rank(job_file, attempt or 1, Path(resume) if resume else None, smoke)
    if attempt:
        write_exit_file(directory.exit_file(attempt, rank), rank_exit)
    # As the last line: if a full disk prevented the exit file, the launcher quotes the end of the log instead.
    (log.info if rank_exit.code == RankExitCode.DONE else log.error)("%s", rank_exit.why)
    exit_now(rank_exit.code)


def run_rank(job: JobFile, attempt: int, resume: Path | None, smoke: bool) -> RankExit:
    """The whole life of a rank. Returns how it ended; no exception of training leaves this function."""
    from wattwatch.trainer.train.heartbeat import HeartbeatWriter
    from wattwatch.trainer.train.process_groups import RankInfo
    from wattwatch.trainer.train.start import AttemptOptions

    options = AttemptOptions(attempt, os.environ.get("WATTWATCH_GATE_ID"), resume, smoke)
    directory = RunDirectory(Path(job.settings.run))
    name = job.settings.name or directory.path.name
    try:
        info = RankInfo.from_environment()
    except UserError as error:
        return RankExit(RankExitCode.REFUSED, str(error))
    with HeartbeatWriter(directory, run=name, rank=info.rank, world=info.world, attempt=attempt) as heartbeat:
        try:
            return train_rank(job, options, info, directory, heartbeat)
        except UserError as error:
            return RankExit(RankExitCode.REFUSED, str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the launcher has to report it to the user
            return replace(describe_failure(error), step=heartbeat.step)


def train_rank(
    job: JobFile, options: AttemptOptions, info: RankInfo, directory: RunDirectory, heartbeat: HeartbeatWriter
) -> RankExit:
    """Joins the other ranks, prepares, trains. Raises UserError, and whatever else ends training."""
    from wattwatch.trainer.train.diagnostics import worker_socket, write_flight_record
    from wattwatch.trainer.train.heartbeat import RankPhase
    from wattwatch.trainer.train.loop import TrainingStopped, train
    from wattwatch.trainer.train.process_groups import process_group
    from wattwatch.trainer.train.start import prepare_training
    from wattwatch.trainer.train.stopping import StopListener

    def exit_from_collective() -> None:
        # Called in a thread: the main thread is inside a collective and cannot be interrupted from Python.
        why = (
            "this rank was asked to exit, but it is still waiting in a collective, because another rank does not "
            "respond"
        )
        write_exit_file(
            directory.exit_file(options.number, info.rank), RankExit(RankExitCode.FAILED, why, heartbeat.step)
        )
        os._exit(RankExitCode.FAILED)

    # One rank watches the file: the others learn of it in the next step's all_reduce, all at the same step.
    stop_file = directory.stop_file if info.rank == 0 else None
    # In this order: signals and the worker socket must work while the process group is being created, which waits for
    # all ranks and is the first place where a job hangs.
    with (
        StopListener(stop_file, exit_from_collective) as stop_listener,
        worker_socket(directory, info.rank, log.info),
        process_group(info, job.settings.train.step_timeout_seconds) as (mesh, device),
    ):
        training = prepare_training(job, options, info, mesh, device, heartbeat, stop_listener)
        try:
            steps_done = train(training)
        except TrainingStopped as stop:
            return RankExit(RankExitCode.STOPPED, str(stop), heartbeat.step)
        except RuntimeError:
            # Probably a collective. The record must be written before the process group is destroyed.
            write_flight_record(directory, options.number, info.rank, log.info)
            raise
        heartbeat.update(RankPhase.DONE, steps_done)
        return RankExit(RankExitCode.DONE, f"{format_all(steps_done, 'step')} done and saved", steps_done)


def describe_failure(error: Exception) -> RankExit:
    """The exit of a rank that an exception ended, in one sentence. An unexpected one's traceback goes to the log."""
    import torch
    import torch.distributed as dist

    from wattwatch.trainer.checkpoint.save import SaveError
    from wattwatch.trainer.train.loop import NonFiniteLoss

    if isinstance(error, SaveError | NonFiniteLoss):
        return RankExit(RankExitCode.FAILED, str(error))
    traceback.print_exc()
    first_line = str(error).strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        advice = "lower train.micro_batch, or set train.gradient_checkpointing"
        return RankExit(RankExitCode.FAILED, f"out of memory: {first_line}; {advice}")
    # gloo raises a plain RuntimeError whose text starts with [gloo/...]; NCCL's are subclasses of DistError.
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
        what = first_line.partition(". This may indicate")[0]  # gloo appends speculation and a greeting
        # The watcher finds this sentence in logs by its first words, see watcher/diagnosis/stacks/log_errors.toml.
        why = f"a collective failed: another rank has exited or does not respond ({what})"
        return RankExit(RankExitCode.FAILED, why, follows=True)
    if isinstance(error, OSError):
        return RankExit(RankExitCode.FAILED, f"{error.filename or 'a file'}: {error.strerror or error}")
    text = f"internal error, please report it: {type(error).__name__}: {first_line}"
    return RankExit(RankExitCode.INTERNAL_ERROR, text)


def redirect_output(path: Path) -> None:
    """Sends standard output and error, those of native code included, to the file `path`. Raises UserError.

    On the level of file descriptors: NCCL and glibc write past sys.stdout.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def reserve_exit_file(path: Path) -> None:
    """Allocates disk space for the exit file now: "disk full" is a common reason to exit, and has to fit on that disk.

    Raises UserError.
    """
    try:
        path.with_suffix(RESERVED_SUFFIX).write_bytes(b" " * RESERVED_BYTES)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def write_exit_file(path: Path, rank_exit: RankExit) -> None:
    """Writes into the reserved file, without allocating a new block, and renames it to `path`."""
    reserved = path.with_suffix(RESERVED_SUFFIX)
    try:
        with open(reserved, "r+b") as file:
            file.write(dumps(asdict(rank_exit)).encode())
            file.truncate()  # the rest of the reserved spaces
            file.flush()
            os.fsync(file.fileno())
        os.replace(reserved, path)
    except OSError as error:
        log.error("%s: %s", path, error)


def exit_now(code: int) -> NoReturn:
    """Exits without the interpreter's cleanup: threads of a process group that lost its peers may hang in it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
