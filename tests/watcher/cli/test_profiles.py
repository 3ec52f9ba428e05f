"""`wattwatch profiles`: the ranges that verdicts use, what was published, and why a range is wider."""

from __future__ import annotations

import pytest

from tests.watcher.command_shell import Shell
from tests.watcher.detection.job_samples import job_sample
from wattwatch.watcher.detection.baselines.profiles import (
    find_profile,
    published_measurements,
    reasons_for_wider_ranges,
    shipped_profiles,
)
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.model import PowerState

# arXiv 2608.05944, section 3: the table of states on B300
PAPER = {
    "compute": (940, 1040),
    "communication": (640, 640),
    "starvation": (575, 575),
    "waiting": (190, 190),
}


def test_the_papers_table_is_shown_with_the_ranges_that_are_used(shell: Shell) -> None:
    (said,) = shell.run("profiles", "--json", "B300").json
    assert said["limit_watts"] == 1100
    used = {row["state"]: row for row in said["states"]}
    for state, (low, high) in PAPER.items():
        (row,) = [
            each
            for each in said["measurements"]
            if each["state"] == state and each["source"].startswith("arXiv 2608.05944")
        ]
        assert (row["low_watts"], row["high_watts"]) == (low, high)
        assert used[state]["low_watts"] <= low
        assert used[state]["high_watts"] is None or used[state]["high_watts"] >= high
        assert used[state]["scaled_from"] is None
        assert used[state]["why_wider"]
    out = shell.run("profiles", "NVIDIA B300 SXM6 AC").out
    assert "from 700 W" in out
    assert "published: 940-1,040 W (16 GPUs, limit not published)" in out
    assert "wider because: 940-1,040 W was published for one job on one cluster." in out


def test_every_model_is_listed_and_what_is_scaled_is_marked(shell: Shell) -> None:
    lines = shell.run("profiles").out.splitlines()
    for profile in shipped_profiles():
        (line,) = [each for each in lines if each.split()[:1] == [profile.name]]
        assert ("*" in line) == bool(profile.bands_from)
    answer = shell.run("profiles", "--json")
    assert [said["name"] for said in answer.json] == [profile.name for profile in shipped_profiles()]
    assert answer.exit_code == 0


def test_how_a_range_was_scaled_is_said(shell: Shell) -> None:
    out = shell.run("profiles", "h100").out
    assert "their ranges are scaled from those of b300" in out
    assert "Scaled from" not in out
    out = shell.run("profiles", "h100", "--limit", "500").out
    assert "at a power limit of 500 W" in out
    assert "Scaled from a power limit of 700 W: idle and waiting power do not depend on the limit" in out
    (usual,) = shell.run("profiles", "h100", "--json").json
    (capped,) = shell.run("profiles", "h100", "--json", "--limit", "500").json
    for row, scaled in zip(usual["states"], capped["states"], strict=True):
        same = row["state"] in ("idle", "waiting")
        assert (row["low_watts"], row["high_watts"]) != (scaled["low_watts"], scaled["high_watts"]) or same


@pytest.mark.parametrize("arguments", [["b9000"], ["--limit", "500"], ["b300", "--limit", "0"]])
def test_wrong_usage(arguments: list[str], shell: Shell) -> None:
    answer = shell.run("profiles", *arguments)
    assert (answer.exit_code, answer.out) == (2, "")


def test_each_measurement_is_of_a_model_with_a_profile_and_has_its_source() -> None:
    names = {profile.name for profile in shipped_profiles()}
    states = {"idle", "context", "waiting", "checkpoint", "starvation", "communication", "compute"}
    for each in published_measurements():
        assert each.profile in names
        assert each.state in states
        assert 0 < each.watts.low_watts <= each.watts.high_watts
        assert each.limit_watts is None or each.watts.high_watts <= 1.1 * each.limit_watts
        assert each.source.startswith(("https://", "arXiv ", "public note"))
    for name in names:
        assert set(reasons_for_wider_ranges(name)) <= {"idle", "waiting", *states, "light"}


def test_a_model_is_found_as_a_person_writes_it() -> None:
    for text, name in (
        ("B300", "b300"), ("nvidia b300 sxm6 ac", "b300"), ("h100 pcie", "h100-pcie"), ("H100", "h100"),
        ("3090", "3090"), ("Tesla T4", "t4"), ("generic", "generic"),
    ):  # fmt: skip
        profile = find_profile(text)
        assert profile is not None
        assert profile.name == name
    assert find_profile("") is None
    assert find_profile("b9000") is None


def test_a_verdict_says_where_its_range_was_widened() -> None:
    widened = classify(job_sample([720.0] * 8, [100.0] * 8))
    assert widened.state is PowerState.COMPUTE
    assert "on this model compute was measured at 395-414, 844-882 and 940-1,040 W" in widened.why
    assert "`wattwatch profiles b300`" in widened.why
    for watts in (860.0, 990.0):
        assert "was measured at" not in classify(job_sample([watts] * 8, [100.0] * 8)).why
    assert "communication was measured at 640 W" in classify(job_sample([680.0] * 8, [100.0] * 8)).why
    assert "was measured at" not in classify(job_sample([640.0] * 8, [100.0] * 8)).why
