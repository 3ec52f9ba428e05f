"""How a job ends: complete, or crashed. Processes that were there are gone; or, where nobody can list processes, the
memory of all boards is given back."""

from __future__ import annotations

from typing import Final

from wattwatch.collectors.samples import CheckpointEntry
from wattwatch.watcher.detection import job_exit_findings as end_findings
from wattwatch.watcher.detection.model import Finding
from wattwatch.watcher.detection.trackers.checkpoint_save import CheckpointSaveTracker
from wattwatch.watcher.detection.trackers.observation import Observation, Streak
from wattwatch.watcher.detection.trackers.processes import DONE_PHASE, ExitedProcess, ProcessTracker
from wattwatch.watcher.detection.trackers.step_rate import StepRateTracker

RESUMED_SECONDS: Final = 30.0  # steps that are counted this long after a crash: the job goes on without those ranks
EXIT_GRACE_SECONDS: Final = 120.0  # the last rank may write or upload while the others have left
LISTING_SECONDS: Final = 15.0  # a checkpoint directory is listed each other second, and file servers show late
# Without a counter: a checkpoint that was complete this shortly before everybody left was the last one.
FINAL_SAVE_SECONDS: Final = 60.0
# A log that stands for this long already when it is first read was written by a run before.
OLD_RUN_SECONDS: Final = 300.0
# A process that never had so much on its boards is no training job; a bare driver keeps up to 0.6 GB itself.
MIN_JOB_BYTES: Final = 1e9
RELEASED_SECONDS: Final = 15.0
DONE_PHASES: Final = frozenset({DONE_PHASE})


