"""The next step for people: commands with what is known filled in, and words for what is not. Pure.

Nodes come from files of any origin, and people paste what stands here: a name that is more than a name is never in a
command.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from wattwatch.watcher.common.formatting import format_ranks
from wattwatch.watcher.diagnosis.model import (
    CollectiveAnalysis,
    Culprit,
    DiagnosisVerdict,
    Evidence,
    HangCause,
    known_ranks,
    nodes_by_rank,
)
from wattwatch.watcher.diagnosis.nccl_ras.model import RasAnalysis, RasSuspect
from wattwatch.watcher.diagnosis.signals.from_job import ras_suspect_job_rank
from wattwatch.watcher.diagnosis.stacks.log_errors import SIZE_MISMATCH, UNCLASSIFIED_EXCEPTION

MAX_COMMANDS: Final = 3  # that have a command of their own
SAFE_NODE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}")


@dataclass(frozen=True, slots=True)
class CommandTarget:
    """Where a command would run. None: not known; `rank` None: the whole node."""

    rank: int | None
    node: str | None
    gpu: int | None = None
    pid: int | None = None


def recommend_next_step(
    verdict: DiagnosisVerdict,
    cause: HangCause,
    culprits: Sequence[Culprit],
    evidence: Evidence,
    nothing_open: bool,
    ras: RasAnalysis | None,
    reading: CollectiveAnalysis | None,
) -> str:
    step = _load_next_steps()[_choose_row(verdict, cause, culprits, evidence, nothing_open, reading)]
    spots = command_targets(culprits, evidence, ras)
    return step["text"].format(
        run=f"Run {format_commands(step.get('run', ''), step.get('bare', ''), spots)}",
        then=format_commands(step.get("then", ""), step.get("then", ""), spots),
        ranks=format_ranks(culprit.rank for culprit in culprits) if culprits else "each rank",
    )


def _choose_row(
    verdict: DiagnosisVerdict,
    cause: HangCause,
    culprits: Sequence[Culprit],
    evidence: Evidence,
    nothing_open: bool,
    reading: CollectiveAnalysis | None,
) -> str:
    if nothing_open:
        return "nothing"
    first = culprits[0] if culprits else Culprit(-1)
    printed = next((log.failure for log in evidence.logs if log.rank == first.rank and log.failure is not None), None)
    if printed is not None and cause.value == printed.cause and printed.kind in (UNCLASSIFIED_EXCEPTION, SIZE_MISMATCH):
        return printed.kind
    if cause is HangCause.RANK:
        return _choose_row_for_rank(first, evidence) if culprits else "gone"
    if cause is HangCause.DATA and verdict is DiagnosisVerdict.NEVER_ARRIVED:
        return "loader"
    return cause.value if cause is not HangCause.UNKNOWN else _choose_row_for_unknown(evidence, reading)


def _choose_row_for_unknown(evidence: Evidence, reading: CollectiveAnalysis | None) -> str:
    """What is there already is not asked for again."""
    if reading is not None and len({wait.group for wait in reading.waits}) > 1:
        return "circle"
    if {each.rank for each in evidence.stacks} >= known_ranks(evidence) and evidence.stacks:
        return "stacks"
    return "unknown" if evidence.records else "unrecorded"


def _choose_row_for_rank(culprit: Culprit, evidence: Evidence) -> str:
    process = next((each for each in evidence.processes if each.rank == culprit.rank), None)
    if process is not None:
        return {"T": "stopped", "t": "stopped", None: "gone", "Z": "gone"}.get(process.state, "rank")
    seen = evidence.live_ranks
    gone = any(each.rank == culprit.rank and each.alive is False for each in seen)
    return "gone" if gone or any(each.rank == culprit.rank for each in evidence.endings) else "rank"


def command_targets(culprits: Sequence[Culprit], evidence: Evidence, ras: RasAnalysis | None) -> list[CommandTarget]:
    """Of the culprits, from whichever source tells; without any the nodes that are known."""
    nodes = {*nodes_by_rank(evidence).values(), *(polls.node for polls in evidence.ras)} - {""}
    if not culprits:
        return [CommandTarget(None, node) for node in sorted(nodes)] or [CommandTarget(None, None)]
    suspects: dict[int | None, RasSuspect] = {}
    if ras is not None:
        suspects = {ras_suspect_job_rank(each, ras, evidence): each for each in ras.suspects}
    only = nodes.pop() if len(nodes) == 1 else None
    spots = []
    for culprit in culprits:
        process = next((each for each in evidence.processes if each.rank == culprit.rank), None)
        suspect = suspects.get(culprit.rank)
        spots.append(
            CommandTarget(
                culprit.rank,
                culprit.node or (suspect.host if suspect is not None else None) or only,
                culprit.gpu if culprit.gpu is not None or suspect is None else suspect.gpu,
                process.pid if process is not None else suspect.pid if suspect is not None else None,
            )
        )
    return spots


def format_commands(run: str, bare: str, spots: Iterable[CommandTarget]) -> str:
    """`ssh node-01 'py-spy dump --pid 4003'` and `py-spy dump` for the process of rank 9 on its node."""
    whole: dict[str, None] = {}
    rest: dict[str, list[int]] = {}  # ranks by place, "" where the node is not known
    for spot in spots:
        command = run.format(pid=spot.pid, gpu=spot.gpu)
        of_process = "{pid}" in run
        if ("{gpu}" in run and spot.gpu is None) or (of_process and spot.pid is None):
            command = bare
        if spot.node and SAFE_NODE_NAME.fullmatch(spot.node) and not (of_process and spot.pid is None):
            whole[f"`ssh {spot.node} '{command}'`"] = None
        else:
            named = spot.node if spot.node and SAFE_NODE_NAME.fullmatch(spot.node) else ""
            rest.setdefault(named, []).extend([] if spot.rank is None else [spot.rank])
    listed = [*whole, *(_command_with_location(run, bare, node, ranks) for node, ranks in rest.items())]
    if len(listed) > MAX_COMMANDS:
        more = f"{len(listed) - MAX_COMMANDS:,} more of the same"
        return f"{', '.join(listed[:MAX_COMMANDS])} and {more}"
    return " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)


def _command_with_location(run: str, bare: str, node: str, ranks: Sequence[int]) -> str:
    who = format_ranks(ranks) if ranks else "each rank"
    several = len(ranks) > 1
    if "{pid}" in run:
        of = f" for the process{'es' if several else ''} of {who}" if ranks else " for each rank"
        where = node or (("their nodes" if several else "its node") if ranks else "its node")
        return f"`{bare}`{of} on {where}"
    where = node or (f"the node{'s' if several else ''} of {who}" if ranks else "each node")
    return f"`{bare}` on {where}"


@cache
def _load_next_steps() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(resources.files(__package__).joinpath("next_steps.toml").read_text("utf-8"))
