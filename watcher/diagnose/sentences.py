"""The words of a diagnosis: who, where, in what, against how many; why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from watcher.diagnose.collectives.operations import operation_words
from watcher.diagnose.diagnosis import CollectiveReading, Culprit, DiagnosisVerdict, GroupFrontier, Member, Place
from watcher.diagnose.evidence import Evidence
from watcher.diagnose.known_ranks import nodes_of_ranks
from watcher.diagnose.witnesses.causes import left_behind
from watcher.diagnose.witnesses.weigh import Weighed
from watcher.diagnose.witnesses.witness import (
    ENDINGS,
    KERNEL_LOG,
    LOGS,
    PROCESSES,
    REACHABILITY,
    RECORDS,
    STACKS,
    Witness,
)
from watcher.diagnose.words import agreeing, counted, ranks_in_words

PARTED = (DiagnosisVerdict.DESYNC, DiagnosisVerdict.MISMATCH)
TELLING = (KERNEL_LOG, REACHABILITY, LOGS, PROCESSES, ENDINGS, STACKS)  # whose word on a culprit comes first

MISSING: Mapping[Place | None, str] = {
    Place.SILENT: "has not launched it and waits in nothing",
    Place.BEHIND: "has not launched it and waits elsewhere",
    Place.ABSENT: "left no record",
}


def culprits_of(
    ranks: frozenset[int], evidence: Evidence, witnesses: Sequence[Witness], reading: CollectiveReading | None
) -> tuple[Culprit, ...]:
    nodes = nodes_of_ranks(evidence)
    boards = {each.rank: each.gpu for each in evidence.seen_ranks}
    found = []
    for rank in sorted(ranks):
        place = "" if reading is None else place_in_words(reading, rank)
        told = said_of(rank, witnesses)
        doing = "; ".join(words for words in (place, told) if words)
        found.append(Culprit(rank, nodes.get(rank), boards.get(rank), doing))
    return tuple(found)


def said_of(rank: int, witnesses: Sequence[Witness]) -> str:
    """What the other sources say of it, those first whose word explains most."""
    said = {witness.source: words for witness in witnesses if (words := witness.doing.get(rank))}
    telling = [said[source] for source in TELLING if source in said]
    return "; ".join(dict.fromkeys(telling[:2] or list(said.values())[:1]))


def place_in_words(reading: CollectiveReading, rank: int) -> str:
    """Of the first group that it holds up: "in barrier at slot 7 of default_pg (save, train.py:88)"."""
    for group in reading.groups:
        member = next((each for each in group.members if each.rank == rank), None)
        if member is None:
            continue
        where = f"slot {group.slot:,} of {group.group}"
        line = "" if member.frame is None else f" ({member.frame.function}, {member.frame.file}:{member.frame.line})"
        if member.operation is not None and member.place is Place.WAITING:
            return f"in {operation_words(member.operation)} at {where}{line}"
        if member.place is Place.ABSENT:
            return f"left no record of {where}"
        if member.place in (Place.SILENT, Place.BEHIND):
            last = "" if member.last_enqueued is None else f", its last was {member.last_enqueued:,}"
            return f"has not launched {where}{last}{line}"
        if member.place is Place.AHEAD:
            return f"finished {where}{line}"
    return ""


def who_in_words(culprits: Sequence[Culprit]) -> str:
    """`rank 3 (node-01, GPU 3)`, `ranks 8-15 (node-02)`."""
    words = ranks_in_words(culprit.rank for culprit in culprits)
    nodes = sorted({culprit.node for culprit in culprits if culprit.node})
    if len(culprits) == 1 and culprits[0].gpu is not None:
        nodes.append(f"GPU {culprits[0].gpu}")
    more = f" and {len(nodes) - 3} more nodes" if len(nodes) > 3 else ""
    return f"{words} ({', '.join(nodes[:3])}{more})" if nodes else words


def summary_of(
    verdict: DiagnosisVerdict,
    culprits: Sequence[Culprit],
    weighed: Weighed,
    witnesses: Sequence[Witness],
    reading: CollectiveReading | None,
    step: int | None,
    nothing_open: bool,
) -> str:
    at_step = "" if step is None else f", step {step:,}"
    moves = next((witness.words for witness in witnesses if witness.denies), None)
    if nothing_open and reading is None and moves is not None:
        return f"the job moves: {moves}"
    if nothing_open:
        return f"no rank waits in a collective: no hang in these records{at_step}"
    group = _group_of(reading, culprits)
    who = who_in_words(culprits)
    if not culprits:
        return _about_nobody(verdict, group, reading, weighed, witnesses) + at_step
    if group is not None and reading is not None and verdict in PARTED:
        parted = _parted(who, culprits, group) or _crossed(who, culprits, reading)
        if parted is not None:
            return parted + at_step
    said = said_of(culprits[0].rank, witnesses)
    several = "" if not said else f"; the first {said}" if len(culprits) > 1 else f": it {said}"
    if verdict is DiagnosisVerdict.NO_DESYNC:
        return f"all ranks launched the same; {who} stands out{several}{at_step}"
    if verdict is DiagnosisVerdict.UNKNOWN:
        return f"{who} {'stands' if len(culprits) == 1 else 'stand'} out{several}{at_step}"
    if verdict is DiagnosisVerdict.MISMATCH:
        return f"{who} and the others differ in the sizes of a collective{several}{at_step}"
    if group is not None and verdict is DiagnosisVerdict.NEVER_ARRIVED:
        return _never_arrived(who, culprits, group, reading, several) + at_step
    return f"the job waits for {who}{several}{at_step}"


def _group_of(reading: CollectiveReading | None, culprits: Sequence[Culprit]) -> GroupFrontier | None:
    """The first that has the culprits among its members, else the first."""
    groups = () if reading is None else reading.groups
    ranks = {culprit.rank for culprit in culprits}
    return next((g for g in groups if ranks & {m.rank for m in g.members}), next(iter(groups), None))


def _parted(who: str, culprits: Sequence[Culprit], group: GroupFrontier) -> str | None:
    """None where they did not part at this slot."""
    ranks = {culprit.rank for culprit in culprits}
    launched = {m.rank: m.operation for m in group.members if m.operation is not None}
    sizes = len({operation.name for operation in launched.values()}) == 1
    words = {rank: operation_words(operation, sizes) for rank, operation in launched.items()}
    theirs = {words[rank] for rank in words if rank in ranks}
    others = _commonest(words[rank] for rank in words if rank not in ranks)
    if not theirs or others is None or others[0] in theirs:
        return None
    return f"{_in_against(who, culprits, theirs, others)}: slot {group.slot:,} of {group.group}"


def _crossed(who: str, culprits: Sequence[Culprit], reading: CollectiveReading) -> str | None:
    """Of groups that were entered in different orders: each rank waits in one of them."""
    ranks = {culprit.rank for culprit in culprits}
    places = {w.rank: f"{operation_words(w.operation)} at slot {w.slot:,} of {w.group}" for w in reading.waits}
    theirs = {places[rank] for rank in places if rank in ranks}
    others = _commonest(places[rank] for rank in places if rank not in ranks)
    if not theirs or others is None or others[0] in theirs:
        return None
    return f"{_in_against(who, culprits, theirs, others)}: groups that were entered in different orders"


def _in_against(who: str, culprits: Sequence[Culprit], theirs: set[str], others: tuple[str, int]) -> str:
    where, number = others
    theirs_in_words = " and ".join(sorted(theirs)[:3])
    them, rest = "is" if len(culprits) == 1 else "are", "is" if number == 1 else "are"
    return f"{who} {them} in {theirs_in_words}, {counted(number, 'rank')} {rest} in {where}"


def _commonest(words: Iterable[str]) -> tuple[str, int] | None:
    """And how many there are of it."""
    return min(Counter(words).items(), key=lambda each: (-each[1], each[0]), default=None)


def _operations(members: Iterable[Member]) -> Iterator[str]:
    """Without their sizes, which may be each rank's own."""
    return (operation_words(member.operation) for member in members if member.operation is not None)