class JobExitTracker:
    """Follows the end of one job."""

    def __init__(self) -> None:
        self._completed_since: float | None = None
        self._crashed_since: float | None = None
        self._gone_since: float | None = None
        self._gone_count = 0
        self._stopped: tuple[float, str] | None = None  # since when, and what its log says
        self._old_stops: frozenset[str] | None = None  # told by logs of the run before; None: not looked at yet
        self._ran = False  # its counter moved, or stood for a short time only
        self._held = False  # its boards had memory in use
        self._released = Streak()
        self.memory_returned = False  # in this very look memory is in use again, where no process can be listed

    def clear(self) -> None:
        """The job was started again."""
        self._completed_since = self._crashed_since = self._gone_since = None
        self._gone_count = 0
        self._stopped = self._old_stops = None
        self._released.clear()

    def watch(self, observation: Observation, step_rate: StepRateTracker) -> None:
        """Take note of whether the job runs."""
        progress = observation.sample.progress
        if self._old_stops is None:
            self._old_stops = _stop_lines(observation)
        young = progress.step is not None and (progress.age_seconds or 0.0) < OLD_RUN_SECONDS
        self._ran = self._ran or young or step_rate.advances > 0
        self.memory_returned = False
        in_use = [ranked.gpu.memory_used_bytes for ranked in observation.sample.gpus]
        told = [used for used in in_use if used is not None]
        if observation.alive is not None or len(told) < len(in_use) or not observation.sample.complete:
            # Who can list processes needs no guess; half a picture, or a board that does not say, allows none.
            if observation.alive is not None:
                self._released.clear()
            return
        if any(used >= MIN_JOB_BYTES for used in told):
            self.memory_returned = self._is_released
            self._held = True
            self._released.clear()
        elif self._held and told:
            self._released.update(True, observation)

    @property
    def _is_released(self) -> bool:
        return self._released.lasted(2, RELEASED_SECONDS)

    def update(
        self,
        observation: Observation,
        step_rate: StepRateTracker,
        saves: CheckpointSaveTracker,
        processes: ProcessTracker,
    ) -> Finding | None:
        """Completion or crash, whichever is true now."""
        crashed_for = 0.0 if self._crashed_since is None else observation.now - self._crashed_since
        if crashed_for > RESUMED_SECONDS and step_rate.stalled_seconds == 0.0:
            processes.forget_missing()
            self._crashed_since = None
        exited = processes.exited()
        if exited and self._is_nobodys(observation, exited, processes):
            processes.forget_missing()
            exited = ()
        left = bool(exited) or self._is_released
        leaving = (bool(exited) and processes.all_exited) or self._is_released
        if not left:
            self._gone_since = None
        elif self._gone_since is None or len(exited) > self._gone_count:
            self._gone_since = observation.now  # each one that leaves shows that they are still leaving
        self._gone_count = len(exited)
        final = self._is_final(observation, step_rate, saves, exited)
        if (
            final
            and (leaving or observation.phases == DONE_PHASES)
            and _unfinished_last_save(observation, saves) is None
        ):
            self._completed_since = observation.now if self._completed_since is None else self._completed_since
        if self._completed_since is not None:
            return end_findings.completion_finding(observation, self._completed_since, saves.newest_complete)
        # After the last step ranks leave one by one, and a checkpoint's mark may be there and not be listed yet.
        patience = 0.0 if not final else LISTING_SECONDS if leaving or not step_rate.known else EXIT_GRACE_SECONDS
        if self._gone_since is None or observation.now - self._gone_since < patience:
            return None
        stop = None if any(g.cause for g in exited) else self._stop(observation)
        if stop is not None and leaving:
            self._stopped = self._stopped or (observation.now, stop)
            return end_findings.stop_finding(observation, *self._stopped, saves.newest_complete)
        if stop is not None and observation.now - self._gone_since < EXIT_GRACE_SECONDS:
            return None  # they were asked to leave, and do
        if not exited and not self._ran:
            return None  # memory that is given back, with no process and no counter to tell more: the boards are idle
        self._crashed_since = observation.now if self._crashed_since is None else self._crashed_since
        sure = self._ran or processes.ranked or not _has_progress_source(observation) or any(g.cause for g in exited)
        return end_findings.crash_finding(observation, self._crashed_since, exited, all_gone=leaving, confirmed=sure)

    def _stop(self, observation: Observation) -> str | None:
        """What a log says of a stop from outside that is not of the run before; it holds until the job comes back."""
        if self._stopped is not None:
            return self._stopped[1]
        return min(_stop_lines(observation) - (self._old_stops or frozenset()), default=None)

    def _is_nobodys(
        self, observation: Observation, exited: tuple[ExitedProcess, ...], processes: ProcessTracker
    ) -> bool:
        """Somebody's small test on boards that wait for the job: nothing of the job has been seen, and those who left
        had next to nothing on their boards."""
        if processes.ranked or self._ran or any(g.cause for g in exited):
            return False
        return all(g.held_bytes is not None and g.held_bytes < MIN_JOB_BYTES for g in exited)

    def _is_final(
        self,
        observation: Observation,
        step_rate: StepRateTracker,
        saves: CheckpointSaveTracker,
        exited: tuple[ExitedProcess, ...],
    ) -> bool:
        """The planned last step is reached, every rank says done, or the newest checkpoint is of the last step."""
        progress, newest = observation.sample.progress, saves.newest_complete
        if observation.phases == DONE_PHASES:
            return True
        if progress.step is not None and progress.total_steps is not None:
            # Counted from zero the last step is one less; then its checkpoint must say so.
            last = progress.total_steps - 1
            saved = newest is not None and newest.step is not None and newest.step >= last
            return progress.step >= progress.total_steps or (progress.step >= last and saved)
        if newest is None or any(g.cause for g in exited):
            return False
        if progress.step is not None:
            return newest.step is not None and newest.step >= progress.step
        if (
            step_rate.known
            or _has_progress_source(observation)
            or newest.age_seconds is None
            or self._gone_since is None
        ):
            return False
        return newest.age_seconds - (observation.now - self._gone_since) <= FINAL_SAVE_SECONDS


def _stop_lines(observation: Observation) -> frozenset[str]:
    return frozenset(s.stopped for s in observation.sample.progress.sources if s.stopped is not None)


def _has_progress_source(observation: Observation) -> bool:
    return observation.spec.run_directory is not None or bool(observation.spec.logs)


def _unfinished_last_save(observation: Observation, saves: CheckpointSaveTracker) -> CheckpointEntry | None:
    """The save of the last step, where it is not complete: who leaves now leaves it torn."""
    entry = None if saves.save is None else saves.save.entry
    return None if observation.phases == DONE_PHASES else entry
