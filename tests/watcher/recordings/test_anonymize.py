"""A copy of a recording for strangers: nothing of whose it was, and the same verdicts."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from tests.collectors.test_probe_reader import line, nvml, row
from tests.faults.plan import Phase, Setting
from tests.faults.probe_lines import ProbeLines
from tests.faults.simulated_job import SimulatedJob
from tests.faults.watched_job import job_spec
from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.cli.replay import replay_command, verdicts_without_names
from wattwatch.watcher.detection.model import JobSpec
from wattwatch.watcher.recordings.anonymize import Pseudonyms, write_anonymized
from wattwatch.watcher.recordings.format import RecordingWriter, open_recording
from wattwatch.watcher.recordings.replay import replay

COLLECTORS = Path(__file__).parents[3] / "collectors"
SECRET = ("acme", "alice", "falcon", "zeus", "GPU-1920", "10.1.2.3", "hunter")
HOSTS = {"node-1": "zeus-07.acme.example", "node-2": "zeus-08.acme.example"}


def recorded_hang(path: Path) -> Path:
    """A job of Alice's hangs."""
    setting = Setting(seed=4, nodes=2, gpus=4, step_seconds=3.0, victim=5)
    spec = replace(
        job_spec(setting), name="falcon-40b", nodes=tuple(HOSTS.values()), run_directory="/home/alice/runs/falcon"
    )
    recorder = RecordingWriter(path, [spec])
    job = SimulatedJob(setting)
    probes = {node: ProbeLines(HOSTS[node].split(".")[0]) for node in HOSTS}
    for phase in (Phase(120, "train"), Phase(120, "spin", ranks={"victim": "in_barrier"})):
        for _ in range(int(phase.seconds)):
            for sample in job.tell(phase, 1.0):
                said = probes[sample.node].line(sample).replace(b"/runs/a", b"/home/alice/runs/falcon")
                recorder.write_line(HOSTS[sample.node], job.now, said)
            states = {h: NodeLink(h, HostStatus.OK, "zeus-07.acme.example (10.1.2.3) answers") for h in HOSTS.values()}
            recorder.write_links(states, job.now + 0.1)
    recorder.close()
    return path


def test_the_copy_gives_the_same_verdicts_without_any_name(tmp_path: Path) -> None:
    original, copy = recorded_hang(tmp_path / "incident.gz"), tmp_path / "copy.gz"
    write_anonymized(original, copy)
    text = gzip.decompress(copy.read_bytes()).decode()
    assert [secret for secret in SECRET if secret.lower() in text.lower()] == []
    assert "NVIDIA B300 SXM6 AC" in text
    before, after = replay("a", open_recording(original)), replay("b", open_recording(copy))
    assert verdicts_without_names(before) == verdicts_without_names(after)
    (hang,) = after.episodes
    assert (hang.alert, hang.job, [str(s) for s in hang.suspects]) == ("JobHung", "job-1", ["rank 5 on node-2 GPU 1"])


def test_the_command_writes_the_copy_and_replays_it(tmp_path: Path) -> None:
    original, copy = recorded_hang(tmp_path / "incident.gz"), tmp_path / "copy.gz"
    result = CliRunner().invoke(replay_command, [str(original), "--anonymous", str(copy)])
    assert result.exit_code == 2
    assert "JobHung" in result.output
    assert "zeus" not in result.output
    again = CliRunner().invoke(replay_command, [str(original), "--anonymous", str(copy)])
    assert again.exit_code == 2
    assert "exists" in again.output


def test_exits_stay_proven_in_the_copy(tmp_path: Path) -> None:
    spec = JobSpec("falcon", ("zeus-07",), logs=("/home/alice/train.log",))
    recorder = RecordingWriter(tmp_path / "a.gz", [spec])
    rank = [7, 500.0, "S", "python3", 1.0, [0]]
    recorder.write_line("zeus-07", 1.0, line(0, 1.0, proc=[rank], exited=[]))
    recorder.write_line("zeus-07", 2.0, line(1, 2.0, proc=None, exited=[], unlisted=[[7, 500.0]]))
    recorder.write_line("zeus-07", 3.0, line(2, 3.0, proc=None, exited=[[7, 500.0]]))
    recorder.close()
    write_anonymized(tmp_path / "a.gz", tmp_path / "copy.gz")
    samples = [event.sample for event in open_recording(tmp_path / "copy.gz").events if event.sample]
    assert [(set(s.exited_processes), set(s.unlisted_processes)) for s in samples] == [
        (set(), set()),
        (set(), {(7, 500.0)}),
        ({(7, 500.0)}, set()),
    ]