def _never_arrived(
    who: str, culprits: Sequence[Culprit], group: GroupFrontier, reading: CollectiveReading | None, several: str
) -> str:
    where = f"slot {group.slot:,} of {group.group}"
    if reading is not None and left_behind(reading, culprits[0].rank):
        ahead = sum(member.place is Place.AHEAD for member in group.members)
        mine = next((m.operation for m in group.members if m.rank == culprits[0].rank), None)
        what = "its operation" if mine is None else operation_words(mine)
        return f"{who} did not finish {what} at {where}, which {counted(ahead, 'rank')} of the group finished{several}"
    ranks = {culprit.rank for culprit in culprits}
    waiting = [m for m in group.members if m.place is Place.WAITING and m.rank not in ranks]
    found = _commonest(_operations(waiting))
    if found is None:
        return f"the job waits for {who}{several}"
    wait = "waits" if len(waiting) == 1 else "wait"
    places = {m.place for m in group.members if m.rank in ranks}
    place = next(iter(places), None)
    missing = f", which {agreeing(MISSING[place], len(culprits))}" if place in MISSING and len(places) == 1 else ""
    what = f"{found[0]} at {where}"
    return f"{counted(len(waiting), 'rank')} {wait} in {what} for {who}{missing}{several}"


def _about_nobody(
    verdict: DiagnosisVerdict,
    group: GroupFrontier | None,
    reading: CollectiveReading | None,
    weighed: Weighed,
    witnesses: Sequence[Witness],
) -> str:
    if reading is not None and reading.tied:
        sides = " against ".join(ranks_in_words(ranks) for ranks in reading.tied[:3])
        where = "" if group is None else f" at slot {group.slot:,} of {group.group}"
        return f"{sides} in different collectives{where}: as many on each side, so nobody can be named"
    if (
        verdict is DiagnosisVerdict.NO_DESYNC
        and group is not None
        and (found := _commonest(_operations(group.members)))
    ):
        return (
            f"all {counted(found[1], 'rank')} wait in the same {found[0]} at slot {group.slot:,} of "
            f"{group.group}: nobody is missing, so the network, a GPU or its driver holds it up"
        )
    if verdict is DiagnosisVerdict.NO_DESYNC:
        return "all ranks launched the same: the network, a GPU or its driver holds them up"
    states = next((witness.words for witness in witnesses if witness.source == PROCESSES and witness.doing), "")
    told = states or next((w.words for w, _ in weighed.agrees), reading.why if reading is not None else "")
    return f"nobody can be named: {told}" if told else "nobody can be named: no source tells the ranks apart"


def why_of(weighed: Weighed, witnesses: Sequence[Witness], reading: CollectiveReading | None) -> str:
    """The numbers, and how many sources agree."""
    sides = [(w, yes) for w, yes in weighed.agrees if w.source != RECORDS]
    parts = [reading.why] if reading is not None else []
    parts += [f"{witness.source}: {witness.words}" for witness, yes in sides if yes]
    against = "against it " if weighed.ranks else ""
    parts += [f"{against}{witness.source}: {witness.words}" for witness, yes in sides if not yes]
    if not parts:
        parts = [f"{witness.source}: {witness.words}" for witness in witnesses if witness.words]
    if weighed.tie_broken:
        parts.append("the records are even, the other sources decide")
    return ". ".join(part[:1].upper() + part[1:] for part in parts) or "No source says anything"
