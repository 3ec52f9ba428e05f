"""`wattwatch calibrate`: what it learns of hosts, logs and recordings, what it refuses, and the profile it writes."""

from __future__ import annotations

import gzip
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.collectors.ssh.real_sshd import Site, site
from tests.collectors.ssh.test_check import tool
from tests.watcher.command_shell import Shell
from tests.watcher.detection.learning_job import working_job
from wattwatch.collectors.samples import GpuSample, HostStatus, NodeSample, ProcessSample
from wattwatch.watcher.config.settings import load_config
from wattwatch.watcher.daemon.preflight import preflight_problems, to_user_profile
from wattwatch.watcher.detection.baselines.baseline import BaselineKind
from wattwatch.watcher.detection.classifier.features import StepProgress
from wattwatch.watcher.recordings.calibration import (
    build_profiles,
    calibrate_idle,
    calibrate_source,
    format_profiles_toml,
)
from wattwatch.watcher.recordings.format import RecordedEvent, Recording
from wattwatch.watcher.recordings.inputs import read_input_file

CORPUS = Path(__file__).parents[4] / "shared" / "corpus" / "timeseries"
H100 = "NVIDIA H100 80GB HBM3"
HEADER = "timestamp, index, name, power.draw [W], power.limit [W], utilization.gpu [%], memory.used [MiB]\n"


def a_log(path: Path, *stretches: tuple[int, float, float, float], name: str = H100, limit: str = "700.00 W") -> Path:
    """Two boards: seconds, watts, utilisation, memory in MiB."""
    lines, second = [HEADER], 0
    for seconds, watts, busy, memory in stretches:
        for _ in range(seconds):
            stamp = f"2026/05/01 {second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}.000"
            for i in range(2):
                shown = watts + 2 * i + second % 2
                lines.append(f"{stamp}, {i}, {name}, {shown:.2f} W, {limit}, {busy:.0f} %, {memory:.0f} MiB\n")
            second += 1
    path.write_text("".join(lines))
    return path


def a_whole_run(path: Path) -> Path:
    return a_log(path, (100, 70, 0, 4), (60, 118, 0, 2500), (200, 560, 99, 71000))


def board(watts: float = 70.0, busy: float = 0.0, memory: float | None = 4e6, index: int = 0) -> GpuSample:
    return GpuSample(
        index, f"GPU-{index}", name=H100, power_watts=watts, power_limit_watts=700.0, utilization_percent=busy,
        memory_used_bytes=memory,
    )  # fmt: skip


def heard(*gpus: GpuSample, seconds: int = 30, processes: Sequence[ProcessSample] = ()) -> list[NodeSample]:
    return [
        NodeSample("a", HostStatus.OK, "", i, i, 1.7e9 + i, i, "nvml", gpus, processes=tuple(processes))
        for i in range(seconds)
    ]


# Logs and recordings


def test_a_log_of_a_whole_run_gives_a_profile_that_the_configuration_accepts(shell: Shell, tmp_path: Path) -> None:
    log, out = a_whole_run(tmp_path / "run.csv"), tmp_path / "profile.toml"
    answer = shell.run("calibrate", log, "--progress", "advancing", "--out", out)
    assert answer.exit_code == 0, answer.text
    assert "idle power: 72 W" in answer.out
    assert "power with a CUDA context: 120 W" in answer.out
    assert "compute power: 562 W" in answer.out
    assert "not learned" not in answer.out
    config = tmp_path / "wattwatch.toml"
    config.write_text('[[jobs]]\nname = "a"\nnodes = "gpu-[1-2]"\n' + out.read_text())
    (section,) = load_config(config).profiles
    assert preflight_problems(load_config(config)) == []
    assert (section.idle_watts, section.floor_watts, section.limit_watts) == pytest.approx((71.5, 154.5, 700), abs=1)
    assert section.compute_watts == pytest.approx(0.85 * 561.5, abs=1)
    assert to_user_profile(section).matches(H100)
    assert not to_user_profile(section).matches(H100 + " MIG 1g.10gb")


def test_the_profile_says_where_each_number_comes_from(tmp_path: Path) -> None:
    calibration = calibrate_source("run", read_input_file(a_whole_run(tmp_path / "run.csv")), StepProgress.ADVANCING)
    made, refused = build_profiles([calibration])
    assert refused == ()
    text = format_profiles_toml(made)
    assert "at start-up, plus the extra power of waiting in a collective" in text.replace(")", "")
    assert "with nothing running" in text
    assert "85% of" in text
    assert tomllib.loads(text)["profiles"][0]["match"] == "^NVIDIA H100 80GB HBM3$"


def test_a_log_without_a_step_counter_needs_the_user_to_state_that_steps_advanced(shell: Shell, tmp_path: Path) -> None:
    answer = shell.run("calibrate", a_whole_run(tmp_path / "run.csv"), "--json")
    assert answer.exit_code == 0
    (source,) = answer.json["sources"]
    assert {value["kind"] for value in source["learned"]} == {"idle", "context"}
    assert any("add --progress advancing" in sentence for sentence in source["not_learned"])
    (profile,) = answer.json["profiles"]
    assert profile["grounds"]["compute_watts"] == "not learned; from the shipped profile h100"


