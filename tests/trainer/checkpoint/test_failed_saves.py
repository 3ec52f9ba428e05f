"""Saves that fail at any point: nothing incomplete looks complete, all ranks report why, the next save succeeds."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from tests.trainer.checkpoint.made_checkpoints import make_checkpoint
from tests.trainer.checkpoint.rank_processes import Ended, run_ranks
from tests.trainer.checkpoint.scenarios import Fault, saves
from wattwatch.trainer.checkpoint.complete import find_newest_complete, why_incomplete
from wattwatch.trainer.checkpoint.save import SaveReport

KILLED = {
    "rank 1 opens its weights": Fault(1, "open", "model-00002-of"),
    "rank 0 opens its weights": Fault(0, "open", "model-00001-of"),
    "rank 1 opens its optimizer": Fault(1, "open", "optimizer/rank-00001"),
    "rank 0 writes the index": Fault(0, "open", "model.safetensors.index.json"),
    "rank 0 writes the marker": Fault(0, "open", "COMPLETE.json"),
    "rank 0 renames": Fault(0, "os.rename", "step-00000500.tmp-"),
}


@pytest.mark.parametrize("moment", KILLED)
def test_a_rank_killed_while_saving_leaves_nothing_that_looks_complete(
    moment: str, tmp_path: Path, model: Path
) -> None:
    fault = KILLED[moment]
    before = make_checkpoint(tmp_path / "checkpoints", 100)
    ended = run_ranks(2, saves, run=tmp_path, model=model, fault=fault, optimizer=True)
    assert ended[fault.rank].exit_code == -signal.SIGKILL
    (text,) = ended[1 - fault.rank].value
    assert f"rank {1 - fault.rank}: the save of step 500 failed" in text

    staged = [path for path in (tmp_path / "checkpoints").iterdir() if path != before]
    assert [path.name.partition("-")[0] for path in staged] == ["step"]
    assert why_incomplete(staged[0]) == f"{staged[0]} is the temporary directory of a save that did not finish"
    assert find_newest_complete(tmp_path / "checkpoints").directory == before

    (again, _) = run_ranks(2, saves, run=tmp_path, model=model, optimizer=True)
    (report,) = again.value
    assert why_incomplete(report.directory, deep=True) is None
    assert not staged[0].exists()


def test_a_write_that_hangs_ends_the_save_after_the_saves_own_timeout(tmp_path: Path, model: Path) -> None:
    """Like a file system that does not respond any more. The default group's timeout is half an hour."""
    os.mkfifo(tmp_path / "pipe")
    fault = Fault(1, "open", "model-00002-of", pipe=tmp_path / "pipe")
    ended = run_ranks(2, saves, run=tmp_path / "run", model=model, fault=fault, timeout_seconds=1.0)
    assert [rank.exit_code for rank in ended] == [0, 0]
    for number, rank in enumerate(ended):
        assert f"rank {number}: the save of step 500 failed" in rank.value[0]
    assert find_newest_complete(tmp_path / "run" / "checkpoints").directory is None


def test_a_rank_killed_between_the_rename_and_latest_leaves_a_complete_checkpoint(tmp_path: Path, model: Path) -> None:
    ended = run_ranks(2, saves, run=tmp_path, model=model, fault=Fault(0, "open", "latest.tmp"))
    assert ended[0].exit_code == -signal.SIGKILL
    newest = find_newest_complete(tmp_path / "checkpoints", deep=True)
    assert newest.directory == tmp_path / "checkpoints" / "step-00000500"


def assert_all_failed_and_the_next_save_succeeded(ended: list[Ended], run: Path, words: tuple[str, ...]) -> None:
    assert [rank.exit_code for rank in ended] == [0] * len(ended), ended
    first, second = zip(*(rank.value for rank in ended), strict=True)
    assert len(set(first)) == 1, "every rank gives the same reason"
    assert all(word in first[0] for word in words), first[0]
    assert all(isinstance(report, SaveReport) for report in second), second
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-00000501"]
    assert why_incomplete(run / "checkpoints" / "step-00000501", deep=True) is None


@pytest.mark.parametrize("limited_rank", [0, 2])
def test_a_full_disk_on_one_rank_fails_on_all_with_rank_file_and_remedy(
    limited_rank: int, tmp_path: Path, model: Path
) -> None:
    """With the system's limit on file sizes the write fails in the middle, as on a full disk."""
    ended = run_ranks(
        3, saves, run=tmp_path, model=model, steps=(500, 501), file_limit_bytes=9_000, limited_rank=limited_rank
    )
    words = (f"rank {limited_rank} on ", "/model-0000", "File too large; free some space")
    assert_all_failed_and_the_next_save_succeeded(ended, tmp_path, words)


DISK_FAULTS = {
    "a directory cannot be created": (Fault(0, "os.mkdir", ".tmp-", errno.ENOSPC), "rank 0 on"),
    "the marker cannot be written": (Fault(0, "open", "COMPLETE.json", errno.ENOSPC), "COMPLETE.json: No space left"),
    "the rename fails": (Fault(0, "os.rename", ".tmp-", errno.EIO), "Input/output error"),
    "optimizer state cannot be written": (
        Fault(1, "open", "optimizer/rank-00001", errno.EDQUOT),
        "optimizer/rank-00001.safetensors: Disk quota exceeded; free some space",
    ),
}


@pytest.mark.parametrize("kind", DISK_FAULTS)
def test_a_failure_of_any_step_fails_on_all_and_leaves_nothing(kind: str, tmp_path: Path, model: Path) -> None:
    fault, words = DISK_FAULTS[kind]
    ended = run_ranks(2, saves, run=tmp_path, model=model, steps=(500, 501), fault=fault, optimizer=True)
    assert_all_failed_and_the_next_save_succeeded(ended, tmp_path, (words,))


def test_latest_that_cannot_be_replaced_is_a_warning_since_the_checkpoint_is_safe(tmp_path: Path, model: Path) -> None:
    fault = Fault(0, "open", "latest.tmp", errno.ENOSPC)
    for rank in run_ranks(2, saves, run=tmp_path, model=model, fault=fault):
        (report,) = rank.value
        assert why_incomplete(report.directory, deep=True) is None
        assert "checkpoints/latest was not updated: No space left on device" in report.warnings[0]


def test_with_a_damaged_shard_the_previous_checkpoint_is_resumed(tmp_path: Path, model: Path) -> None:
    (rank, _) = run_ranks(2, saves, run=tmp_path, model=model, steps=(500, 600))
    before, last = (report.directory for report in rank.value)
    path = sorted(last.glob("model-*.safetensors"))[1]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    newest = find_newest_complete(tmp_path / "checkpoints")
    assert newest.directory == before
    assert newest.skipped == (f"{path} is truncated: it has {len(data) // 2:,} bytes, but {len(data):,} were written",)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    newest = find_newest_complete(tmp_path / "checkpoints", deep=True)
    assert newest.directory == before
    assert "content does not match the SHA-256" in newest.skipped[0]
