"""An exact resume restores the same bits, or is refused with one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.checkpoint.rank_processes import run_ranks
from tests.trainer.checkpoint.scenarios import resumed_exactly
from wattwatch.trainer.checkpoint.complete import why_incomplete


@pytest.mark.parametrize(("world", "tied"), [(2, False), (3, True)])
def test_state_is_restored_bit_for_bit_or_refused(
    world: int, tied: bool, tmp_path: Path, model: Path, tied_model: Path
) -> None:
    ended = run_ranks(world, resumed_exactly, run=tmp_path, model=tied_model if tied else model, tied=tied)
    assert [rank.exit_code for rank in ended] == [0] * world, ended
    for number, rank in enumerate(ended):
        assert rank.value["restored"], "masters, moments and step counts are the saved bits"
        assert rank.value["continued"], "two more steps give the same bits as without the interruption"
        assert f"saved by {world} ranks, but this job has {world + 1}" in rank.value["other world"]
        assert f"optimizer/rank-{number:05d}.safetensors: tensor " in rank.value["other shape"]
        assert "in this rank's shard" in rank.value["other shape"]
        assert "lm_head.weight" in rank.value["other model"]
        assert "saved without optimizer state, so only its weights can be loaded" in rank.value["weights only"]
        assert rank.value["untouched"], "a refused resume changes nothing"
    directory = tmp_path / "checkpoints" / "step-00000002"
    assert why_incomplete(directory, deep=True) is None
    (directory / "optimizer" / "rank-00001.safetensors").unlink()
    assert str(why_incomplete(directory)).endswith("optimizer/rank-00001.safetensors: missing")
