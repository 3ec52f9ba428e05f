"""How a job ends: complete, stopped from outside, or crashed.

The job's processes exit; or, where no node can list processes, the memory of all GPUs is released. The end is a
completion if the last step (or its checkpoint) was reached, a stop if the job's log says so (Slurm preemption, time
limit, ...), and a crash otherwise. Of several processes that exited, the suspects are those that were missing while
the others were still seen: what the others do afterwards follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from wattwatch.collectors.samples import CheckpointEntry
from wattwatch.watcher.common.formatting import format_bytes, format_count
from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.model import IDLE_PERCENT, AlertName, Finding, JobSample, Severity, Suspect
from wattwatch.watcher.detection.trackers.checkpoint_save import CheckpointSaveTracker
from wattwatch.watcher.detection.trackers.observation import Observation, Streak
from wattwatch.watcher.detection.trackers.processes import DONE_PHASE, ExitedProcess, ProcessTracker
from wattwatch.watcher.detection.trackers.step_rate import StepRateTracker

RESUMED_SECONDS: Final = 30.0  # steps counted this long after a crash: the job continues without those ranks
EXIT_GRACE_SECONDS: Final = 120.0  # after the last step one rank may still write or upload while the others have left
LISTING_SECONDS: Final = 15.0  # checkpoint directories are listed every two seconds, and file servers show files late
# Without a step counter: a checkpoint completed this shortly before all processes exited was the final one.
FINAL_SAVE_SECONDS: Final = 60.0
# A log whose last step is this old when first read was written by an earlier run.
OLD_RUN_SECONDS: Final = 300.0
# A process that never had this much memory on its GPUs is no training job; a bare driver keeps up to 0.6 GB itself.
MIN_JOB_BYTES: Final = 1e9
RELEASED_SECONDS: Final = 15.0
DONE_PHASES: Final = frozenset({DONE_PHASE})
MAX_NAMED: Final = 4  # ranks or processes named in one sentence

CRASH_ADVICE: Final = (
    "Read the log of the named rank first: timeouts of other ranks are probably a consequence of its failure. "
)
SIMULTANEOUS_EXIT_ADVICE: Final = (
    "Compare the last lines of the ranks' logs to find the process that failed first. With wattwatch-train, a rank "
    "without logs/attempt-*/rank-*.ending.json was probably killed. "
)


class JobExitTracker:
    """Follows the end of one job."""

    def __init__(self) -> None:
        self._completed_since: float | None = None
        self._crashed_since: float | None = None
        self._exited_since: float | None = None
        self._exited_count = 0
        self._stopped: tuple[float, str] | None = None  # since when, and what its log says
        self._earlier_stop_lines: frozenset[str] | None = None  # in logs of the previous run; None: not read yet
        self._has_run = False  # its counter advanced, or was recent when first read
        self._memory_was_in_use = False
        self._most_in_use_bytes = 0.0  # on all GPUs together, at any time of this run
        self._released = Streak()
        self.memory_returned = False  # in this observation, where no process can be listed: the job was restarted

    def clear(self) -> None:
        """The job was restarted."""
        self._completed_since = self._crashed_since = self._exited_since = None
        self._exited_count = 0
        self._stopped = self._earlier_stop_lines = None
        self._most_in_use_bytes = 0.0
        self._released.clear()

    def observe_run(self, observation: Observation, step_rate: StepRateTracker) -> None:
        """Note whether the job runs. Called before `update`, which may depend on `memory_returned`."""
        progress = observation.sample.progress
        if self._earlier_stop_lines is None:
            self._earlier_stop_lines = _stop_lines(observation)
        recent = progress.step is not None and (progress.age_seconds or 0.0) < OLD_RUN_SECONDS
        self._has_run = self._has_run or recent or step_rate.advances > 0
        self.memory_returned = False
        in_use = [ranked.gpu.memory_used_bytes for ranked in observation.sample.gpus]
        readings = [used for used in in_use if used is not None]
        if observation.alive is not None or len(readings) < len(in_use) or not observation.sample.complete:
            # Where processes can be listed no guess is needed, and an incomplete sample allows none.
            if observation.alive is not None:
                self._released.clear()
            return
        if any(used >= MIN_JOB_BYTES for used in readings):
            self.memory_returned = self._memory_released
            self._memory_was_in_use = True
            self._most_in_use_bytes = max(self._most_in_use_bytes, sum(readings))
            self._released.clear()
        elif self._memory_was_in_use and readings:
            self._released.update(True, observation)

    @property
    def _memory_released(self) -> bool:
        return self._released.lasted(2, RELEASED_SECONDS)

    def update(
        self,
        observation: Observation,
        step_rate: StepRateTracker,
        saves: CheckpointSaveTracker,
        processes: ProcessTracker,
    ) -> Finding | None:
        """JobCompleted or JobCrashed, whichever is true now."""
        now = observation.now
        crashed_for = 0.0 if self._crashed_since is None else now - self._crashed_since
        if crashed_for > RESUMED_SECONDS and step_rate.stalled_seconds == 0.0:
            processes.forget_missing()
            self._crashed_since = None
        exited = processes.exited()
        if exited and self._is_unrelated(exited, processes):
            processes.forget_missing()
            exited = ()
        any_exited = bool(exited) or self._memory_released
        all_exited = (bool(exited) and processes.all_exited) or self._memory_released
        if not any_exited:
            self._exited_since = None
        elif self._exited_since is None or len(exited) > self._exited_count:
            self._exited_since = now  # each further exit shows that they are still exiting
        self._exited_count = len(exited)
        final = self._is_final(observation, step_rate, saves, exited)
        if final and (all_exited or observation.phases == DONE_PHASES) and _unfinished_save(observation, saves) is None:
            self._completed_since = now if self._completed_since is None else self._completed_since
        if self._completed_since is not None:
            return completion_finding(observation, self._completed_since, saves.newest_complete, len(exited))
        # After the last step ranks exit one by one, and the final checkpoint's mark may exist without being listed yet.
        grace = 0.0
        if final:
            grace = LISTING_SECONDS if all_exited or not step_rate.has_counter else EXIT_GRACE_SECONDS
        if self._exited_since is None or now - self._exited_since < grace:
            return None
        stop = None if any(each.cause for each in exited) else self._stop_line(observation)
        if stop is not None and all_exited:
            self._stopped = self._stopped or (now, stop)
            return stop_finding(observation, *self._stopped, saves.newest_complete)
        if stop is not None and now - self._exited_since < EXIT_GRACE_SECONDS:
            return None  # they were asked to exit, and do
        if not exited and not self._has_run:
            return None  # memory was released, but neither processes nor a counter show that a job ran
        self._crashed_since = now if self._crashed_since is None else self._crashed_since
        confirmed = (
            self._has_run
            or processes.has_ranks
            or not observation.spec.has_progress_source
            or any(each.cause for each in exited)
        )
        left = _describe_remaining(observation, processes)
        found = crash_finding(
            observation, self._crashed_since, exited, left, self._most_in_use_bytes, confirmed=confirmed
        )
        return replace(found, gpus_idle=found.gpus_idle - _gpus_of_others(observation)) if all_exited else found

    def _stop_line(self, observation: Observation) -> str | None:
        """What a log says about a stop from outside, unless it is of the previous run. Kept until the job restarts."""
        if self._stopped is not None:
            return self._stopped[1]
        return min(_stop_lines(observation) - (self._earlier_stop_lines or frozenset()), default=None)

    def _is_unrelated(self, exited: tuple[ExitedProcess, ...], processes: ProcessTracker) -> bool:
        """Somebody's small test on GPUs that wait for the job: no sign of the job has been seen, and the processes that
        exited used next to no memory."""
        if processes.has_ranks or self._has_run or any(each.cause for each in exited):
            return False
        return all(each.held_bytes is not None and each.held_bytes < MIN_JOB_BYTES for each in exited)

    def _is_final(
        self,
        observation: Observation,
        step_rate: StepRateTracker,
        saves: CheckpointSaveTracker,
        exited: tuple[ExitedProcess, ...],
    ) -> bool:
        """The planned last step is reached, every rank reports done, or the newest checkpoint is of the last step."""
        progress, newest = observation.sample.progress, saves.newest_complete
        if observation.phases == DONE_PHASES:
            return True
        if progress.step is not None and progress.total_steps is not None:
            # Counted from zero, the last step is one less; then its checkpoint must confirm it.
            last = progress.total_steps - 1
            saved = newest is not None and newest.step is not None and newest.step >= last
            return progress.step >= progress.total_steps or (progress.step >= last and saved)
        if newest is None or any(each.cause for each in exited):
            return False
        if progress.step is not None:
            return newest.step is not None and newest.step >= progress.step
        if step_rate.has_counter or observation.spec.has_progress_source:
            return False
        if newest.age_seconds is None or self._exited_since is None:
            return False
        return newest.age_seconds - (observation.now - self._exited_since) <= FINAL_SAVE_SECONDS


def _describe_remaining(observation: Observation, processes: ProcessTracker) -> str:
    """What is known of the job's other processes, to follow "8 processes of the job exited"."""
    newly_missing, living = processes.newly_missing(), processes.living()
    unlisted = [node for node in observation.sample.nodes if node.processes is None]
    hidden = [node.node for node in unlisted if not node.exited_processes]
    text = f", and {newly_missing} more are missing from the newest sample" if newly_missing else ""
    if living:
        return f"{text}; {living} still {'exists' if living == 1 else 'exist'}"
    if hidden:
        return f"{text}; the processes of {_some(hidden)} cannot be listed"
    if newly_missing:
        return text
    return ", and none of the known processes is left" if unlisted else ", and none is left"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _describe_kernel_log(observation: Observation, nodes: Iterable[str], subject: str) -> str:
    """What it means that the kernel log has no entry about `subject`: nothing, where it cannot be read."""
    unread = sorted(
        state.node for state in observation.sample.nodes if state.node in set(nodes) and state.kernel_log_error
    )
    if unread:
        return f"the kernel log of {_some(unread)} cannot be read"
    return f"the kernel log has no entry about {subject}"


