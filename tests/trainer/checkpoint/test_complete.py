"""Directories that look like complete checkpoints and are not: every kind of damage is named."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trainer.checkpoint.made_checkpoints import (
    completion_of,
    contents,
    make_checkpoint,
    relist,
    tensors_file,
    write,
)
from wattwatch.trainer.checkpoint.complete import find_newest_complete, read_completion, why_incomplete
from wattwatch.trainer.errors import UserError

SHARD = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def cut(path: Path, bytes_left: int) -> None:
    path.write_bytes(path.read_bytes()[:bytes_left])


def change_index(directory: Path, **changes: str) -> None:
    data = json.loads((directory / INDEX).read_bytes())
    data["weight_map"] |= changes
    relist(directory, INDEX, json.dumps(data).encode())


def drop_from_index(directory: Path) -> None:
    data = json.loads((directory / INDEX).read_bytes())
    del data["weight_map"]["c"]
    relist(directory, INDEX, json.dumps(data).encode())


def remark(directory: Path, **changes: object) -> None:
    data = json.loads((directory / "COMPLETE.json").read_bytes())
    (directory / "COMPLETE.json").write_text(json.dumps(data | changes))


def relist_without(directory: Path, name: str) -> None:
    data = json.loads((directory / "COMPLETE.json").read_bytes())
    del data["files"][name]
    (directory / "COMPLETE.json").write_text(json.dumps(data))


def forget(directory: Path, name: str) -> None:
    (directory / name).unlink()
    relist_without(directory, name)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "marker missing": (lambda d: (d / "COMPLETE.json").unlink(), "COMPLETE.json is missing: the save did not finish"),
    "marker empty": (
        lambda d: cut(d / "COMPLETE.json", 0),
        "COMPLETE.json is not valid JSON: the file is truncated or damaged",
    ),
    "marker cut": (
        lambda d: cut(d / "COMPLETE.json", 100),
        "COMPLETE.json is not valid JSON: the file is truncated or damaged",
    ),
    "marker is a list": (lambda d: (d / "COMPLETE.json").write_text("[]"), "expected an object"),
    "marker of a later version": (lambda d: remark(d, v=2), "format version 2, but this program reads version 1"),
    "marker without a field": (lambda d: remark(d, world=None), "world: expected int, found None"),
    "marker with a field more": (lambda d: remark(d, more=1), "more: unknown field"),
    "marker of another step": (
        lambda d: remark(d, step=400),
        "says step 400, but the directory is named step-00000500",
    ),
    "marker names a file outside": (
        lambda d: remark(d, files={"../config.json": {"bytes": 1, "sha256": ""}}),
        "which is not a valid name of a file in this directory",
    ),
    "marker lists no configuration": (
        lambda d: relist_without(d, "config.json"),
        "does not list config.json, which the checkpoint needs",
    ),
    "marker lists one rank's optimizer": (
        lambda d: relist_without(d, "optimizer/rank-00001.safetensors"),
        "does not list optimizer/rank-00001.safetensors",
    ),
    "marker does not list a shard": (
        lambda d: relist_without(d, SHARD),
        f"{SHARD} is not listed in COMPLETE.json, but would be loaded as part of the checkpoint",
    ),
    "shard missing": (lambda d: (d / SHARD).unlink(), f"{SHARD}: missing"),
    "shard cut": (lambda d: cut(d / SHARD, 20), f"{SHARD} is truncated: it has 20 bytes, "),
    "shard longer": (
        lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes() + b"x"),
        f"{SHARD} is too long",
    ),
    "shard is a directory": (lambda d: replace_by_directory(d / SHARD), f"{SHARD}: not a regular file"),
    "shard is a pipe": (lambda d: replace_by_fifo(d / SHARD), f"{SHARD}: not a regular file"),
    "optimizer directory gone": (lambda d: shutil.rmtree(d / "optimizer"), "optimizer/rank-00000.safetensors: missing"),
    "header tells of more": (
        lambda d: relist(d, SHARD, tensors_file({"c": b"678"}, offset=1)),
        f"{SHARD}: according to its header, the file should have",
    ),
    "header tells of less": (
        lambda d: relist(d, SHARD, tensors_file({"c": b"678"}) + b"\0"),
        f"{SHARD}: according to its header, the file should have",
    ),
    "header of another format": (
        lambda d: relist(d, SHARD, (2).to_bytes(8, "little") + b"[]"),
        f"{SHARD}: the file has no valid safetensors header",
    ),
    "header longer than the file": (
        lambda d: relist(d, SHARD, b"\xff" * 8),
        f"{SHARD}: the file says that its header has",
    ),
    "empty shard": (lambda d: relist(d, SHARD, b""), f"{SHARD}: the file is too short for a safetensors file (0 B)"),
    "index names a file not there": (
        lambda d: change_index(d, c="model-00003-of-00003.safetensors"),
        "refers to model-00003-of-00003.safetensors, which is not part of this checkpoint",
    ),
    "index names a tensor not there": (lambda d: change_index(d, d=SHARD), f"says that tensor d is in {SHARD}"),
    "index leaves a tensor out": (drop_from_index, f"does not list tensor c, which is in {SHARD}"),
    "index without a map": (lambda d: relist(d, INDEX, b"{}"), "no valid weight_map: the file is truncated or damaged"),
    "index gone with its listing": (
        lambda d: forget(d, INDEX),
        "must list model.safetensors.index.json, or model.safetensors as the only weights file",
    ),
    "weights beside that would be loaded first": (
        lambda d: (d / "model.safetensors").write_bytes(tensors_file({"a": b"0"})),
        "model.safetensors is not listed in COMPLETE.json, but would be loaded as part of the checkpoint",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_kind_of_damage_is_named(kind: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    damage, words = DAMAGE[kind]
    damage(directory)
    reason = why_incomplete(directory)
    assert reason is not None
    assert words in reason
    assert str(directory) in reason


def test_an_undamaged_checkpoint_is_complete(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    assert why_incomplete(directory) is None
    assert why_incomplete(directory, deep=True) is None
    assert read_completion(directory) == completion_of(contents())


def test_a_checkpoint_that_the_user_has_renamed_is_complete(tmp_path: Path) -> None:
    assert why_incomplete(make_checkpoint(tmp_path).rename(tmp_path / "best")) is None


def test_one_weights_file_needs_no_index(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": tensors_file({"a": b"1"})}
    assert why_incomplete(write(tmp_path / "step-00000500", files, completion_of(files, optimizer=False))) is None


def test_a_staged_directory_is_not_complete_whatever_it_holds(tmp_path: Path) -> None:
    staged = make_checkpoint(tmp_path).rename(tmp_path / "step-00000500.tmp-0af3")
    assert why_incomplete(staged) == f"{staged} is the temporary directory of a save that did not finish"


def test_bytes_changed_in_place_are_found_only_by_the_deep_check(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    data = (directory / SHARD).read_bytes()
    (directory / SHARD).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert why_incomplete(directory) is None
    reason = why_incomplete(directory, deep=True)
    assert reason is not None
    assert f"{SHARD}: the content does not match the SHA-256 in COMPLETE.json" in reason


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_file_truncated_anywhere_is_incomplete(data: st.DataObject, tmp_path: Path) -> None:
    directory = tmp_path / "step-00000500"
    shutil.rmtree(directory, ignore_errors=True)
    make_checkpoint(tmp_path)
    path = data.draw(st.sampled_from(sorted(path for path in directory.rglob("*") if path.is_file())))
    cut(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    reason = why_incomplete(directory)
    assert reason is not None
    assert path.name in reason


def test_reading_a_marker_that_does_not_exist_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such directory; resume from another checkpoint$"):
        read_completion(tmp_path / "step-00000500")


def test_the_newest_is_the_one_with_the_most_steps(tmp_path: Path) -> None:
    for step in (500, 1500, 1000):
        make_checkpoint(tmp_path, step)
    newest = find_newest_complete(tmp_path)
    assert newest.directory == tmp_path / "step-00001500"
    assert newest.completion is not None
    assert newest.completion.step == 1500
    assert newest.skipped == ()


def test_a_broken_one_is_skipped_with_its_reason_and_a_staged_one_never_counts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 500)
    cut(make_checkpoint(tmp_path, 1000) / SHARD, 3)
    make_checkpoint(tmp_path, 1500).rename(tmp_path / "step-00001500.tmp-12ab")
    newest = find_newest_complete(tmp_path)
    assert newest.directory == tmp_path / "step-00000500"
    (reason,) = newest.skipped
    assert f"step-00001000/{SHARD} is truncated" in reason


def test_without_any_there_is_none(tmp_path: Path) -> None:
    assert find_newest_complete(tmp_path / "checkpoints").directory is None
    (tmp_path / "step-00000001").mkdir()
    newest = find_newest_complete(tmp_path)
    assert newest.directory is None
    assert len(newest.skipped) == 1


def test_a_directory_that_cannot_be_read_is_an_error_and_not_treated_as_empty(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match="cannot list the checkpoints: Not a directory"):
        find_newest_complete(tmp_path / "checkpoints")


def test_optimizer_files_are_needed_only_if_the_marker_says_so(tmp_path: Path) -> None:
    files = contents(optimizer=False)
    completion = completion_of(files, optimizer=False)
    assert why_incomplete(write(tmp_path / "a", files, completion)) is None
    reason = why_incomplete(write(tmp_path / "b", files, replace(completion, optimizer=True)))
    assert reason is not None
    assert "does not list optimizer/rank-00000.safetensors" in reason


def test_it_imports_only_the_standard_library() -> None:
    source = Path(__file__).parents[3] / "trainer" / "checkpoint" / "complete.py"
    names = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source.read_text()))
        for name in (
            [item.name for item in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names - set(sys.stdlib_module_names) <= {"wattwatch"}
