"""The state of each rank in each group: what it launched, what it finished, what it waits in.

PyTorch's recorder has two traps:

- A record may contain only pending launches, so a slot that is missing from it was either never launched or finished
long
  ago. The counts in `pg_status` decide.
- These counts are of the last operation of any kind (seen in NCCL 2.27 records of pipeline-parallel jobs), so they say
  nothing about the collectives of a group that also sends and receives.
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
    """What all records say about one group."""

    group: ProcessGroup
    records: dict[int, GroupRecord] = field(default_factory=dict)  # by rank
    counts_usable: bool = True  # the counts of the records are of collectives, not mixed with sends and receives
    _launch_by_slot: dict[int, dict[int, OperationLaunch]] = field(default_factory=dict)
    _finished_by_slot: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def launch_at(self, rank: int, slot: int) -> OperationLaunch | None:
        """The rank's launch of the collective at this slot. None: its record does not contain it (any more)."""
        if rank not in self.records:
            return None
        if rank not in self._launch_by_slot:
            self._launch_by_slot[rank] = {each.slot: each for each in collective_launches(self.records[rank])}
        return self._launch_by_slot[rank].get(slot)

    def operation_at(self, rank: int, slot: int) -> Operation | None:
        """As `launch_at`: what was launched."""
        launch = self.launch_at(rank, slot)
        return None if launch is None else launch.operation

    def launched(self, rank: int, slot: int) -> bool | None:
        """Whether the rank has launched the collective at this slot. None: the records do not say."""
        if self.launch_at(rank, slot) is not None:
            return True
        record = self.records.get(rank)
        if record is None:
            return None
        # A missing slot was never launched, or finished and left the ring buffer: only the count distinguishes these.
        if self.counts_usable and record.last_enqueued is not None:
            return record.last_enqueued >= slot
        recorded = self._launch_by_slot[rank]
        if not recorded:
            return None
        if max(recorded) > slot:
            return True  # a rank launches in order, so this one came earlier
        return False if keeps_finished_launches(record) else None

    def completed(self, rank: int, slot: int) -> bool | None:
        """Whether the rank has finished the collective at this slot. None: the records do not say."""
        launch = self.launch_at(rank, slot)
        if launch is not None:
            return not launch.pending
        record = self.records.get(rank)
        if record is None:
            return None
        if self.counts_usable and record.last_completed is not None:
            return record.last_completed >= slot
        # Launched and not among the pending launches: it finished and has left the ring buffer.
        return self.launched(rank, slot)

    def finished_by(self, slot: int) -> tuple[int, ...]:
        """Members that have certainly finished the collective at this slot.

        Cached: a thousand ranks may wait in the same two thousand slots.
        """
        if slot not in self._finished_by_slot:
            self._finished_by_slot[slot] = tuple(rank for rank in self.records if self.completed(rank, slot))
        return self._finished_by_slot[slot]


@dataclass(slots=True)
class RankState:
    """One rank over all its groups."""

    rank: int
    source: str
    waits: tuple[tuple[ProcessGroup, OperationLaunch], ...]  # pending launches, oldest first
    ring_overflowed: bool = False  # the launch that has been pending for longest is no longer in its record

    @property
    def current_wait(self) -> tuple[ProcessGroup, OperationLaunch] | None:
        """The operation that the rank is in. All other pending launches are queued behind it."""
        return self.current_wait_except(())

    def current_wait_except(
        self, ignored: Collection[tuple[ProcessGroup, OperationLaunch]]
    ) -> tuple[ProcessGroup, OperationLaunch] | None:
        """The first pending launch whose kernel has started, otherwise the first pending one, without `ignored`."""
        waits = [wait for wait in self.waits if wait not in ignored] if ignored else self.waits
        # A later launch can run first if it is on another stream; the earlier one is then queued behind something else.
        running = (wait for wait in waits if wait[1].started)
        return next(running, next(iter(waits), None))


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """What all records say about the job."""

    groups: dict[ProcessGroup, GroupState]
    ranks: dict[int, RankState]  # ranks that left a record
    guessed_groups: frozenset[ProcessGroup] = frozenset()  # no record names their members
    possibly_larger_groups: frozenset[ProcessGroup] = frozenset()  # guessed groups that may have more members
    # Ranks whose sends and receives are not recorded: one that seems to wait in nothing may wait in one of these.
    unrecorded_point_to_point: frozenset[int] = frozenset()

    @property
    def ranks_without_record(self) -> tuple[int, ...]:
        """Members of any group without a record, and gaps in the numbering, as ranks are numbered from 0."""
        known = {rank for group in self.groups for rank in group.members} | set(range(max(self.ranks, default=-1)))
        return tuple(sorted(known - set(self.ranks)))

    def members_without_record(self, group: ProcessGroup) -> tuple[int, ...]:
        """Members of this group that left no record."""
        return tuple(rank for rank in group.members if rank not in self.ranks)


