"""Real jobs that hang."""

from tests.watcher.diagnose.hung_jobs.hung import KINDS, HungJob, Kind, hung_job

__all__ = ["KINDS", "HungJob", "Kind", "hung_job"]
