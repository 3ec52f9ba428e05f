"""Which bottleneck keeps GPUs waiting, as far as the hosts show it, with numbers; or that none is found."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.watcher.detection.job_samples import job_sample
from tests.watcher.detection.simulated_seconds import Activity, Job
from wattwatch.collectors.samples import (
    FilesystemSample,
    HostLoad,
    HungCall,
    ProcessSample,
    ProgressSample,
    WorkerSample,
)
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.classifier.input_bottleneck import (
    BottleneckKind,
    bottleneck_table,
    find_input_bottleneck,
)
from wattwatch.watcher.detection.model import AlertName, JobProgress, JobSample, NodeState, PowerState

WATTS = [575.0, 600, 560, 580, 590, 570, 565, 585]
SCATTERED = [12.0, 85, 40, 97, 5, 66, 31, 74]
QUIET = HostLoad(3.0, 64, 0.5, 0.3, 0.0, int(900e9), int(2000e9), 0)


@dataclass(frozen=True)
class Given:
    kind: BottleneckKind
    says: tuple[str, ...]
    load: HostLoad = QUIET
    calls: tuple[HungCall, ...] = ()
    filesystems: tuple[FilesystemSample, ...] = ()
    processes: tuple[ProcessSample, ...] = ()
    workers: tuple[WorkerSample, ...] = ()
    data_wait_ms: float | None = None


def rank(pid: int, state: str = "R", cpu: float | None = 40.0, waits_in: str | None = None) -> ProcessSample:
    return ProcessSample(pid, "python3", state, 1.0, 100.0, (pid,), pid, cpu, waits_in)


def worker(pid: int, cpu: float | None, state: str = "R", waits_in: str | None = None) -> WorkerSample:
    return WorkerSample(100 + pid, pid, "pt_data_worker", state, cpu, waits_in)


NFS = FilesystemSample("/runs/a", 1, 2, None, "nfs4")
LOCAL = FilesystemSample("/ckpt/a", 1, 2, None, "xfs")
K = BottleneckKind
TABLE = {
    "no reading": Given(K.UNNAMED, ("does not report its load",), HostLoad()),
    "nothing stands out": Given(K.UNNAMED, ("load 3.0 on 64 cores", "IO pressure 0 %")),
    "a listing hangs": Given(K.STUCK_CALL, ("`list /ckpt/a` has not returned for 14 s (xfs)",),
                             calls=(HungCall("list /ckpt/a", 14.0),), filesystems=(NFS, LOCAL)),
    "statvfs hangs on nfs": Given(K.STUCK_CALL, ("statvfs /runs/a", "21 s (nfs4)"),
                                  calls=(HungCall("statvfs /runs/a", 21.0),), filesystems=(NFS,)),
    "the driver hangs": Given(K.UNNAMED, (), calls=(HungCall("nvidia-smi", 30.0), HungCall("read kernel log", 9.0))),
    "workers sleep in nfs": Given(K.NETWORK_FILE_SYSTEM, ("2 of 3 processes", "nfs_wait_bit_killable"),
                                  processes=(rank(1),),
                                  workers=(worker(1, 1.0, "D", "nfs_wait_bit_killable"),
                                           worker(2, 1.0, "D", "rpc_wait_bit_killable"))),
    "a rank sleeps in lustre": Given(K.NETWORK_FILE_SYSTEM, ("1 of 2", "cl_sync_io_wait"),
                                     processes=(rank(1), rank(2, "D", 0.0, "cl_sync_io_wait"))),
    "a rank sleeps in fuse": Given(K.NETWORK_FILE_SYSTEM, ("request_wait_answer",),
                                   processes=(rank(2, "D", 0.0, "request_wait_answer"),)),
    "workers sleep on a disk": Given(K.STORAGE, ("io_schedule", "IO pressure 61 %"),
                                     replace(QUIET, io_pressure_percent=61.0),
                                     workers=(worker(1, 3.0, "D", "io_schedule"),)),
    "a rank sleeps in the driver": Given(K.UNNAMED, (), processes=(rank(1, "D", 0.0, "nvidia_unlocked_ioctl"),)),
    "state D without a channel": Given(K.UNNAMED, (), processes=(rank(1, "D", 0.0),)),
    "swapping in": Given(K.MEMORY, ("do_swap_page",), workers=(worker(1, 3.0, "D", "do_swap_page"),)),
    "memory pressure": Given(K.MEMORY, ("memory pressure 34 %", "12 of 2000 GB", "40.0 GB in swap"),
                             HostLoad(9.0, 64, 1.0, 9.0, 34.0, int(12e9), int(2000e9), int(40e9))),
    "memory full, no pressure reading": Given(K.MEMORY, ("20 of 2000 GB",),
                                           HostLoad(9.0, 64, None, None, None, int(20e9), int(2000e9), None)),
    "old swap alone": Given(K.UNNAMED, (), replace(QUIET, swap_used_bytes=int(8e9))),
    "io pressure": Given(K.STORAGE, ("44 % of the time",), replace(QUIET, io_pressure_percent=44.0),
                         filesystems=(NFS, LOCAL)),
    "io pressure, all on nfs": Given(K.NETWORK_FILE_SYSTEM, ("44 %", "/runs/a is on nfs4"),
                                     replace(QUIET, io_pressure_percent=44.0), filesystems=(NFS,)),
    "cpu pressure": Given(K.CPU, ("CPU pressure 71 %", "load 180.0 on 64 cores"),
                          HostLoad(180.0, 64, 71.0, 0.0, 0.0)),
    "a high load, no pressure reading": Given(K.CPU, ("load 64.5 on 64 cores",), HostLoad(64.5, 64)),
    "a high load without pressure": Given(K.UNNAMED, (), replace(QUIET, load_1m=70.0)),
    "workers use a core each": Given(K.LOADER, ("3 of 4 data loader workers", "97 to 100 %", "load 3.0 on 64"),
                                     workers=tuple(worker(i, s) for i, s in enumerate((100.0, 97.0, 98.0, 30.0)))),
    "one of many workers": Given(K.UNNAMED, (), workers=tuple(worker(i, s) for i, s in enumerate((99.0, 5.0, 5.0)))),
    "workers of unknown share": Given(K.UNNAMED, (), workers=(worker(1, None),)),
    "a rank tokenizes": Given(K.LOADER, ("rank 3 waits 1,300 ms", "99 % of one core"), processes=(rank(3, cpu=99.0),),
                              data_wait_ms=1300.0),
    "a rank spins": Given(K.UNNAMED, (), processes=(rank(3, cpu=99.0),)),
    "ranks wait and the host is idle": Given(K.OUTSIDE, ("up to 1,300 ms", "load 3.0 on 64"),
                                           processes=(rank(3, cpu=5.0),), data_wait_ms=1300.0),
    "ranks wait, no pressure reading": Given(K.UNNAMED, (), HostLoad(3.0, 64), data_wait_ms=1300.0),
    "ranks are fed": Given(K.UNNAMED, (), data_wait_ms=2.0),
}  # fmt: skip


def sample_of(given: Given) -> JobSample:
    sample = job_sample(WATTS, SCATTERED)
    node: NodeState = replace(
        sample.nodes[0], load=given.load, hung_calls=given.calls, filesystems=given.filesystems,
        processes=given.processes, workers=given.workers,
    )  # fmt: skip
    source = ProgressSample("/runs/a/heartbeat/rank-3.json", "heartbeat", 5, rank=3, data_wait_ms=given.data_wait_ms)
    return replace(sample, nodes=(node,), progress=JobProgress(step=5, sources=(source,)))


@pytest.mark.parametrize("given", TABLE.values(), ids=TABLE)
def test_the_strongest_evidence_is_named_with_its_numbers(given: Given) -> None:
    bottleneck = find_input_bottleneck(sample_of(given))
    assert bottleneck.kind is given.kind, bottleneck.description
    assert [words for words in given.says if words not in bottleneck.description] == []
    assert bottleneck.next_step == bottleneck_table()["next_step"][given.kind.value]


def test_any_node_may_be_the_one() -> None:
    quiet = sample_of(TABLE["nothing stands out"])
    other = replace(sample_of(TABLE["cpu pressure"]).nodes[0], node="node-2")
    bottleneck = find_input_bottleneck(replace(quiet, nodes=(quiet.nodes[0], other)))
    assert bottleneck.kind is K.CPU
    assert bottleneck.description.startswith("node-2: ")


@pytest.mark.parametrize(
    ("name", "said"),
    [("io pressure", "Likely cause of the slow input"), ("nothing stands out", "ause of the slow input")],
)
def test_the_verdict_of_starvation_says_it_and_claims_no_more_than_that_it_is_likely(name: str, said: str) -> None:
    verdict = classify(sample_of(TABLE[name]))
    bottleneck = find_input_bottleneck(sample_of(TABLE[name]))
    assert verdict.state is PowerState.STARVATION
    assert f"{said}: {bottleneck.description}." in verdict.why
    assert verdict.advice == bottleneck.next_step


def test_every_kind_has_its_next_step() -> None:
    assert set(bottleneck_table()["next_step"]) == set(BottleneckKind)


def test_the_finding_says_it_once_and_advises_on_it() -> None:
    job = Job()
    starving = {rank: Activity(w, u, steps=True) for rank, (w, u) in enumerate(zip(WATTS, SCATTERED, strict=True))}
    job.play(90, Activity(575, 40, steps=True), starving)
    told = [f for look in job.observed for f in look.findings if f.alert is AlertName.JOB_STARVING]
    assert told
    assert sum(words.count("ause of the slow input: unknown (") for words in told[0].evidence) == 1
    assert told[0].advice == bottleneck_table()["next_step"]["unnamed"]
