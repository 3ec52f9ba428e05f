"""Healthy hours with every kind of pause, of 20 kinds of job: no hang, no crash, no fault is said.

Whole days: `python -m tests.faults.healthy`.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.faults.healthy_days import EVENTS, Day, live

SEEDS = range(20)


@cache
def hour(seed: int) -> Day:
    return live(seed, 3600.0, every_kind=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_grave_is_said_of_a_healthy_hour(seed: int) -> None:
    day = hour(seed)
    assert [(seconds, during, said.newest) for seconds, during, said in day.forbidden] == []
    # A rank that compiles while the rest waits is suspected until steps go on; nothing else may be.
    told = [(seconds, during, said.newest) for seconds, during, said in day.said if said.worst != "info"]
    assert [entry for entry in told if entry[1] != "recompilation"] == []


def test_every_kind_of_event_happens() -> None:
    seen = {name for seed in SEEDS for name in hour(seed).events}
    assert seen == {"start", *(event.__name__ for event in EVENTS)}
