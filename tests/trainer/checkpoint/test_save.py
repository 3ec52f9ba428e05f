"""Several ranks together save an ordinary Hugging Face model directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.checkpoint.made_checkpoints import make_checkpoint
from tests.trainer.checkpoint.rank_processes import run_ranks
from tests.trainer.checkpoint.scenarios import gathered_in_pieces, refused_saver, saves, whole_model
from wattwatch.trainer.checkpoint.complete import read_completion, why_incomplete
from wattwatch.trainer.checkpoint.save import SaveReport


def saved(world: int, run: Path, model: Path, **arguments: object) -> SaveReport:
    """The one save of all ranks."""
    ended = run_ranks(world, saves, run=run, model=model, **arguments)
    assert [rank.exit_code for rank in ended] == [0] * world, ended
    reports = [rank.value[-1] for rank in ended]
    assert all(isinstance(report, SaveReport) for report in reports), reports
    report: SaveReport = reports[0]
    return report


def assert_loads_as(directory: Path, tied: bool) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    expected = whole_model(tied).bfloat16().state_dict()
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("world", "tied"), [(2, False), (3, True), (3, False), (1, False)])
def test_transformers_loads_it_unchanged(world: int, tied: bool, tmp_path: Path, model: Path, tied_model: Path) -> None:
    report = saved(world, tmp_path, tied_model if tied else model, tied=tied)
    assert why_incomplete(report.directory, deep=True) is None
    assert_loads_as(report.directory, tied)
    assert report.warnings == ()
    mapping = json.loads((report.directory / "model.safetensors.index.json").read_text())["weight_map"]
    assert ("lm_head.weight" in mapping) is not tied


def test_one_file_is_named_as_the_hub_names_it(tmp_path: Path, model: Path) -> None:
    report = saved(2, tmp_path, model, file_bytes=1 << 30)
    assert sorted(path.name for path in report.directory.glob("*.safetensors*")) == ["model.safetensors"]
    assert_loads_as(report.directory, tied=False)


def test_tokenizer_templates_and_generation_settings_are_copied_and_old_weights_are_not(
    tmp_path: Path, model: Path
) -> None:
    directory = saved(2, tmp_path, model).directory
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (directory / name).read_bytes() == (model / name).read_bytes()
    assert not (directory / "pytorch_model.bin").exists()
    assert AutoTokenizer.from_pretrained(directory)("w1 w2")["input_ids"]
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_every_rank_writes_and_none_holds_more_than_one_file(tmp_path: Path, model: Path) -> None:
    report = saved(3, tmp_path, model, file_bytes=26_000)
    assert report.writers == 3
    assert report.peak_bytes <= 26_000
    assert report.bytes > 3 * 26_000


def test_the_marker_lists_what_was_saved(tmp_path: Path, model: Path) -> None:
    directory = saved(2, tmp_path, model).directory
    completion = read_completion(directory)
    assert (completion.step, completion.world, completion.optimizer) == (500, 2, False)
    on_disk = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert on_disk == {*completion.files, "COMPLETE.json"}
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step-00000500"


def test_only_the_newest_are_kept_and_leftovers_of_a_killed_save_are_removed(tmp_path: Path, model: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    make_checkpoint(checkpoints, 100)
    make_checkpoint(checkpoints, 200)
    (make_checkpoint(checkpoints, 300) / "config.json").unlink()  # broken: counts for nothing
    (checkpoints / "step-00000400.tmp-1a2b").mkdir()
    (checkpoints / "notes").mkdir()
    saved(2, tmp_path, model, keep=2)
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "latest",
        "notes",
        "step-00000200",
        "step-00000300",
        "step-00000500",
    ]


def test_a_checkpoint_of_the_same_step_is_replaced_and_one_of_a_later_step_gets_a_warning(
    tmp_path: Path, model: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    make_checkpoint(checkpoints, 500)
    make_checkpoint(checkpoints, 900)
    report = saved(2, tmp_path, model, keep=1)
    assert_loads_as(report.directory, tied=False)
    (warning,) = report.warnings
    assert "step-00000900 is from a later step than the checkpoint just saved" in warning
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-00000500", "step-00000900"]


@pytest.mark.parametrize("scratch_bytes", [2, 60, 1 << 20])
def test_tensors_of_any_shape_are_gathered_in_pieces_of_any_size(scratch_bytes: int) -> None:
    ended = run_ranks(3, gathered_in_pieces, scratch_bytes=scratch_bytes)
    assert [rank.value for rank in ended] == [[], [], []]


def test_a_model_that_rank_0_cannot_read_is_refused_by_all(tmp_path: Path) -> None:
    ended = run_ranks(2, refused_saver, run=tmp_path, model=tmp_path / "nowhere")
    for rank in ended:
        assert "nowhere/config.json: No such file or directory" in rank.value
