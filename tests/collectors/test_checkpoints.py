"""Checkpoint directories of each trainer, complete and cut short, laid out as files."""

from __future__ import annotations

import json
import os
import re
import struct
import time
import zipfile
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
OURS = "paper / ours"
ONE_FILE = {"Lightning"}  # put in place when whole: there is no half of it


def lay_out(layout: dict[str, Any], root: Path, complete: bool) -> Path:
    """The layout's files; without what marks completion, or with its "incomplete" marker, where not complete."""
    mark = layout["complete"]
    withheld = set() if complete else {mark.get("path"), *mark.get("paths", [])}
    # Our own trainer gives a folder its final name only when it is complete.
    staged = not complete and layout["framework"] == OURS
    folder = root / (layout["step_dir"] + (".tmp-3fa9" if staged else ""))
    for name in [each for listed in layout["files"] for each in all_of(listed)]:
        if name not in withheld:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".safetensors"):
                safetensors(folder / name, 8, 8)
            else:
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
        elif name.endswith((".pt", ".ckpt")):
            write(root, name)
        else:
            (root / name).write_text(text)
    return root


def all_of(name: str) -> list[str]:
    """The data names one file of several: model-00001-of-00014 stands for fourteen."""
    found = re.search(r"(?<!shard-00001-model-)00001-of-(\d+)", name)
    if found is None:
        return [name]
    return [name.replace("00001-of-", f"{number:05}-of-") for number in range(1, int(found[1]) + 1)]


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


def write(folder: Path, *names: str) -> None:
    """Files with a content that suits their names."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            safetensors(path, 100, 100)
        elif name.endswith((".pt", ".pth", ".pkl", ".ckpt")):
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("data", b"x" * 500)
        else:
            path.write_text("{}")


# A folder as its trainer leaves it, and the files that are missing while a save is unfinished ("": its final name).
FOREIGN: dict[str, tuple[str, list[str], list[str]]] = {
    "levanter": ("step-500", ["model/0", "metadata.json"], ["metadata.json"]),
    "orbax": ("500", ["_CHECKPOINT_METADATA", "items/manifest.ocdbt", "items/d/0a1b"], [""]),
    "speculators": ("3", ["config.json", "model.safetensors", "optimizer_state_dict.pt"], ["optimizer_state_dict.pt"]),
    "accelerate (diffusers)": ("checkpoint-500", ["unet/model.safetensors", "random_states_0.pkl"], []),
    "ms-swift (Megatron)": (
        "checkpoint-500",
        ["args.json", "latest_checkpointed_iteration.txt", "iter_0000500/__0_0.distcp", "iter_0000500/.metadata"],
        ["iter_0000500/.metadata"],
    ),
    "lightning (DeepSpeed)": (
        "epoch=0-step=500.ckpt",
        ["checkpoint/mp_rank_00_model_states.pt", "checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest"],
        ["latest"],
    ),
    "KempnerForge": (
        "step_500", ["__0_0.distcp", ".metadata", "train_state.pt", "metadata.json"], [".metadata", "metadata.json"],
    ),
    "verl": (
        "global_step_500",
        [*(f"actor/model_world_size_4_rank_{rank}.pt" for rank in range(4)), "data.pt"],
        ["actor/model_world_size_4_rank_2.pt"],
    ),
    "NeMo-RL": ("step_500", ["training_info.json", "config.yaml", "policy/weights/x.safetensors"], [""]),
    "fairseq2": ("step_500", ["trainer/rank_00.pt", "model/pp_00/tp_00/sdp_00.pt"], [""]),
    "prime-rl": ("step_500", ["trainer/__0_0.distcp", "trainer/.metadata"], ["trainer/.metadata"]),
    "xtuner": (
        "ckpt-step-500", ["weights/__0_0.distcp", "weights/.metadata", "train_state.json"], ["weights/.metadata"],
    ),
}  # fmt: skip
STAGED = {"orbax": "500.orbax-checkpoint-tmp-7", "NeMo-RL": "tmp_step_500", "fairseq2": "step_500.tmp"}


@pytest.mark.parametrize("framework", FOREIGN)
def test_a_foreign_checkpoint_is_judged_by_the_layout_of_its_own_trainer(framework: str, tmp_path: Path) -> None:
    name, files, missing = FOREIGN[framework]
    write(tmp_path / name, *files)
    age(tmp_path, 600.0)
    (whole,) = entries(tmp_path)
    assert (whole.name, whole.complete) == (name, True)
    assert whole.why.startswith(f"{framework} layout: ")
    for path in missing:
        (tmp_path / name / path).unlink() if path else (tmp_path / name).rename(tmp_path / STAGED[framework])
    (torn,) = entries(tmp_path)
    unrecognized = framework in ("levanter", "speculators")  # what is missing is all that is special about it
    assert torn.complete is (None if unrecognized else not missing), torn.why
    assert str(torn.step) in name


@pytest.mark.parametrize(
    "name", ["500", "0000000500", "step-500", "step_500", "checkpoint-500", "checkpoint_500", "epoch=0-step=500.ckpt"]
)
def test_a_name_that_many_trainers_use_says_nothing_about_the_trainer(name: str, tmp_path: Path) -> None:
    """Neither complete nor incomplete is known of a checkpoint whose layout is not (vllm-project/speculators#739,
    marin-community/levanter#991)."""
    write(tmp_path / name, "config.json", "tokenizer.json", "model.safetensors", "my_state.pt")
    age(tmp_path, 600.0)
    (entry,) = entries(tmp_path)
    assert (entry.step, entry.complete) == (500, None)
    assert entry.why == (
        "layout not recognized: the folder has 4 files and has not changed for 600 s; its files do not show "
        "whether the save is complete"
    )


def test_a_save_that_begins_has_the_layout_of_the_checkpoints_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "step-100", "model/0", "metadata.json")
    write(tmp_path / "step-200", "model/0")
    assert [(entry.step, entry.complete) for entry in entries(tmp_path)] == [(100, True), (200, False)]
    assert entries(tmp_path)[1].why == "levanter layout: metadata.json does not exist yet"