def _stop_lines(observation: Observation) -> frozenset[str]:
    return frozenset(s.stopped for s in observation.sample.progress.sources if s.stopped is not None)


def _unfinished_save(observation: Observation, saves: CheckpointSaveTracker) -> CheckpointEntry | None:
    """The save of the last step where it is incomplete: processes that exit now leave it incomplete."""
    entry = None if saves.save is None else saves.save.entry
    return None if observation.phases == DONE_PHASES else entry


def _bytes_in_use(sample: JobSample) -> float:
    return sum(ranked.gpu.memory_used_bytes or 0.0 for ranked in sample.gpus)


# The findings.


def first_exits(exited: tuple[ExitedProcess, ...]) -> tuple[ExitedProcess, ...]:
    """Those last seen before the first of all was noticed missing. Which of several was the first cannot be known."""
    first = min((each.since_seconds for each in exited), default=0.0)
    return tuple(each for each in exited if each.last_seen_seconds < first)


def simultaneous_exit(observation: Observation, together: tuple[ExitedProcess, ...]) -> tuple[str, tuple[Suspect, ...]]:
    """Several processes that exited between two samples, in words. Suspects are at most the nodes that lost some, where
    other nodes lost none."""
    ranks = sorted(each.process.rank for each in together if each.process.rank is not None)
    known = len(ranks) == len(together)
    names = [str(rank) for rank in ranks] if known else [str(each.suspect) for each in together]
    nodes = sorted({each.node for each in together})
    who = ("ranks " if known else "") + ", ".join(names[:MAX_NAMED])
    who += f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    some_nodes = len(nodes) < len(observation.sample.nodes)
    who += f" on {nodes[0]}" if known and some_nodes and len(nodes) == 1 else ""
    text = f"{who} exited between two samples; it is unknown which exited first"
    return text, tuple(map(Suspect, nodes)) if some_nodes else ()


