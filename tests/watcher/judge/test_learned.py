"""How learned values are used: bounds, per board, in words; and rows that were kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.watcher.judge.learning import a_job_at_work
from tests.watcher.judge.pictures import B300, picture
from tests.watcher.judge.scenes import COMPUTE, PAUSE, SPIN
from watcher.judge.classify import classify
from watcher.judge.job_sample import JobSample
from watcher.judge.learn_bounds import learned_of, refusal
from watcher.judge.learned import Kind, Knowledge, Learned, Phase, read_rows
from watcher.judge.profiles import profile_for
from watcher.judge.verdict import PowerState

JOB = "pretrain"
ADA = "NVIDIA RTX 4000 Ada Generation"


def value(
    kind: Kind, watts: float, index: int = 0, node: str = "node-1", limit: float | None = 1100.0, name: str = B300
) -> Learned:
    phase = {Kind.IDLE: Phase.EMPTY, Kind.CONTEXT: Phase.START_UP, Kind.PLATEAU: Phase.ADVANCING}[kind]
    return Learned(node, str(index), kind, JOB, watts, 240, phase, 1.7e9, name, limit)


def of_all(kind: Kind, watts: float, boards: int = 8, limit: float | None = 1100.0, name: str = B300) -> list[Learned]:
    return [value(kind, watts, index, limit=limit, name=name) for index in range(boards)]


def judged(sample: JobSample, values: list[Learned]) -> tuple[PowerState, str, bool]:
    gpu = sample.gpus[0].gpu
    learned = learned_of(Knowledge(values), JOB, sample.gpus, profile_for(gpu.name, gpu.power_limit_watts))
    verdict = classify(sample, learned=learned)
    return verdict.state, verdict.why, verdict.at_floor


# In a scene


def test_why_says_where_the_floor_was_learned() -> None:
    job = a_job_at_work()
    job.play(5, SPIN)
    verdict = job.told[-1].verdict
    assert verdict.state is PowerState.HANG
    assert "floor 221 W learned on this host from 55 samples a board at start-up" in verdict.why
    assert "plateau 985 W learned from its steps" in verdict.why
    assert "by profile" not in verdict.why


def test_nothing_learned_is_the_profile() -> None:
    assert "floor 235 W by profile b300" in judged(picture([191] * 8, [100] * 8), [])[1]


def test_a_host_that_draws_more_at_rest_has_its_own_floor() -> None:
    """B300 at rest differ by up to 50 W between sites: 280 W spins here, and there it would be work."""
    warm = picture([285] * 8, [100] * 8)
    assert not judged(warm, [])[2]
    assert judged(warm, of_all(Kind.CONTEXT, 250))[2]


def test_each_board_is_measured_by_its_own_floor() -> None:
    watts = [191.0] * 7 + [275.0]
    values = [*of_all(Kind.CONTEXT, 186, 7), value(Kind.CONTEXT, 245, 7)]
    assert not judged(picture(watts, [100] * 8), of_all(Kind.CONTEXT, 186))[2]
    assert judged(picture(watts, [100] * 8), values)[2]


def test_light_work_on_a_small_board_is_no_wait_once_its_floor_is_known() -> None:
    """Boards of this size may rest at 0.6 of the limit: nothing is made of the watts. This one rests at 11 of 130 W."""
    work = picture([31, 32], [100, 100], name=ADA, limit_watts=130)
    floor = of_all(Kind.CONTEXT, 11.5, 2, limit=130, name=ADA)
    assert judged(work, [])[0] is PowerState.UNKNOWN
    assert not judged(work, floor)[2]
    spins = picture([14, 15], [100, 100], name=ADA, limit_watts=130)
    assert judged(spins, [])[0] is PowerState.UNKNOWN
    assert judged(spins, floor)[0] is PowerState.HANG


def test_what_the_job_always_draws_is_compute() -> None:
    light = picture([500] * 8, [99] * 8)
    assert judged(light, [])[0] is PowerState.COMMUNICATION
    state, why, _ = judged(light, of_all(Kind.PLATEAU, 505))
    assert state is PowerState.COMPUTE
    assert "plateau 505 W" in why


def test_half_of_what_the_job_always_draws_is_no_plain_compute() -> None:
    slow = picture([430] * 8, [99] * 8, name="NVIDIA H100 80GB HBM3", limit_watts=700)
    assert judged(slow, of_all(Kind.PLATEAU, 660, limit=700))[0] is not PowerState.COMPUTE


def test_starving_is_seen_although_the_plateau_is_known() -> None:
    starving = picture([575] * 8, [90, 30, 55, 70, 20, 95, 60, 45])
    assert judged(starving, of_all(Kind.PLATEAU, 985))[0] is PowerState.STARVATION


def test_a_plateau_at_another_limit_says_nothing() -> None:
    assert "505 W" not in judged(picture([500] * 8, [99] * 8), of_all(Kind.PLATEAU, 505, limit=800))[1]


def test_a_few_boards_do_not_speak_for_all() -> None:
    few = of_all(Kind.CONTEXT, 250, 3) + of_all(Kind.PLATEAU, 505, 3)
    state, why, _ = judged(picture([500] * 8, [99] * 8), few)
    assert state is PowerState.COMMUNICATION
    assert "by profile b300" in why


def test_a_floor_that_was_read_at_low_clocks_lowers_the_profile_a_little_at_most() -> None:
    """An L40S rests at 32 W in P8 and draws 44 to 85 W while it waits."""
    learned = learned_of(
        Knowledge([value(Kind.CONTEXT, 32, limit=350, name="NVIDIA L40S")]),
        JOB,
        picture([60], [100], name="NVIDIA L40S", limit_watts=350).gpus,
        profile_for("NVIDIA L40S", 350),
    )
    assert learned is not None
    assert learned.profile.floor_watts == pytest.approx(0.75 * 93)


def test_a_cap_near_the_floor_leaves_nothing_to_tell_by() -> None:
    """An A100 may be capped at 100 W: its work draws no more than spinning does."""
    capped = picture([99] * 8, [100] * 8, name="NVIDIA A100-SXM4-80GB", limit_watts=100)
    state, _, at_floor = judged(capped, [])
    assert not at_floor
    assert state is not PowerState.HANG


def test_a_job_that_rests_is_idle_by_the_learned_floor_too() -> None:
    job = a_job_at_work()
    states = []
    for doing in (PAUSE, COMPUTE):
        job.play(5, doing)
        states.append(job.told[-1].verdict.state)
    assert states == [PowerState.IDLE, PowerState.COMPUTE]


# What cannot be true


@pytest.mark.parametrize(
    ("one", "others", "words"),
    [
        (value(Kind.CONTEXT, 700), [], "no context floor"),
        (value(Kind.CONTEXT, 100), [value(Kind.IDLE, 139)], "expected 111 to"),
        (value(Kind.CONTEXT, 186), [value(Kind.PLATEAU, 250)], "no room below the plateau"),
        (value(Kind.CONTEXT, 0), [], "no watts"),
        (value(Kind.IDLE, 20), [], "no idle floor"),
        (value(Kind.IDLE, 400), [], "no idle floor"),
        (value(Kind.PLATEAU, 240), [], "no plateau: the floor of this board is 235 W"),
        (value(Kind.PLATEAU, 270), [value(Kind.CONTEXT, 245)], "the floor of this board is 280 W"),
        (value(Kind.PLATEAU, 1500), [], "above the limit of 1100 W"),
        (value(Kind.CONTEXT, 60, limit=130, name=ADA), [], "expected 0 to 46 W"),
    ],
)
def test_nonsense_is_refused(one: Learned, others: list[Learned], words: str) -> None:
    why = refusal(one, profile_for(one.name, one.limit_watts), Knowledge(others))
    assert why is not None
    assert words in why


@pytest.mark.parametrize(
    "one",
    [
        value(Kind.IDLE, 184),
        value(Kind.CONTEXT, 190),
        value(Kind.PLATEAU, 400),
        value(Kind.IDLE, 234, name="NVIDIA GB300", limit=1400),
        value(Kind.CONTEXT, 118, name="NVIDIA H100 80GB HBM3", limit=700),
        value(Kind.CONTEXT, 11.5, name=ADA, limit=130),
        value(Kind.PLATEAU, 66, name="Tesla T4", limit=70),
    ],
)
def test_what_public_tables_show_is_accepted(one: Learned) -> None:
    assert refusal(one, profile_for(one.name, one.limit_watts), Knowledge()) is None


# Rows


def test_what_is_kept_is_what_is_read() -> None:
    job = a_job_at_work()
    rows = {key: content for key, content in job.knowledge.unkept().items() if content is not None}
    again, warnings = read_rows(rows, job.known(Kind.IDLE).wall_seconds)  # type: ignore[union-attr]  # it was learned
    assert warnings == ()
    assert sorted(again.values(), key=str) == sorted(job.knowledge.values(), key=str)
    assert again.unkept() == {}


def test_garbage_in_the_table_is_left_out_with_a_word_each_and_goes() -> None:
    good = value(Kind.IDLE, 139)
    content = Knowledge()
    content.put(good)
    row = content.unkept()[good.key]
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
    knowledge, warnings = read_rows(rows, 1.7e9)
    assert knowledge.values() == (good,)
    assert len(warnings) == 10
    assert all("learned anew" in warning for warning in warnings)
    assert knowledge.unkept() == dict.fromkeys("abcdefghij")


def test_what_was_learned_half_a_year_ago_is_learned_anew() -> None:
    old = replace(value(Kind.IDLE, 139), wall_seconds=1.7e9 - 200 * 86400)
    content = Knowledge()
    content.put(old)
    rows = {key: row for key, row in content.unkept().items() if row is not None}
    assert read_rows(rows, 1.7e9)[0].values() == ()
