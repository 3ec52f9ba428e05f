"""The tables are consistent, and each scenario's files show what it injects."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.tools import DEADLINE_SECONDS
from wattwatch.collectors.clock import Clock
from wattwatch.collectors.simulated.driver import (
    Driver,
    PhaseStarted,
    RunningScenario,
    set_up_scenarios,
    write_job_state,
)
from wattwatch.collectors.simulated.scenario import (
    SCENARIOS,
    Scenario,
    UnknownScenario,
    get_scenario,
    phase_number_at,
    step_at,
)
from wattwatch.watcher.detection.model import AlertName, JobState, Severity


def play_of(name: str, directory: Path) -> RunningScenario:
    plays, _ = set_up_scenarios([get_scenario(name)], directory / "live", directory / "tools", Clock())
    return plays[0]


def gpus(play: RunningScenario, node: int = 0) -> list[dict[str, Any]]:
    state = json.loads((play.nodes[node].directory / "state.json").read_text())
    found: list[dict[str, Any]] = state["gpus"]
    return found


def heartbeats(play: RunningScenario) -> list[dict[str, Any]]:
    folder = play.job.directory / "heartbeat"
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_a_scenario_starts_healthy_and_expects_only_existing_alerts(scenario: Scenario) -> None:
    starts = [phase.at_seconds for phase in scenario.phases]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert scenario.phases[0].activity == "compute"
    assert all(start >= 40 for start in starts[1:])
    assert scenario.duration_seconds <= 200
    assert all(expected.alert in set(AlertName) for expected in scenario.expected)
    assert all(expected.severity in set(Severity) for expected in scenario.expected)
    assert all(state in set(JobState) for state in scenario.states)
    assert all(scenario.phases[expected.phase].injects for expected in scenario.expected)


def test_all_scenarios_fit_into_one_cluster() -> None:
    names = [name for scenario in SCENARIOS.values() for name in scenario.node_names]
    assert len(names) == len(set(names))
    usual = [name for scenario in SCENARIOS.values() if not scenario.by_name for name in scenario.node_names]
    assert len(usual) <= 20


def test_an_unknown_scenario_lists_those_that_exist() -> None:
    with pytest.raises(UnknownScenario, match="no scenario is named 'dedlock'; choose one of: healthy, deadlock"):
        get_scenario("dedlock")


def test_the_job_loads_until_the_cluster_begins() -> None:
    deadlock = get_scenario("deadlock")
    assert phase_number_at(deadlock, -1.0) is None
    assert step_at(deadlock, -100.0) == deadlock.first_step


def test_the_deadlock_stops_at_step_3850_of_3857() -> None:
    deadlock = get_scenario("deadlock")
    assert step_at(deadlock, 44.9) == 3850
    assert step_at(deadlock, 500.0) == 3850
    assert deadlock.total_steps == 3857


def test_in_the_deadlock_rank_3_is_low_and_fifteen_ranks_are_pinned_at_the_floor(tmp_path: Path) -> None:
    play = play_of("deadlock", tmp_path)
    write_job_state(play, 1, 3850, tick=1)
    first, second = gpus(play, 0), gpus(play, 1)
    assert [gpu["util"] for gpu in first] == [100, 100, 100, 0, 100, 100, 100, 100]
    assert [gpu["util"] for gpu in second] == [100] * 8
    assert all(180_000 <= gpu["power_mw"] <= 200_000 for gpu in first + second)
    assert all(gpu["mem_used"] == 82 * 10**9 and len(gpu["pids"]) == 1 for gpu in first + second)
    assert [heartbeat["phase"] for heartbeat in heartbeats(play)] == ["train"] * 3 + ["barrier"] + ["train"] * 12
    assert {heartbeat["host"] for heartbeat in heartbeats(play)} == {"deadlock-1", "deadlock-2"}


def test_starvation_scatters_over_the_ranks_around_575_watts(tmp_path: Path) -> None:
    play = play_of("starvation", tmp_path)
    samples = []
    for tick in range(50):
        write_job_state(play, 1, 511, tick)
        samples += gpus(play)
    watts = [gpu["power_mw"] / 1000 for gpu in samples]
    assert sum(watts) / len(watts) == pytest.approx(575, abs=25)
    assert max(gpu["util"] for gpu in samples) - min(gpu["util"] for gpu in samples) > 80


def test_communication_is_evenly_busy_at_640_watts(tmp_path: Path) -> None:
    play = play_of("communication", tmp_path)
    write_job_state(play, 1, 100, tick=1)
    assert all(gpu["util"] >= 98 and 620_000 <= gpu["power_mw"] <= 660_000 for gpu in gpus(play))


def test_a_killed_rank_leaves_no_process_no_memory_and_a_kernel_line(tmp_path: Path) -> None:
    play = driven("crash", tmp_path, to_phase=1)
    crashed = play.nodes[1]
    assert not (crashed.directory / "proc" / str(crashed.pids[1])).exists()
    assert (crashed.directory / "proc" / str(crashed.pids[0]) / "stat").exists()
    assert [gpu["mem_used"] > 0 for gpu in gpus(play, 1)] == [True, False, True, True]
    assert f"Out of memory: Killed process {crashed.pids[1]} (python3)" in (crashed.directory / "dev/kmsg").read_text()


def test_a_lost_gpu_is_lost_in_the_state_and_in_the_kernel_log(tmp_path: Path) -> None:
    play = driven("gpu-lost", tmp_path, to_phase=1)
    assert [gpu["lost"] for gpu in gpus(play)] == [False] * 5 + [True] + [False] * 2
    assert "NVRM: Xid (PCI:0001:69:00): 79" in (play.nodes[0].directory / "dev/kmsg").read_text()


def test_a_hung_driver_hangs_on_its_node_only(tmp_path: Path) -> None:
    play = driven("blind", tmp_path, to_phase=1)
    states = [json.loads((node.directory / "state.json").read_text()) for node in play.nodes]
    assert [(state["nvml"], state["smi"]) for state in states] == [("ok", "ok"), ("hang", "hang")]


def test_a_frozen_node_writes_nothing(tmp_path: Path) -> None:
    frozen: list[str] = []
    play = driven("node-loss", tmp_path, to_phase=1, frozen=frozen)
    assert frozen == ["lost-2"]
    write_job_state(play, 1, 9999, tick=3)
    assert [heartbeat["step"] == 9999 for heartbeat in heartbeats(play)] == [True] * 4 + [False] * 4


def test_a_checkpoint_grows_under_a_temporary_name_and_is_published_complete(tmp_path: Path) -> None:
    play = play_of("checkpoint", tmp_path)
    folder = play.job.checkpoints
    assert (folder / "latest").read_text().strip() == "step-00002500"
    play.job.begin_save(3000, seconds=1e-9)
    staged = [path.name for path in folder.iterdir() if path.is_dir()]
    assert sorted(staged) == ["step-00002500", "step-00003000.tmp-5eed"]
    write_job_state(play, 2, 3000, tick=1)
    complete = json.loads((folder / "step-00003000" / "COMPLETE.json").read_text())
    assert complete["step"] == 3000
    assert sum(complete["files"].values()) == pytest.approx(62e9, rel=0.01)
    assert (folder / "latest").read_text().strip() == "step-00003000"


def test_a_shard_states_its_own_length(tmp_path: Path) -> None:
    play = play_of("checkpoint", tmp_path)
    for path in (play.job.checkpoints / "step-00002500").glob("*.safetensors"):
        with path.open("rb") as file:
            head = int.from_bytes(file.read(8), "little")
            tensors = json.loads(file.read(head))
        end = max(tensor["data_offsets"][1] for tensor in tensors.values())
        assert 8 + head + end == path.stat().st_size


def test_after_completion_the_gpus_are_idle_and_the_ranks_are_done(tmp_path: Path) -> None:
    play = play_of("completion", tmp_path)
    write_job_state(play, 2, 3857, tick=1)
    assert all(gpu["pids"] == [] and gpu["mem_used"] == 0 and gpu["power_mw"] < 150_000 for gpu in gpus(play))
    assert {heartbeat["phase"] for heartbeat in heartbeats(play)} == {"done"}
    assert not list((play.nodes[0].directory / "proc").glob("4*"))


def test_a_job_of_another_trainer_writes_a_torchtitan_log_and_no_heartbeats(tmp_path: Path) -> None:
    play = play_of("hang", tmp_path)
    write_job_state(play, 0, 815, tick=1)
    assert heartbeats(play) == []
    last = play.job.log.read_text().splitlines()[-1]
    assert "step: 814  loss:" in last
    assert "tps: 3,310" in last


def test_a_driver_that_comes_late_begins_every_phase_it_missed(tmp_path: Path) -> None:
    clock = Clock()
    plays, _ = set_up_scenarios([get_scenario("crash")], tmp_path / "live", tmp_path / "tools", clock)
    began: list[PhaseStarted] = []
    driver = Driver(plays, clock, freeze=lambda _: None, report=began.append)
    driver._started = clock.wall() - 1000.0
    driver._tick()
    driver._tick()
    assert [phase.phase for phase in began] == list(range(len(get_scenario("crash").phases)))
    assert began[0].late_seconds >= 1000.0
    assert began[0].late_seconds - began[1].late_seconds == pytest.approx(65.0)
    assert not (plays[0].nodes[1].directory / "proc" / str(plays[0].nodes[1].pids[1])).exists()


def driven(name: str, directory: Path, to_phase: int, frozen: list[str] | None = None) -> RunningScenario:
    """The scenario as its driver leaves it once the given phase has begun; four hundred times as fast as life."""
    clock = Clock(speed=400.0)
    plays, _ = set_up_scenarios([get_scenario(name)], directory / "live", directory / "tools", clock)
    began: list[PhaseStarted] = []
    reached = threading.Event()

    def hear(phase: PhaseStarted) -> None:
        began.append(phase)
        if phase.phase == to_phase:
            reached.set()

    driver = Driver(plays, clock, freeze=(frozen if frozen is not None else []).append, report=hear)
    driver.start()
    driver.begin()
    assert reached.wait(DEADLINE_SECONDS), f"phase {to_phase} of {name} never began"
    driver.stop()
    assert [phase.phase for phase in began] == list(range(to_phase + 1))
    return plays[0]
