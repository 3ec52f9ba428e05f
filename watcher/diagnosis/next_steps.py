"""The recommended next step: text from next_steps.toml, with the commands to run on the nodes of the culprits. Pure.

What is known (node, pid, GPU) is filled into the commands, what is not is described in words. Node names come from
files of any origin, and people paste these commands into a shell: only a plain host name becomes part of a command.
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

MAX_COMMANDS: Final = 3  # an alert with more is not readable on a phone
SAFE_NODE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}")


@dataclass(frozen=True, slots=True)
class CommandTarget:
    """Where to run a command. None: unknown."""

    rank: int | None  # None: the whole node
    node: str | None
    gpu: int | None = None
    pid: int | None = None


def recommend_next_step(
    verdict: DiagnosisVerdict,
    cause: HangCause,
    culprits: Sequence[Culprit],
    evidence: Evidence,
    no_hang: bool,
    ras: RasAnalysis | None,
    collectives: CollectiveAnalysis | None,
) -> str:
    """One paragraph for the person on call."""
    step = _load_next_steps()[_choose_row(verdict, cause, culprits, evidence, no_hang, collectives)]
    targets = command_targets(culprits, evidence, ras)
    return step["text"].format(
        run=f"Run {format_commands(step.get('run', ''), step.get('bare', ''), targets)}",
        then=format_commands(step.get("then", ""), step.get("then", ""), targets),
        ranks=format_ranks(culprit.rank for culprit in culprits) if culprits else "each rank",
    )


def _choose_row(
    verdict: DiagnosisVerdict,
    cause: HangCause,
    culprits: Sequence[Culprit],
    evidence: Evidence,
    no_hang: bool,
    collectives: CollectiveAnalysis | None,
) -> str:
    if no_hang:
        return "no_hang"
    first = culprits[0] if culprits else Culprit(-1)
    printed = next((log.failure for log in evidence.logs if log.rank == first.rank and log.failure is not None), None)
    # The log of the rank names the error itself: better advice than the row of the cause.
    if printed is not None and cause.value == printed.cause and printed.kind in (UNCLASSIFIED_EXCEPTION, SIZE_MISMATCH):
        return printed.kind
    if cause is HangCause.RANK:
        return _choose_row_for_rank(first, evidence) if culprits else "gone"
    # Different collectives because of the data means uneven shares; a rank that never arrived waits for its loader.
    if cause is HangCause.DATA and verdict is DiagnosisVerdict.NEVER_ARRIVED:
        return "loader"
    return cause.value if cause is not HangCause.UNKNOWN else _choose_row_for_unknown(evidence, collectives)


def _choose_row_for_unknown(evidence: Evidence, collectives: CollectiveAnalysis | None) -> str:
    """Never asks for evidence that is already there."""
    # Waits in two groups without a culprit: the ranks use the groups in opposite orders.
    if collectives is not None and len({wait.group for wait in collectives.waits}) > 1:
        return "opposite_order"
    # All ranks have stacks already: only stacks taken later show which rank moves.
    if {each.rank for each in evidence.stacks} >= known_ranks(evidence) and evidence.stacks:
        return "stacks"
    return "unknown" if evidence.records else "unrecorded"


def _choose_row_for_rank(culprit: Culprit, evidence: Evidence) -> str:
    process = next((each for each in evidence.processes if each.rank == culprit.rank), None)
    if process is not None:
        return {"T": "stopped", "t": "stopped", None: "gone", "Z": "gone"}.get(process.state, "rank")
    live = evidence.live_ranks
    gone = any(each.rank == culprit.rank and each.alive is False for each in live)
    return "gone" if gone or any(each.rank == culprit.rank for each in evidence.exit_reports) else "rank"


def command_targets(culprits: Sequence[Culprit], evidence: Evidence, ras: RasAnalysis | None) -> list[CommandTarget]:
    """The culprits, with node, GPU and pid from whichever source knows them; without culprits, all known nodes."""
    nodes = {*nodes_by_rank(evidence).values(), *(polls.node for polls in evidence.ras)} - {""}
    if not culprits:
        return [CommandTarget(None, node) for node in sorted(nodes)] or [CommandTarget(None, None)]
    suspects: dict[int | None, RasSuspect] = {}
    if ras is not None:
        suspects = {ras_suspect_job_rank(each, ras, evidence): each for each in ras.suspects}
    # With a single node, the culprit must be on it.
    only = nodes.pop() if len(nodes) == 1 else None
    targets = []
    for culprit in culprits:
        process = next((each for each in evidence.processes if each.rank == culprit.rank), None)
        suspect = suspects.get(culprit.rank)
        targets.append(
            CommandTarget(
                culprit.rank,
                culprit.node or (suspect.host if suspect is not None else None) or only,
                culprit.gpu if culprit.gpu is not None or suspect is None else suspect.gpu,
                process.pid if process is not None else suspect.pid if suspect is not None else None,
            )
        )
    return targets


def format_commands(run: str, bare: str, targets: Iterable[CommandTarget]) -> str:
    """`ssh node-01 'py-spy dump --pid 4003'` and `py-spy dump` for the process of rank 9 on its node.

    `run`: command with {pid} or {gpu}; `bare`: the same without them, where they are unknown.
    """
    whole: dict[str, None] = {}
    rest: dict[str, list[int]] = {}  # ranks by node, "" where the node is unknown
    for target in targets:
        command = run.format(pid=target.pid, gpu=target.gpu)
        needs_pid = "{pid}" in run
        if ("{gpu}" in run and target.gpu is None) or (needs_pid and target.pid is None):
            command = bare
        if target.node and SAFE_NODE_NAME.fullmatch(target.node) and not (needs_pid and target.pid is None):
            # A dictionary keeps the order and drops repetitions: one command for each node is enough for `dmesg`.
            whole[f"`ssh {target.node} '{command}'`"] = None
        else:
            named = target.node if target.node and SAFE_NODE_NAME.fullmatch(target.node) else ""
            rest.setdefault(named, []).extend([] if target.rank is None else [target.rank])
    listed = [*whole, *(_command_with_location(run, bare, node, ranks) for node, ranks in rest.items())]
    if len(listed) > MAX_COMMANDS:
        more = f"{len(listed) - MAX_COMMANDS:,} more like these"
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