def build_recorded_job(records: Sequence[RankRecord]) -> RecordedJob:
    """`records`: one per rank, in any order."""
    groups: dict[ProcessGroup, GroupState] = {}
    ranks: dict[int, RankState] = {}
    resolved = resolve_members(records)
    for record in sorted(records, key=lambda each: each.rank):
        waits: list[tuple[ProcessGroup, OperationLaunch]] = []
        for part in record.groups:
            group = resolved.get(part.group, part.group)
            state = groups.setdefault(group, GroupState(group))
            state.records[record.rank] = part
            waits += [(group, launch) for launch in part.launches if launch.pending]
        # Slots count within a group; only record_id orders launches over all groups of the rank.
        waits.sort(key=lambda wait: wait[1].record_id)
        ranks[record.rank] = RankState(record.rank, record.source, tuple(waits))
    for state in groups.values():
        state.counts_usable = counts_only_collectives(state)
        if state.counts_usable:
            for rank, part in state.records.items():
                ranks[rank].ring_overflowed |= _ring_overflowed(part)
    guessed = frozenset(resolved.values())
    in_first_collective = {
        group for group in guessed if any(map(_is_in_first_collective, groups[group].records.values()))
    }
    # Of a Gloo group that only sends and receives nothing is recorded, not even the group. So if the members of one
    # group are a guess, its ranks may also be in a group that no record mentions.
    unrecorded = {
        rank
        for state in groups.values()
        if state.group in guessed or any(part.unrecorded_point_to_point for part in state.records.values())
        for rank in (*state.group.members, *state.records)
    }
    return RecordedJob(
        groups,
        ranks,
        guessed,
        frozenset(group for group in in_first_collective if group.description != DEFAULT_GROUP),
        frozenset(unrecorded),
    )


def _ring_overflowed(record: GroupRecord) -> bool:
    """Its counts include a pending operation that is older than everything the record still contains."""
    if record.last_enqueued is None or record.last_completed is None or record.last_completed >= record.last_enqueued:
        return False
    oldest = min((launch.slot for launch in record.launches), default=record.last_enqueued + 1)
    return oldest > max(record.last_completed, 0) + 1


def resolve_members(records: Sequence[RankRecord]) -> dict[ProcessGroup, ProcessGroup]:
    """Groups of unknown members -> the same group with its members, known or guessed.

    Gloo overwrites its single entry of `pg_config` with each new group. The members are then those that another rank's
    record gives, otherwise the ranks that launched something in the group. If the very first launch in it is still
    pending, further members may not have launched anything yet: then any rank may be a member.
    """
    parts_of: dict[ProcessGroup, list[GroupRecord]] = {}
    ranks_of: dict[ProcessGroup, list[int]] = {}
    known: dict[tuple[str, str], ProcessGroup] = {}
    wrong = _groups_with_wrong_members(records)
    without_members: dict[ProcessGroup, ProcessGroup] = {}
    for record in records:
        for part in record.groups:
            name = part.group.name, part.group.description
            if part.group.members and name not in wrong:
                known[name] = part.group
            else:
                group = without_members.setdefault(part.group, part.group._replace(members=()))
                parts_of.setdefault(group, []).append(part)
                ranks_of.setdefault(group, []).append(record.rank)
    # All numbers up to the highest rank, ranks without a record included: they may be members as well.
    all_ranks = tuple(range(max((record.rank for record in records), default=-1) + 1))
    resolved = {}
    for group, parts in parts_of.items():
        any_rank = group.description == DEFAULT_GROUP or any(_is_in_first_collective(part) for part in parts)
        members = all_ranks if any_rank else tuple(sorted(ranks_of[group]))
        resolved[group] = known.get((group.name, group.description)) or group._replace(members=members)
    return {recorded: resolved[group] for recorded, group in without_members.items()}


def _groups_with_wrong_members(records: Sequence[RankRecord]) -> set[tuple[str, str]]:
    """Gloo groups whose recorded members do not fit the ranks that use them: these are the members of another group,
    which was created later and overwrote the entry."""
    members: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    ranks: dict[tuple[str, str], set[int]] = {}
    for record in records:
        for part in record.groups:
            if any(launch.operation.backend == "gloo" for launch in part.launches[:1]):
                name = part.group.name, part.group.description
                ranks.setdefault(name, set()).add(record.rank)
                members.setdefault(name, set()).update({part.group.members} - {()})
    return {
        name for name, recorded in members.items() if recorded and (len(recorded) > 1 or ranks[name] - set(*recorded))
    }


def _is_in_first_collective(record: GroupRecord) -> bool:
    return any(launch.pending and launch.slot <= 1 for launch in record.launches)


def collective_launches(record: GroupRecord) -> list[OperationLaunch]:
    """Without sends and receives."""
    return [launch for launch in record.launches if not launch.operation.point_to_point]


def keeps_finished_launches(record: GroupRecord) -> bool:
    """Whether the record contains finished launches too. If so, a newer slot that is missing was never launched."""
    return any(not launch.pending for launch in record.launches)


def counts_only_collectives(state: GroupState) -> bool:
    """Whether the counts of the group are of collectives.

    They are not if a send or receive was recorded, or if a count differs from the newest recorded launch.
    """
    for record in state.records.values():
        if any(launch.operation.point_to_point for launch in record.launches):
            return False
        newest = max((launch.slot for launch in record.launches), default=None)
        if newest is not None and record.last_enqueued is not None and record.last_enqueued != newest:
            return False
    return True
