"""How learned values are used: bounds, per GPU, in words; and rows that were kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.watcher.detection.job_samples import B300, job_sample
from tests.watcher.detection.learning_job import working_job
from tests.watcher.detection.simulated_seconds import COMPUTE, PAUSE, SPIN
from wattwatch.watcher.detection.baselines.baseline import (
    Baseline,
    BaselineKind,
    BaselineTable,
    LearningPhase,
    find_job_baseline,
    implausible_reason,
    load_baselines,
)
from wattwatch.watcher.detection.baselines.profiles import profile_for
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.model import JobSample, PowerState

JOB = "pretrain"
ADA = "NVIDIA RTX 4000 Ada Generation"


def value(
    kind: BaselineKind,
    watts: float,
    index: int = 0,
    node: str = "node-1",
    limit: float | None = 1100.0,
    name: str = B300,
) -> Baseline:
    phase = {
        BaselineKind.IDLE: LearningPhase.EMPTY,
        BaselineKind.CONTEXT: LearningPhase.START_UP,
        BaselineKind.PLATEAU: LearningPhase.ADVANCING,
    }[kind]
    return Baseline(node, str(index), kind, JOB, watts, 240, phase, 1.7e9, name, limit)


def of_all(
    kind: BaselineKind, watts: float, boards: int = 8, limit: float | None = 1100.0, name: str = B300
) -> list[Baseline]:
    return [value(kind, watts, index, limit=limit, name=name) for index in range(boards)]


def judged(sample: JobSample, values: list[Baseline]) -> tuple[PowerState, str, bool]:
    gpu = sample.gpus[0].gpu
    learned = find_job_baseline(BaselineTable(values), JOB, sample.gpus, profile_for(gpu.name, gpu.power_limit_watts))
    verdict = classify(sample, learned=learned)
    return verdict.state, verdict.why, verdict.at_floor


# In a scene


def test_why_says_where_the_floor_was_learned() -> None:
    job = working_job()
    job.play(5, SPIN)
    verdict = job.observed[-1].verdict
    assert verdict.state is PowerState.HANG
    assert (
        "GPUs that only wait draw up to 221 W, learned on this host from 55 samples per GPU at start-up" in verdict.why
    )
    assert "compute power 985 W, learned while steps advanced" in verdict.why
    assert "by profile" not in verdict.why


def test_nothing_learned_is_the_profile() -> None:
    assert (
        "GPUs that only wait draw up to 235 W according to profile b300"
        in judged(job_sample([191] * 8, [100] * 8), [])[1]
    )


def test_a_host_that_draws_more_at_rest_has_its_own_floor() -> None:
    """B300 at rest differ by up to 50 W between sites: 280 W spins here, and there it would be work."""
    warm = job_sample([285] * 8, [100] * 8)
    assert not judged(warm, [])[2]
    assert judged(warm, of_all(BaselineKind.CONTEXT, 250))[2]


def test_each_gpu_is_measured_by_its_own_floor() -> None:
    watts = [191.0] * 7 + [275.0]
    values = [*of_all(BaselineKind.CONTEXT, 186, 7), value(BaselineKind.CONTEXT, 245, 7)]
    assert not judged(job_sample(watts, [100] * 8), of_all(BaselineKind.CONTEXT, 186))[2]
    assert judged(job_sample(watts, [100] * 8), values)[2]


def test_light_work_on_a_small_gpu_is_no_wait_once_its_floor_is_known() -> None:
    """GPUs of this size may rest at 0.6 of the limit: nothing is made of the watts. This one rests at 11 of 130 W."""
    work = job_sample([31, 32], [100, 100], name=ADA, limit_watts=130)
    floor = of_all(BaselineKind.CONTEXT, 11.5, 2, limit=130, name=ADA)
    assert judged(work, [])[0] is PowerState.UNKNOWN
    assert not judged(work, floor)[2]
    spins = job_sample([14, 15], [100, 100], name=ADA, limit_watts=130)
    assert judged(spins, [])[0] is PowerState.UNKNOWN
    assert judged(spins, floor)[0] is PowerState.HANG


def test_what_the_job_always_draws_is_compute() -> None:
    light = job_sample([500] * 8, [99] * 8)
    assert judged(light, [])[0] is PowerState.COMMUNICATION
    state, why, _ = judged(light, of_all(BaselineKind.PLATEAU, 505))
    assert state is PowerState.COMPUTE
    assert "compute power 505 W" in why


def test_half_of_what_the_job_always_draws_is_no_plain_compute() -> None:
    slow = job_sample([430] * 8, [99] * 8, name="NVIDIA H100 80GB HBM3", limit_watts=700)
    assert judged(slow, of_all(BaselineKind.PLATEAU, 660, limit=700))[0] is not PowerState.COMPUTE


def test_starving_is_seen_although_the_plateau_is_known() -> None:
    starving = job_sample([575] * 8, [90, 30, 55, 70, 20, 95, 60, 45])
    assert judged(starving, of_all(BaselineKind.PLATEAU, 985))[0] is PowerState.STARVATION


def test_a_plateau_at_another_limit_says_nothing() -> None:
    assert "505 W" not in judged(job_sample([500] * 8, [99] * 8), of_all(BaselineKind.PLATEAU, 505, limit=800))[1]


def test_a_few_gpus_do_not_speak_for_all() -> None:
    few = of_all(BaselineKind.CONTEXT, 250, 3) + of_all(BaselineKind.PLATEAU, 505, 3)
    state, why, _ = judged(job_sample([500] * 8, [99] * 8), few)
    assert state is PowerState.COMMUNICATION
    assert "according to profile b300" in why


def test_a_floor_that_was_read_at_low_clocks_lowers_the_profile_a_little_at_most() -> None:
    """An L40S rests at 32 W in P8 and draws 44 to 85 W while it waits."""
    learned = find_job_baseline(
        BaselineTable([value(BaselineKind.CONTEXT, 32, limit=350, name="NVIDIA L40S")]),
        JOB,
        job_sample([60], [100], name="NVIDIA L40S", limit_watts=350).gpus,
        profile_for("NVIDIA L40S", 350),
    )
    assert learned is not None
    assert learned.profile.floor_watts == pytest.approx(0.75 * 93)


def test_a_cap_near_the_floor_leaves_nothing_to_tell_by() -> None:
    """An A100 may be capped at 100 W: its work draws no more than spinning does."""
    capped = job_sample([99] * 8, [100] * 8, name="NVIDIA A100-SXM4-80GB", limit_watts=100)
    state, _, at_floor = judged(capped, [])
    assert not at_floor
    assert state is not PowerState.HANG


def test_a_job_that_rests_is_idle_by_the_learned_floor_too() -> None:
    job = working_job()
    states = []
    for doing in (PAUSE, COMPUTE):
        job.play(5, doing)
        states.append(job.observed[-1].verdict.state)
    assert states == [PowerState.IDLE, PowerState.COMPUTE]


# What cannot be true


@pytest.mark.parametrize(
    ("one", "others", "words"),
    [
        (value(BaselineKind.CONTEXT, 700), [], "implausible as this GPU's idle power with a CUDA context"),
        (value(BaselineKind.CONTEXT, 100), [value(BaselineKind.IDLE, 139)], "expected 111 to"),
        (value(BaselineKind.CONTEXT, 186), [value(BaselineKind.PLATEAU, 250)], "too close to the compute power"),
        (value(BaselineKind.CONTEXT, 0), [], "the GPU reported no power"),
        (value(BaselineKind.IDLE, 20), [], "implausible as this GPU's idle power:"),
        (value(BaselineKind.IDLE, 400), [], "implausible as this GPU's idle power:"),
        (value(BaselineKind.PLATEAU, 240), [], "too low for compute: this GPU draws up to 235 W while it only waits"),
        (
            value(BaselineKind.PLATEAU, 270),
            [value(BaselineKind.CONTEXT, 245)],
            "this GPU draws up to 280 W while it only waits",
        ),
        (value(BaselineKind.PLATEAU, 1500), [], "above the power limit of 1100 W"),
        (value(BaselineKind.CONTEXT, 60, limit=130, name=ADA), [], "expected 0 to 46 W"),
    ],
)
def test_implausible_values_are_rejected(one: Baseline, others: list[Baseline], words: str) -> None:
    why = implausible_reason(one, profile_for(one.name, one.limit_watts), BaselineTable(others))
    assert why is not None
    assert words in why


@pytest.mark.parametrize(
    "one",
    [
        value(BaselineKind.IDLE, 184),
        value(BaselineKind.CONTEXT, 190),
        value(BaselineKind.PLATEAU, 400),
        value(BaselineKind.IDLE, 234, name="NVIDIA GB300", limit=1400),
        value(BaselineKind.CONTEXT, 118, name="NVIDIA H100 80GB HBM3", limit=700),
        value(BaselineKind.CONTEXT, 11.5, name=ADA, limit=130),
        value(BaselineKind.PLATEAU, 66, name="Tesla T4", limit=70),
    ],
)
def test_what_public_tables_show_is_accepted(one: Baseline) -> None:
    assert implausible_reason(one, profile_for(one.name, one.limit_watts), BaselineTable()) is None


# Rows


def test_what_is_kept_is_what_is_read() -> None:
    job = working_job()
    rows = {key: content for key, content in job.knowledge.unsaved().items() if content is not None}
    again, warnings = load_baselines(rows, job.known(BaselineKind.IDLE).wall_seconds)  # type: ignore[union-attr]  # it was learned
    assert warnings == ()
    assert sorted(again.values(), key=str) == sorted(job.knowledge.values(), key=str)
    assert again.unsaved() == {}


def test_unusable_rows_are_left_out_with_a_warning_each_and_deleted() -> None:
    good = value(BaselineKind.IDLE, 139)
    content = BaselineTable()
    content.put(good)
    row = content.unsaved()[good.key]
    assert row is not None
    told = json.loads(row)
    rows = {
        good.key: row,
        "a": b"",
        "b": b"\xff\x00",
        "c": b"[1, 2]",
        "d": b'{"node": "node-1"}',
        "e": json.dumps({**told, "watts": "many"}).encode(),
        "f": json.dumps({**told, "watts": -5}).encode(),
        "g": json.dumps({**told, "watts": 1e300}).encode(),
        "h": json.dumps({**told, "kind": "mood"}).encode(),
        "i": row,  # under another key than its own
        "j": json.dumps({**told, "limit_watts": None, "board": None}).encode(),
    }
    knowledge, warnings = load_baselines(rows, 1.7e9)
    assert knowledge.values() == (good,)
    assert len(warnings) == 10
    assert all("learned again" in warning for warning in warnings)
    assert knowledge.unsaved() == dict.fromkeys("abcdefghij")


def test_what_was_learned_half_a_year_ago_is_learned_anew() -> None:
    old = replace(value(BaselineKind.IDLE, 139), wall_seconds=1.7e9 - 200 * 86400)
    content = BaselineTable()
    content.put(old)
    rows = {key: row for key, row in content.unsaved().items() if row is not None}
    assert load_baselines(rows, 1.7e9)[0].values() == ()
