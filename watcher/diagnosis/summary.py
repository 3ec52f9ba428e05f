"""The words of a diagnosis: who, where, in what, against how many; why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from wattwatch.watcher.common.formatting import agree_with_count, format_count, format_ranks
from wattwatch.watcher.diagnosis.collectives.operations import describe_operation
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
from wattwatch.watcher.diagnosis.signals.combine import CombinedSignals
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
)

MISMATCH_VERDICTS = (DiagnosisVerdict.DESYNC, DiagnosisVerdict.MISMATCH)
MOST_INFORMATIVE_FIRST = (
    KERNEL_LOG,
    REACHABILITY,
    LOGS,
    PROCESSES,
    EXIT_REPORTS,
    STACKS,
)  # whose word on a culprit comes first

NOT_ARRIVED_TEXT: Mapping[MemberState | None, str] = {
    MemberState.SILENT: "has not launched it and waits in nothing",
    MemberState.BEHIND: "has not launched it and waits elsewhere",
    MemberState.ABSENT: "left no record",
}


def describe_culprits(
    ranks: frozenset[int], evidence: Evidence, witnesses: Sequence[Signal], reading: CollectiveAnalysis | None
) -> tuple[Culprit, ...]:
    nodes = nodes_by_rank(evidence)
    boards = {each.rank: each.gpu for each in evidence.live_ranks}
    found = []
    for rank in sorted(ranks):
        place = "" if reading is None else describe_member_state(reading, rank)
        told = describe_rank_from_signals(rank, witnesses)
        doing = "; ".join(words for words in (place, told) if words)
        found.append(Culprit(rank, nodes.get(rank), boards.get(rank), doing))
    return tuple(found)


def describe_rank_from_signals(rank: int, witnesses: Sequence[Signal]) -> str:
    """What the other sources say of it, those first whose word explains most."""
    said = {witness.source: words for witness in witnesses if (words := witness.doing.get(rank))}
    telling = [said[source] for source in MOST_INFORMATIVE_FIRST if source in said]
    return "; ".join(dict.fromkeys(telling[:2] or list(said.values())[:1]))


def describe_member_state(reading: CollectiveAnalysis, rank: int) -> str:
    """Of the first group that it holds up: "in barrier at slot 7 of default_pg (save, train.py:88)"."""
    for group in reading.groups:
        member = next((each for each in group.members if each.rank == rank), None)
        if member is None:
            continue
        where = f"slot {group.slot:,} of {group.group}"
        line = "" if member.frame is None else f" ({member.frame.function}, {member.frame.file}:{member.frame.line})"
        if member.operation is not None and member.place is MemberState.WAITING:
            return f"in {describe_operation(member.operation)} at {where}{line}"
        if member.place is MemberState.ABSENT:
            return f"left no record of {where}"
        if member.place in (MemberState.SILENT, MemberState.BEHIND):
            last = "" if member.last_enqueued is None else f", its last was {member.last_enqueued:,}"
            return f"has not launched {where}{last}{line}"
        if member.place is MemberState.AHEAD:
            return f"finished {where}{line}"
    return ""


def format_culprits(culprits: Sequence[Culprit]) -> str:
    """`rank 3 (node-01, GPU 3)`, `ranks 8-15 (node-02)`."""
    words = format_ranks(culprit.rank for culprit in culprits)
    nodes = sorted({culprit.node for culprit in culprits if culprit.node})
    if len(culprits) == 1 and culprits[0].gpu is not None:
        nodes.append(f"GPU {culprits[0].gpu}")
    more = f" and {len(nodes) - 3} more nodes" if len(nodes) > 3 else ""
    return f"{words} ({', '.join(nodes[:3])}{more})" if nodes else words


def summarize(
    verdict: DiagnosisVerdict,
    culprits: Sequence[Culprit],
    weighed: CombinedSignals,
    witnesses: Sequence[Signal],
    reading: CollectiveAnalysis | None,
    step: int | None,
    nothing_open: bool,
) -> str:
    at_step = "" if step is None else f", step {step:,}"
    moves = next((witness.words for witness in witnesses if witness.shows_progress), None)
    if nothing_open and reading is None and moves is not None:
        return f"the job moves: {moves}"
    if nothing_open:
        return f"no rank waits in a collective: no hang in these records{at_step}"
    group = _relevant_group(reading, culprits)
    who = format_culprits(culprits)
    if not culprits:
        return _no_culprit_sentence(verdict, group, reading, weighed, witnesses) + at_step
    if group is not None and reading is not None and verdict in MISMATCH_VERDICTS:
        parted = _different_collectives_sentence(who, culprits, group) or _opposite_order_sentence(
            who, culprits, reading
        )
        if parted is not None:
            return parted + at_step
    said = describe_rank_from_signals(culprits[0].rank, witnesses)
    several = "" if not said else f"; the first {said}" if len(culprits) > 1 else f": it {said}"
    if verdict is DiagnosisVerdict.NO_DESYNC:
        return f"all ranks launched the same; {who} stands out{several}{at_step}"
    if verdict is DiagnosisVerdict.UNKNOWN:
        return f"{who} {'stands' if len(culprits) == 1 else 'stand'} out{several}{at_step}"
    if verdict is DiagnosisVerdict.MISMATCH:
        return f"{who} and the others differ in the sizes of a collective{several}{at_step}"
    if group is not None and verdict is DiagnosisVerdict.NEVER_ARRIVED:
        return _never_arrived_sentence(who, culprits, group, reading, several) + at_step
    return f"the job waits for {who}{several}{at_step}"


def _relevant_group(reading: CollectiveAnalysis | None, culprits: Sequence[Culprit]) -> GroupSlotStatus | None:
    """The first that has the culprits among its members, else the first."""
    groups = () if reading is None else reading.groups
    ranks = {culprit.rank for culprit in culprits}
    return next((g for g in groups if ranks & {m.rank for m in g.members}), next(iter(groups), None))


def _different_collectives_sentence(who: str, culprits: Sequence[Culprit], group: GroupSlotStatus) -> str | None:
    """None where they did not part at this slot."""
    ranks = {culprit.rank for culprit in culprits}
    launched = {m.rank: m.operation for m in group.members if m.operation is not None}
    sizes = len({operation.name for operation in launched.values()}) == 1
    words = {rank: describe_operation(operation, sizes) for rank, operation in launched.items()}
    theirs = {words[rank] for rank in words if rank in ranks}
    others = _most_common(words[rank] for rank in words if rank not in ranks)
    if not theirs or others is None or others[0] in theirs:
        return None
    return f"{_contrast_sentence(who, culprits, theirs, others)}: slot {group.slot:,} of {group.group}"


def _opposite_order_sentence(who: str, culprits: Sequence[Culprit], reading: CollectiveAnalysis) -> str | None:
    """Of groups that were entered in different orders: each rank waits in one of them."""
    ranks = {culprit.rank for culprit in culprits}
    places = {w.rank: f"{describe_operation(w.operation)} at slot {w.slot:,} of {w.group}" for w in reading.waits}
    theirs = {places[rank] for rank in places if rank in ranks}
    others = _most_common(places[rank] for rank in places if rank not in ranks)
    if not theirs or others is None or others[0] in theirs:
        return None
    return f"{_contrast_sentence(who, culprits, theirs, others)}: groups that were entered in different orders"


def _contrast_sentence(who: str, culprits: Sequence[Culprit], theirs: set[str], others: tuple[str, int]) -> str:
    where, number = others
    theirs_in_words = " and ".join(sorted(theirs)[:3])
    them, rest = "is" if len(culprits) == 1 else "are", "is" if number == 1 else "are"
    return f"{who} {them} in {theirs_in_words}, {format_count(number, 'rank')} {rest} in {where}"


def _most_common(words: Iterable[str]) -> tuple[str, int] | None:
    """And how many there are of it."""
    return min(Counter(words).items(), key=lambda each: (-each[1], each[0]), default=None)


def _operation_names(members: Iterable[GroupMember]) -> Iterator[str]:
    """Without their sizes, which may be each rank's own."""
    return (describe_operation(member.operation) for member in members if member.operation is not None)


