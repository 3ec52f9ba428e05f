"""How the daemon looks into a hung job: over the fleet's own connections, with what the configuration allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from collectors.clock import Clock
from collectors.ssh.fleet import Fleet
from watcher.concluding import Concluding
from watcher.config import Config
from watcher.diagnose.capture.capture import capture
from watcher.diagnose.capture.plan import plan_of
from watcher.diagnose.diagnosis import Diagnosis
from watcher.diagnosing import Diagnosing
from watcher.incident_page import page_of
from watcher.inquiry import Inquiry
from watcher.judge.job_sample import JobSpec
from watcher.snapshot import JobView
from watcher.tell.episodes import Diagnosed
from watcher.tell.teller import Teller


def diagnosing_of(
    config: Config,
    specs: Sequence[JobSpec],
    fleet: Fleet,
    teller: Teller,
    clock: Clock,
    concluding: Concluding,
    incidents: Path,
) -> Diagnosing:
    """`incidents`: where the recordings of incidents lie."""
    by_name = {spec.name: spec for spec in specs}
    settings = {job.name: job.capture_settings for job in config.jobs}

    def ask(view: JobView, directory: Path) -> None:
        plan = plan_of(by_name[view.name], view.sample, settings[view.name])
        capture(plan, fleet.channels, directory, clock)

    def tell(episode_id: str, diagnosis: Diagnosis) -> None:
        teller.diagnosed(episode_id, Diagnosed(diagnosis.summary, diagnosis.conclusive, diagnosis.advice))

    allowed = {job.name: job.capture for job in config.jobs}
    return Diagnosing(incidents, allowed, Inquiry(ask, concluding.conclude, page_of, clock.wall), tell, clock)
