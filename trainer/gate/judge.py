"""From all reports to the verdict. Pure: every process of the gate judges the same reports, and says the same.

The six are ours: the paper tells that there were six, that block spread is a warning and that the minimum is recorded
(section 7), not which they were.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.gate.judge_checkpoint import judge_checkpoint
from trainer.gate.judge_data import count_blocks, judge_blocks, judge_evenness, judge_shards
from trainer.gate.judge_nodes import judge_devices, judge_world
from trainer.gate.report import NodeReport
from trainer.gate.verdict import GateVerdict


def judge(reports: Sequence[NodeReport], note: str = "") -> GateVerdict:
    """All six. The first report is rank 0's, or the only one; `note` says why ranks are missing, if they are."""
    settings = reports[0].settings
    shards = {shard.rank: shard for report in reports for shard in report.shards}
    evenness = count_blocks(settings, shards)
    checks = (
        judge_world(reports, note),
        judge_blocks(settings, shards),
        judge_shards(reports, shards),
        judge_evenness(reports, shards, evenness),
        judge_checkpoint(reports, evenness),
        judge_devices(reports),
    )
    return GateVerdict(checks, evenness)
