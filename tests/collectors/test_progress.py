"""Logs of trainers, complete, cut off, interleaved: last step, total, loss and line interval, or why there is none."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from wattwatch.collectors.progress import FORMATS, read_heartbeat, read_progress
from wattwatch.watcher.cli.inspect import progress_command

LOGS = Path(__file__).parent.parent / "data" / "logs"

# file -> format, last step, total, loss, tokens/s of 16 GPUs, seconds between lines
EXPECTED = {
    "torchtitan_color.log": ("torchtitan", 510, None, 0.83172, 52976, 49.49),
    "torchtitan_hang_at_epoch_end.log": ("torchtitan", 3850, None, 0.66, 52976, 49.49),
    "torchtitan_structured.training.global_rank_0.20260820-101500-ABC000.jsonl": (
        "torchtitan_structured", 3851, None, None, None, 4.949,
    ),
    "torchtitan_structured.training.global_rank_3.20260820-101500-ABC003.jsonl": (
        "torchtitan_structured", 3850, None, None, None, 4.949,
    ),
    "hf_trainer_v5.log": ("hf_trainer", 510, 3854, 0.8317, None, 49.0),
    "hf_trainer_state.json": ("hf_trainer", 500, 3854, 0.8375, None, None),
    "llamafactory_trainer_log.jsonl": ("llamafactory", 510, 3854, 0.8317, 52969.08, 49.0),
    "lightning_metrics.csv": ("lightning_csv", 499, None, 0.8381358643367616, None, None),
    "lightning_tqdm.log": ("lightning", 4016, None, 0.836, None, 5.0),
    "nemo2.log": ("nemo", 500, 3853, 0.8375, None, None),
    "megatron_lm.log": ("megatron_lm", 501, 3854, 0.8369522, None, 4.949),
    "deepspeed.log": ("deepspeed", 500, None, None, None, 49.49),
    "nanotron.log": ("nanotron", 500, 3854, 0.838, 53000, 4.949),
    "olmo_core.log": ("olmo_core", 500, 3854, 0.8375, 52969.6, 4.949),
    "composer_console.log": ("composer", 500, 3854, 0.8375, 52969.0848, None),
    "torchtune_disk_logger.txt": ("torchtune", 500, None, 0.8375430666673082, 52969.08466356837, None),
    "litgpt.log": ("litgpt", 500, None, 0.838, None, None),
    "automodel.log": ("automodel", 500, None, 0.8375, 52969.08, 5.0),
    "lingua.log": ("lingua", 500, None, 0.8375, 52960, 4.949),
    "our_trainer_evenfix.log": ("wattwatch_train", 1955, None, 0.6614, 52970, None),
}  # fmt: skip


def test_every_log_of_the_data_is_expected() -> None:
    assert {path.name for path in LOGS.iterdir()} - {"LICENCES.md"} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_last_progress_is_read(name: str) -> None:
    sample = read_progress((LOGS / name).read_text("utf-8"), name, world=16)
    kind, step, total, loss, tokens_per_second, interval = EXPECTED[name]
    assert (sample.format, sample.step, sample.total_steps, sample.loss) == (kind, step, total, loss)
    assert sample.tokens_per_second == pytest.approx(tokens_per_second)
    assert sample.line_interval_seconds == interval


@pytest.mark.parametrize("name", EXPECTED)
def test_a_log_torn_at_any_byte_never_shows_a_step_that_it_did_not_print(name: str) -> None:
    whole_text = (LOGS / name).read_text("utf-8")
    text, cut = whole_text[-1500:], len(whole_text) > 1500
    whole_lines = [end + 1 for end, letter in enumerate(text) if letter in "\r\n"]
    whole = [read_progress(text[:end], cut=cut) for end in [*whole_lines, len(text)]]
    steps = {None, *(sample.step for sample in whole)}
    totals = {None, *(sample.total_steps for sample in whole)}
    for end in range(max(0, len(text) - 250), len(text)):
        torn = read_progress(text[:end], cut=cut)
        assert torn.step in steps
        assert torn.total_steps in totals


def test_a_tail_that_begins_within_a_line_starts_at_the_next_line() -> None:
    text = "0/ 3854 | lm loss: 1.0 |\n iteration 501/ 3854 | lm loss: 8.0E-01 |\n"
    assert read_progress(text, cut=True).step == 501
    assert read_progress("ep=7 loss=1\nstep=8 loss=2\n", cut=True).step == 8


def test_megatron_without_timestamps_has_no_line_interval() -> None:
    lines = [f" iteration {n:8}/    3854 | elapsed time per iteration (ms): 4949.0 | lm loss: 1E0 |" for n in (1, 2, 3)]
    sample = read_progress("\n".join(lines) + "\n")
    assert (sample.format, sample.step, sample.line_interval_seconds) == ("megatron_lm", 3, None)


def test_hf_trainer_4_prints_numbers() -> None:
    text = "\r  1%|  | 10/3854 [00:49<5:17:03,  4.95s/it]\r   \r{'loss': 1.569, 'grad_norm': 0.77, 'epoch': 0.1}\n"
    sample = read_progress(text)
    assert (sample.step, sample.total_steps, sample.loss) == (10, 3854, 1.569)


def test_the_evaluation_bar_is_not_taken_for_the_training_bar() -> None:
    text = (
        "  1%|  | 10/3854 [00:49<5:17:03,  4.95s/it]\r{'loss': '1.5', 'epoch': '0.1'}\n"
        " 50%|  | 5000/10000 [00:10<00:10, 500.00it/s]\r{'eval_loss': '9.0'}\n"
    )
    sample = read_progress(text)
    assert (sample.step, sample.total_steps, sample.loss) == (10, 3854, 1.5)


def test_torchtitans_validation_line_is_not_a_step() -> None:
    text = "step: 10  loss:  1.5  tps: 100\nvalidate step: 99  loss:  7.0  tps: 9\n"
    sample = read_progress(text, world=8)
    assert (sample.step, sample.loss, sample.tokens_per_second) == (10, 1.5, 800)


@pytest.mark.parametrize(("word", "kind"), [("nan", math.isnan), ("inf", math.isinf), ("-inf", math.isinf)])
def test_a_loss_of_nan_is_kept(word: str, kind: object) -> None:
    loss = read_progress(f"step: 10  loss:  {word}  memory: 1\n").loss
    assert loss is not None
    assert not math.isfinite(loss)


def test_throughput_per_gpu_is_not_reported_as_the_jobs() -> None:
    sample = read_progress((LOGS / "torchtitan_color.log").read_text("utf-8"))
    assert sample.tokens_per_second is None
    assert "3311 tokens/s per GPU" in sample.why


def test_a_restart_in_the_same_log_steps_back() -> None:
    assert read_progress("step=900 loss=1 \nstep=500 loss=2 \n").step == 500


def test_a_rank_in_a_structured_log_reports_its_phase() -> None:
    ranks = sorted(LOGS.glob("torchtitan_structured*"))
    samples = [read_progress(path.read_text("utf-8")) for path in ranks]
    assert [(s.rank, s.phase) for s in samples] == [(0, "train"), (3, "save")]


def test_the_users_pattern_replaces_the_formats() -> None:
    sample = read_progress(
        "it 7 of 90, l=0.5\nstep=3 loss=1\n", pattern=r"it (?P<step>\d+) of (?P<total>\d+), l=(?P<loss>\S+)"
    )
    assert (sample.format, sample.step, sample.total_steps, sample.loss) == ("regex", 7, 90, 0.5)


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("(", "not a valid regular expression"),
        (r"\d+", "no group named step"),
        (r"(?P<step>\d+)(?P<speed>x)", "'speed'"),
        (r"(?P<step>(\d+)+)x", "nested repetition"),
        (r"a.*b.*c.*d.*(?P<step>\d+)", "more than 3"),
    ],
)
def test_a_useless_pattern_says_what_is_wrong(pattern: str, word: str) -> None:
    assert word in read_progress("step 1\n", pattern=pattern).why


def test_a_pattern_that_takes_too_long_is_dropped() -> None:
    slow = r"a.*a.*a(?P<step>\d+)"
    for text in (("a" * 2000 + "\n") * 400, "aaa7\n"):
        sample = read_progress(text, pattern=slow)
        assert sample.step is None
        assert "simplify the pattern" in sample.why


@given(st.text(max_size=400))
def test_no_text_is_an_error(text: str) -> None:
    assert read_progress(text).why


@given(st.text(alphabet="step=:loss|[]{}'\"0123456789,/%\r\n \x1binfa.e", max_size=200))
def test_no_text_that_looks_like_a_log_is_an_error(text: str) -> None:
    assert read_progress(text, pattern=r"(?P<step>\S+) (?P<total>\S+)").why


def test_formats_name_their_source() -> None:
    assert len({one.name for one in FORMATS}) >= 19


def test_a_heartbeat_is_read_by_rank() -> None:
    text = json.dumps(
        {"v": 1, "rank": 3, "world": 16, "host": "gpu-01", "pid": 41, "restart": 1, "phase": "save", "step": 500,
         "steps": 3854, "tokens_per_second": 52969.0, "data_wait_ms": 0.3, "loss": 0.8}
    )  # fmt: skip
    heartbeat = read_heartbeat(text, "rank-00003.json", 4.0)
    assert (heartbeat.rank, heartbeat.world, heartbeat.pid, heartbeat.restart, heartbeat.phase, heartbeat.step) == (
        3,
        16,
        41,
        1,
        "save",
        500,
    )
    assert (heartbeat.total_steps, heartbeat.loss, heartbeat.age_seconds) == (3854, 0.8, 4.0)


def test_a_heartbeat_with_a_loss_of_nan_is_read() -> None:
    heartbeat = read_heartbeat('{"step": 7, "loss": NaN}', "x")
    assert heartbeat.step == 7
    assert heartbeat.loss is not None
    assert math.isnan(heartbeat.loss)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"step": "7"}', '{"step": true}', '{"step": null}'])
def test_an_empty_heartbeat_has_no_step(text: str) -> None:
    heartbeat = read_heartbeat(text, "x")
    assert heartbeat.step is None
    assert heartbeat.why


def test_the_command_prints_the_contracts_keys() -> None:
    result = CliRunner().invoke(progress_command, [str(LOGS / "megatron_lm.log"), "--json"])
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert list(said) == [
        "format", "step", "total_steps", "loss", "tokens_per_second", "line_interval_seconds", "age_seconds", "why",
        "epoch", "epochs", "epoch_step", "epoch_steps", "samples_per_second", "seconds_per_step", "eta_seconds",
        "phase", "guessed",
    ]  # fmt: skip
    assert said["step"] == 501


def test_the_command_says_that_it_recognises_nothing(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"\xff\xfe\x00 hello\n")
    result = CliRunner().invoke(progress_command, [str(log)])
    assert result.exit_code == 3
    assert "no line has a known format" in result.stderr


def test_the_command_says_that_the_file_is_missing(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        result = CliRunner().invoke(progress_command, [str(path), "--json"])
        assert result.exit_code == 3
        assert str(path) in result.stderr


def test_the_command_takes_the_newest_log_of_a_run_directory(tmp_path: Path) -> None:
    for attempt, step in ((2, 40), (9, 70), (10, 80)):
        for rank in (0, 1):
            log = tmp_path / "logs" / f"attempt-{attempt:02d}" / f"rank-{rank:05d}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"step={step + rank}/100 loss=2.5 tok_s=900 rank={rank}\n")
    result = CliRunner().invoke(progress_command, [str(tmp_path), "--json"])
    assert (result.exit_code, json.loads(result.stdout)["step"]) == (0, 80)
    result = CliRunner().invoke(progress_command, [str(tmp_path)])
    assert str(Path("logs") / "attempt-10" / "rank-00000.log") in result.stdout


def test_the_command_uses_heartbeats_if_the_newest_log_has_no_step(tmp_path: Path) -> None:
    (tmp_path / "logs" / "attempt-01").mkdir(parents=True)
    (tmp_path / "heartbeat").mkdir()
    (tmp_path / "logs" / "attempt-01" / "rank-00000.log").write_text("starting\n")
    result = CliRunner().invoke(progress_command, [str(tmp_path)])
    assert result.exit_code == 3
    assert "rank-00000.log: no line has a known format" in result.stderr
    for rank in (0, 1):
        heartbeat = tmp_path / "heartbeat" / f"rank-{rank:05d}.json"
        heartbeat.write_text(json.dumps({"step": 9 - rank, "rank": rank}))
        os.utime(heartbeat, (1e9 + rank, 1e9 + rank))  # the newest one counts, not the one that is furthest
    result = CliRunner().invoke(progress_command, [str(tmp_path), "--json"])
    assert (result.exit_code, json.loads(result.stdout)["step"]) == (0, 8)


def test_torchtitan_says_that_it_is_done_until_it_starts_again() -> None:
    stamp = "[rank0]:[titan] 2026-08-20 10:15:00,000 - root - INFO - "
    steps = "".join(f"{stamp}step: {i}  loss:  1.59  grad_norm:  0.8  tps: 3,311\n" for i in (10, 20))
    done = f"{stamp}Training completed\n"
    assert read_progress(steps, "train.log").phase is None
    assert read_progress(steps + done, "train.log").phase == "done"
    assert read_progress(steps + done + f"{stamp}Training starts at step 1\n", "train.log").phase == "train"
    assert read_progress(steps + done + steps, "train.log").phase != "done"
