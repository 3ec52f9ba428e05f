"""Every format of the recorder becomes the same model, and anything else is rejected with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.watcher.diagnosis.flight_recorder.sample_dumps import (
    DATA,
    GLOO,
    NCCL,
    NEWER_TORCH,
    PIPELINE,
    as_json,
    in_format,
    loaded,
)
from wattwatch.watcher.diagnosis.flight_recorder.loader import Interner, build_rank_record
from wattwatch.watcher.diagnosis.flight_recorder.model import GroupRecord, OperationLaunch, ProcessGroup, RankRecord
from wattwatch.watcher.diagnosis.flight_recorder.schema import MalformedRecord, build_record_table

WORLD = ProcessGroup("0", (0, 1, 2, 3), "default_pg")


def parse(dump: Any, keep: int = 1000) -> RankRecord:
    return build_rank_record(json.loads(json.dumps(build_record_table(dump, keep))), 3, "here", Interner())


def group_named(found: RankRecord, name: str) -> GroupRecord:
    return next(group for group in found.groups if group.group.name == name)


def names(launches: tuple[OperationLaunch, ...]) -> list[str]:
    return [launch.operation.name for launch in launches]


@pytest.mark.parametrize("version", NEWER_TORCH)
def test_every_version_gives_the_same_launches(version: str) -> None:
    found = parse(in_format(loaded(NCCL), version))
    (group,) = found.groups
    assert (found.rank, found.source, found.version) == (3, "here", version)
    assert group.group == WORLD
    assert names(group.launches) == ["all_gather", "all_reduce"] * 3 + ["all_reduce"]
    assert [launch.slot for launch in group.launches] == [1, 2, 3, 4, 5, 6, 7]
    assert [launch.pending for launch in group.launches] == [False] * 6 + [True]
    last = group.launches[-1]
    assert last.operation.backend == "nccl"
    assert last.operation.input_sizes == ((1,),)
    assert [frame.file for frame in last.frames if "train/" in frame.file] == ["train/frgen.py"]
    assert last.frames[0].function == "all_reduce"
    assert group.last_enqueued == 7
    assert group.last_completed == (None if version in ("1.4", "2.1") else 6)
    assert last.timeout_ms == (None if version in ("1.4", "2.1") else 60_000)
    assert found.library_version == ("2.27.5" if version in ("2.9", "2.10", "2.11") else "")


@pytest.mark.parametrize("version", NEWER_TORCH)
@pytest.mark.parametrize("path", [NCCL, GLOO, PIPELINE], ids=["nccl", "gloo", "pipeline"])
def test_json_gives_the_same_as_the_pickle_except_for_stacks(version: str, path: Path) -> None:
    dump = in_format(loaded(path), version)
    found = parse(dump)
    for entry in dump["entries"]:
        entry.pop("frames", None)
    assert parse(json.loads(as_json(dump))) == parse(dump)
    assert [group.last_enqueued for group in found.groups] == [group.last_enqueued for group in parse(dump).groups]


def test_real_gloo_json_agrees_with_its_pickle() -> None:
    both = [path.parent for path in sorted(DATA.glob("gloo_213_*/fr_trace_0"))]
    assert len(both) >= 3
    for case in both:
        for rank in range(4):
            pickled = parse(loaded(case / f"fr_trace_{rank}"))
            from_json = parse(json.loads((case / f"fr_trace_json_{rank}.json").read_bytes()))
            for one, other in zip(pickled.groups, from_json.groups, strict=True):
                assert tuple(each._replace(frames=()) for each in one.launches) == other.launches
                assert (one.group, one.last_enqueued) == (other.group, other.last_enqueued)


def test_a_retired_gloo_entry_is_finished_and_the_unnamed_members_belong_to_the_only_group() -> None:
    (group,) = parse(loaded(GLOO)).groups
    assert group.group == WORLD
    assert (group.last_enqueued, group.last_started, group.last_completed) == (7, None, 6)
    assert [launch.pending for launch in group.launches] == [False] * 6 + [True]
    assert {launch.started for launch in group.launches} == {None}


def test_members_that_a_later_gloo_group_overwrote_are_unknown() -> None:
    found = parse(json.loads((DATA / "gloo_213_three_groups" / "fr_trace_json_0.json").read_bytes()))
    assert {str(group.group): group.group.members for group in found.groups} == {
        "default_pg": (),
        "dp": (),
        "group 1": (),
    }


def test_gloo_counts_with_a_send_in_between_count_collectives_only() -> None:
    found = parse(json.loads((DATA / "gloo_213_three_groups" / "fr_trace_json_0.json").read_bytes()))
    world = group_named(found, "0")
    assert (world.last_enqueued, world.last_completed) == (6, 6)


def test_a_gloo_record_without_entries_belongs_to_the_default_group() -> None:
    dump = loaded(GLOO)
    dump["entries"] = []
    (group,) = parse(json.loads(as_json(dump))).groups
    assert group == GroupRecord(WORLD, 7, None, 6, ())


def test_sends_and_receives_name_their_two_ends_and_are_counted_separately() -> None:
    pipeline = group_named(parse(loaded(PIPELINE)), "43")
    ends = [(o.name, o.source, o.destination) for o in (launch.operation for launch in pipeline.launches)]
    assert ends == [("recv", 0, 3), ("send", 3, 2), ("recv", 2, 3), ("send", 3, 0)]
    assert [launch.slot for launch in pipeline.launches] == [11977, 11978, 11979, 11980]
    assert all(launch.operation.point_to_point for launch in pipeline.launches)
    # The recorder's own count, 11980, is of its last operation, which was a send.
    assert (pipeline.last_enqueued, pipeline.last_completed) == (26, 26)


def test_groups_without_entries_get_their_counts_by_order() -> None:
    found = parse(loaded(PIPELINE))
    assert len(found.groups) == 13
    assert group_named(found, "112").last_enqueued == 104
    assert group_named(found, "0").last_completed == 163
    dump = loaded(PIPELINE)
    del dump["pg_config"]["108"]  # now as many numbers as names no longer
    assert group_named(parse(dump), "112").last_enqueued is None
    assert group_named(parse(dump), "41").last_enqueued == 42817


def test_group_names_that_are_not_numbers_are_matched_by_the_entries() -> None:
    dump = loaded(PIPELINE)
    dump["pg_config"]["split:7"] = dump["pg_config"].pop("112")
    found = parse(dump)
    assert group_named(found, "split:7").last_enqueued is None
    assert group_named(found, "41").last_enqueued == 42817


def test_a_count_is_zero_for_never_and_none_for_not_recorded() -> None:
    dump = loaded(NCCL)
    dump["entries"] = []
    dump["pg_status"]["0"] = {"last_enqueued_collective": -1, "last_started_collective": -1}
    (group,) = parse(dump).groups
    assert (group.last_enqueued, group.last_started, group.last_completed) == (0, None, None)


def test_starts_are_known_only_if_the_recorder_sees_them() -> None:
    dump = loaded(NCCL)
    dump["entries"][-2].update(state="started", time_discovered_completed_ns=None, retired=False)
    dump["pg_status"]["0"]["last_started_collective"] = 6
    (group,) = parse(dump).groups
    assert [launch.started for launch in group.launches[-2:]] == [True, False]
    assert group.last_started == 6


def test_launches_in_a_batch_take_its_state_and_a_batch_of_sends_itself_is_dropped() -> None:
    dump = loaded(PIPELINE)
    two = [entry for entry in dump["entries"] if entry["is_p2p"]][:2]
    for entry in two:
        entry["p2p_seq_id"] = 11978
    batch = {**two[-1], "profiling_name": "nccl:coalesced", "state": "completed", "retired": True}
    dump["entries"].insert(dump["entries"].index(two[-1]) + 1, batch)
    pipeline = group_named(parse(dump), "43")
    assert names(pipeline.launches) == ["recv", "send", "recv", "send"]
    assert [launch.pending for launch in pipeline.launches] == [False, False, True, True]


def test_a_group_that_only_entries_mention_has_no_members() -> None:
    dump = loaded(PIPELINE)
    del dump["pg_config"]["41"]
    assert group_named(parse(dump), "41").group == ProcessGroup("41", (), "TENSOR_MODEL_PARALLEL_GROUP")


def test_format_1_4_with_several_groups_without_names() -> None:
    dump = in_format(loaded(PIPELINE), "1.4")
    found = parse(dump)
    names_of_groups = {str(group.group) for group in found.groups if group.launches}
    assert "group number 5" in names_of_groups
    assert {group.group.members for group in found.groups if group.launches} == {()}


def test_members_may_be_a_list() -> None:
    dump = loaded(NCCL)
    dump["pg_config"]["0"]["ranks"] = [0, 1, 2, 3]
    assert parse(dump).groups[0].group == WORLD


def test_the_newest_and_the_oldest_pending_launches_of_a_long_record_are_kept() -> None:
    dump = loaded(NCCL)
    dump["entries"][1].update(state="scheduled", time_discovered_completed_ns=None, retired=False)
    (group,) = parse(dump, keep=3).groups
    assert [launch.slot for launch in group.launches] == [2, 5, 6, 7]
    assert group.last_enqueued == 7


def test_equal_values_are_one_object_across_ranks() -> None:
    interner = Interner()
    tables = [json.loads(json.dumps(build_record_table(loaded(NCCL.parent / f"_dump_{rank}")))) for rank in (0, 1)]
    one, other = (build_rank_record(table, rank, "here", interner).groups[0] for rank, table in enumerate(tables))
    assert one.group is other.group
    assert one.launches[0].operation is other.launches[0].operation
    assert one.launches[0].frames is other.launches[0].frames
    assert one.launches[0].frames[0].file is other.launches[0].frames[0].file


def test_unprintable_characters_are_replaced() -> None:
    dump = loaded(NCCL)
    dump["entries"][0]["frames"][0]["name"] = "evil\x1b[2J\n\ud800"
    (group,) = parse(dump).groups
    assert group.launches[0].frames[0].function == "evil?[2J??"


REJECTED: list[tuple[Any, str]] = [
    ([], "the file contains a list instead of a dict with version, pg_config and entries"),
    ({}, "the file lacks the fields of a flight record (version, pg_config, entries) or is from torch 2.2 or older"),
    ({"version": 2.1, "entries": []}, "version is a float instead of a string"),
    ({"version": "2.10", "entries": {}}, "entries is a dict instead of a list or a tuple"),
    ({"version": "2.10", "entries": [3]}, "entries contains an integer instead of a dict"),
    ({"version": "2.10", "pg_config": {"0": []}}, "pg_config's group is a list instead of a dict"),
    (
        {"version": "2.10", "pg_config": {"0": {"ranks": "all"}}},
        'pg_config.ranks is a string that is not a list of ranks such as "[0, 1]"',
    ),
    ({"version": "2.10", "pg_status": {"x": {}}}, "pg_status is a string instead of an integer"),
    ({"version": "2.10", "entries": [{}]}, "entries[0].seq_id is null instead of an integer"),
    (
        {"version": "v" * 5000, "entries": []},
        "version is a string of 5,000 characters, more than the limit of 4,096",
    ),
]


@pytest.mark.parametrize(("decoded", "words"), REJECTED, ids=range(len(REJECTED)))
def test_anything_else_is_rejected_with_a_reason(decoded: Any, words: str) -> None:
    with pytest.raises(MalformedRecord) as rejected:
        build_record_table(decoded)
    assert str(rejected.value) == words


WRONG: tuple[Any, ...] = ("text", 1.5, True, None, b"bytes", [["x"]], {"a": 1}, 2**70, (), [None], {"": []})


@pytest.mark.parametrize("field", [*loaded(NCCL), *loaded(NCCL)["entries"][0]])
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_wrong_type_anywhere_is_accepted_or_rejected_but_never_raises_anything_else(field: str, value: Any) -> None:
    for place in (0, -1):
        dump = loaded(NCCL)
        target = dump if field in dump else dump["entries"][place]
        target[field] = value
        try:
            parse(dump)
            continue
        except MalformedRecord as rejected:
            words = str(rejected)
        assert field in words or "of torch" in words or "frame" in words
