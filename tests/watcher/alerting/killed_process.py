"""Started by test_kill.py as a separate process: reports one hang, and kills itself at the given step.

python -m tests.watcher.alerting.killed_process DIRECTORY PORT STEP

STEP is before_commit, after_commit, before_outcome, after_outcome or never.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.watcher.alerting.fakes import finding, receiver, wait_until
from wattwatch.collectors.clock import Clock
from wattwatch.watcher.alerting.alert_manager import AlertManager
from wattwatch.watcher.common.state_store import Delivery, EpisodeRow, StateStore


class SelfKillingStore(StateStore):
    """The real store, which sends kill -9 to this process before or after one of its commits."""

    step = "never"

    def record(self, episodes: Sequence[EpisodeRow], deliveries: Sequence[Delivery]) -> None:
        self.die("before_commit")
        super().record(episodes, deliveries)
        self.die("after_commit")

    def record_outcome(self, delivery: Delivery, outcome: str, wall_seconds: float) -> None:
        self.die("before_outcome")
        super().record_outcome(delivery, outcome, wall_seconds)
        self.die("after_outcome")

    def die(self, step: str) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(directory: Path, port: int, step: str) -> None:
    clock = Clock()
    store = SelfKillingStore(directory / "state.db")
    store.step = step
    manager = AlertManager(store, [receiver(directory, port)], (), clock)
    manager.start()
    manager.observe([finding(since=clock.monotonic())], frozenset({"", "llama"}), clock.monotonic(), clock.wall())
    wait_until(lambda: manager.stats().waiting == 0)
    manager.stop()
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
