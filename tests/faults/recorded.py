"""A recording of a rig, replayed and compared with what was injected into it.

`python -m tests.faults.recorded RECORDING TRUTH` prints one row per fault: what was injected, what was said, when; and
every statement that nothing injected explains. Exit code 1 if anything is missing or untrue.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wattwatch.watcher.alerting.alert_manager import AlertManager
from wattwatch.watcher.common.state_store import StateStore
from wattwatch.watcher.detection.model import Finding
from wattwatch.watcher.engine.engine import Engine
from wattwatch.watcher.engine.snapshot import JobView
from wattwatch.watcher.recordings.format import Recording, open_recording
from wattwatch.watcher.recordings.inputs import SourcePlayer
from wattwatch.watcher.recordings.replay import ROUND_WINDOW_FRACTION, SourceClock

EXPECTED = tomllib.loads(Path(__file__).with_name("recorded.toml").read_text("utf-8"))["injected"]
HEALTHY_STATES = ("computing", "communicating")
START_SECONDS = 14.0  # of the recording: the nodes are logged in to, and send their first lines
SETTLE_SECONDS = 14.0  # until a state may lag behind: two rounds of samples, and a node that comes back
OVER_SECONDS = 8.0


@dataclass(frozen=True)
class Injected:
    """One fault, with its times in seconds since the start of the recording, and what must be said about it."""

    job: str
    what: str
    begins: float
    ends: float
    expected: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, str]:
        return self.expected.get("alert", ""), self.expected.get("scope", "")

    @property
    def over(self) -> float:
        return self.ends + float(self.expected.get("over_seconds", OVER_SECONDS))

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(self.expected.get("states", HEALTHY_STATES))


@dataclass
class Said:
    """What was said about one fault, and how late."""

    injected: Injected
    summary: str = ""
    late_seconds: float | None = None
    confirmed_seconds: float | None = None
    problems: list[str] = field(default_factory=list)


@dataclass
class Comparison:
    said: list[Said]
    untrue: list[str]  # statements that nothing explains

    @property
    def problems(self) -> list[str]:
        return [f"{each.injected.what}: {problem}" for each in self.said for problem in each.problems] + self.untrue


def injected_faults(truth: Sequence[Mapping[str, Any]], started_wall_seconds: float) -> list[Injected]:
    """The rows of recorded.toml with the times of the truth file. A row without its entry is left out."""
    faults = []
    for row in EXPECTED:
        mine = [entry for entry in truth if entry["job"] == row["job"]]
        begins = [i for i, entry in enumerate(mine) if entry["what"].startswith(row["begins"])]
        if len(begins) < row.get("occurrence", 1):
            continue
        first = begins[row.get("occurrence", 1) - 1]
        start = mine[first]["wall_seconds"] - started_wall_seconds
        if "lasts_seconds" in row:
            end = start + float(row["lasts_seconds"])
        else:
            ending = next(entry for entry in mine[first + 1 :] if entry["what"].startswith(row["ends"]))
            end = ending["wall_seconds"] - started_wall_seconds
        faults.append(Injected(row["job"], mine[first]["what"], start, end, row))
    return faults


def play(recording: Recording) -> Iterator[tuple[float, JobView]]:
    """Every evaluation of every job with its time, as live: seconds since the start."""
    clock = SourceClock()
    player = SourcePlayer(recording.specs, iter(recording.events))
    interval = min(spec.interval_seconds for spec in recording.specs)
    seen: dict[str, JobView] = {}
    with tempfile.TemporaryDirectory() as directory:
        store = StateStore(Path(directory) / "state.db")
        try:
            manager = AlertManager(store, (), (), clock)
            engine = Engine(recording.specs, player, manager, clock, prior_state=recording.prior_state)
            for seconds in player.play(interval * ROUND_WINDOW_FRACTION, interval):
                clock.set(seconds)
                for name, view in engine.tick().jobs.items():
                    if seen.get(name) is not view:
                        seen[name] = view
                        yield clock.wall(), view
        finally:
            store.close()


def started_wall_seconds(recording: Recording) -> float:
    """Wall time of the first event, by the clock of the first node that sent a line."""
    start: float | None = None
    for event in recording.events:
        start = event.seconds if start is None else start
        if event.sample is not None:
            return event.sample.wall_seconds - (event.sample.received_seconds - start)
    raise ValueError("the recording has no sample")


def compare(path: Path, truth: Sequence[Mapping[str, Any]], jobs: Sequence[str] = ()) -> Comparison:
    """Replay and compare. `jobs`: only these, for a part of the recording."""
    faults = [
        fault
        for fault in injected_faults(truth, started_wall_seconds(open_recording(path)))
        if not jobs or fault.job in jobs
    ]
    comparison = Comparison([Said(fault) for fault in faults], [])
    last = 0.0
    for now, view in play(open_recording(path)):
        last = now
        for said in comparison.said:
            if said.injected.job == view.name:
                _look_for(said, now, view)
        _check_statements(comparison, [fault for fault in faults if fault.job == view.name], now, view)
    for said in comparison.said:
        _check_delays(said, last)
    return comparison


def _look_for(said: Said, now: float, view: JobView) -> None:
    fault = said.injected
    if not fault.key[0] or not fault.begins <= now <= fault.over:
        return
    for finding in view.findings:
        if (finding.alert.value, finding.scope) != fault.key or "(last seen" in finding.summary:
            continue
        if fault.expected.get("says", "") not in finding.summary:
            continue
        if said.late_seconds is None:
            said.summary, said.late_seconds = finding.summary, now - fault.begins
        if finding.confirmed and said.confirmed_seconds is None:
            said.summary, said.confirmed_seconds = finding.summary, now - fault.begins
        who = [str(suspect) for suspect in finding.suspects]
        if "who" in fault.expected and now <= fault.ends and who != fault.expected["who"]:
            said.problems.append(f"suspects {who} at {clock_time(now)}: {finding.summary}")
        elif who and not all(name in finding.summary for name in who):
            said.problems.append(f"suspects {who} not in {finding.summary!r}")


def _check_statements(comparison: Comparison, faults: Sequence[Injected], now: float, view: JobView) -> None:
    """Every state and finding must be explained by something that was injected."""
    recent = [fault for fault in faults if fault.begins <= now <= fault.over]
    explained = {fault.key for fault in recent}
    for finding in view.findings:
        if (finding.alert.value, finding.scope) not in explained:
            comparison.untrue.append(_statement(now, view, finding))
    if now < START_SECONDS:
        return
    current = [fault for fault in recent if now <= fault.ends]
    states = {state for fault in current for state in fault.states} if current else set(HEALTHY_STATES)
    for fault in faults:
        if fault.begins <= now <= fault.begins + SETTLE_SECONDS or fault.ends <= now <= fault.ends + SETTLE_SECONDS:
            states |= {*fault.states, *HEALTHY_STATES}
    if view.state.value not in states:
        comparison.untrue.append(f"{clock_time(now)} {view.name} is {view.state.value}: {view.reason}")


def _statement(now: float, view: JobView, finding: Finding) -> str:
    return f"{clock_time(now)} {view.name}: {finding.alert.value} {finding.scope}: {finding.summary}"


def _check_delays(said: Said, last: float) -> None:
    expected, begins = said.injected.expected, said.injected.begins
    if "alert" not in expected or begins < 0 or begins + expected["within_seconds"] > last:
        return  # the recording is a part, and begins or ends within it
    if said.late_seconds is None:
        said.problems.append(f"{expected['alert']} was never said")
    elif said.late_seconds > expected["within_seconds"]:
        said.problems.append(f"{expected['alert']} came after {said.late_seconds:.1f} s")
    limit = expected.get("confirmed_within")
    if (
        limit is not None
        and begins + limit <= last
        and (said.confirmed_seconds is None or said.confirmed_seconds > limit)
    ):
        when = "never" if said.confirmed_seconds is None else f"after {said.confirmed_seconds:.1f} s"
        said.problems.append(f"{expected['alert']} was confirmed {when}; the limit is {limit} s")


def clock_time(seconds: float) -> str:
    return f"{int(seconds // 60)}:{seconds % 60:04.1f}"


def table(comparison: Comparison) -> Iterator[str]:
    """One line per fault, then everything that is wrong."""
    for said in sorted(comparison.said, key=lambda each: (each.injected.job, each.injected.begins)):
        fault = said.injected
        late = "" if said.late_seconds is None else f"+{said.late_seconds:.1f} s"
        confirmed = said.confirmed_seconds
        if confirmed is not None and confirmed != said.late_seconds:
            late += f", confirmed +{confirmed:.1f} s"
        told = said.summary or f"nothing: {fault.expected.get('nothing', 'MISSING')}"
        yield f"{clock_time(fault.begins):>7}  {fault.job}  {fault.what[:58]:<58}  {late:<26}  {told}"
    for problem in comparison.problems:
        yield f"WRONG  {problem}"


def main() -> None:
    recording, truth = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text("utf-8"))
    comparison = compare(recording, truth)
    sys.stdout.writelines(f"{line}\n" for line in table(comparison))
    sys.exit(1 if comparison.problems else 0)


if __name__ == "__main__":
    main()
