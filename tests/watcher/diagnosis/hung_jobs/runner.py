"""Real jobs that hang, each in its own way: four ranks of torch on gloo, with what a diagnosis should find.

`with hung_job("early_end", tmp_path) as job:` starts them, waits until they hang and ends them by pid. Ranks that wait
show it in their flight recorder, asked through their worker sockets as a watcher on their node would.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from tests.tools import DEADLINE_SECONDS
from tests.trainer.preloaded_processes import preloaded_context
from wattwatch.trainer.run_directory import RunDirectory
from wattwatch.watcher.diagnosis.model import DiagnosisVerdict, HangCause

WORLD: Final = 4
STEPS_BEFORE: Final = 3  # one all_reduce each
TRAIN: Final = Path(__file__).parent / "train.py"
ENVIRONMENT: Final = {"TORCH_FR_BUFFER_SIZE": "2000", "GLOO_SOCKET_IFNAME": "lo"}

RankProcess = subprocess.Popen[bytes] | BaseProcess


@dataclass(frozen=True, slots=True)
class Kind:
    """How the job hangs, and what is true about it."""

    words: str
    verdict: DiagnosisVerdict
    culprits: tuple[int, ...]
    cause: HangCause
    function: str  # of train.py, that the culprits are in
    silent: tuple[int, ...] = ()  # ranks whose worker socket cannot answer
    mute: tuple[int, ...] = ()  # ranks that return their flight record but not their stacks
    tied: tuple[tuple[int, ...], ...] = ()  # sets of ranks: one is wrong, and the evidence cannot show which
    dies: bool = False  # gloo ends the job where NCCL would hang


KINDS: Final[Mapping[str, Kind]] = {
    "early_end": Kind(
        "rank 3 ran out of data and is in the save's barrier, the others reduce gradients",
        DiagnosisVerdict.DESYNC,
        (3,),
        HangCause.DATA,
        "save_checkpoint",
    ),
    "different_collective": Kind(
        "rank 1 gathers, the others reduce", DiagnosisVerdict.DESYNC, (1,), HangCause.PROGRAM, "gather_parameters"
    ),
    "size_mismatch": Kind(
        "rank 2 reduces a quarter of the tensor",
        DiagnosisVerdict.MISMATCH,
        (2,),
        HangCause.PROGRAM,
        "reduce_gradients",
        dies=True,
    ),
    "waits_for_data": Kind(
        "rank 3 waits for its loader, the others reduce",
        DiagnosisVerdict.NEVER_ARRIVED,
        (3,),
        HangCause.RANK,
        "load_batch",
    ),
    "endless_loop": Kind(
        "rank 2 loops in Python, the others reduce", DiagnosisVerdict.NEVER_ARRIVED, (2,), HangCause.RANK, "tokenize"
    ),
    "endless_call": Kind(
        "rank 2 is in a C function that holds the interpreter's lock, the others reduce",
        DiagnosisVerdict.NEVER_ARRIVED,
        (2,),
        HangCause.RANK,
        "tokenize_in_one_call",
        mute=(2,),
    ),
    "stopped": Kind(
        "rank 1 is stopped by a signal, the others reduce",
        DiagnosisVerdict.NEVER_ARRIVED,
        (1,),
        HangCause.RANK,
        "stop_itself",
        silent=(1,),
    ),
    "raised": Kind(
        "rank 2 raised, and a thread of it keeps its process; the others reduce",
        DiagnosisVerdict.NEVER_ARRIVED,
        (2,),
        HangCause.PROGRAM,
        "read_shard",
        silent=(2,),
    ),
    "crossed_groups": Kind(
        "ranks 0 and 1 reduce in group 1 then 2, ranks 2 and 3 in group 2 then 1",
        DiagnosisVerdict.DESYNC,
        (),
        HangCause.PROGRAM,
        "hang",
        tied=((0, 1), (2, 3)),
    ),
}


@dataclass(slots=True)
class HungJob:
    name: str
    kind: Kind
    run_directory: Path
    processes: dict[int, RankProcess] = field(default_factory=dict)  # by rank

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self.processes.items() if process.pid is not None}

    @property
    def answering(self) -> list[int]:
        """Ranks whose flight record can be had through their sockets."""
        return [] if self.kind.dies else [rank for rank in self.processes if rank not in self.kind.silent]

    def states(self) -> dict[int, str]:
        """As in /proc/PID/stat; a process that has ended and was not waited for is Z."""
        return {rank: process_state(pid) for rank, pid in self.pids.items()}

    def log(self, rank: int) -> str:
        return RunDirectory(self.run_directory).rank_log(1, rank).read_text()


@contextlib.contextmanager
def hung_job(name: str, directory: Path) -> Iterator[HungJob]:
    """A job that hangs, until the block ends. `directory` gets `run`, its run directory."""
    run = RunDirectory(directory / "run")
    job = HungJob(name, KINDS[name], run.path)
    run.logs(1).mkdir(parents=True)
    try:
        for rank in range(WORLD):
            job.processes[rank] = start(name, run, rank)
        wait_until_hung(job)
        yield job
    finally:
        for process in job.processes.values():
            process.kill()
        for process in job.processes.values():
            (process.join if isinstance(process, BaseProcess) else process.wait)(10)


def start(name: str, run: RunDirectory, rank: int) -> RankProcess:
    log = run.rank_log(1, rank)
    arguments = (str(run.path), rank, WORLD, name, STEPS_BEFORE)
    if not KINDS[name].dies:
        return start_preloaded(log, arguments)
    # A rank that died must stay a zombie, which the capture has to see: it is our own child, and not waited for.
    with log.open("wb") as opened:
        return subprocess.Popen(
            [sys.executable, "-u", str(TRAIN), *map(str, arguments)],
            env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TRAIN.parents[4])},
            stdin=subprocess.DEVNULL,
            stdout=opened,
            stderr=opened,
        )


def start_preloaded(log: Path, arguments: tuple[str, int, int, str, int]) -> BaseProcess:
    """The same program, forked from a process that has torch loaded: importing it takes longer than hanging."""
    process = preloaded_context().Process(target=train_preloaded, args=(log, arguments))
    process.start()
    return process


def train_preloaded(log: Path, arguments: tuple[str, int, int, str, int]) -> None:
    from tests.watcher.diagnosis.hung_jobs.train import train

    os.environ.update(ENVIRONMENT)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        train(*arguments)
    except BaseException:  # noqa: BLE001 - its log shows it, as that of any program
        traceback.print_exc()
        raise SystemExit(1) from None  # as the interpreter ends a program: it still waits for threads


def wait_until_hung(job: HungJob) -> None:
    """All ranks that will wait in a collective do, and the one that is to blame is where it stays."""
    ends = time.monotonic() + DEADLINE_SECONDS
    while not hangs(job):
        assert time.monotonic() < ends, f"{job.name}: it does not hang; " + "; ".join(map(job.log, job.processes))
        time.sleep(0.05)


def hangs(job: HungJob) -> bool:
    states = job.states()
    if job.kind.dies:
        return set(states.values()) == {"Z"}
    run = RunDirectory(job.run_directory)
    for rank in job.processes:
        if job.name == "stopped" and rank == 1:
            settled = states[rank] == "T"
        elif job.name == "raised" and rank == 2:
            settled = "ValueError" in job.log(rank) and not run.worker_socket(rank).exists()
        elif job.name == "endless_call" and rank == 2:
            settled = last_launch(run.worker_socket(rank)) == (STEPS_BEFORE, True) and not answers(
                run.worker_socket(rank)
            )
        elif rank in job.kind.culprits and job.kind.verdict is DiagnosisVerdict.NEVER_ARRIVED:
            settled = job.kind.function in (ask(run.worker_socket(rank), "dump_traceback") or "")
        else:
            settled = last_launch(run.worker_socket(rank)) == (STEPS_BEFORE + 1, False)
        if not settled:
            return False
    return True


def last_launch(path: Path) -> tuple[int, bool]:
    """How many collectives a rank has launched, and whether the last has ended."""
    entries = json.loads(ask(path, "fr_trace_json") or "{}").get("entries", [])
    return (len(entries), entries[-1]["retired"]) if entries else (0, True)


def answers(path: Path) -> bool:
    return bool(ask(path, "dump_traceback"))


def ask(path: Path, handler: str) -> str | None:
    """The body of the worker server's answer; None where there is none."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path.resolve()))
            head = f"POST /handler/{handler} HTTP/1.1\r\nHost: rank\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode())  # without a length the server waits 5 s for a body
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
    except OSError:
        return None
    return answer.partition(b"\r\n\r\n")[2].decode()


def process_state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "gone"
