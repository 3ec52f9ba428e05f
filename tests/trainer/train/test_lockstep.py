"""Sharded over ranks, step by step: the same gradients, losses and collectives as one process would have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from tests.trainer.train.lockstep import LockstepResult, Reference, lockstep, single_process
from tests.trainer.train.rank_processes import on_ranks
from tests.trainer.train.tiny_model import write_blocks, write_model
from wattwatch.trainer.settings import TrainSettings

RAGGED: Final = TrainSettings(
    micro_batch=2, accumulation=2, precision="fp32", document_mask=True, learning_rate=3e-3, warmup_steps=10
)
STEPS: Final = 200


@dataclass(frozen=True, slots=True)
class Pair:
    ranks: list[LockstepResult]
    alone: Reference


def pair(directory: Path, counts: list[int], settings: TrainSettings, steps: int) -> Pair:
    model, data = write_model(directory / "model", tied=len(counts) == 2), write_blocks(directory / "data", counts)
    ranks = on_ranks(len(counts), lockstep, str(model), str(data), settings, steps)
    return Pair(ranks, single_process(model, data, len(counts), replace(settings, precision="fp32"), steps))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two ranks with unequal shards, 200 steps."""
    return pair(tmp_path_factory.mktemp("two"), [803, 811], RAGGED, STEPS)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Four ranks, two steps with whole weights and gradients held; weights that are not tied."""
    return pair(tmp_path_factory.mktemp("four"), [9, 8, 8, 11], replace(RAGGED, gather="step"), 2)


@pytest.mark.parametrize("world", ["two", "four"])
def test_gradients_are_those_of_one_process_over_all_tokens(world: str, request: pytest.FixtureRequest) -> None:
    both: Pair = request.getfixturevalue(world)
    for result in both.ranks:
        assert result.tokens == both.alone.tokens
        assert result.gradients.keys() == both.alone.gradients.keys()
        for name, gradient in result.gradients.items():
            np.testing.assert_allclose(gradient, both.alone.gradients[name], rtol=1e-4, atol=1e-7, err_msg=name)
        assert result.norm == pytest.approx(both.alone.norm, rel=1e-5)


def test_the_token_counts_of_ranks_and_micro_steps_differ_in_this_test(two: Pair) -> None:
    # 2 ranks x 4 blocks of 32: were no record begun inside, 248 ids would be targets.
    assert two.alone.tokens < 248


def test_with_gather_step_every_group_is_gathered_once_per_step(four: Pair) -> None:
    np.testing.assert_allclose(four.ranks[0].losses, four.alone.losses, rtol=1e-5)
    for result in four.ranks:
        gathers = sum("all_gather" in name for name, _ in result.collectives) - len(result.gradients)  # the test's own
        groups, steps = 5, 3  # two layers, embedding, head, root
        assert gathers == groups * steps


def test_200_steps_have_the_losses_of_a_simple_loop(two: Pair) -> None:
    assert [len(result.losses) for result in two.ranks] == [STEPS, STEPS]
    assert two.ranks[0].losses == two.ranks[1].losses
    np.testing.assert_allclose(two.ranks[0].losses, two.alone.losses, rtol=2e-3)
    assert two.alone.losses[-1] < 0.8 * two.alone.losses[0]


@pytest.mark.parametrize("world", ["two", "four"])
def test_every_rank_issues_the_same_collectives_in_the_same_order(world: str, request: pytest.FixtureRequest) -> None:
    both: Pair = request.getfixturevalue(world)
    for result in both.ranks[1:]:
        assert result.collectives == both.ranks[0].collectives
    assert any("all_gather" in name for name, _ in both.ranks[0].collectives)


def test_all_ranks_stop_at_the_smallest_block_count(two: Pair, four: Pair) -> None:
    assert [result.plan for result in two.ranks] == ["[evenfix] local=803 -> min=803", "[evenfix] local=811 -> min=803"]
    assert four.ranks[3].plan == "[evenfix] local=11 -> min=8"


def test_bfloat16_gradients_point_in_the_direction_of_float32_ones(tmp_path: Path) -> None:
    both = pair(tmp_path, [8, 8], replace(RAGGED, precision="bf16"), 0)
    ours = np.concatenate([both.ranks[0].gradients[name].ravel() for name in sorted(both.alone.gradients)])
    theirs = np.concatenate([both.alone.gradients[name].ravel() for name in sorted(both.alone.gradients)])
    assert np.dot(ours, theirs) / np.linalg.norm(ours) / np.linalg.norm(theirs) > 0.998
    assert both.ranks[0].norm == pytest.approx(both.alone.norm, rel=0.02)
