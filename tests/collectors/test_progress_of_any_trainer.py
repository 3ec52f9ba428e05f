"""Logs of trainers that nobody prepared for the watcher: the step of each, and what must never be taken for one.

tests/data/progress/trainers.json: lines in the formats of 63 trainers, rendered from the format strings of their
sources.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wattwatch.collectors.progress import continue_progress, read_progress
from wattwatch.collectors.samples import ProgressSample

TRAINERS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "progress" / "trainers.json").read_text("utf-8")
)
NAMES = [trainer["trainer"] for trainer in TRAINERS]
VALUES = (
    "format", "step", "total_steps", "epoch", "epochs", "epoch_step", "epoch_steps", "loss", "tokens_per_second",
    "samples_per_second", "seconds_per_step", "eta_seconds",
)  # fmt: skip
MIN_GUESSED_SHARE = 0.8


def step_in_log(sample: ProgressSample) -> int | None:
    """The number as the log prints it."""
    return sample.step if sample.epoch_step is None else sample.epoch_step


@pytest.mark.parametrize("trainer", TRAINERS, ids=NAMES)
def test_progress_of_a_trainer_is_read(trainer: dict[str, Any]) -> None:
    sample = read_progress(trainer["text"])
    assert {name: getattr(sample, name) for name in VALUES} == {name: trainer.get(name) for name in VALUES}
    assert not sample.guessed


@pytest.mark.parametrize("trainer", TRAINERS, ids=NAMES)
def test_a_log_cut_at_any_byte_shows_no_step_that_it_did_not_print(trainer: dict[str, Any]) -> None:
    text = trainer["text"]
    ends = [index + 1 for index, letter in enumerate(text) if letter in "\r\n"]
    whole = {step_in_log(read_progress(text[:end])) for end in ends} | {None}
    for end in range(len(text)):
        assert step_in_log(read_progress(text[:end])) in whole, text[:end]


def test_without_the_formats_most_trainers_are_guessed_and_none_is_guessed_wrong() -> None:
    right = 0
    for trainer in TRAINERS:
        sample = read_progress(trainer["text"], formats=())
        printed = trainer.get("epoch_step", trainer["step"])
        if sample.step is not None:
            assert sample.guessed
            # litgpt prints both the iteration and the step; the iteration is the more frequent counter.
            assert step_in_log(sample) == printed or trainer["trainer"] == "litgpt", trainer["trainer"]
            right += step_in_log(sample) == printed
    assert right / len(TRAINERS) >= MIN_GUESSED_SHARE


BAR = "%|████      |"
# What plain scripts print, with the step that counts. Shapes are those of public tutorials and reports.
PLAIN: dict[str, tuple[str, int]] = {
    "slash": ("step 8/500 loss 3.20\nstep 9/500 loss 3.21\n", 9),
    "bracket": ("Epoch [0] Step [8/500] | Loss: 3.2\nEpoch [0] Step [9/500] | Loss: 3.2\n", 9),
    "srun -l": ("0: step 5 loss 3.2\n1: step 5 loss 3.2\n0: step 6 loss 3.1\n1: step 6 loss 3.1\n", 6),
    "torchrun --tee": ("[default0]:iter 500: loss 3.2, time 135.21ms\n[default0]:iter 510: loss 3.2, time 1ms\n", 510),
    "pipes": ("[2026-11-30 10:15:02] Epoch: 3 | Step: 120 | Loss: 2.3\n[2026-11-30 10:15:12] Epoch: 3 | Step: 130 | "
        "Loss: 2.2\n", 130),
    # https://github.com/SenseTime-FVG/OpenDWM/issues/20
    "step (s/step)": ("Step 3100 (1.1 s/step), loss: 0.39\nStep 3200 (1.1 s/step), loss: 0.39\n", 3200),
    # https://github.com/yuantailing/ctw-baseline/issues/34
    "tf slim": (
        "INFO:tensorflow:global step 5310: loss = 6.8 (29.3 sec/step)\n"
        "INFO:tensorflow:Recording summary at step 5315.\n"
        "INFO:tensorflow:global step 5320: loss = 6.8 (29.3 sec/step)\n",
        5320,
    ),
    # https://github.com/mks0601/Hand4Whole_RELEASE/issues/31
    "itr": (
        "09-24 22:55:13 Epoch 0/7 itr 108/3489: lr: 0.0001 speed: 2.84(0.62s r2.18)s/itr loss_pose: 0.25\n"
        "09-24 22:55:16 Epoch 0/7 itr 109/3489: lr: 0.0001 speed: 2.82(0.62s r2.16)s/itr loss_pose: 0.26\n",
        109,
    ),
    "word language model": (
        "| epoch   3 |   200/ 2983 batches | lr 5.00 | ms/batch 12.3 | loss  4.2\n"
        "| epoch   3 |   400/ 2983 batches | lr 5.00 | ms/batch 12.3 | loss  4.1\n",
        400,
    ),
    "quickstart": ("Epoch 2\n-------\nloss: 2.30  [    0/60000]\nloss: 2.29  [ 6400/60000]\nloss: 2.2  "
        "[12800/60000]\n", 12800),
    "epoch and batch": ("[1,  2000] loss: 2.2\n[1,  4000] loss: 1.9\n[1,  6000] loss: 1.7\n", 6000),
    "long time series": ("\titers: 100, epoch: 1 | loss: 0.31\n\tspeed: 0.0312s/iter; left time: 1200.1s\n\titers: "
        "200, epoch: 1 | loss: 0.3\n", 200),
    "it": ("it 1000 | loss 0.2\nit 1010 | loss 0.2\n", 1010),
    "llm.c": (
        "step  100/19560 | loss 3.28 (+nanz)| norm 0.31 (+nanz)| lr 6.00e-04 | 250.12 ms | 41.2% bf16 MFU | 2096123 "
        "tok/s\n"
        "step  101/19560 | loss 3.28 (+nanz)| norm 0.31 (+nanz)| lr 6.00e-04 | 250.12 ms | 41.2% bf16 MFU | 2096123 "
        "tok/s\n",
        101,
    ),
    "estimator": ("INFO:tensorflow:loss = 0.25, step = 1200 (3.5 sec)\nINFO:tensorflow:loss = 0.24, step = 1300 "
        "(3.5 sec)\n", 1300),
    "caffe": ("Iteration 1200 (3.2 iter/s, 31s/100 iters), loss = 0.2\nIteration 1300 (3.2 iter/s, 31s/100 iters), "
        "loss = 0.2\n", 1300),
    "progress": ("Progress: 12% (120/1000)\nProgress: 13% (130/1000)\n", 130),
    "epochs": ("Epoch 1/50 loss: 0.5\nEpoch 2/50 loss: 0.4\nEpoch 3/50 loss: 0.3\n", 3),
    "evaluation between": ("step 100 loss 2.0\neval step 1/40\neval step 2/40\nstep 110 loss 2.0\neval step "
        "1/40\neval step 2/40\n", 110),
    "validation after": ("step 100 loss 2.0\nstep 110 loss 2.0\nValidation step: 9/40\nValidation step: 10/40\n", 110),
    "test after": ("Train iter 10 loss 1\nTrain iter 20 loss 1\nTest iter 1 loss 3\nTest iter 2 loss 3\nTest iter 3 "
        "loss 3\n", 20),
    "images": (f"Epoch 1/5:  10{BAR} 500/4580 [01:00<08:00, 8.2img/s, loss (batch)=0.5]\r", 500),
    "ray": (f"(RayTrainWorker pid=12, ip=10.0.0.1)  10{BAR} 100/1000 [01:40<15:00,  1.00s/it]\n", 100),
    "no total": ("training: 1500it [02:00, 12.5it/s, loss=0.3]\rtraining: 1501it [02:00, 12.5it/s, loss=0.3]\r", 1501),
    "yolov5": (
        "     Epoch   gpu_mem       box       obj       cls\n"
        f"      0/299      3.2G   0.0452   0.0321   0.0121        45       640:  13{BAR} 15/115 [00:05<00:33,  "
        "2.97it/s]\r",
        15,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_the_step_of_a_plain_script_is_guessed(name: str) -> None:
    text, step = PLAIN[name]
    sample = read_progress(text)
    assert step_in_log(sample) == step


# Counters that grow and are no steps.
NO_STEPS: dict[str, str] = {
    "downloads": "Downloading shards 1/5\nDownloading shards 2/5\nLoading file 1/200\nLoading file 2/200\n",
    "examples": "Processed 1000/50000 examples\nProcessed 2000/50000 examples\nProcessed 3000/50000 examples\n",
    "settings": "max_steps: 1000\nwarmup_steps: 100\nbatch_size: 32\nnum_steps=5000\nlr: 0.1\n",
    "ranks": "Using 8/8 GPUs\nrank 3/8 ready\nrank 4/8 ready\nrank 5/8 ready\n",
    "members": "GLOBAL_RANK: 0, MEMBER: 1/4\nGLOBAL_RANK: 1, MEMBER: 2/4\nGLOBAL_RANK: 2, MEMBER: 3/4\n",
    "attempts": "attempt 1/5 failed\nattempt 2/5 failed\nattempt 3/5 failed\n",
    "layers": "loading layer 1/80\nloading layer 2/80\nloading layer 3/80\n",
    "nccl": "n:1:2 [0] NCCL INFO Channel 00/16 : 0 1\nn:1:2 [0] NCCL INFO Channel 01/16 : 0 1\nn:1:2 [0] NCCL INFO "
        "Channel 02/16 : 0 1\n",
    "build steps": "Step 1/3: downloading the model\nStep 2/3: loading the tokenizer\nStep 3/3: building the index\n",
    "tokenizing": f"\rTokenizing train dataset:  43{BAR} 172000/400000 [02:23<03:10, 1197.30 examples/s]\n",
    "adding": f"\rAdding EOS to train dataset:  85{BAR} 2569/3000 [00:01<00:00, 2069.9 examples/s]",
    "weights": f"\rLoading weights: 100{BAR} 290/290 [00:00<00:00, 3021.01it/s]\n",
    "split": "Generating train split: 1000 examples [00:01, 820.1 examples/s]\nGenerating train split: 2000 "
        "examples [00:02, 820.1 examples/s]\n",
    "evaluation": f"Evaluating:  10{BAR} 10/100 [00:05<00:33,  2.97it/s]\rEvaluating:  11{BAR} 11/100 [00:05<00:33, "
        " 2.97it/s]\r",
    "validation": f"Validation DataLoader 0:  10{BAR} 10/100 [00:05<00:33,  2.97it/s]\r",
    "graphs": f"Capturing CUDA graph shapes:  10{BAR} 3/35 [00:05<00:33,  2.97it/s]\r",
    "generation": f"Processed prompts:  10{BAR} 10/100 [00:05<00:33,  2.97it/s, est. speed input: 10 toks/s]\r",
}  # fmt: skip


@pytest.mark.parametrize("name", NO_STEPS)
@pytest.mark.parametrize("formats", [None, ()], ids=["all formats", "guess"])
def test_preparation_and_evaluation_are_never_steps(name: str, formats: tuple[()] | None) -> None:
    sample = read_progress(NO_STEPS[name], formats=formats)
    assert sample.step is None
    assert sample.why


def test_the_bar_that_is_not_the_trainings_is_named() -> None:
    why = read_progress(NO_STEPS["tokenizing"]).why
    assert "the last progress bar 'Tokenizing train dataset' belongs to preparation, not to training" in why


def test_an_evaluation_bar_nested_in_the_training_bar_is_not_the_step() -> None:
    training = f" 10{BAR} 100/1000 [01:40<15:00,  1.00s/it]\n"
    evaluation = "".join(f"\r {n}{BAR} {n}/100 [00:30<01:10, 50.0it/s]" for n in range(0, 100, 7))
    for text in (training + evaluation, training + evaluation + "\n", training * 2 + evaluation):
        sample = read_progress(text)
        assert (sample.step, sample.total_steps) == (100, 1000)


def test_an_evaluation_that_outlasts_the_text_is_known_from_what_was_read_before() -> None:
    before = read_progress(f" 10{BAR} 100/1000 [01:40<15:00,  1.00s/it]\n")
    later = f"\r 30{BAR} 1500/5000 [00:30<01:10, 50.0it/s]\r 31{BAR} 1550/5000 [00:31<01:10, 50.0it/s]\r"
    assert read_progress(later).step == 1550  # nothing else is known
    sample = continue_progress(read_progress(later, cut=True, previous=before), before)
    assert (sample.step, sample.total_steps) == (100, 1000)


def test_the_bar_of_a_second_run_in_the_same_log_counts() -> None:
    text = (
        f"100{BAR} 500/500 [10:00<00:00, 1.2s/it]\n{{'loss': 1.0, 'epoch': 1.0}}\n{{'train_runtime': 600}}\n"
        f"Loading weights: 100{BAR} 21/21 [00:00<00:00, 99it/s]\n  0{BAR} 3/1000 [00:03<10:00, 1.2s/it]\r"
    )
    sample = read_progress(text)
    assert (sample.step, sample.total_steps, sample.loss, sample.phase) == (3, 1000, None, None)


def test_a_prediction_after_the_training_is_not_a_second_run() -> None:
    text = (
        f"100{BAR} 500/500 [10:00<00:00, 1.2s/it]\n{{'loss': 1.0, 'epoch': 1.0}}\n{{'train_runtime': 600}}\n"
        f"  3{BAR} 3/100 [00:03<10:00, 1.2s/it]\r  5{BAR} 5/100 [00:03<10:00, 1.2s/it]\n"
    )
    sample = read_progress(text)
    assert (sample.step, sample.total_steps, sample.phase) == (500, 500, "done")


def test_keras_evaluation_is_not_an_epoch() -> None:
    text = "".join(f"Epoch {e}/2\n\r 500/500 ━━━━━━━━━━ 5s 4ms/step - loss: 0.3\n" for e in (1, 2))
    assert read_progress(text + "\r 20/100 ━━━━━━━━━━ 5s 4ms/step - loss: 0.3\n").step == 1000


def test_a_counter_that_starts_again_in_each_epoch_counts_on() -> None:
    places = [(epoch, batch) for epoch in (1, 2, 3) for batch in (0, 50, 100)]
    lines = [f"Epoch {e}, batch {b}, loss[loss=0.2, over 1. frames. ], tot_loss[loss=0.2]\n" for e, b in places]
    sample, steps = None, []
    for line in lines:
        sample = continue_progress(read_progress(line, previous=sample), sample)
        steps.append(sample.step)
    assert steps == sorted(steps, key=lambda step: step or 0)
    assert steps[-1] == 300
    assert sample is not None
    assert (sample.epoch, sample.epoch_step, sample.total_steps) == (3, 100, None)


def test_a_bar_without_a_description_counts_on_in_the_next_epoch() -> None:
    first = read_progress(f"100{BAR} 812/812 [01:00<00:00, 1.2it/s]\n")
    second = continue_progress(read_progress(f"  1{BAR} 8/812 [00:05<10:00, 1.2it/s]\n", previous=first), first)
    assert (second.step, second.epoch_step) == (820, 8)


def test_another_run_in_the_same_log_does_not_count_on() -> None:
    first = read_progress("step 900 loss 1.0\nstep 910 loss 1.0\n")
    assert continue_progress(read_progress("step 500 loss 1.0\nstep 510 loss 1.0\n"), first).step == 510


def test_a_rate_of_unknown_extent_is_named_and_not_the_jobs() -> None:
    sample = read_progress("step 8 loss 3.2 tps 3311\nstep 9 loss 3.2 tps 3311\n", formats=())
    assert sample.tokens_per_second is None


def test_a_log_of_nothing_known_is_read_in_reasonable_time() -> None:
    line = "2026-11-30 10:15:02 some words 12/13 and a=1 b=2 epoch step value [3] (4) 5% of 6\n"
    assert read_progress(line * 200).why


def test_a_pattern_is_suggested_for_a_counter_without_a_known_name() -> None:
    lines = [f"12:00:{second:02} sprocket {second * 4} turned, heat 7\n" for second in range(1, 9)]
    why = read_progress("".join(lines)).why
    assert why.endswith(r"with log_pattern = 'sprocket\s+(?P<step>\d+)', wattwatch would read step 32")
    suggested = why.partition("log_pattern = '")[2].partition("', wattwatch")[0]
    assert read_progress("".join(lines), pattern=suggested).step == 32


def test_no_pattern_is_suggested_where_nothing_grows() -> None:
    for text in ("hello\n" * 9, "port 22 open\n" * 9, NO_STEPS["tokenizing"], "a 3\na 1\na 2\na 9\n"):
        assert "log_pattern" not in read_progress(text).why
