"""Which GPU gets which numbers."""

from __future__ import annotations

import pytest

from wattwatch.watcher.detection.baselines.profiles import PowerProfile, profile_for, shipped_profiles


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GH200 480GB", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A40", "a40"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "generic"),
        (None, "generic"),
    ],
)
def test_the_first_that_matches_the_name(name: str | None, profile: str) -> None:
    assert profile_for(name, None).name == profile


@pytest.mark.parametrize("profile", shipped_profiles(), ids=lambda p: p.name)
def test_each_shipped_profile_is_in_order_and_says_where_it_is_from(profile: PowerProfile) -> None:
    assert 0 < profile.idle_watts < profile.floor_watts < profile.compute_watts < profile.limit_watts
    assert 0 < profile.certain <= 1
    assert profile.source
    most = profile.limit_watts if profile.bands_from else profile.compute_watts
    for band in (profile.communication, profile.starvation, *profile.light):
        assert band is not None
        assert profile.floor_watts < band.low_watts < band.high_watts <= most


def test_bands_never_measured_on_a_gpu_model_are_scaled_and_trusted_less() -> None:
    measured, scaled = profile_for("NVIDIA B300 SXM6 AC", None), profile_for("NVIDIA H100 80GB HBM3", None)
    assert (measured.bands_from, scaled.bands_from) == ("", "b300")
    assert scaled.bands_certain < measured.bands_certain
    assert measured.starvation is not None
    assert scaled.starvation is not None
    shares = [
        (p.starvation.low_watts - p.floor_watts) / (p.limit_watts - p.floor_watts)
        for p in (measured, scaled)
        if p.starvation is not None
    ]
    assert shares[0] == pytest.approx(shares[1])


def test_an_unknown_gpu_gets_its_bands_by_its_limit() -> None:
    small, large = profile_for("Accelerator X", 300.0), profile_for("Accelerator X", 600.0)
    assert small.communication is not None
    assert large.communication is not None
    assert large.communication.low_watts == pytest.approx(2 * small.communication.low_watts)


def test_another_power_limit_moves_what_lies_above_the_floor_and_nothing_below() -> None:
    board = profile_for("NVIDIA B300 SXM6 AC", 900.0)
    usual = profile_for("NVIDIA B300 SXM6 AC", None)
    assert (board.idle_watts, board.floor_watts) == (usual.idle_watts, usual.floor_watts)
    assert usual.floor_watts < board.compute_watts < usual.compute_watts


def test_a_limit_below_the_floor_changes_nothing() -> None:
    assert profile_for("NVIDIA B300 SXM6 AC", 100.0) == profile_for("NVIDIA B300 SXM6 AC", None)