def crash_finding(
    observation: Observation,
    since: float,
    exited: tuple[ExitedProcess, ...],
    remaining: str,
    most_in_use_bytes: float,
    *,
    confirmed: bool = True,
) -> Finding:
    """Processes exited before the job was done. `exited` is empty where only released GPU memory shows it; `remaining`:
    what is known of the other processes; `most_in_use_bytes`: on all GPUs together, before that."""
    sample = observation.sample
    first = first_exits(exited)
    named = tuple(each for each in exited if each.cause) or (first if len(first) == 1 else ())
    suspects = tuple(each.suspect for each in named)
    who = _some([str(suspect) for suspect in suspects])
    advice = CRASH_ADVICE
    count = "1 process" if len(exited) == 1 else f"{len(exited)} processes"
    evidence = [f"{count} of the job exited{remaining}"]
    for one in named[:1]:
        no_entry = _describe_kernel_log(observation, (one.node,), "its exit")
        evidence.append(
            f"process {one.process.pid} ({one.process.name}) of {one.suspect}: "
            + (one.cause or f"{no_entry}; read its own log")
        )
    if exited and not named:
        who, suspects = simultaneous_exit(observation, first)
        evidence.append(_describe_kernel_log(observation, {each.node for each in first}, "these exits"))
        advice = SIMULTANEOUS_EXIT_ADVICE
    if not exited:
        gpus = format_count(len(sample.gpus), "GPU")
        hidden = [node.node for node in sample.nodes if node.processes is None]
        who = f"the memory of all {gpus} was released, so its processes have exited"
        advice = SIMULTANEOUS_EXIT_ADVICE
        evidence = [
            f"memory in use on {gpus}: {format_bytes(_bytes_in_use(sample))} in total, before that up to "
            f"{format_bytes(most_in_use_bytes)}"
        ]
        if hidden:
            evidence.append(f"the processes of {_some(hidden)} cannot be listed")
    if not confirmed:
        evidence.append("no step of the job was seen, so this may have been a test run before the actual start")
    progress = observation.sample.progress
    if progress.step is not None:
        total = "" if progress.total_steps is None else f" of {progress.total_steps:,}"
        evidence.append(f"last step {progress.step:,}{total}{progress.guess_note}")
    kind = ALERT_KINDS[AlertName.JOB_CRASHED]
    return Finding(
        job=observation.spec.name,
        alert=kind.name,
        severity=kind.severity if confirmed else Severity.WARNING,
        scope="",
        summary=f"{observation.spec.name} {'crashed' if confirmed else 'may have crashed'}: {who}.",
        evidence=tuple(evidence),
        advice=f"{advice}{kind.advice}",
        since_seconds=since,
        confirmed=confirmed,
        suspects=suspects,
        gpus_idle=observation.sample.gpu_count,
    )