def _never_arrived_sentence(
    who: str, culprits: Sequence[Culprit], group: GroupSlotStatus, reading: CollectiveAnalysis | None, several: str
) -> str:
    where = f"slot {group.slot:,} of {group.group}"
    if reading is not None and is_behind_its_group(reading, culprits[0].rank):
        ahead = sum(member.place is MemberState.AHEAD for member in group.members)
        mine = next((m.operation for m in group.members if m.rank == culprits[0].rank), None)
        what = "its operation" if mine is None else describe_operation(mine)
        return f"{who} did not finish {what} at {where}, which {format_count(ahead, 'rank')} of the group finished{several}"
    ranks = {culprit.rank for culprit in culprits}
    waiting = [m for m in group.members if m.place is MemberState.WAITING and m.rank not in ranks]
    found = _most_common(_operation_names(waiting))
    if found is None:
        return f"the job waits for {who}{several}"
    wait = "waits" if len(waiting) == 1 else "wait"
    places = {m.place for m in group.members if m.rank in ranks}
    place = next(iter(places), None)
    missing = (
        f", which {agree_with_count(NOT_ARRIVED_TEXT[place], len(culprits))}"
        if place in NOT_ARRIVED_TEXT and len(places) == 1
        else ""
    )
    what = f"{found[0]} at {where}"
    return f"{format_count(len(waiting), 'rank')} {wait} in {what} for {who}{missing}{several}"