@pytest.mark.parametrize("content", [b"\0" * 5000, b"", b"{}", b"\xff" * 40, struct.pack("<Q", 9) + b'{"w": {}}'])
@pytest.mark.parametrize("beside", [["trainer_state.json", "training_args.bin"], ["my_state.txt"]])
def test_a_file_that_only_is_named_safetensors_is_not_complete(
    content: bytes, beside: list[str], tmp_path: Path
) -> None:
    write(tmp_path / "checkpoint-500", *beside)
    (tmp_path / "checkpoint-500" / "model.safetensors").write_bytes(content)
    age(tmp_path, 600.0)
    (entry,) = entries(tmp_path)
    assert entry.complete is False
    assert (
        f"model.safetensors ({len(content):,} bytes) is damaged or still being written: it does not begin with a "
        "safetensors header"
    ) in entry.why


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "ckpt", "pkl"])
def test_an_archive_that_was_cut_off_is_not_complete(suffix: str, tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-500", "trainer_state.json", "whole.pt")
    whole = (tmp_path / "checkpoint-500" / "whole.pt").read_bytes()
    (tmp_path / "checkpoint-500" / f"optimizer.{suffix}").write_bytes(whole)
    assert entries(tmp_path)[0].complete is True
    (tmp_path / "checkpoint-500" / f"optimizer.{suffix}").write_bytes(whole[:-10])
    (entry,) = entries(tmp_path)
    assert entry.complete is False
    assert f"optimizer.{suffix} ({len(whole) - 10} bytes) is damaged or still being written" in entry.why


def test_a_checkpoint_that_is_one_file_is_read_to_its_end_too(tmp_path: Path) -> None:
    path = tmp_path / "epoch=0-step=500.ckpt"
    write(tmp_path, path.name)
    assert [entry.complete for entry in entries(tmp_path)] == [True]
    path.write_bytes(path.read_bytes()[:300])
    (entry,) = entries(tmp_path)
    assert (entry.complete, "the end of the archive is missing" in entry.why) == (False, True)


def test_files_are_counted_and_an_index_is_mentioned_only_if_there_is_one(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-1", "trainer_state.json", "model.safetensors")
    names = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    write(tmp_path / "checkpoint-2", "trainer_state.json", *names)
    index = {"weight_map": dict(zip("ab", names, strict=True))}
    (tmp_path / "checkpoint-2" / "model.safetensors.index.json").write_text(json.dumps(index))
    without, indexed = entries(tmp_path)
    assert (without.complete, indexed.complete) == (True, True)
    assert without.why.startswith(
        "hf_trainer layout: trainer_state.json exists, 1 safetensors file has the length that its header says; "
    )
    assert indexed.why.startswith(
        "hf_trainer layout: trainer_state.json exists, all 2 files listed in model.safetensors.index.json exist, "
        "2 safetensors files have the length that their headers say; "
    )


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_numbered_names_say_how_many_files_there_must_be(suffix: str, tmp_path: Path) -> None:
    names = [f"model-{number:05}-of-00003.{suffix}" for number in (1, 2, 3)]
    write(tmp_path / "checkpoint-500", "trainer_state.json", *names)
    assert entries(tmp_path)[0].complete is True
    (tmp_path / "checkpoint-500" / names[1]).unlink()
    (entry,) = entries(tmp_path)
    assert entry.complete is False
    assert f"2 of the 3 files model-*.{suffix} exist (the total is part of the file names)" in entry.why


def test_more_files_than_are_listed_do_not_make_a_checkpoint_incomplete(tmp_path: Path) -> None:
    names = [f"model-{number:05}-of-00191.safetensors" for number in range(1, 192)]
    write(tmp_path / "checkpoint-500", "trainer_state.json", *names)
    index = {"weight_map": {name: name for name in names}}
    (tmp_path / "checkpoint-500" / "model.safetensors.index.json").write_text(json.dumps(index))
    (entry,) = entries(tmp_path)
    assert entry.complete is True
    assert "all 191 files listed in model.safetensors.index.json exist" in entry.why
    (tmp_path / "checkpoint-500" / names[150]).unlink()
    (entry,) = entries(tmp_path)
    assert entry.complete is False
    assert f"model.safetensors.index.json lists {names[150]}, which does not exist yet" in entry.why


def test_a_marker_among_more_files_than_are_scanned_is_not_called_missing(tmp_path: Path) -> None:
    folder = tmp_path / "step-500"
    write(folder, *(f"__{number}_0.distcp" for number in range(4200)))
    (entry,) = entries(tmp_path)
    assert (entry.complete, entry.why) == (False, "torchtitan layout: .metadata does not exist yet")
    write(folder, "optimizer/part")
    (entry,) = entries(tmp_path)
    assert entry.complete is None
    assert entry.why == "torchtitan layout: only 96 of 4,200 files were listed, and .metadata is not one of them"


def test_a_file_that_is_written_again_in_place_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-500"
    write(folder, "trainer_state.json")
    for length in (500, 100, 900):
        safetensors(folder / "model.safetensors", length, length)
        assert entries(tmp_path)[0].complete is True


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


TREES = json.loads((Path(__file__).parent.parent / "data" / "checkpoints" / "trees.json").read_text())


@pytest.mark.parametrize("tree", TREES, ids=[tree["case"] for tree in TREES])
def test_checkpoints_of_any_trainer(tree: dict[str, Any], tmp_path: Path) -> None:
    """`says`: name -> step, and whether it is complete 30 s and 600 s after the last change."""
    for name, content in tree["files"].items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content.startswith("-> "):
            path.symlink_to(content[3:])
        elif content.endswith(" archive"):
            write(tmp_path, name) if name.endswith((".pt", ".pth", ".pkl", ".ckpt")) else write_archive(path)
            if content == "cut archive":
                path.write_bytes(path.read_bytes()[:300])
        else:
            path.write_text(content)
    soon, later = entries(tmp_path, 30.0), entries(tmp_path, 600.0)
    said = {entry.name: [entry.step, entry.complete] for entry in soon}
    for entry in later:
        said[entry.name].append(entry.complete)
    assert said == tree["says"]


def write_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", b"x" * 500)


def test_shards_are_whole_when_as_many_exist_as_of_the_other_checkpoints(tmp_path: Path) -> None:
    write(tmp_path, *(f"checkpoint_1_500-shard{rank}.pt" for rank in range(4)))
    (only,) = entries(tmp_path, 600.0)
    assert (only.name, only.step, only.complete) == ("checkpoint_1_500.pt", 500, None)
    write(tmp_path, *(f"checkpoint_2_900-shard{rank}.pt" for rank in range(3)))
    assert [(entry.step, entry.complete) for entry in entries(tmp_path, 600.0)] == [(500, True), (900, False)]
    write(tmp_path, "checkpoint_2_900-shard3.pt")
    assert [(entry.step, entry.complete) for entry in entries(tmp_path, 600.0)] == [(500, True), (900, True)]
    path = tmp_path / "checkpoint_2_900-shard1.pt"
    path.write_bytes(path.read_bytes()[:200])
    assert [(entry.step, entry.complete) for entry in entries(tmp_path, 600.0)] == [(500, True), (900, False)]


def test_model_parts_of_metaseq_are_one_checkpoint(tmp_path: Path) -> None:
    for step in (100, 200):
        write(tmp_path, *(f"checkpoint_{step}-model_part-{part}-shard{rank}.pt" for part in (0, 1) for rank in (0, 1)))
    assert [(entry.name, entry.step, entry.complete) for entry in entries(tmp_path)] == [
        ("checkpoint_100.pt", 100, True), ("checkpoint_200.pt", 200, True),
    ]  # fmt: skip


def test_silence_does_not_complete_what_lacks_the_files_that_are_written_last(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint_0", "model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl")
    write(tmp_path / "checkpoint_1", "model.safetensors", "optimizer.bin")
    age(tmp_path, 600.0)
    assert [entry.complete for entry in entries(tmp_path)] == [True, False]
    write(tmp_path / "checkpoint_1", "random_states_0.pkl")
    age(tmp_path, 600.0)
    (_, torn) = entries(tmp_path)
    assert (torn.complete, "another checkpoint has 2" in torn.why) == (None, True)


def test_silence_does_not_complete_what_the_pointer_does_not_refer_to(tmp_path: Path) -> None:
    write(tmp_path / "global_step_100", "actor/model_world_size_1_rank_0.pt", "data.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("50")
    age(tmp_path, 600.0)
    assert [entry.complete for entry in entries(tmp_path)] == [None]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    assert [entry.complete for entry in entries(tmp_path)] == [True]


def test_a_checkpoint_of_megatron_bridge_needs_its_metadata(tmp_path: Path) -> None:
    write(tmp_path / "iter_0000500", "run_config.yaml", "train_state.pt", "common.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("500")
    assert [(entry.step, entry.complete) for entry in entries(tmp_path, 600.0)] == [(500, False)]
    write(tmp_path / "iter_0000500", ".metadata", "__0_0.distcp")
    assert [(entry.step, entry.complete) for entry in entries(tmp_path, 600.0)] == [(500, True)]


@pytest.mark.parametrize(
    ("content", "complete"),
    [(b"", False), (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8" * 9, None), (b"PK\x03\x04abc", False)],
)
def test_a_single_file_is_judged_by_its_content_not_by_silence(
    content: bytes, complete: bool | None, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint-500.pt").write_bytes(content)
    assert [(entry.step, entry.complete) for entry in entries(tmp_path, 6000.0)] == [(500, complete)]


@pytest.mark.parametrize(("written", "complete"), [(100, True), (60, False), (140, False)])
def test_a_single_safetensors_file_has_the_length_in_its_header(written: int, complete: bool, tmp_path: Path) -> None:
    safetensors(tmp_path / "lora-step00000500.safetensors", 100, written)
    assert [(entry.step, entry.complete) for entry in entries(tmp_path, 6000.0)] == [(500, complete)]


def test_files_beside_checkpoints_and_parts_of_one_are_no_checkpoints(tmp_path: Path) -> None:
    write(tmp_path, "optimizer.pt", "rng_state_0.pth", "training_args.pt")
    assert entries(tmp_path) == ()
    write(tmp_path, "trainer_state.json", "model.safetensors", "pytorch_model.pt")
    assert entries(tmp_path) == ()


def test_the_newest_of_many_files_are_listed_and_a_change_is_seen(tmp_path: Path) -> None:
    """Not every file is looked at again in each look: new ones and those that were written last are."""
    for number in range(700):
        (tmp_path / f"step-{number}.pt").touch()
        os.utime(tmp_path / f"step-{number}.pt", (1e9 + number, 1e9 + number))
    assert [entry.complete for entry in entries(tmp_path)] == [False] * 48
    write(tmp_path, "step-699.pt", "step-800.pt")
    assert [(each.step, each.complete) for each in entries(tmp_path)][-2:] == [(699, True), (800, True)]
    write(tmp_path, "step-3.pt")
    seen = [{entry.step for entry in entries(tmp_path) if entry.complete} for _ in range(16)]
    assert 3 in seen[-1]
    (tmp_path / "step-800.pt").unlink()
    assert 800 not in {entry.step for entry in entries(tmp_path)}
