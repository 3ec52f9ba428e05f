"""From records to blocks on disk: every token once, in order, on the right rank, and always the same bytes."""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.tools import DEADLINE_SECONDS
from tests.trainer.command_line import Answer, run_wattwatch_train
from tests.trainer.conftest import make_tokenizer, words, write_jsonl
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.pack.blocks import PackedBlocks, block_count
from wattwatch.trainer.pack.manifest import PackManifest, read_manifest, shard_row_range, xor_below

SEQ_LEN = 32


def packed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Answer:
    answer = run_wattwatch_train(capsys, "pack", *arguments, "--seq-len", str(SEQ_LEN))
    assert answer.exit_code == 0, answer.err
    return answer


def manifest(directory: Path, rank: int) -> PackManifest:
    return read_manifest((directory / f"rank-{rank:05d}.json").read_text())


def ids_of(tokenizer: Path, texts: list[str]) -> list[int]:
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return [token for text in texts if text for token in (*plain.encode(text).ids, 0)]


@pytest.mark.parametrize("deal", ["--contiguous", "--strided"])
def test_every_token_of_a_rank_is_in_its_blocks_once_and_in_order(
    deal: str, corpus: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(capsys, corpus, "-o", tmp_path, "--tokenizer", tokenizer, "--world", "3", "--workers", "1", deal)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    for rank in range(3):
        mine = texts[rank::3] if deal == "--strided" else texts[sum((67, 67, 66)[:rank]) :][: (67, 67, 66)[rank]]
        expected = ids_of(tokenizer, mine)
        packed_manifest = manifest(tmp_path, rank)
        stored = np.fromfile(tmp_path / f"rank-{rank:05d}.i32", dtype="<i4")
        assert stored.tolist() == expected[: packed_manifest.blocks * SEQ_LEN]
        assert (packed_manifest.tokens, packed_manifest.dropped_tokens) == (len(expected), len(expected) % SEQ_LEN)
        assert packed_manifest.rows == len(mine)
        assert packed_manifest.empty_rows == sum(not text for text in mine)
        assert (packed_manifest.contiguous, packed_manifest.corpus_rows) == (deal == "--contiguous", 200)
        assert (packed_manifest.rows, packed_manifest.first_row, packed_manifest.last_row) == shard_row_range(
            200, 3, rank, packed_manifest.contiguous
        )
        assert packed_manifest.sha256 == hashlib.sha256(stored.tobytes()).hexdigest()
    assert manifest(tmp_path, 0).row_xor ^ manifest(tmp_path, 1).row_xor ^ manifest(tmp_path, 2).row_xor == xor_below(
        200
    )


def test_same_input_gives_the_same_bytes_whatever_the_number_of_workers(
    corpus: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text(corpus.read_text() * 10)  # several batches
    for name, workers in (("one", "1"), ("two", "2")):
        packed(
            capsys, many, "-o", tmp_path / name, "--tokenizer", tokenizer, "--world", "2", "--workers", workers,
            "--document-mask",
        )  # fmt: skip
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == [f"rank-0000{rank}{suffix}" for rank in (0, 1) for suffix in (".i32", ".json", ".starts.i64")]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_node_packs_only_its_own_ranks_and_gives_the_same_bytes(
    corpus: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--tokenizer", tokenizer, "--workers", "1")
    packed(capsys, corpus, "-o", tmp_path / "all", "--world", "4", *common)
    packed(capsys, corpus, "-o", tmp_path / "node", "--world", "4", "--ranks", "2-3", *common)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    packed(capsys, corpus, "-o", tmp_path / "rank", *common)
    assert sorted(path.name for path in (tmp_path / "rank").iterdir()) == ["rank-00001.i32", "rank-00001.json"]
    for path in (*(tmp_path / "node").iterdir(), *(tmp_path / "rank").iterdir()):
        assert path.read_bytes() == (tmp_path / "all" / path.name).read_bytes()


def test_chats_are_rendered_by_the_template_and_end_with_one_eos(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [
        [{"role": "user", "content": words(n, 9), "name": "x"}, {"role": "assistant", "content": words(-n, 30)}]
        for n in range(20)
    ]
    source = write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    packed(capsys, source, "-o", tmp_path / "own", "--tokenizer", tokenizer, "--world", "1", "--workers", "1")
    rendered = [f"[user]{a['content']}![assistant]{b['content']}" for a, b in chats]
    expected = ids_of(tokenizer, rendered)
    stored = np.fromfile(tmp_path / "own" / "rank-00000.i32", dtype="<i4").tolist()
    assert stored == expected[: len(stored)]
    assert len(expected) - len(stored) < SEQ_LEN

    ends_itself = make_tokenizer(
        tmp_path / "ends", template="{% for m in messages %}{{ m['content'] }}<eos>\n{% endfor %}"
    )
    packed(capsys, source, "-o", tmp_path / "theirs", "--tokenizer", ends_itself, "--world", "1", "--workers", "1")
    packed_manifest = manifest(tmp_path / "theirs", 0)
    stored = np.fromfile(tmp_path / "theirs" / "rank-00000.i32", dtype="<i4").tolist()
    assert stored.count(0) in (39, 40)  # two turns each, the last perhaps in the dropped tail
    assert packed_manifest.template_sha256 != manifest(tmp_path / "own", 0).template_sha256
    assert packed_manifest.tokenizer_sha256 == manifest(tmp_path / "own", 0).tokenizer_sha256


def test_a_saved_dataset_packs_like_the_jsonl_it_came_from(
    corpus: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets

    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    saved = datasets.DatasetDict({"small": datasets.Dataset.from_dict({"body": texts, "n": list(range(200))})})
    saved.save_to_disk(tmp_path / "saved")
    common = ("--tokenizer", tokenizer, "--world", "1", "--workers", "1")
    packed(capsys, corpus, "-o", tmp_path / "a", *common)
    packed(capsys, tmp_path / "saved", "--split", "small", "--column", "body", "-o", tmp_path / "b", *common)
    assert (tmp_path / "a" / "rank-00000.i32").read_bytes() == (tmp_path / "b" / "rank-00000.i32").read_bytes()
    answer = run_wattwatch_train(capsys, "pack", tmp_path / "saved", "-o", tmp_path / "c", *common)
    assert (answer.exit_code, answer.err) == (2, f"{tmp_path}/saved has no split 'train'; its splits are small\n")
    answer = run_wattwatch_train(capsys, "pack", tmp_path / "saved", "--split", "small", "-o", tmp_path / "c", *common)
    assert "no column 'text' or 'messages'; its columns are body, n" in answer.err


def test_any_block_can_be_read_without_those_before_it(
    corpus: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(
        capsys, corpus, "-o", tmp_path, "--tokenizer", tokenizer, "--world", "1", "--workers", "1", "--document-mask"
    )
    blocks = PackedBlocks(tmp_path, 0)
    stored = np.fromfile(tmp_path / "rank-00000.i32", dtype="<i4").reshape(-1, SEQ_LEN)
    assert blocks.count == len(stored)
    for index in (0, 7, 26, blocks.count - 1):
        assert blocks.ids(index).dtype == np.int32
        assert blocks.ids(index).tolist() == stored[index].tolist()
        starts = blocks.document_starts(index).tolist()
        after_eos = (np.flatnonzero(stored[index] == 0) + 1).tolist()
        assert starts == sorted({0, *(place for place in after_eos if place < SEQ_LEN)})
        positions = blocks.positions(index)
        assert np.flatnonzero(positions == 0).tolist() == starts
        assert set(np.diff(positions)[np.diff(positions) != 1]) <= {-p for p in range(SEQ_LEN)}
    for index in (blocks.count, -1):
        with pytest.raises(IndexError):
            blocks.ids(index)


@pytest.mark.parametrize(
    ("records", "world", "message"),
    [
        ([], 1, "source.jsonl cannot be read as a dataset: "),
        ([{"text": "few"}], 1, "but one block needs 32; pack more records"),
        ([{"text": words(1, 90)}] * 3, 4, "rank 3 of 4 gets none of the 3 rows"),
        ([{"text": 5}] * 9, 1, "column 'text', row 0: expected text"),
        (
            [{"text": "x", "messages": []}],
            1,
            "has both a column 'text' and a column 'messages'; choose one with --column",
        ),
        ([{"note": "x"}], 1, "no column 'text' or 'messages'; its columns are note"),
        ([{"messages": [{"content": "x"}]}], 1, "column 'messages', row 0: expected text, or a list of messages"),
    ],
)
def test_records_that_cannot_be_packed_are_refused_in_one_line_and_nothing_is_written(
    records: list[object],
    world: int,
    message: str,
    tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = write_jsonl(tmp_path / "source.jsonl", records)
    answer = run_wattwatch_train(
        capsys, "pack", source, "-o", tmp_path / "out", "--tokenizer", tokenizer, "--world", str(world),
        "--workers", "1", "--seq-len", "32",
    )  # fmt: skip
    assert answer.exit_code == 2
    assert message in answer.err
    assert "Traceback" not in answer.err
    assert not list(tmp_path.glob("out/*"))


def test_missing_sources_and_tokenizers_are_named(
    corpus: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torn.jsonl").write_text('{"text": "whole"}\n{"text": "to')
    for source, chosen, named in (
        (tmp_path / "none.jsonl", tokenizer, "none.jsonl cannot be read"),
        (tmp_path / "torn.jsonl", tokenizer, "torn.jsonl cannot be read"),
        (corpus, tmp_path, f"{tmp_path} has no tokenizer_config.json"),
    ):
        answer = run_wattwatch_train(
            capsys, "pack", source, "-o", tmp_path / "out", "--tokenizer", chosen, "--world", "1", "--workers", "1"
        )
        assert answer.exit_code == 2
        assert named in answer.err
        assert "Traceback" not in answer.err


def test_a_full_disk_leaves_the_previous_files(
    corpus: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("-o", tmp_path, "--tokenizer", tokenizer, "--world", "1", "--workers", "1")
    packed(capsys, corpus, *common)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    big = write_jsonl(tmp_path.parent / "big.jsonl", [{"text": words(row, 400)} for row in range(300)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))  # a write beyond fails, as on a full disk
    try:
        answer = run_wattwatch_train(capsys, "pack", big, *common, "--seq-len", "32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert answer.exit_code == 2
    assert "Traceback" not in answer.err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("damage", ["ragged", "shorter", "gone", "manifest"])
def test_a_damaged_shard_is_not_read(
    damage: str, corpus: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(capsys, corpus, "-o", tmp_path, "--tokenizer", tokenizer, "--world", "1", "--workers", "1")
    path = tmp_path / "rank-00000.i32"
    data = path.read_bytes()
    if damage == "manifest":
        path.with_suffix(".json").write_text("{")
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: -3 if damage == "ragged" else -4 * SEQ_LEN])
    with pytest.raises(UserError, match="rank-00000"):
        PackedBlocks(tmp_path, 0)


def test_an_incomplete_last_block_is_an_error_and_not_rounded_down() -> None:
    assert block_count(4 * 2048 * 30_835, 2048) == 30_835
    with pytest.raises(ValueError, match=r"not a whole number of blocks of 2048"):
        block_count(4 * 2048 * 30_835 + 4, 2048)


def test_no_worker_outlives_a_pack_command_that_is_killed(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text(corpus.read_text() * 500)
    command = ["pack", many, "-o", tmp_path / "out", "--tokenizer", tokenizer, "--world", "1", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "wattwatch.trainer.cli", *map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    children: set[str] = set()
    try:
        wait_for(lambda: process.poll() is not None or len(children_of(process.pid)) >= 3)  # two, and their tracker
        children = children_of(process.pid)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    assert not (tmp_path / "out" / "rank-00000.json").exists()


def children_of(pid: int) -> set[str]:
    try:
        return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    except OSError:
        return set()


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
