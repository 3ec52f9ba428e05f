"""`wattwatch replay`: what would have been said of a log or a recording, at its own times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.watcher.command_shell import Shell
from wattwatch.collectors.samples import GpuSample, HostStatus, NodeSample
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.cli.replay import format_elapsed
from wattwatch.watcher.detection.model import JobSpec
from wattwatch.watcher.recordings.format import RecordedEvent, Recording, RecordingWriter
from wattwatch.watcher.recordings.replay import ReplayResult, replay

PAIR = JobSpec("pair", ("a", "b"))
START = 54_321.0  # the control host was up for hours


def boards(watts: float = 985.0, busy: float = 100.0) -> tuple[GpuSample, ...]:
    return tuple(
        GpuSample(index, name="NVIDIA B300 SXM6 AC", power_watts=watts, power_limit_watts=1100.0,
                  utilization_percent=busy, memory_used_bytes=8e10, memory_total_bytes=2.8e11)
        for index in range(8)
    )  # fmt: skip


def said(node: str, second: float, gpus: tuple[GpuSample, ...]) -> RecordedEvent:
    now = START + second
    return RecordedEvent(now, sample=NodeSample(node, HostStatus.OK, "", int(second * 10), now, now, now, "nvml", gpus))


def up(*nodes: str) -> Iterator[RecordedEvent]:
    for node in nodes:
        yield RecordedEvent(START, link=NodeLink(node, HostStatus.OK, ""))


def played(events: Iterable[RecordedEvent], *specs: JobSpec) -> ReplayResult:
    return replay("r", Recording(specs or (PAIR,), iter(events)))


def test_times_are_counted_from_the_start_of_the_recording() -> None:
    events = [*up("a", "b"), *(said(node, second, boards()) for second in range(20) for node in ("a", "b"))]
    result = played(events)
    assert result.seconds == 19.0
    assert result.rounds == 20
    assert result.changes[0].at_seconds == 0.0
    assert result.changes[-1].state == "computing"
    assert result.episodes == ()


def test_the_silence_of_a_node_is_replayed_tick_by_tick() -> None:
    events = [*up("a", "b"), *(said(node, second, boards()) for second in range(20) for node in ("a", "b"))]
    events += [RecordedEvent(START + 25, link=NodeLink("b", HostStatus.UNREACHABLE, "no line for 6 s"))]
    events += [said("a", second, boards()) for second in range(20, 60)]
    events.sort(key=lambda event: event.seconds)
    (episode,) = played(events).episodes
    assert (episode.alert, episode.scope) == ("NodeUnreachable", "b")
    assert 25 <= episode.opened_wall_seconds <= 35


def test_silence_of_all_nodes_lasts_until_the_end_record() -> None:
    single = JobSpec("single", ("a",))
    events = [*up("a"), *(said("a", second, boards()) for second in range(20))]
    events += [
        RecordedEvent(START + 26, link=NodeLink("a", HostStatus.UNREACHABLE, "no line for 6 s")),
        RecordedEvent(START + 90),
    ]
    result = played(events, single)
    assert [(episode.alert, episode.scope) for episode in result.episodes] == [("NodeUnreachable", "a")]
    assert result.seconds == 90.0
    assert result.changes[-1].state == "unknown"


def test_nodes_that_send_at_different_times_still_form_rounds() -> None:
    """Ten nodes a tenth of an interval apart: no pause parts one round from the next."""
    many = JobSpec("many", tuple(f"n{i}" for i in range(10)))
    events = [*up(*many.nodes)]
    events += [said(f"n{i}", second + i / 10, boards()) for second in range(30) for i in range(10)]
    result = played(events, many)
    assert result.rounds >= 30
    assert result.changes[-1].state == "computing"
    assert result.changes[-1].at_seconds < 15


def test_events_in_the_wrong_order_do_not_turn_time_back() -> None:
    events = [*up("a", "b")]
    for second in range(10):
        events += [said("a", second + 0.001, boards()), said("b", float(second), boards())]
    result = played(events)
    assert result.rounds == 10
    assert [change.at_seconds for change in result.changes] == sorted(change.at_seconds for change in result.changes)


def test_a_time_stamp_in_the_far_future_is_replayed_quickly() -> None:
    events = [*up("a"), said("a", 1.0, boards()), RecordedEvent(1e18)]
    assert played(events, JobSpec("single", ("a",))).seconds > 1e17


# The command


def log(*stretches: tuple[int, str, str]) -> str:
    """An nvidia-smi log of two H100s, a sample a second: stretches of (seconds, watts, utilisation)."""
    lines = ["timestamp, index, name, power.draw [W], power.limit [W], utilization.gpu [%], memory.used [MiB]"]
    second = 0
    for seconds, watts, busy in stretches:
        for _ in range(seconds):
            stamp = f"2026/01/01 10:{second // 60:02}:{second % 60:02}.000"
            lines += [
                f"{stamp}, {i}, NVIDIA H100 80GB HBM3, {watts}, 700.00 W, {busy}, 71000 MiB" for i in range(2)
            ]  # fmt: skip
            second += 1
    return "\n".join(lines) + "\n"


def test_a_healthy_log_has_no_alerts(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "healthy.csv"
    path.write_text(log((60, "640.00 W", "100 %")))
    answer = shell.run("replay", path)
    assert answer.exit_code == 0
    assert answer.out.splitlines()[0] == f"{path}: 60 samples over 0:00:59"
    assert "no alerts" in answer.out
    (said,) = shell.run("replay", "--json", path).json
    assert list(said) == [
        "source", "seconds", "rounds", "samples", "states", "alerts", "problem", "beginnings", "assumptions",
    ]  # fmt: skip
    assert said["alerts"] == []


def test_a_lost_gpu_in_a_log_is_a_critical_alert_at_its_time(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "lost.csv"
    path.write_text(log((30, "640.00 W", "100 %"), (20, "[GPU is lost]", "[GPU is lost]")))
    answer = shell.run("replay", "--json", path)
    alerts = answer.json[0]["alerts"]
    assert {alert["alert"] for alert in alerts} == {"GpuFault"}
    assert {alert["severity"] for alert in alerts} == {"critical"}
    assert [alert["opened_seconds"] for alert in alerts] == [pytest.approx(30.0, abs=2.0)] * len(alerts)
    assert answer.exit_code == 2
    assert "CRITICAL GpuFault" in shell.run("replay", path).out


def test_each_change_of_an_alert_is_shown_with_its_text_at_that_time(shell: Shell, tmp_path: Path) -> None:
    """A suspicion of a hang that turns out to be one, and is over at last."""
    path = tmp_path / "hangs.csv"
    path.write_text(log((300, "640.00 W", "100 %"), (900, "149.00 W", "100 %"), (120, "640.00 W", "100 %")))
    (alert,) = shell.run("replay", "--json", path).json[0]["alerts"]
    opened, escalated, resolved = alert["changes"]
    assert (opened["change"], opened["severity"], opened["confirmed"]) == ("opened", "warning", False)
    assert (escalated["change"], escalated["severity"], escalated["confirmed"]) == ("escalated", "critical", True)
    assert resolved["change"] == "resolved"
    assert alert["opened_seconds"] == opened["at_seconds"] < escalated["at_seconds"] < resolved["at_seconds"]
    assert alert["closed_seconds"] == resolved["at_seconds"]
    assert "may be hung" in opened["summary"]
    assert "may be hung" not in escalated["summary"]
    told = [line.split(maxsplit=1) for line in shell.run("replay", path).out.splitlines() if "JobHung" in line]
    assert [words.split(" hangs.csv")[0] for _, words in told] == [
        "WARNING JobHung (not confirmed)", "CRITICAL JobHung (escalated)", "resolved JobHung (not seen since 0:20:01)",
    ]  # fmt: skip
    assert [at for at, _ in told] == [format_elapsed(change["at_seconds"]) for change in alert["changes"]]


def test_lines_of_several_jobs_name_the_job(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "two.gz"
    recorder = RecordingWriter(path, [JobSpec("one", ("a",)), JobSpec("two", ("b",))])
    recorder.write_links({node: NodeLink(node, HostStatus.OK, "") for node in ("a", "b")}, START)
    for second in range(3):
        for node in ("a", "b"):
            recorder.write_line(node, START + second, b'{"v":1,"seq":%d,"t":%d,"w":%d}' % (second, second, second))
    recorder.close()
    out = shell.run("replay", path).out
    assert " one: " in out
    assert " two: " in out


def test_each_file_gets_a_result_or_an_error(shell: Shell, tmp_path: Path) -> None:
    good, text = tmp_path / "good.csv", tmp_path / "text.txt"
    good.write_text(log((10, "640.00 W", "100 %")))
    text.write_text("nothing of ours\n")
    answer = shell.run("replay", "--json", good, text, tmp_path / "none", tmp_path)
    assert [said["source"] for said in answer.json] == [str(p) for p in (good, text, tmp_path / "none", tmp_path)]
    assert [("error" in said) for said in answer.json] == [False, True, True, True]
    assert "No such file" in answer.json[2]["error"]
    assert "directory" in answer.json[3]["error"]
    assert len(answer.err.splitlines()) == 3
    assert answer.exit_code == 3


def test_no_file_is_wrong_usage(shell: Shell) -> None:
    assert shell.run("replay").exit_code == 2