def test_a_file_that_is_not_a_recording_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("nothing")
    result = CliRunner().invoke(replay_command, [str(tmp_path / "log.txt"), "--anonymous", str(tmp_path / "copy.gz")])
    assert result.exit_code == 3
    assert "not a wattwatch recording" in result.output
    assert not (tmp_path / "copy.gz").exists()


def test_a_log_keeps_its_steps_and_loses_its_text(tmp_path: Path) -> None:
    spec = JobSpec("falcon", ("zeus",), logs=("/home/alice/*.log",), log_pattern=r"at turn (?P<step>\d+)")
    recorder = RecordingWriter(tmp_path / "r.gz", [spec])
    for second in range(5):
        text = f"hunter2 of alice@acme.example at turn {second}\n"
        log = [0, "/home/alice/falcon-7b.log", 100 * second, 100 * second + 100, 1.7e9 + second, text]
        recorder.write_line("zeus", 10.0 + second, line(second, 100.0 + second, gpu=nvml(100.0, [row(0)]), log=[log]))
    recorder.write_line("zeus", 16.0, b"Welcome to zeus, alice!")
    recorder.close()
    write_anonymized(tmp_path / "r.gz", tmp_path / "c.gz")
    text = gzip.decompress((tmp_path / "c.gz").read_bytes()).decode()
    assert [secret for secret in SECRET if secret.lower() in text.lower()] == []
    samples = [m.sample for m in open_recording(tmp_path / "c.gz").events if m.sample is not None]
    assert [sample.progress[0].step for sample in samples] == [0, 1, 2, 3, 4]
    (spec,) = open_recording(tmp_path / "c.gz").specs
    assert all(source.source in spec.logs for sample in samples for source in sample.progress)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("/mnt/ckpt/alice/step-100/model.safetensors", "/mnt/ckpt/d1/step-100/model.safetensors"),
        ("Out of memory: Killed process 4005 (python3)", "Out of memory: Killed process 4005 (python3)"),
        ("NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.", None),
        ("step: 10 loss: 2.5 alice bob alice", "step: 10 loss: 2.5 w1 w2 w1"),
        ("connect zeus-1 from 10.0.0.7 failed", "connect node-9 from 192.0.2.1 failed"),
    ],
)
def test_kept_words_stay_and_every_other_word_gets_one_pseudonym(before: str, after: str | None) -> None:
    names = Pseudonyms()
    names.add_host("zeus-1.acme.example", "node-9")
    assert names.text(before) == (before if after is None else after)


def test_a_checkpoint_listing_keeps_its_layout(tmp_path: Path) -> None:
    news = {
        "dir": "/ckpt/alice", "t": 100.0, "w": 1.7e9, "error": None, "names": ["step-100"], "root": {},
        "entries": {"step-100": {"bytes": 62, "count": 1, "mtime": 1.7e9, "files": {"COMPLETE.json": 2}}},
    }  # fmt: skip
    recorder = RecordingWriter(tmp_path / "r.gz", [JobSpec("falcon", ("zeus",), checkpoint_directory="/ckpt/alice")])
    recorder.write_line("zeus", 10.0, line(1, 100.0, gpu=nvml(100.0, [row(0)]), ckpt=[news]))
    recorder.close()
    write_anonymized(tmp_path / "r.gz", tmp_path / "c.gz")
    records = [orjson.loads(each) for each in gzip.decompress((tmp_path / "c.gz").read_bytes()).splitlines()]
    assert orjson.loads(records[1]["line"])["ckpt"][0] == {**news, "dir": "/ckpt/d1"}


# What tells of people, and every place where it may stand.
NAMES = ("gpu-lost", "gpu_lost", "karpathy", "meta", "hiyouga", "acme", "alice", "max", "u48213", "10.1.2.3", "zeus",
         "hf_Ab1c2D3", "fe80:", "wandb", "secret")  # fmt: skip
LINES = (
    "[alice@zeus-07 ~]$ srun -J gpu-lost train.py --user u48213\n"
    "wandb: View run at https://wandb.ai/acme/gpu-lost/runs/a1b2c3\n"
    "login alice@acme.example from 10.1.2.3, fe80::1ff:fe23, token hf_Ab1c2D3\n"
    "karpathy/llm.c, meta-llama/Llama, hiyouga/data: /home/max/gpu-lost/secret.txt gpu_lost\n"
)


