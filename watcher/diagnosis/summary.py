"""The sentences of a diagnosis: which ranks, where, in which operation, what the others do, and why. Pure.

They are read in an alert on a phone: short, with names and numbers, and the suspect first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from wattwatch.watcher.common.formatting import agree_with_count, format_count, format_ranks
from wattwatch.watcher.diagnosis.collectives.operations import describe_operation
from wattwatch.watcher.diagnosis.flight_recorder.model import position_text
from wattwatch.watcher.diagnosis.model import (
    CollectiveAnalysis,
    Culprit,
    DiagnosisVerdict,
    Evidence,
    GroupMember,
    GroupSlotStatus,
    MemberState,
    nodes_by_rank,
)
from wattwatch.watcher.diagnosis.nccl_ras.model import RasFinding
from wattwatch.watcher.diagnosis.signals.combine import CombinedSignals
from wattwatch.watcher.diagnosis.signals.from_job import RAS_RANK_TEXT
from wattwatch.watcher.diagnosis.signals.root_cause import is_behind_its_group
from wattwatch.watcher.diagnosis.signals.signal import (
    EXIT_REPORTS,
    FLIGHT_RECORDER,
    KERNEL_LOG,
    LOGS,
    PROCESSES,
    REACHABILITY,
    STACKS,
    Signal,
    source_label,
)

MISMATCH_VERDICTS: Final = (DiagnosisVerdict.DESYNC, DiagnosisVerdict.MISMATCH)
# Of several sources that describe a rank, these explain the most.
MOST_INFORMATIVE_FIRST: Final = (KERNEL_LOG, REACHABILITY, LOGS, PROCESSES, EXIT_REPORTS, STACKS)
MAX_NODES_NAMED: Final = 3

NOT_ARRIVED_TEXT: Final[Mapping[MemberState | None, str]] = {
    MemberState.SILENT: "has not launched it and has no pending operation",
    MemberState.BEHIND: "has not launched it and waits in another operation",
    MemberState.ABSENT: "left no flight record",
}


# Culprits


def describe_culprits(
    ranks: frozenset[int],
    evidence: Evidence,
    signals: Sequence[Signal],
    collectives: CollectiveAnalysis | None,
) -> tuple[Culprit, ...]:
    nodes = nodes_by_rank(evidence)
    gpus = {each.rank: each.gpu for each in evidence.live_ranks}
    culprits = []
    for rank in sorted(ranks):
        state = "" if collectives is None else describe_member_state(collectives, rank)
        doing = "; ".join(text for text in (state, describe_rank_from_signals(rank, signals)) if text)
        culprits.append(Culprit(rank, nodes.get(rank), gpus.get(rank), doing))
    return tuple(culprits)


def describe_rank_from_signals(rank: int, signals: Sequence[Signal], joiner: str = "; ") -> str:
    """Completes "rank 3 ..." from the most informative sources; empty if none describes the rank."""
    texts = {signal.source: text for signal in signals if (text := signal.rank_text.get(rank))}
    informative = [texts[source] for source in MOST_INFORMATIVE_FIRST if source in texts]
    return joiner.join(dict.fromkeys(informative[:2] or list(texts.values())[:1]))


def describe_member_state(collectives: CollectiveAnalysis, rank: int) -> str:
    """Where the rank is in the first group that lists it: `in barrier at sequence number
    7 of default_pg (save, train.py:88)`."""
    for group in collectives.groups:
        member = next((each for each in group.members if each.rank == rank), None)
        if member is None:
            continue
        where = position_text(group.group, group.slot)
        frame = "" if member.frame is None else f"{member.frame.function}, {member.frame.file}:{member.frame.line}"
        if member.operation is not None and member.state is MemberState.WAITING:
            return _with_details(f"in {describe_operation(member.operation)} at {where}", frame)
        if member.state is MemberState.ABSENT:
            return f"left no flight record, so its state at {where} is unknown"
        if member.state in (MemberState.SILENT, MemberState.BEHIND):
            last = "" if member.last_enqueued is None else f"last launched: {member.last_enqueued}"
            return _with_details(f"has not reached {where}", last, frame)
        if member.state is MemberState.AHEAD:
            return _with_details(f"finished {where}", frame)
    return ""


def _with_details(text: str, *details: str) -> str:
    known = "; ".join(detail for detail in details if detail)
    return f"{text} ({known})" if known else text


def format_culprits(culprits: Sequence[Culprit]) -> str:
    """`rank 3 (node-01, GPU 3)`, `ranks 8-15 (node-02)`."""
    ranks = format_ranks(culprit.rank for culprit in culprits)
    nodes = sorted({culprit.node for culprit in culprits if culprit.node})
    if len(culprits) == 1 and culprits[0].gpu is not None:
        nodes.append(f"GPU {culprits[0].gpu}")
    more = f" and {len(nodes) - MAX_NODES_NAMED} more nodes" if len(nodes) > MAX_NODES_NAMED else ""
    return f"{ranks} ({', '.join(nodes[:MAX_NODES_NAMED])}{more})" if nodes else ranks


# The summary


def summarize(
    verdict: DiagnosisVerdict,
    culprits: Sequence[Culprit],
    combined: CombinedSignals,
    signals: Sequence[Signal],
    collectives: CollectiveAnalysis | None,
    step: int | None,
    no_hang: bool,
) -> str:
    """One sentence without a period, for the title of an alert."""
    at_step = "" if step is None else f", step {step:,}"
    progress = next((signal.text for signal in signals if signal.shows_progress), None)
    if no_hang and collectives is None and progress is not None:
        return f"the job is making progress: {progress}"
    if no_hang:
        return f"these records show no hang: the ranks are not waiting in a collective{at_step}"
    group = _relevant_group(collectives, culprits)
    if not culprits:
        return _no_culprit_sentence(verdict, group, collectives, combined, signals) + at_step
    who, several = format_culprits(culprits), len(culprits) > 1
    # What proves the verdict is the contrast between the culprits and the others.
    if group is not None and collectives is not None and verdict in MISMATCH_VERDICTS:
        contrast = _different_collectives_sentence(who, culprits, group)
        contrast = contrast or _opposite_order_sentence(who, culprits, collectives)
        if contrast is not None:
            return contrast + at_step
    text = describe_rank_from_signals(culprits[0].rank, signals, "; it ")
    detail = "" if not text else f"; rank {culprits[0].rank} {text}" if several else f": it {text}"
    if verdict is DiagnosisVerdict.NO_DESYNC:
        differ = "differ" if several else "differs"
        return f"the ranks launched the same collectives, but {who} {differ} from the others{detail}{at_step}"
    if verdict is DiagnosisVerdict.UNKNOWN:
        behave = "behave" if several else "behaves"
        return f"{who} {behave} differently from the other ranks{detail}{at_step}"
    if verdict is DiagnosisVerdict.MISMATCH:
        return f"{who} and the other ranks launched a collective with different sizes{detail}{at_step}"
    if group is not None and verdict is DiagnosisVerdict.NEVER_ARRIVED:
        return _never_arrived_sentence(who, culprits, group, collectives, detail) + at_step
    return f"{_job_waits_sentence(who, several, detail, text)}{at_step}"


def _job_waits_sentence(who: str, several: bool, detail: str, text: str) -> str:
    """A rank that only fails to answer NCCL RAS is a likely culprit, not a proven one."""
    if text == RAS_RANK_TEXT[RasFinding.UNRESPONSIVE]:
        answer, hold = ("do not answer", "hold") if several else ("does not answer", "holds")
        return f"{who} {answer} NCCL RAS and probably {hold} up the job"
    return f"the job waits for {who}{detail}"


def _relevant_group(collectives: CollectiveAnalysis | None, culprits: Sequence[Culprit]) -> GroupSlotStatus | None:
    """The first group with a culprit among its members, else the first group."""
    groups = () if collectives is None else collectives.groups
    ranks = {culprit.rank for culprit in culprits}
    return next((g for g in groups if ranks & {m.rank for m in g.members}), next(iter(groups), None))


def _different_collectives_sentence(who: str, culprits: Sequence[Culprit], group: GroupSlotStatus) -> str | None:
    """None if the culprits and the others launched the same operation at this slot."""
    ranks = {culprit.rank for culprit in culprits}
    launched = {m.rank: m.operation for m in group.members if m.operation is not None}
    # Sizes are shown only if the operations differ in nothing else.
    sizes = len({operation.name for operation in launched.values()}) == 1
    texts = {rank: describe_operation(operation, sizes) for rank, operation in launched.items()}
    of_culprits = {texts[rank] for rank in texts if rank in ranks}
    of_others = _most_common(texts[rank] for rank in texts if rank not in ranks)
    if not of_culprits or of_others is None or of_others[0] in of_culprits:
        return None
    contrast = _contrast_sentence(who, culprits, of_culprits, of_others)
    return f"{contrast} at {position_text(group.group, group.slot)}"


def _opposite_order_sentence(who: str, culprits: Sequence[Culprit], collectives: CollectiveAnalysis) -> str | None:
    """For groups that were entered in different orders, so that each rank waits in one of them."""
    ranks = {culprit.rank for culprit in culprits}
    texts = {
        w.rank: f"{describe_operation(w.operation)} at {position_text(w.group, w.slot)}" for w in collectives.waits
    }
    of_culprits = {texts[rank] for rank in texts if rank in ranks}
    of_others = _most_common(texts[rank] for rank in texts if rank not in ranks)
    if not of_culprits or of_others is None or of_others[0] in of_culprits:
        return None
    contrast = _contrast_sentence(who, culprits, of_culprits, of_others)
    return f"{contrast}: the ranks use these groups in different orders"


def _contrast_sentence(who: str, culprits: Sequence[Culprit], of_culprits: set[str], of_others: tuple[str, int]) -> str:
    where, number = of_others
    in_what = " and ".join(sorted(of_culprits)[:3])
    verb, others_verb = "is" if len(culprits) == 1 else "are", "is" if number == 1 else "are"
    return f"{who} {verb} in {in_what} while {format_count(number, 'rank')} {others_verb} in {where}"


def _most_common(texts: Iterable[str]) -> tuple[str, int] | None:
    """The text and its count; at equal counts the first in alphabetical order."""
    return min(Counter(texts).items(), key=lambda each: (-each[1], each[0]), default=None)


def _operation_names(members: Iterable[GroupMember]) -> Iterator[str]:
    """Without sizes: in operations such as all_to_all every rank has its own."""
    return (describe_operation(member.operation) for member in members if member.operation is not None)


def _never_arrived_sentence(
    who: str,
    culprits: Sequence[Culprit],
    group: GroupSlotStatus,
    collectives: CollectiveAnalysis | None,
    detail: str,
) -> str:
    where = position_text(group.group, group.slot)
    if collectives is not None and is_behind_its_group(collectives, culprits[0].rank):
        ahead = sum(member.state is MemberState.AHEAD for member in group.members)
        operation = next((m.operation for m in group.members if m.rank == culprits[0].rank), None)
        what = "its operation" if operation is None else describe_operation(operation)
        finished = f"{format_count(ahead, 'rank')} of the group finished it"
        if not {culprit.rank for culprit in culprits} <= {member.rank for member in group.members}:
            finished = "other ranks of their groups finished it"  # the count is that of one group only
        return f"{who} did not finish {what} at {where}, while {finished}{detail}"
    ranks = {culprit.rank for culprit in culprits}
    # The others may be in several operations; the most common one is named, the report lists all.
    waiting = [m for m in group.members if m.state is MemberState.WAITING and m.rank not in ranks]
    common = _most_common(_operation_names(waiting))
    if common is None:
        return f"the job waits for {who}{detail}"
    wait = "waits" if len(waiting) == 1 else "wait"
    states = {m.state for m in group.members if m.rank in ranks}
    state = next(iter(states), None)
    absent = ""
    if state in NOT_ARRIVED_TEXT and len(states) == 1:
        absent = f", which {agree_with_count(NOT_ARRIVED_TEXT[state], len(culprits))}"
    return f"{format_count(len(waiting), 'rank')} {wait} in {common[0]} at {where} for {who}{absent}{detail}"


def _no_culprit_sentence(
    verdict: DiagnosisVerdict,
    group: GroupSlotStatus | None,
    collectives: CollectiveAnalysis | None,
    combined: CombinedSignals,
    signals: Sequence[Signal],
) -> str:
    if collectives is not None and collectives.tied:
        sides = " and ".join(format_ranks(ranks) for ranks in collectives.tied[:3])
        where = "" if group is None else f" at {position_text(group.group, group.slot)}"
        return (
            f"{sides} are in different collectives{where}; no side has a majority, so the records do not show which "
            "side is wrong"
        )
    if verdict is DiagnosisVerdict.NO_DESYNC:
        common = None if group is None else _most_common(_operation_names(group.members))
        if group is not None and common is not None:
            return (
                f"all {format_count(common[1], 'rank')} wait in the same {common[0]} at "
                f"{position_text(group.group, group.slot)}: the network, a GPU or its driver blocks the operation"
            )
        return "the ranks launched the same collectives: the network, a GPU or its driver blocks them"
    # Gone or stopped processes explain more than anything that the records show.
    processes = next((signal.text for signal in signals if signal.source == PROCESSES and signal.rank_text), "")
    first = next((signal.text for signal, _ in combined.agrees), collectives.why if collectives is not None else "")
    waits = collectives.why if collectives is not None and collectives.waits else ""
    known = processes or waits or first
    if known:
        return f"the cause cannot be narrowed down to one rank: {known}"
    return "the cause cannot be narrowed down to one rank: the evidence against each is too weak"


# The explanation


def explain(combined: CombinedSignals, signals: Sequence[Signal], collectives: CollectiveAnalysis | None) -> str:
    """The evidence with its numbers, and which sources contradict the conclusion."""
    others = [(signal, yes) for signal, yes in combined.agrees if signal.source != FLIGHT_RECORDER]
    parts = [collectives.why] if collectives is not None else []
    parts += [_with_source(signal) for signal, yes in others if yes]
    contradicts = "contradicted by " if combined.ranks else ""
    parts += [f"{contradicts}{_with_source(signal)}" for signal, yes in others if not yes]
    if not parts:
        parts = [_with_source(signal) for signal in signals if signal.text]
    if combined.tie_broken:
        parts.append(
            "the flight records do not show which side is wrong, so this result is based on the other evidence"
        )
    return ". ".join(part[:1].upper() + part[1:] for part in parts) or "There is no evidence"


def _with_source(signal: Signal) -> str:
    return f"{source_label(signal.source)}: {signal.text}"
