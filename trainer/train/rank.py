"""`wattwatch-train run`: one rank. The launcher starts it through torchrun, once for every GPU."""

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

import click

from wattwatch.trainer.errors import UserError
from wattwatch.trainer.run_directory import RankExit, RunDirectory
from wattwatch.trainer.settings import JobFile, read_job_file, smoke_test_job

if TYPE_CHECKING:
    from wattwatch.trainer.train.heartbeat import HeartbeatWriter
    from wattwatch.trainer.train.process_groups import RankInfo
    from wattwatch.trainer.train.start import AttemptOptions

EXIT_DONE: Final = 0
EXIT_REFUSED: Final = 2
EXIT_INTERNAL_ERROR: Final = 3
EXIT_STOPPED: Final = 4
EXIT_FAILED: Final = 5
RESERVED_SUFFIX: Final = ".reserved"
RESERVED_BYTES: Final = 4000

log = logging.getLogger("wattwatch.train")


@click.command()
@click.argument("job")
@click.option("--resume", help="Checkpoint directory to go on from; it must be complete.")
@click.option("--smoke", type=click.Choice(["boundary"]), help="Only the last two steps and the save at their end.")
def run_command(job: str, resume: str | None, smoke: str | None) -> None:
    """One rank of the job in the file JOB, started by the launcher.

    Exit code: 0 all steps are done and saved, 2 refused, 3 a bug, 4 stopped on request before the end, 5 failed: a new
    attempt from the last complete checkpoint may help.
    """
    job_file = read_job_file(job)
    if smoke:
        job_file = smoke_test_job(job_file)
    number = int(os.environ.get("WATTWATCH_ATTEMPT") or 0)
    rank = int(os.environ.get("RANK") or 0)
    directory = RunDirectory(Path(job_file.settings.run))
    if number:
        redirect_output(directory.rank_log(number, rank))
        reserve_exit_file(directory.ending(number, rank))
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format=f"%(asctime)s rank={rank} %(message)s")
    ending = run_rank(job_file, number or 1, Path(resume) if resume else None, smoke is not None)
    if number:
        write_exit_file(directory.ending(number, rank), ending)
    # Last: where a full disk took the ending, the launcher reads the end of the log.
    (log.info if ending.code == EXIT_DONE else log.error)("%s", ending.why)
    exit_now(ending.code)


def run_rank(job: JobFile, number: int, resume: Path | None, smoke: bool) -> RankExit:
    """The whole life of a rank, and how it ended, in words for people."""
    from wattwatch.trainer.train.heartbeat import HeartbeatWriter
    from wattwatch.trainer.train.process_groups import RankInfo
    from wattwatch.trainer.train.start import AttemptOptions

    attempt = AttemptOptions(number, os.environ.get("WATTWATCH_GATE_ID"), resume, smoke)
    directory = RunDirectory(Path(job.settings.run))
    name = job.settings.name or directory.path.name
    try:
        place = RankInfo.from_environment()
    except UserError as error:
        return RankExit(EXIT_REFUSED, str(error))
    with HeartbeatWriter(directory, run=name, rank=place.rank, world=place.world, attempt=number) as heartbeat:
        try:
            return train_rank(job, attempt, place, directory, heartbeat)
        except UserError as error:
            return RankExit(EXIT_REFUSED, str(error))
        except Exception as error:  # noqa: BLE001 - the launcher and its user must hear of whatever it is
            return replace(describe_failure(error), step=heartbeat.step)


def train_rank(
    job: JobFile, attempt: AttemptOptions, place: RankInfo, directory: RunDirectory, heartbeat: HeartbeatWriter
) -> RankExit:
    """Raises Refusal, and whatever ends a rank that is at work."""
    from wattwatch.trainer.train.diagnostics import worker_socket, write_flight_record
    from wattwatch.trainer.train.heartbeat import RankPhase
    from wattwatch.trainer.train.loop import TrainingStopped, train
    from wattwatch.trainer.train.process_groups import process_group
    from wattwatch.trainer.train.start import prepare_training
    from wattwatch.trainer.train.stopping import StopListener

    def cannot_leave() -> None:
        why = "asked to leave, and still in a collective: another rank does not come"
        write_exit_file(directory.ending(attempt.number, place.rank), RankExit(EXIT_FAILED, why, heartbeat.step))
        os._exit(EXIT_FAILED)

    stop_file = directory.stop_file if place.rank == 0 else None
    with (
        StopListener(stop_file, cannot_leave) as stopping,
        worker_socket(directory, place.rank, log.info),
        process_group(place, job.settings.train.step_timeout_seconds) as (mesh, device),
    ):
        ready = prepare_training(job, attempt, place, mesh, device, heartbeat, stopping)
        try:
            done = train(ready)
        except TrainingStopped as stop:
            return RankExit(EXIT_STOPPED, str(stop), heartbeat.step)
        except RuntimeError:
            write_flight_record(directory, attempt.number, place.rank, log.info)
            raise
        heartbeat.beat(RankPhase.DONE, done)
        return RankExit(EXIT_DONE, f"all {done:,} steps are done and saved", done)


def describe_failure(error: Exception) -> RankExit:
    """What a rank that was at work says of its end; the traceback goes into its log, for developers."""
    import torch
    import torch.distributed as dist

    from wattwatch.trainer.checkpoint.save import SaveError
    from wattwatch.trainer.train.loop import NonFiniteLoss

    if isinstance(error, SaveError | NonFiniteLoss):
        return RankExit(EXIT_FAILED, str(error))
    traceback.print_exc()
    first_line = str(error).strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return RankExit(
            EXIT_FAILED, f"out of memory: {first_line}; lower train.micro_batch or use gradient_checkpointing"
        )
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
        what = first_line.partition(". This may indicate")[0]  # gloo goes on to wish good luck
        return RankExit(
            EXIT_FAILED, f"a collective failed, another rank has gone or does not come: {what}", follows=True
        )
    if isinstance(error, OSError):
        return RankExit(EXIT_FAILED, f"{error.filename or 'a file'}: {error.strerror or error}")
    return RankExit(EXIT_INTERNAL_ERROR, f"an internal error, please report it: {type(error).__name__}: {first_line}")


def redirect_output(path: Path) -> None:
    """Standard output and error, of native code too. Raises Refusal where there can be no log."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def reserve_exit_file(path: Path) -> None:
    """Room for the last words: a full disk must not take the reason with it. Raises Refusal."""
    try:
        path.with_suffix(RESERVED_SUFFIX).write_bytes(b" " * RESERVED_BYTES)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def write_exit_file(path: Path, ending: RankExit) -> None:
    """Writes into the room that was reserved, and gives it its name."""
    reserved = path.with_suffix(RESERVED_SUFFIX)
    try:
        with open(reserved, "r+b") as file:
            file.write(dumps(asdict(ending)).encode())
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        os.replace(reserved, path)
    except OSError as error:
        log.error("%s: %s", path, error)


def exit_now(code: int) -> NoReturn:
    """Without the interpreter's tidying up, in which a thread of a process group that lost its peers may hang."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
