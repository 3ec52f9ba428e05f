"""Real jobs that hang."""

from tests.watcher.diagnosis.hung_jobs.runner import KINDS, HungJob, Kind, hung_job

__all__ = ["KINDS", "HungJob", "Kind", "hung_job"]
