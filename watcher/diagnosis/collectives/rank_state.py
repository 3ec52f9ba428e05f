"""Where each rank stands in each group: what it launched, what it finished, what it waits in.

Two traps of torch's recorder. A record may hold only what is open, so that a slot which is not in it was either never
launched or finished long ago: the counts in `pg_status` decide. And those counts take the send and recv count where the
last launch was one (seen in NCCL 2.27 records of pipelined jobs), so in a group with send and recv they say nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from wattwatch.watcher.diagnosis.flight_recorder.model import (
    DEFAULT_GROUP,
    GroupRecord,
    Operation,
    OperationLaunch,
    ProcessGroup,
    RankRecord,
)


@dataclass(slots=True)
class GroupState:
    """All that the records say of one group."""

    group: ProcessGroup
    records: dict[int, GroupRecord] = field(default_factory=dict)
    counted: bool = True  # pg_status counts collectives here
    _slots: dict[int, dict[int, OperationLaunch]] = field(default_factory=dict)
    _finished: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def at(self, rank: int, slot: int) -> OperationLaunch | None:
        """The rank's launch at the slot, where its record still holds it."""
        if rank not in self.records:
            return None
        if rank not in self._slots:
            self._slots[rank] = {each.slot: each for each in collective_launches(self.records[rank])}
        return self._slots[rank].get(slot)

    def launched(self, rank: int, slot: int) -> bool | None:
        """None: the record does not tell."""
        if self.at(rank, slot) is not None:
            return True
        record = self.records.get(rank)
        if record is None:
            return None
        if self.counted and record.last_enqueued is not None:
            return record.last_enqueued >= slot
        known = self._slots[rank]
        if not known:
            return None
        if max(known) > slot:
            return True
        return False if keeps_history(record) else None

    def completed(self, rank: int, slot: int) -> bool | None:
        launch = self.at(rank, slot)
        if launch is not None:
            return not launch.open
        record = self.records.get(rank)
        if record is None:
            return None
        if self.counted and record.last_completed is not None:
            return record.last_completed >= slot
        # What was launched, and is not among those that are open, ended and left the ring.
        return self.launched(rank, slot)

    def finished_by(self, slot: int) -> tuple[int, ...]:
        """Members that have surely completed it. Kept: a thousand ranks may wait in the same two thousand slots."""
        if slot not in self._finished:
            self._finished[slot] = tuple(rank for rank in self.records if self.completed(rank, slot))
        return self._finished[slot]

    def operation_at(self, rank: int, slot: int) -> Operation | None:
        launch = self.at(rank, slot)
        return None if launch is None else launch.operation


@dataclass(slots=True)
class RankState:
    """One rank over all its groups."""

    rank: int
    source: str
    waits: tuple[tuple[ProcessGroup, OperationLaunch], ...]  # open ones, in the order of their launch
    overflown: bool = False  # what it has been in for longest is not in its record any more

    @property
    def primary(self) -> tuple[ProcessGroup, OperationLaunch] | None:
        """What it is in: of those whose kernel runs the first, else the first launched. The rest queues behind it."""
        return self.first_but(())

    def first_but(
        self, passed: Collection[tuple[ProcessGroup, OperationLaunch]]
    ) -> tuple[ProcessGroup, OperationLaunch] | None:
        """The like, of those that are not in `passed`."""
        waits = [wait for wait in self.waits if wait not in passed] if passed else self.waits
        running = (wait for wait in waits if wait[1].started)
        return next(running, next(iter(waits), None))


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """`guessed`: groups whose members no record tells. `uncertain`: those of them that may have members who launched
    nothing in them yet. `unseen_pairs`: ranks whose sends and receives are not written down, so that one of them that
    waits in nothing may wait in those."""

    groups: dict[ProcessGroup, GroupState]
    ranks: dict[int, RankState]
    guessed: frozenset[ProcessGroup] = frozenset()
    uncertain: frozenset[ProcessGroup] = frozenset()
    unrecorded_point_to_point: frozenset[int] = frozenset()

    @property
    def unrecorded(self) -> tuple[int, ...]:
        """Members of any group without any record, and numbers that are left out: ranks are counted from 0."""
        known = {rank for group in self.groups for rank in group.members} | set(range(max(self.ranks, default=-1)))
        return tuple(sorted(known - set(self.ranks)))

    def absent(self, group: ProcessGroup) -> tuple[int, ...]:
        """Members without any record."""
        return tuple(rank for rank in group.members if rank not in self.ranks)