def recorded_names(path: Path) -> None:
    run = "/scratch/meta/karpathy/gpu-lost"
    spec = JobSpec(
        "gpu-lost", ("zeus-07.acme.example",), run_directory=run, logs=(f"{run}/logs/*.log",),
        checkpoint_directory=f"{run}/checkpoints",
    )  # fmt: skip
    recorder = RecordingWriter(path, [spec])
    tool = {
        "src": "nvidia-smi",
        "t": 100.0,
        "rc": 9,
        "out": "",
        "err": "zeus-07: /home/alice/bin/nvidia-smi: not found",
    }
    for n in range(6):
        text = f"{LINES}step: {n} loss: 2.5\n"
        beat = f'{{"step": {n}, "rank": 0, "host": "zeus-07", "phase": "train", "user": "alice"}}'
        recorder.write_line(
            "zeus-07.acme.example",
            10.0 + n,
            line(
                n, 100.0 + n, gpu=nvml(100.0 + n, [row(0)]) if n else tool,
                log=[[0, f"{run}/logs/alice-step.log", 1000 * n, 1000 * n + len(text), 1.7e9 + n, text]],
                beat=[[f"{run}/heartbeat/rank-0.json", 1.7e9 + n, beat]],
                listed=[[f"{run}/checkpoints", 100.0]],
                fs=[[run, 10**9, 2 * 10**9, "Stale file handle on zeus-07", "lustre"]],
                kmsg=[[1.0, "Out of memory: Killed process 7 (alice_tool)"]],
                busy=[[f"read {run}", 3.0]], warn=["stat /home/alice: Permission denied"],
            ),
        )  # fmt: skip
    recorder.write_line("zeus-07.acme.example", 17.0, LINES.encode())
    recorder.write_links(
        {spec.nodes[0]: NodeLink(spec.nodes[0], HostStatus.UNREACHABLE, "alice@10.1.2.3 refused")}, 18.0
    )
    recorder.close()


def test_names_of_jobs_users_hosts_and_companies_are_replaced_everywhere(tmp_path: Path) -> None:
    recorded_names(tmp_path / "r.gz")
    write_anonymized(tmp_path / "r.gz", tmp_path / "c.gz")
    text = gzip.decompress((tmp_path / "c.gz").read_bytes()).decode()
    assert [name for name in NAMES if name.lower() in text.lower().replace('"max_', "")] == []
    assert "/scratch/d1/d2/job-1/heartbeat/rank-0.json" in text
    assert "/scratch/d1/d2/job-1/checkpoints" in text
    before, after = (list(open_recording(tmp_path / name).events) for name in ("r.gz", "c.gz"))
    steps = [[p.step for m in events if m.sample for p in m.sample.progress] for events in (before, after)]
    assert steps[0] == steps[1]
    assert steps[0]


@pytest.mark.parametrize("job", ["train", "step", "run", "runs", "checkpoint-1"])
def test_a_job_that_has_the_name_of_a_kept_word_is_replaced_in_paths(job: str) -> None:
    names = Pseudonyms()
    names.add_job(job)
    assert names.path(f"/mnt/{job}/heartbeat/rank-0.json") == "/mnt/job-1/heartbeat/rank-0.json"
    assert names.text("step: 10 loss: 2.5") == "step: 10 loss: 2.5"


@pytest.mark.parametrize(
    "text",
    [
        "step: 10  loss:  2.5e-05", "'loss': 2.5", "step 5/10 (50%) | loss: 2.5",
        " 10%|##| 10/100 [1:02:03<0:01, 3it/s]", "*** JOB 7 CANCELLED AT 2026-01-01T10:00:00 DUE TO PREEMPTION ***",
        "global_step10", "checkpoint-1234", "iter_0000100", "step=10-rank0.pt", "latest_checkpointed_iteration.txt",
        "pytorch_model_fsdp_0", "training_args.bin", "trainer_state.json", "12ms 1h30m 4MiB",
        "checked", "bad", "named", "cut", "500.orbax-checkpoint-tmp-7", "manifest.ocdbt", "training_info.json",
        "actor/model_world_size_4_rank_0.pt", "optimizer_state_dict.pt", "random_states_0.pkl",
    ],
)  # fmt: skip
def test_what_the_parsers_need_stays(text: str) -> None:
    assert Pseudonyms().listing(text) == text


@pytest.mark.parametrize("table", ["progress_formats.toml", "checkpoint_layouts.toml", "stop_lines.toml"])
def test_no_word_is_kept_only_because_it_is_in_a_table(table: str) -> None:
    """Tables name their sources: companies and people."""
    sources = re.findall(r'^source = "([\w-]+)/', (COLLECTORS / table).read_text("utf-8"), re.MULTILINE)
    kept = {source for source in sources if Pseudonyms().path(f"/{source}") == f"/{source}"}
    assert kept == set()


def test_the_command_reports_that_it_wrote_a_copy(tmp_path: Path) -> None:
    recorded_names(tmp_path / "r.gz")
    result = CliRunner().invoke(replay_command, [str(tmp_path / "r.gz"), "--anonymous", str(tmp_path / "c.gz")])
    assert f"{tmp_path / 'c.gz'}: the anonymous copy" in result.stderr
    assert "Look through it before you share it" in result.stderr
