"""What is said of logs as people have them: several in one file, rows without index, no time stamps, steady readings
near a threshold."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.watcher.command_shell import Shell
from tests.watcher.recordings.log_stress import NEVER, all_variations, judge
from tests.watcher.recordings.log_variations import Format, Rounds, burst, csv_text, table_text
from wattwatch.collectors.samples import GpuSample
from wattwatch.watcher.recordings import inputs
from wattwatch.watcher.recordings.inputs import GpuLog, read_input
from wattwatch.watcher.recordings.replay import ReplayResult, replay

NAMED = Format(name=True, limit=True)
MEBIBYTE = 2.0**20


def job(seconds: int, gpus: int, *, every: float = 1.0, start: float = 0.0, seed: int = 1) -> Rounds:
    """A healthy job: it starts, trains with short saves by rank 0, and ends."""
    chance = random.Random(seed)
    rounds = []
    for number in range(int(seconds / every)):
        second = number * every
        share = second / seconds
        saving = second > 10 and second % 40 < 6
        samples = []
        for index in range(gpus):
            watts, busy, used = chance.gauss(640, 8), 98.0, 71000.0 + 20 * index
            if share < 0.1 or share > 0.93:
                watts, busy, used = chance.gauss(72, 1), 0.0, 4.0
            elif saving:
                watts, busy = chance.gauss(148, 3), 5.0 if index == 0 else 100.0
            samples.append(
                GpuSample(
                    index,
                    name="NVIDIA H100 80GB HBM3",
                    power_watts=watts,
                    power_limit_watts=700.0,
                    utilization_percent=busy,
                    memory_used_bytes=used * MEBIBYTE,
                )
            )
        rounds.append(burst(start + second, tuple(samples)))
    return tuple(rounds)


def steady(watts: float, noise: float, *, seconds: int, every: float, gpus: int, busy: float = 97.0) -> Rounds:
    chance = random.Random(7)
    return tuple(
        burst(
            number * every,
            tuple(
                GpuSample(
                    index,
                    name="NVIDIA L40S",
                    power_watts=chance.gauss(watts, noise),
                    power_limit_watts=350.0,
                    utilization_percent=min(100.0, chance.gauss(busy, 2)),
                    memory_used_bytes=30e9,
                )
                for index in range(gpus)
            ),
        )
        for number in range(int(seconds / every))
    )


def read(text: str) -> GpuLog:
    source = read_input("run.csv", text.encode())
    assert isinstance(source, GpuLog)
    return source


def played(text: str) -> ReplayResult:
    return replay("run.csv", read(text))


def test_nothing_untrue_is_said_of_any_form_of_a_healthy_log() -> None:
    logs = [("eight", job(160, 8)), ("one", job(120, 1, seed=2)), ("two", job(140, 2, every=0.5, seed=3))]
    untrue = [
        f"{name}, {variation.name}: {text}"
        for name, variation in all_variations(logs, seed=2, limit=110, count=12)
        for text in judge(variation).untrue
    ]
    assert untrue == []


# Another host or job in the same file


def test_another_job_on_other_gpus_is_a_new_log_and_is_said(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(table_text(job(60, 1), 0x1A) + table_text(job(60, 1, start=9000.0), 0x5A))
    answer = shell.run("replay", "--json", path)
    (said,) = answer.json
    assert (answer.exit_code, said["alerts"]) == (0, [])
    (beginning,) = said["beginnings"]
    assert (beginning["at_seconds"], beginning["job"]) == (9000.0, "run.log part 2")
    assert beginning["reason"].startswith(
        "there are no samples for 2 h 29 min, and GPU 0 changes from NVIDIA H100 80GB HBM3 at"
    )
    assert {state["job"] for state in said["states"]} == {"run.log part 1", "run.log part 2"}
    lines = [line.split(maxsplit=2) for line in shell.run("replay", path).out.splitlines()]
    assert ["2:30:00", "new", "log"] in [
        [at, *rest.split()[:2]] for at, *more in lines[1:] for rest in [" ".join(more)]
    ]


def test_triage_judges_the_last_log_and_says_which_it_is(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(table_text(job(60, 1), 0x1A) + table_text(job(50, 1, start=9000.0)[:40], 0x5A))
    (said,) = shell.run("triage", "--json", path).json
    assert said["source"] == f"{path}: run.log part 2"
    assert said["state"] == "compute"
    assert (
        "The verdict is about log 2 of 2 in this input. This log begins where there are no samples for 2 h 29 min"
        in said["why"]
    )


def test_hosts_whose_logs_end_at_the_same_time_are_both_judged(shell: Shell) -> None:
    text = csv_text(job(60, 8)[:50], NAMED) + csv_text(job(60, 4, seed=2)[:50], NAMED)
    said = shell.run("triage", "--json", "-", stdin=text.encode()).json
    assert [len(each["gpus"]) for each in said] == [8, 4]
    assert [each["state"] for each in said] == ["compute", "compute"]


def test_logs_of_nodes_in_one_file_are_joined_into_one_job(shell: Shell) -> None:
    text = csv_text(job(60, 8)[:50], NAMED) + csv_text(job(60, 4, seed=2)[:50], NAMED)
    (said,) = shell.run("triage", "--json", "--job", "-", stdin=text.encode()).json
    assert len(said["gpus"]) == 12
    assert said["state"] == "compute"
    assert "The 2 logs in - that end at the same time were each read as a separate node." in said["why"]


def test_a_node_of_a_job_is_what_its_file_holds_last(shell: Shell, tmp_path: Path) -> None:
    one, other = tmp_path / "one.log", tmp_path / "other.log"
    one.write_text(table_text(job(60, 1), 0x1A) + table_text(job(50, 1, start=9000.0)[:40], 0x5A))
    other.write_text(table_text(job(50, 1, start=9000.0, seed=2)[:40], 0x1A))
    (said,) = shell.run("triage", "--json", "--job", one, other).json
    assert len(said["gpus"]) == 2
    assert said["state"] == "compute"
    assert "The verdict is about log 2 of 2 in this input" in said["why"]


def test_undated_logs_in_one_file_are_not_joined_into_one_job(shell: Shell) -> None:
    undated = Format(name=True, limit=True, stamp=False, header=False)
    text = csv_text(job(60, 8)[:50], undated) + csv_text(job(60, 4, seed=2)[:50], undated)
    answer = shell.run("triage", "--job", "-", stdin=text.encode())
    assert answer.exit_code == 3
    assert "contains 2 logs one after the other" in answer.err


def test_a_gpu_that_vanishes_within_a_log_is_lost_and_one_of_another_log_is_not() -> None:
    eight, seven = job(60, 8)[:50], tuple(burst(r.seconds, r.gpus[1:]) for r in job(60, 8, start=50.0)[10:50])
    assert [(e.alert, e.scope) for e in played(csv_text((*eight, *seven), NAMED)).episodes] == [
        ("GpuFault", "run.csv/0")
    ]  # fmt: skip
    later = tuple(each.moved(3600.0) for each in seven)
    result = played(csv_text((*eight, *later), NAMED))
    assert result.episodes == ()
    (beginning,) = result.beginnings
    assert beginning.reason == "there are no samples for 1 h 0 min, and GPU 0 is no longer listed"


def test_guessed_identities_are_said_and_never_declared_gone() -> None:
    unnamed = Format(index=False)
    result = played(csv_text(job(60, 8)[:50], unnamed) + csv_text(job(60, 3, start=60.0)[:50], unnamed))
    assert result.episodes == ()
    assert (
        "The rows do not show which GPU they are from; they were read as 8 GPUs, numbered in the order of the rows"
        in result.problem
    )
    assert [each.reason for each in result.beginnings] == [
        "a new header or table begins, and the size of each round changes from 8 rows to 3 rows"
    ]


# Time


def test_an_assumed_pace_is_said_and_no_hang_is_claimed_on_it(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    hangs = job(400, 4)[:300] + tuple(
        burst(300.0 + i, tuple(gpu_at(index, 148.0) for index in range(4))) for i in range(900)
    )
    path.write_text(csv_text(hangs, Format(stamp=False, name=True, limit=True)))
    (said,) = shell.run("replay", "--json", path).json
    assert said["assumptions"] == ["1 s between two samples, because the input has no time stamps"]
    assert {alert["alert"] for alert in said["alerts"]} & NEVER == set()
    assert "assumed: 1 s between two samples" in shell.run("replay", path).out
    path.write_text(csv_text(hangs, NAMED))
    (said,) = shell.run("replay", "--json", path).json
    assert said["assumptions"] == []
    assert {alert["alert"] for alert in said["alerts"]} & NEVER == {"JobHung"}


def gpu_at(index: int, watts: float, busy: float = 100.0) -> GpuSample:
    return GpuSample(
        index,
        name="NVIDIA H100 80GB HBM3",
        power_watts=watts,
        power_limit_watts=700.0,
        utilization_percent=busy,
        memory_used_bytes=7e10,
    )


def test_tables_with_lists_of_processes_keep_their_times() -> None:
    """Six hours at one table a minute are not six minutes."""
    rounds = tuple(burst(60.0 * i, (gpu_at(0, 640.0),)) for i in range(360))
    result = played(table_text(rounds))
    assert (result.seconds, result.samples, result.assumptions) == (359 * 60.0, 360, ())


def test_several_tables_a_second_do_not_make_a_log_longer() -> None:
    rounds = tuple(burst(i / 8, (gpu_at(0, 640.0),)) for i in range(800))
    result = played(csv_text(rounds, Format(millisecond=False, name=True, limit=True)))
    assert result.seconds == pytest.approx(99.9, abs=0.5)


def test_samples_after_a_pause_of_a_log_count() -> None:
    """A pause of a log is none of the watcher: one that is slower at first says what it shows there."""
    slow = tuple(burst(60.0 * i, (gpu_at(0, 72.0, 0.0) if i < 3 else gpu_at(0, 640.0, 98.0),)) for i in range(8))
    fast = tuple(burst(480.0 + i, (gpu_at(0, 72.0, 0.0),)) for i in range(60))
    result = played(csv_text((*slow, *fast), NAMED))
    assert [(c.at_seconds, c.state.value) for c in result.changes] == [
        (0.0, "idle"), (240.0, "computing"), (pytest.approx(481.0), "idle"),
    ]  # fmt: skip
    assert [each.reason for each in result.beginnings] == ["the time between samples changes from 60 s to 1 s"]


def test_a_long_pause_of_a_log_is_an_unknown_state() -> None:
    rounds = (*job(60, 2)[20:40], *job(60, 2, start=7200.0)[20:40])
    told = [(c.state.value, c.reason) for c in played(csv_text(rounds, NAMED)).changes]
    assert told[1] == ("unknown", "there are no samples for 1 h 59 min")
    assert told[2][0] == told[0][0] == "computing"


def test_the_end_of_a_long_file_of_several_logs_is_judged_like_the_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(inputs, "LOG_HEAD_BYTES", 4000)
    monkeypatch.setattr(inputs, "LOG_TAIL_BYTES", 9000)
    path = tmp_path / "run.csv"
    eight, four = job(300, 8)[:250], job(300, 4, start=9000.0)[:250]
    path.write_text(csv_text(eight, NAMED) + csv_text(four, NAMED))
    whole, end = (inputs.read_input_file(path, only_the_end=only) for only in (False, True))
    assert isinstance(whole, GpuLog)
    assert isinstance(end, GpuLog)
    assert [part.begins for part in whole.parts] == [part.begins for part in end.parts]


# States


@pytest.mark.parametrize("every", [0.1, 1.0])
@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("share", [step / 50 for step in range(12, 50, 2)])
def test_a_steady_picture_has_one_state(share: float, gpus: int, every: float) -> None:
    """Whatever side of a threshold single samples are on."""
    rounds = steady(350 * share, 5.0, seconds=60 if every < 1 else 240, every=every, gpus=gpus)
    result = played(csv_text(rounds, NAMED))
    assert len(result.changes) <= 8, [(c.at_seconds, c.state.value, c.reason) for c in result.changes]


def test_noise_does_not_flap_and_a_real_change_is_seen_in_two_samples() -> None:
    chance = random.Random(3)
    uneven = tuple(
        burst(float(i), tuple(gpu_at(g, chance.uniform(120, 600), chance.uniform(0, 100)) for g in range(4)))
        for i in range(420)
    )
    assert len(played(csv_text(uneven, NAMED)).changes) <= 30
    changed = (
        *(burst(float(i), tuple(gpu_at(g, 640.0, 98.0) for g in range(4))) for i in range(100)),
        *(burst(float(i), tuple(gpu_at(g, 72.0, 0.0) for g in range(4))) for i in range(100, 200)),
    )
    told: list[Any] = [(c.at_seconds, c.state.value) for c in played(csv_text(changed, NAMED)).changes]
    assert told[0] == (0.0, "computing")
    assert told[1][0] <= 101.1
    assert len(told) == 2