def test_nothing_is_learned_from_busy_gpus_and_nothing_is_written(shell: Shell, tmp_path: Path) -> None:
    out = tmp_path / "profile.toml"
    answer = shell.run("calibrate", a_log(tmp_path / "busy.csv", (300, 640, 100, 71000)), "--out", out)
    assert answer.exit_code == 3
    assert "idle power was not learned for 2 of 2 GPUs: no full minute was found with 0 %" in answer.out
    assert "because no profile could be made" in answer.err
    assert not out.exists()


def test_hours_at_the_floor_with_memory_in_use_teach_nothing(shell: Shell, tmp_path: Path) -> None:
    hang = a_log(tmp_path / "hang.csv", (300, 640, 100, 71000), (3000, 122, 0, 71000))
    assert shell.run("calibrate", hang).exit_code == 3


def test_a_gpu_without_a_power_limit_gets_no_profile(shell: Shell, tmp_path: Path) -> None:
    answer = shell.run("calibrate", a_log(tmp_path / "log.csv", (100, 70, 0, 4), limit="[N/A]"))
    assert answer.exit_code == 0
    assert "because the source does not contain the power limit" in answer.err


def test_a_name_that_is_no_plain_word_is_written_as_one(tmp_path: Path) -> None:
    odd = 'NVIDIA "X" (R+D) \\ 4090'
    log = a_log(tmp_path / "odd.csv", (100, 70, 0, 4), name="ODD")
    calibration = calibrate_source("odd", read_input_file(log), None)
    boards = {key: replace(gpu, name=odd) for key, gpu in calibration.boards.items()}
    made, _ = build_profiles([replace(calibration, boards=boards)])
    (table,) = tomllib.loads(format_profiles_toml(made))["profiles"]
    assert made[0].profile.matches(odd)
    assert table["name"] == "nvidia-x-r-d-4090"


def test_several_sources_make_one_profile_per_model(shell: Shell, tmp_path: Path) -> None:
    first = a_log(tmp_path / "a.csv", (100, 70, 0, 4))
    second = a_log(tmp_path / "b.csv", (100, 90, 0, 4))
    third = a_log(tmp_path / "c.csv", (100, 139, 0, 4), name="NVIDIA B300 SXM6 AC", limit="1100.00 W")
    answer = shell.run("calibrate", first, second, third, "--json")
    assert [(p["name"], p["boards"]) for p in answer.json["profiles"]] == [
        ("nvidia-h100-80gb-hbm3", 4),
        ("nvidia-b300-sxm6-ac", 2),
    ]
    assert answer.json["profiles"][0]["idle_watts"] == pytest.approx(81.5, abs=1)


def test_a_recording_teaches_by_its_own_counter() -> None:
    job = working_job()
    events = [RecordedEvent(line.received_seconds, sample=line) for line in job.lines]
    calibration = calibrate_source("incident", Recording((job.spec,), iter(events)), None)
    assert calibration.not_learned == ()
    known = {(value.kind, value.watts, value.job) for value in calibration.values}
    assert known == {
        (BaselineKind.IDLE, 139, "pretrain"),
        (BaselineKind.CONTEXT, 186, "pretrain"),
        (BaselineKind.PLATEAU, 985, "pretrain"),
    }
    ((profile,), _) = build_profiles([calibration])
    assert profile.boards == 8


def test_gpus_without_any_identity_are_not_learned() -> None:
    job = working_job()
    nameless = [
        replace(line, gpus=tuple(replace(gpu, uuid=None, pci_bus_id=None, index=None) for gpu in line.gpus or ()))
        for line in job.lines
    ]
    events = [RecordedEvent(line.received_seconds, sample=line) for line in nameless]
    assert calibrate_source("log", Recording((job.spec,), iter(events)), None).values == ()


# Wrong use and what cannot be read


def test_an_existing_file_is_not_overwritten(shell: Shell, tmp_path: Path) -> None:
    out = tmp_path / "profile.toml"
    out.write_text("mine")
    answer = shell.run("calibrate", a_log(tmp_path / "a.csv", (100, 70, 0, 4)), "--out", out)
    assert answer.exit_code == 2
    assert "exists" in answer.err
    assert out.read_text() == "mine"


def test_a_file_that_cannot_be_written_is_named(shell: Shell, tmp_path: Path) -> None:
    answer = shell.run(
        "calibrate", a_log(tmp_path / "a.csv", (100, 70, 0, 4)), "--out", tmp_path / "absent" / "profile.toml"
    )
    assert answer.exit_code == 2
    assert "cannot write the file" in answer.err


