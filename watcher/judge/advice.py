"""What to do next, one sentence a state. The person who reads it was asleep a minute ago."""

from __future__ import annotations

from typing import Final

from watcher.judge.verdict import PowerState

ADVICE: Final[dict[PowerState, str]] = {
    PowerState.COMPUTE: "Nothing to do.",
    PowerState.COMMUNICATION: "If tokens per second fell, look at the links; else nothing to do.",
    PowerState.STARVATION: "Look upstream: data loading, tokenising, the file system, host CPU.",
    PowerState.CHECKPOINT: "Wait for the save; look at the checkpoint directory if its files do not grow.",
    PowerState.HANG: "Look at the step counter. If it stands: before the watchdog or anybody ends the job, have its "
    "flight records and stacks (`wattwatch serve` collects them by itself where capture is on); then restart from the "
    "last checkpoint.",
    PowerState.IDLE: "Nothing runs here. If a job should, look for why it ended.",
    PowerState.GPU_FAULT: "Read the kernel log for Xid lines, drain the node, reset or replace the board.",
    PowerState.STRAGGLER: "Compare clocks, temperature and throttle reasons of the boards that work with the others.",
    PowerState.THROTTLE: "Look at cooling and power supply of the named boards.",
    PowerState.WAITING: "Look at the step counter: start-up and evaluation look like this, and so does a job that lost "
    "its feed.",
    PowerState.UNKNOWN: "Give the job's progress (a log or a run directory) to settle it.",
}