def build_recorded_job(records: Sequence[RankRecord]) -> RecordedJob:
    """`records`: one a rank, in any order."""
    groups: dict[ProcessGroup, GroupState] = {}
    ranks: dict[int, RankState] = {}
    whole = resolve_members(records)
    for record in sorted(records, key=lambda each: each.rank):
        waits: list[tuple[ProcessGroup, OperationLaunch]] = []
        for part in record.groups:
            group = whole.get(part.group, part.group)
            standing = groups.setdefault(group, GroupState(group))
            standing.records[record.rank] = part
            waits += [(group, launch) for launch in part.launches if launch.open]
        waits.sort(key=lambda wait: wait[1].record)
        ranks[record.rank] = RankState(record.rank, record.source, tuple(waits))
    for standing in groups.values():
        standing.counted = counts_only_collectives(standing)
        if standing.counted:
            for rank, part in standing.records.items():
                ranks[rank].overflown |= _ring_overflowed(part)
    guessed = frozenset(whole.values())
    uncertain = {group for group in guessed if any(map(_is_in_first_collective, groups[group].records.values()))}
    # In a group that has only sends and receives nothing is written down, not even the group.
    unseen = {
        rank
        for standing in groups.values()
        if standing.group in guessed or any(part.unrecorded_point_to_point for part in standing.records.values())
        for rank in (*standing.group.members, *standing.records)
    }
    return RecordedJob(
        groups,
        ranks,
        guessed,
        frozenset(group for group in uncertain if group.description != DEFAULT_GROUP),
        frozenset(unseen),
    )


def _ring_overflowed(record: GroupRecord) -> bool:
    """It counts an open operation that is older than all that it still holds."""
    if record.last_enqueued is None or record.last_completed is None or record.last_completed >= record.last_enqueued:
        return False
    oldest = min((launch.slot for launch in record.launches), default=record.last_enqueued + 1)
    return oldest > max(record.last_completed, 0) + 1


def resolve_members(records: Sequence[RankRecord]) -> dict[ProcessGroup, ProcessGroup]:
    """Groups of unknown members (gloo overwrites its one entry of pg_config with each new group) -> the same with those
    that are known: as another rank tells, else who launched something in it. Where the first launch of all is still
    open, some may have launched nothing in it yet: then it may be anybody."""
    heard: dict[ProcessGroup, list[GroupRecord]] = {}
    ranks_of: dict[ProcessGroup, list[int]] = {}
    told: dict[tuple[str, str], ProcessGroup] = {}
    mistold = _groups_with_wrong_members(records)
    untold: dict[ProcessGroup, ProcessGroup] = {}
    for record in records:
        for part in record.groups:
            name = part.group.name, part.group.description
            if part.group.members and name not in mistold:
                told[name] = part.group
            else:
                nameless = untold.setdefault(part.group, part.group._replace(members=()))
                heard.setdefault(nameless, []).append(part)
                ranks_of.setdefault(nameless, []).append(record.rank)
    everybody = tuple(range(max((record.rank for record in records), default=-1) + 1))  # who left no record too
    found = {}
    for group, parts in heard.items():
        any_rank = group.description == DEFAULT_GROUP or any(_is_in_first_collective(part) for part in parts)
        members = everybody if any_rank else tuple(sorted(ranks_of[group]))
        found[group] = told.get((group.name, group.description)) or group._replace(members=members)
    return {said: found[group] for said, group in untold.items()}


def _groups_with_wrong_members(records: Sequence[RankRecord]) -> set[tuple[str, str]]:
    """Groups of gloo whose members do not fit who is in them: they are those of another group, which was made later."""
    members: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    ranks: dict[tuple[str, str], set[int]] = {}
    for record in records:
        for part in record.groups:
            if any(launch.operation.backend == "gloo" for launch in part.launches[:1]):
                name = part.group.name, part.group.description
                ranks.setdefault(name, set()).add(record.rank)
                members.setdefault(name, set()).update({part.group.members} - {()})
    return {name for name, told in members.items() if told and (len(told) > 1 or ranks[name] - set(*told))}


def _is_in_first_collective(record: GroupRecord) -> bool:
    return any(launch.open and launch.slot <= 1 for launch in record.launches)


def collective_launches(record: GroupRecord) -> list[OperationLaunch]:
    return [launch for launch in record.launches if not launch.operation.point_to_point]


def keeps_history(record: GroupRecord) -> bool:
    """Whether finished launches are in it too: then what is not there and newer was never launched."""
    return any(not launch.open for launch in record.launches)


def counts_only_collectives(standing: GroupState) -> bool:
    """False where send and recv share the counts: seen, or a count that is not that of the newest launch."""
    for record in standing.records.values():
        if any(launch.operation.point_to_point for launch in record.launches):
            return False
        newest = max((launch.slot for launch in record.launches), default=None)
        if newest is not None and record.last_enqueued is not None and record.last_enqueued != newest:
            return False
    return True