def _gpus_of_others(observation: Observation) -> int:
    """GPUs that work although every process of the job has exited: another job uses them, so they are not wasted."""
    return sum((ranked.gpu.utilization_percent or 0.0) > IDLE_PERCENT for ranked in observation.sample.gpus)


def completion_finding(
    observation: Observation, since: float, newest: CheckpointEntry | None, exited: int = 0
) -> Finding:
    """The job is done. `exited`: how many of its processes were seen and are gone."""
    step = observation.sample.progress.step
    evidence = [] if step is None else [f"last step {step:,}{observation.sample.progress.guess_note}"]
    if exited:
        evidence.append("its only process has exited" if exited == 1 else f"all {exited} processes have exited")
    if newest is not None:
        evidence.append(f"checkpoint {newest.name} is complete, {format_bytes(newest.bytes)}")
    kind = ALERT_KINDS[AlertName.JOB_COMPLETED]
    return Finding(
        job=observation.spec.name,
        alert=kind.name,
        severity=kind.severity,
        scope="",
        summary=f"{observation.spec.name} is complete.",
        evidence=tuple(evidence),
        advice=kind.advice,
        since_seconds=since,
    )


def stop_finding(observation: Observation, since: float, stop_line: str, newest: CheckpointEntry | None) -> Finding:
    """Stopped from outside before it was done, as its log says: no crash. `stop_line`: "preempted: LINE OF THE LOG"."""
    step = observation.sample.progress.step
    what, _, line = stop_line.partition(": ")
    evidence = [f"its log says: {line}"]
    if newest is not None:
        evidence.append(f"newest complete checkpoint: {newest.name}")
    kind = ALERT_KINDS[AlertName.JOB_COMPLETED]
    return Finding(
        job=observation.spec.name,
        alert=kind.name,
        severity=kind.severity,
        scope="",
        summary=f"{observation.spec.name} was {what}"
        + ("." if step is None else f" at step {step:,}, before it finished."),
        evidence=tuple(evidence),
        advice="Check that the job was put back into the queue. When it is restarted, it resumes from its last "
        "checkpoint.",
        since_seconds=since,
    )