def _no_culprit_sentence(
    verdict: DiagnosisVerdict,
    group: GroupSlotStatus | None,
    reading: CollectiveAnalysis | None,
    weighed: CombinedSignals,
    witnesses: Sequence[Signal],
) -> str:
    if reading is not None and reading.tied:
        sides = " against ".join(format_ranks(ranks) for ranks in reading.tied[:3])
        where = "" if group is None else f" at slot {group.slot:,} of {group.group}"
        return f"{sides} in different collectives{where}: as many on each side, so nobody can be named"
    if (
        verdict is DiagnosisVerdict.NO_DESYNC
        and group is not None
        and (found := _most_common(_operation_names(group.members)))
    ):
        return (
            f"all {format_count(found[1], 'rank')} wait in the same {found[0]} at slot {group.slot:,} of "
            f"{group.group}: nobody is missing, so the network, a GPU or its driver holds it up"
        )
    if verdict is DiagnosisVerdict.NO_DESYNC:
        return "all ranks launched the same: the network, a GPU or its driver holds them up"
    states = next((witness.words for witness in witnesses if witness.source == PROCESSES and witness.doing), "")
    told = states or next((w.words for w, _ in weighed.agrees), reading.why if reading is not None else "")
    return f"nobody can be named: {told}" if told else "nobody can be named: no source tells the ranks apart"


def explain(weighed: CombinedSignals, witnesses: Sequence[Signal], reading: CollectiveAnalysis | None) -> str:
    """The numbers, and how many sources agree."""
    sides = [(w, yes) for w, yes in weighed.agrees if w.source != FLIGHT_RECORDER]
    parts = [reading.why] if reading is not None else []
    parts += [f"{witness.source}: {witness.words}" for witness, yes in sides if yes]
    against = "against it " if weighed.ranks else ""
    parts += [f"{against}{witness.source}: {witness.words}" for witness, yes in sides if not yes]
    if not parts:
        parts = [f"{witness.source}: {witness.words}" for witness in witnesses if witness.words]
    if weighed.tie_broken:
        parts.append("the records are even, the other sources decide")
    return ". ".join(part[:1].upper() + part[1:] for part in parts) or "No source says anything"
