"""Dumps of Python stacks: what a rank is doing, at which line of its own code, and which ranks are outliers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.watcher.diagnosis.hung_job_evidence import stacks
from wattwatch.watcher.diagnosis.model import RankStacks, StackFrame
from wattwatch.watcher.diagnosis.stacks.activity import group_by_activity, outliers, rank_activities, rank_activity
from wattwatch.watcher.diagnosis.stacks.python_stacks import MAX_TEXT_CHARACTERS, main_thread, parse_stacks
from wattwatch.watcher.diagnosis.stacks.user_code import is_library

DATA = Path(__file__).parents[2] / "data" / "worker_server"
FAULTHANDLER = """\
Thread 0x00007f1 [Thread-3 (beat)] (most recent call first):
  File "/usr/lib/python3.14/threading.py", line 359 in wait
  File "/job/beat.py", line 7 in beat

Current thread 0x00007f2 (most recent call first):
  Garbage-collecting
  File "/opt/lib/python3.14/site-packages/torch/utils/data/dataloader.py", line 1295 in _next_data
  File "/job/my data/train.py", line 36 in <module>
  ...

Extension modules: numpy._core._multiarray_umath (total: 1)
"""
PY_SPY = """\
Process 4003: python train.py --steps 10
Python v3.11.9 (/usr/bin/python3.11)

Thread 4003 (active+gil): "MainThread"
    0x7f11 (libcuda.so.1)
    forward (model/block.py:88)
        Arguments:
            x: <Tensor at 0x7f>
    main (train.py:120)
    <module> (train.py:200)
Thread 4010 (idle): "beat (x)"
    wait (threading.py:320)

Process 4100: python train.py
Thread 4100 (idle): "MainThread"
    get (multiprocessing/queues.py:103)
"""


def read(text: str) -> RankStacks:
    found = parse_stacks(text, 3, "stacks.txt")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("rank", "words", "line"), [(0, "waits in a collective", 22), (1, "waits for a reply over the network", 18)]
)
def test_stacks_from_torchs_worker_server_of_two_hung_ranks(rank: int, words: str, line: int) -> None:
    activity = rank_activity(read((DATA / f"rank{rank}_dump_traceback.txt").read_text()))
    assert activity is not None
    assert (activity.words, activity.frame) == (words, StackFrame("w", "train/dbg2.py", line))


def test_the_last_thread_of_faulthandler_is_the_main_one() -> None:
    found = read(FAULTHANDLER)
    assert [(thread.thread, thread.main) for thread in found.threads] == [
        ("Thread-3 (beat)", False),
        ("0x00007f2", True),
    ]
    activity = rank_activity(found)
    assert activity is not None
    assert (activity.activity, activity.frame) == ("data", StackFrame("<module>", "/job/my data/train.py", 36))


def test_py_spy_dump_with_locals_native_frames_and_loader_workers() -> None:
    found = read(PY_SPY)
    assert [thread.main for thread in found.threads] == [True, False, False]
    main = main_thread(found)
    assert main is not None
    assert [frame.function for frame in main.frames] == ["0x7f11", "forward", "main", "<module>"]
    activity = rank_activity(found)
    assert activity is not None
    assert activity.frame == StackFrame("forward", "model/block.py", 88)


def test_py_spy_dump_as_json() -> None:
    frames = [{"name": "load", "filename": "/job/data.py", "line": 4}, {"name": "main", "filename": "/job/train.py"}]
    rows = [
        {"pid": 7, "thread_id": 1, "thread_name": "MainThread", "frames": frames},
        {"pid": 8, "thread_id": 2, "thread_name": "MainThread", "frames": []},
        "odd",
    ]
    found = read(json.dumps(rows))
    assert [thread.main for thread in found.threads] == [True, False]
    assert found.threads[0].frames[1] == StackFrame("main", "/job/train.py", None)


def test_a_rank_whose_main_thread_has_no_frames_has_no_activity() -> None:
    assert rank_activity(read("Current thread 0x1 (most recent call first):\n  <no Python frame>\n")) is None


@pytest.mark.parametrize("text", ["", "hello", "[]", "[1]", "{}", "[" * 5000, "Thread"])
def test_other_text_is_not_a_dump(text: str) -> None:
    assert parse_stacks(text, 0, "x") is None


@given(st.text(max_size=400) | st.text('Thread 0x12(mostrecenlfi):\n  "File,lineMa', max_size=400))
def test_no_text_raises(text: str) -> None:
    for head in ("", "Thread 0x1 (most recent call first):\n", 'Thread 1 (idle): "MainThread"\n    '):
        found = parse_stacks(head + text, 0, "x")
        assert found is None or rank_activity(found) is None or found.threads


def test_an_endless_dump_is_cut() -> None:
    line = '  File "/job/a.py", line 1 in f\n'
    found = read("Thread 0x1 (most recent call first):\n" + line * (2 * MAX_TEXT_CHARACTERS // len(line)))
    assert len(found.threads[0].frames) == 256


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", True),
        ("/usr/lib/python3/dist-packages/numpy/core.py", True),
        ("/opt/pytorch/torch/distributed/distributed_c10d.py", True),
        ("lib/python3.11/socket.py", True),
        ("threading.py", True),
        ("torch/_ops.py", True),
        ("<frozen runpy>", True),
        ("<string>", True),
        ("libcuda.so.1", True),
        ("train.py", False),
        ("/home/me/train/data.py", False),
        ("/home/torch/train.py", False),
        ("megatron/training/training.py", False),
    ],
)
def test_what_is_a_library(file: str, library: bool) -> None:
    assert is_library(file) is library


def test_an_installed_training_program_is_user_code_if_nothing_else_is() -> None:
    site = "/opt/lib/python3.11/site-packages"
    text = (
        "Thread 0x1 (most recent call first):\n"
        f'  File "{site}/torch/distributed/distributed_c10d.py", line 1 in barrier\n'
        f'  File "{site}/bigtrainer/loop.py", line 9 in save\n'
        '  File "/usr/lib/python3.11/runpy.py", line 88 in _run_code\n'
    )
    activity = rank_activity(read(text))
    assert activity is not None
    assert (activity.activity, activity.frame) == ("collective", StackFrame("save", f"{site}/bigtrainer/loop.py", 9))


def test_if_more_than_half_are_at_one_line_the_others_are_outliers() -> None:
    groups = group_by_activity(rank_activities(stacks({3: "own"})))
    assert [group.ranks for group in groups] == [(0, 1, 2, 4, 5, 6, 7), (3,)]
    assert [group.ranks for group in outliers(groups)] == [(3,)]
    halves = group_by_activity(rank_activities(stacks(dict.fromkeys(range(4), "own"))))
    assert outliers(halves) == ()
