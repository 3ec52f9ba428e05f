"""Checkpoint directories of each trainer, complete and cut short, laid out as files."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from wattwatch.collectors.checkpoints import list_checkpoint_directory, read_checkpoints
from wattwatch.collectors.samples import CheckpointEntry
from wattwatch.watcher.cli.inspect import checkpoints_command

LAYOUTS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "checkpoints" / "layouts.json").read_text()
)
NAMES = [layout["framework"] for layout in LAYOUTS]
QUIET = {layout["framework"] for layout in LAYOUTS if layout["complete"]["rule"] == "quiet"}
ONE_FILE = {"Lightning"}  # put in place when whole: there is no half of it


def lay_out(layout: dict[str, Any], root: Path, complete: bool) -> Path:
    """The layout's files; without what marks completion, or with its "incomplete" marker, where not complete."""
    mark = layout["complete"]
    withheld = set() if complete else {mark.get("path"), *mark.get("paths", [])}
    folder = root / layout["step_dir"]
    for name in layout["files"]:
        if name not in withheld:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}" if name.endswith(".json") else "")
    if not complete:
        for name in mark.get("absent", []):
            folder.mkdir(exist_ok=True)
            (folder / name).touch()
        if "absent_sibling" in mark:
            (root / mark["absent_sibling"].format(step_dir=layout["step_dir"])).touch()
    for name, text in layout["root_files"].items():
        if name in withheld:
            continue
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            (root / name).symlink_to(text[3:])
        else:
            (root / name).write_text(text)
    return root


def entries(root: Path, age_seconds: float = 0.0) -> tuple[CheckpointEntry, ...]:
    listing, ages = list_checkpoint_directory(str(root))
    return read_checkpoints(str(root), listing, {name: age + age_seconds for name, age in ages.items()}).entries


def age(root: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in [root, *root.rglob("*")]:
        os.utime(path, (then, then), follow_symlinks=False)


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_a_finished_checkpoint_is_complete(layout: dict[str, Any], tmp_path: Path) -> None:
    root = lay_out(layout, tmp_path, complete=True)
    age(root, 600.0)
    (entry,) = entries(root)
    step = next(part for part in (entry.step,))
    assert (entry.name, entry.complete) == (layout["step_dir"], True)
    assert step is not None
    assert str(step) in layout["step_dir"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_one_that_is_still_being_written_is_not_complete(layout: dict[str, Any], tmp_path: Path) -> None:
    (entry,) = entries(lay_out(layout, tmp_path, complete=False))
    if layout["framework"] in QUIET:
        assert entry.complete is None
        assert "the folder has not changed for" in entry.why
    else:
        assert entry.complete is (layout["framework"] in ONE_FILE)


def safetensors(path: Path, stated: int, written: int) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [stated], "data_offsets": [0, stated]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * written)


def ours(root: Path, written: int) -> Path:
    folder = root / "step-00000500"
    folder.mkdir()
    safetensors(folder / "model-00001-of-00001.safetensors", 1000, written)
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "COMPLETE.json").write_text("{}")
    return root


def test_a_truncated_safetensors_file_is_detected_by_its_header(tmp_path: Path) -> None:
    (entry,) = entries(ours(tmp_path, written=400))
    assert entry.complete is False
    assert "truncated or still being written" in entry.why


def test_the_same_file_untruncated_is_complete(tmp_path: Path) -> None:
    (entry,) = entries(ours(tmp_path, written=1000))
    assert (entry.complete, entry.step) == (True, 500)


def test_a_file_listed_in_the_index_must_exist(tmp_path: Path) -> None:
    ours(tmp_path, written=1000)
    (tmp_path / "step-00000500" / "model-00001-of-00001.safetensors").unlink()
    (entry,) = entries(tmp_path)
    assert entry.complete is False
    assert "model-00001-of-00001.safetensors" in entry.why


def test_a_save_in_progress_shows_as_growing_bytes(tmp_path: Path) -> None:
    shard = tmp_path / "step-10" / "__0_0.distcp"
    shard.parent.mkdir()
    sizes = []
    for size in (10, 20, 30):
        shard.write_bytes(b"x" * size)
        sizes.append(entries(tmp_path)[0].bytes)
    assert sizes == [10, 20, 30]


def test_a_staged_checkpoint_is_not_complete_whatever_is_in_it(tmp_path: Path) -> None:
    ours(tmp_path, written=1000)
    (tmp_path / "step-00000500").rename(tmp_path / "step-00000500.tmp-3fa9")
    (entry,) = entries(tmp_path)
    assert (entry.complete, entry.step) == (False, 500)


def test_an_older_checkpoint_stays_complete_when_the_pointer_moves_on(tmp_path: Path) -> None:
    for step in (500, 1000):
        (tmp_path / f"iter_{step:07}").mkdir()
        (tmp_path / f"iter_{step:07}" / "common.pt").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1000")
    assert [(e.step, e.complete) for e in entries(tmp_path)] == [(500, True), (1000, True)]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("500")
    assert [(e.step, e.complete) for e in entries(tmp_path)] == [(500, True), (1000, False)]


def test_only_the_newest_eight_are_listed_newest_last(tmp_path: Path) -> None:
    for step in range(20):
        (tmp_path / f"step-{step}").mkdir()
        os.utime(tmp_path / f"step-{step}", (step, step))
    assert [entry.step for entry in entries(tmp_path)] == list(range(12, 20))


def test_names_and_files_of_any_kind_are_no_error(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"step-7\xff")).mkdir()
    (tmp_path / "step-8").mkdir()
    (tmp_path / "step-8" / "model.safetensors").write_bytes(b"\xff" * 40)
    (tmp_path / "step-8" / "model.safetensors.index.json").write_text("no json")
    (tmp_path / "step-8" / "loop").symlink_to(tmp_path)
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    assert [entry.complete for entry in entries(tmp_path)] == [False]


def test_the_command_prints_the_contracts_keys(tmp_path: Path) -> None:
    result = CliRunner().invoke(checkpoints_command, [str(ours(tmp_path, 1000)), "--json"])
    assert result.exit_code == 0
    (entry,) = json.loads(result.stdout)
    assert list(entry) == ["name", "step", "complete", "bytes", "why"]
    assert (entry["name"], entry["complete"]) == ("step-00000500", True)


def test_the_command_says_what_to_give_instead(tmp_path: Path) -> None:
    result = CliRunner().invoke(checkpoints_command, [str(ours(tmp_path, 1000) / "step-00000500")])
    assert result.exit_code == 3
    assert "give its parent directory" in result.stderr
    assert CliRunner().invoke(checkpoints_command, [str(tmp_path / "none")]).exit_code == 3


def test_the_command_takes_the_checkpoints_of_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "checkpoints-before-attempt-02").mkdir()
    (tmp_path / "checkpoints").mkdir()
    ours(tmp_path / "checkpoints", 1000)
    result = CliRunner().invoke(checkpoints_command, [str(tmp_path), "--json"])
    assert (result.exit_code, [entry["name"] for entry in json.loads(result.stdout)]) == (0, ["step-00000500"])
