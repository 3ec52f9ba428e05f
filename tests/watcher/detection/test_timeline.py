"""A day of history fits in memory, and no change of state is thinned away."""

from __future__ import annotations

from itertools import pairwise

import pytest

from wattwatch.watcher.detection.model import JobState
from wattwatch.watcher.detection.timeline import Timeline, TimelinePoint


def point(second: float, state: JobState = JobState.COMPUTING) -> TimelinePoint:
    return TimelinePoint(second, state, int(second), None, 990.0, 940.0, 1040.0, 100.0)


def test_a_day_at_one_sample_a_second_keeps_about_two_thousand_points() -> None:
    timeline = Timeline()
    for second in range(90_000):
        timeline.add(point(float(second)), float(second))
    points = timeline.points()
    assert len(points) < 2_200
    assert points[-1].wall_seconds == 89_999
    assert points[0].wall_seconds >= 90_000 - 86_400 - 60
    assert [p.wall_seconds for p in points] == sorted(p.wall_seconds for p in points)


def test_the_last_ten_minutes_are_whole() -> None:
    timeline = Timeline()
    for second in range(2_000):
        timeline.add(point(float(second)), float(second))
    assert len([p for p in timeline.points() if p.wall_seconds >= 1_400]) == 600


def test_a_state_of_a_few_seconds_survives_thinning() -> None:
    timeline = Timeline()
    for second in range(3_000):
        state = JobState.HUNG if 100 <= second < 103 else JobState.COMPUTING
        timeline.add(point(float(second), state), float(second))
    assert JobState.HUNG in {p.state for p in timeline.points() if p.wall_seconds < 1_000}


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_points_keep_their_distance_when_the_wall_clock_is_set(step: float) -> None:
    timeline = Timeline()
    for second in range(100):
        timeline.add(point(1_000_000.0 + second), float(second))
    for second in range(100, 200):
        timeline.add(point(1_000_000.0 + step + second), float(second))
    times = [each.wall_seconds for each in timeline.points()]
    assert len(times) == 200
    assert [later - earlier for earlier, later in pairwise(times)] == [1.0] * 199
    assert times[-1] == 1_000_000.0 + step + 199
