"""How a job ended, in words: complete, stopped from outside, crashed. Numbers first, then who, then what to do."""

from __future__ import annotations

from typing import Final

from wattwatch.collectors.samples import CheckpointEntry
from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.model import AlertName, Finding, Severity, Suspect
from wattwatch.watcher.detection.trackers.observation import Observation
from wattwatch.watcher.detection.trackers.processes import ExitedProcess

# What a rank of wattwatch-train leaves of its own end, it leaves in its run directory.
SIMULTANEOUS_EXIT_ADVICE: Final = (
    "Find who ended first by the last lines of their logs; of wattwatch-train, a rank without "
    "logs/attempt-*/rank-*.ending.json was killed. "
)


def first_exits(exited: tuple[ExitedProcess, ...]) -> tuple[ExitedProcess, ...]:
    """Those not seen any more once one of them was missing: what the others do follows from it. Who of several was the
    first cannot be known."""
    first = min((g.since_seconds for g in exited), default=0.0)
    return tuple(g for g in exited if g.observed_seconds < first)


def simultaneous_exit(observation: Observation, together: tuple[ExitedProcess, ...]) -> tuple[str, tuple[Suspect, ...]]:
    """Several that left between two samples, in words; suspects are at most the nodes that lost some, where others
    lost none."""
    ranks = sorted(g.process.rank for g in together if g.process.rank is not None)
    known = len(ranks) == len(together)
    names = [str(rank) for rank in ranks] if known else [str(g.suspect) for g in together]
    nodes = sorted({g.node for g in together})
    who = ("ranks " if known else "") + ", ".join(names[:4])
    who += f" and {len(names) - 4} more" if len(names) > 4 else ""
    some = len(nodes) < len(observation.sample.nodes)
    who += f" on {nodes[0]}" if known and some and len(nodes) == 1 else ""
    return f"{who} ended together; the first is not known from outside", tuple(map(Suspect, nodes)) if some else ()


def crash_finding(
    observation: Observation, since: float, exited: tuple[ExitedProcess, ...], *, all_gone: bool, confirmed: bool = True
) -> Finding:
    """Processes left without the job being done. `gone` is empty where only the boards' memory tells it."""
    first = first_exits(exited)
    named = tuple(g for g in exited if g.cause) or (first if len(first) == 1 else ())
    suspects = tuple(g.suspect for g in named)
    who = ", ".join(map(str, suspects[:4])) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
    advice = "Read the log of the named rank first: the time-outs of the others follow from it. "
    evidence = [
        f"{len(exited)} of the job's processes are gone"
        + (", none is left" if all_gone else "; the others wait for them"),
        *(
            f"process {one.process.pid} ({one.process.name}) of {one.suspect}: "
            + (one.cause or "the kernel log says nothing of its end; look into its log")
            for one in named[:1]
        ),
    ]
    if exited and not named:
        who, suspects = simultaneous_exit(observation, first)
        evidence.append("the kernel log says nothing of their ends")
        advice = SIMULTANEOUS_EXIT_ADVICE
    if not exited:
        who = "every process has left"
        evidence = ["all boards have given back their memory; processes cannot be listed here"]
    if not confirmed:
        evidence.append("no step of the job has been seen: it may have been a test before its start")
    step = observation.sample.progress.step
    if step is not None:
        evidence.append(
            f"last step {step:,}"
            + (
                ""
                if observation.sample.progress.total_steps is None
                else f" of {observation.sample.progress.total_steps:,}"
            )
        )
    return Finding(
        job=observation.spec.name,
        alert=AlertName.JOB_CRASHED,
        severity=ALERT_KINDS[AlertName.JOB_CRASHED].severity if confirmed else Severity.WARNING,
        scope="",
        summary=f"{observation.spec.name} {'crashed' if confirmed else 'may have crashed'}: {who}.",
        evidence=tuple(evidence),
        advice=f"{advice}Restart from the last checkpoint.",
        since_seconds=since,
        confirmed=confirmed,
        suspects=suspects,
        gpus_idle=observation.sample.expected_gpus or len(observation.sample.gpus),
    )


def completion_finding(observation: Observation, since: float, newest: CheckpointEntry | None) -> Finding:
    """The job is done."""
    step = observation.sample.progress.step
    evidence = ["every process has left"] if step is None else [f"last step {step:,}"]
    if newest is not None:
        evidence.append(f"checkpoint {newest.name} is complete, {newest.bytes / 1e9:.1f} GB")
    return Finding(
        job=observation.spec.name,
        alert=AlertName.JOB_COMPLETED,
        severity=ALERT_KINDS[AlertName.JOB_COMPLETED].severity,
        scope="",
        summary=f"{observation.spec.name} is complete.",
        evidence=tuple(evidence),
        advice="Nothing to do.",
        since_seconds=since,
    )


def stop_finding(observation: Observation, since: float, said: str, newest: CheckpointEntry | None) -> Finding:
    """Ended from outside before it was done, as its log says: no crash."""
    step, what = observation.sample.progress.step, said.partition(": ")[0]
    evidence = [f"its log says: {said.partition(': ')[2]}"]
    if newest is not None:
        evidence.append(f"newest complete checkpoint: {newest.name}")
    return Finding(
        job=observation.spec.name,
        alert=AlertName.JOB_COMPLETED,
        severity=ALERT_KINDS[AlertName.JOB_COMPLETED].severity,
        scope="",
        summary=f"{observation.spec.name} was {what}"
        + ("." if step is None else f" at step {step:,}, before its end."),
        evidence=tuple(evidence),
        advice="It goes on from its last checkpoint once it is started again; see that it was put back into the queue.",
        since_seconds=since,
    )
