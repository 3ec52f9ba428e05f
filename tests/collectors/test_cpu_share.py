"""CPU seconds to percent of one core: over some seconds, never across a reused pid."""

from __future__ import annotations

from wattwatch.collectors.probe_reader import FORGET_SECONDS, CpuShareTracker


def shares_of(ran: list[tuple[float, float]]) -> list[float | None]:
    shares = CpuShareTracker()
    return [shares.share((7, 1.0), cpu, now) for now, cpu in ran]


def test_a_share_needs_some_seconds() -> None:
    assert shares_of([(0.0, 5.0), (1.0, 6.0), (5.0, 9.5)]) == [None, None, 90.0]


def test_a_share_covers_the_last_seconds_not_the_whole_lifetime() -> None:
    rested = [(float(t), 3.0) for t in range(60)]
    worked = [(60.0 + t, 3.0 + t) for t in range(30)]
    assert shares_of(rested + worked)[-1] == 100.0


def test_readings_every_five_seconds_are_enough() -> None:
    assert shares_of([(5.0 * i, 4.0 * i) for i in range(12)])[1:] == [80.0] * 11


def test_another_process_with_the_same_pid_starts_over() -> None:
    shares = CpuShareTracker()
    shares.share((7, 1.0), 50.0, 0.0)
    assert shares.share((7, 9.0), 50.0, 10.0) is None
    assert shares.share((7, 1.0), 1.0, 20.0) is None  # a counter that went back


def test_no_cpu_seconds_no_share() -> None:
    assert shares_of([(0.0, 1.0)]) == [None]
    assert CpuShareTracker().share((1, 1.0), None, 0.0) is None


def test_processes_that_are_gone_are_forgotten() -> None:
    shares = CpuShareTracker()
    shares.share((7, 1.0), 1.0, 0.0)
    shares.forget(2 * FORGET_SECONDS)
    assert shares.share((7, 1.0), 9.0, 2 * FORGET_SECONDS) is None
