"""Log lines that report that a job was stopped from outside, and those that only resemble them."""

from __future__ import annotations

import pytest

from tests.collectors.test_probe_reader import line
from wattwatch.collectors.probe.request import LogSource, ProbeRequest
from wattwatch.collectors.probe_reader import ProbeReader
from wattwatch.collectors.progress import find_external_stop

STEPS = "step=99/200 loss=2.1 tok_s=50000\nstep=100/200 loss=2.0 tok_s=50000\n"
SLURM = "slurmstepd: error: *** JOB 31182239 ON sh-06-34 CANCELLED AT 2018-11-05T10:35:06"
TORCHRUN = "W0616 00:37:22 4015698 torch/distributed/elastic/agent/server/api.py:719] Received"
FAILED = "E0616 api.py:882] failed (exitcode: 1) local_rank: 3 (pid: 7) of binary: python\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{SLURM} DUE TO PREEMPTION ***\n", "preempted"),
        (f"{SLURM} DUE TO JOB REQUEUE ***\n", "requeued by its scheduler"),
        (f"{SLURM} DUE TO TIME LIMIT ***\n", "ended at its time limit"),
        (f"{FAILED}{SLURM} DUE TO PREEMPTION ***\n", "preempted"),
        (f"{SLURM} ***\n", "canceled"),
        (f"{TORCHRUN} Signals.SIGTERM death signal, shutting down workers\n", "stopped by a signal to its launcher"),
        (f"{TORCHRUN} 15 death signal, shutting down workers\n", "stopped by a signal to its launcher"),
        ("[exiting program after receiving SIGTERM.] datetime: 2026-09-06 17:57:10\n", "stopped by SIGTERM"),
        (f"{TORCHRUN} 15 death signal, shutting down workers\r\n{SLURM} DUE TO PREEMPTION ***", "preempted"),
    ],
)
def test_a_stop_from_outside_is_read_with_its_line(text: str, says: str) -> None:
    stop = find_external_stop(STEPS + text)
    assert stop is not None
    assert stop.description.startswith(f"{says}: ")
    assert "\n" not in stop.description


@pytest.mark.parametrize(
    "text",
    [
        "",
        STEPS,
        "W api.py:900] Sending process 4015788 closing signal SIGTERM\n",  # torchrun ends the others after a crash
        f"{FAILED}{TORCHRUN} Signals.SIGTERM death signal, shutting down workers\n",
        f"{SLURM.replace('JOB 31182239', 'STEP 31182239.0')} ***\n",  # srun ends the others after a crash
        f"{SLURM} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n",
        "jobs in this partition may be preempted\n",
    ],
)
def test_the_consequence_of_a_crash_is_not_an_external_stop(text: str) -> None:
    assert find_external_stop(STEPS + text) is None


def stopped_after(*texts: str) -> str | None:
    reader = ProbeReader("gpu-01", ProbeRequest(logs=(LogSource("/runs/a.out"),)))
    start, sample = 0, None
    for place, text in enumerate(texts):
        end = start + len(text)
        sample = reader.read(line(place, 100.0 + place, log=[[0, "/runs/a.out", start, end, 1.7e9, text]]), 0.0)
        start = end
    assert sample is not None
    (source,) = sample.progress
    assert source.step is not None
    return source.stopped


def test_a_log_sample_includes_its_external_stop() -> None:
    assert (stopped_after(STEPS, f"{SLURM} DUE TO PREEMPTION ***\n") or "").startswith("preempted")


def test_steps_after_the_stop_line_belong_to_the_next_run() -> None:
    assert stopped_after(STEPS, f"{SLURM} DUE TO JOB REQUEUE ***\n", STEPS) is None