@pytest.mark.parametrize(
    "content", [b"", b"\x00\xff garbage", b"epoch 1 loss 2.5\n" * 50, gzip.compress(b"x" * 100)], ids=range(4)
)
def test_a_file_that_is_not_a_log_is_one_sentence(content: bytes, shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "what.log"
    path.write_bytes(content)
    answer = shell.run("calibrate", path)
    assert answer.exit_code == 3
    assert len(answer.text.splitlines()) == 2


def test_no_source_is_wrong_usage(shell: Shell) -> None:
    assert shell.run("calibrate").exit_code == 2


def test_one_source_that_fails_is_a_warning(shell: Shell, tmp_path: Path) -> None:
    answer = shell.run("calibrate", a_log(tmp_path / "a.csv", (100, 70, 0, 4)), tmp_path / "absent.csv")
    assert answer.exit_code == 1
    assert "absent.csv" in answer.out
    assert "cannot read the file" in answer.out


# Hosts


def test_idle_gpus_of_a_host_teach_their_idle_power() -> None:
    calibration = calibrate_idle("a", heard(board(70.0), board(91.0, index=1)), 30)
    assert [(v.kind, v.watts, v.samples) for v in calibration.values] == [
        (BaselineKind.IDLE, 70, 30),
        (BaselineKind.IDLE, 91, 30),
    ]
    assert calibration.not_learned == ()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (heard(board(640.0, 100.0, 71e9)), "71.0 GB of its memory are in use"),
        (heard(board(118.0, 0.0, 5e8)), "0.5 GB of its memory are in use"),
        (heard(board(70.0, 100.0)), "its utilization was 100 %"),
        (heard(board(), processes=[ProcessSample(7, "python3", "R", 1.0, None, (0,))]), "a process is using the GPU"),
        (heard(board(memory=None)), "memory use or utilization cannot be read"),
        (heard(replace(board(), power_watts=None)), "power cannot be read"),
        (heard(board(400.0)), "implausible as this GPU's idle power"),
        ([*heard(board(60.0), seconds=15), *heard(board(130.0), seconds=15)], "not steady"),
        (heard(board(), seconds=3), "3 of 30 samples arrived"),
        ([], "0 of 30 samples arrived: the host did not answer in time"),
    ],
)
def test_nothing_is_learned_from_a_host_that_is_not_idle(said: list[NodeSample], words: str) -> None:
    calibration = calibrate_idle("a", said, 30)
    assert calibration.values == ()
    assert words in " ".join(calibration.not_learned)


def test_the_other_gpus_of_a_host_are_learned_despite_a_busy_one() -> None:
    calibration = calibrate_idle("a", heard(board(), board(640.0, 100.0, 71e9, index=1)), 30)
    assert [value.board for value in calibration.values] == ["GPU-0"]
    assert "GPU 1" in calibration.not_learned[0]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made


FAKE = """
    import sys
    asked = next((a.split("=", 1)[1].split(",") for a in sys.argv if a.startswith("--query-gpu=")), [])
    known = {"index": "0", "uuid": "GPU-11111111-2222-3333-4444-555555555555", "name": "NVIDIA H100 80GB HBM3",
             "power.draw": "70.10 W", "power.draw.average": "70.10 W", "power.limit": "700.00 W",
             "enforced.power.limit": "700.00 W", "utilization.gpu": "0 %", "memory.used": "4 MiB",
             "memory.total": "81559 MiB", "pstate": "P0"}
    if asked:
        print(", ".join(asked))
        print(", ".join(known.get(field, "[N/A]") for field in asked))
"""


def test_a_host_is_sampled_over_ssh(here: Site, shell: Shell, tmp_path: Path) -> None:
    script = tmp_path / "smi.py"
    script.write_text(textwrap.dedent(FAKE))
    here.server("node", tool(here.directory, f'exec {sys.executable} {script} "$@"'))
    answer = shell.run("calibrate", "-F", here.config, "node", "--samples", "10", "--json")
    assert answer.exit_code == 0, answer.text
    (value,) = answer.json["sources"][0]["learned"]
    assert (value["node"], value["kind"], value["watts"]) == ("node", "idle", 70.1)


def test_an_unreachable_host_is_one_sentence(shell: Shell, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host closed\n HostName 127.0.0.1\n Port 1\n UserKnownHostsFile {tmp_path}/known_hosts\n")
    answer = shell.run("calibrate", "-F", config, "closed")
    assert answer.exit_code == 3
    assert "0 of 30 samples arrived" in answer.out


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the public logs are not laid beside this checkout")
def test_public_logs_teach_the_known_power_of_their_gpus(shell: Shell) -> None:
    answer = shell.run("calibrate", CORPUS / "06_h100x8_ckpt1000.csv", "--progress", "advancing", "--json")
    values = answer.json["sources"][0]["learned"]
    plateaus = [value["watts"] for value in values if value["kind"] == "plateau"]
    contexts = [value["watts"] for value in values if value["kind"] == "context"]
    assert len(plateaus) == 8
    assert all(530 <= watts <= 580 for watts in plateaus)
    assert all(110 <= watts <= 130 for watts in contexts)
    input_bound = shell.run("calibrate", CORPUS / "12_a40_input_bound.csv", "--progress", "advancing")
    assert input_bound.exit_code == 3  # hours of starving are no plateau
