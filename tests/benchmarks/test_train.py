"""The trainer's benchmarks run and compare the same work. Their figures are not asserted: the machine may be busy."""

from __future__ import annotations

import pytest

from tests.benchmarks import checkpoint, train


def test_both_trainers_reach_the_same_loss_from_the_same_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--tiny", "--repeat", "1", "--ways", "ours", "hf-fsdp2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    losses = {line[1]: float(line[-1]) for line in lines if line[0] == "1"}
    assert losses.keys() == {"ours", "hf-fsdp2"}
    assert losses["ours"] == pytest.approx(losses["hf-fsdp2"], abs=2e-3)
    assert lines[-1][:3] == ["ours", "/", "hf-fsdp2:"]


def test_all_variants_of_saving_give_the_same_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.main(["--megabytes", "1", "--worlds", "2", "--repeat", "1"]) == 0
    out = capsys.readouterr().out
    assert "torch-all / ours: time " in out
    assert "transformers loads all of them; the weights are the same bits" in out
