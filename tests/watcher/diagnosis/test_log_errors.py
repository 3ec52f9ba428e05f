"""The error that the end of a log shows, and which rank it names."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from wattwatch.watcher.diagnosis.diagnose import diagnose
from wattwatch.watcher.diagnosis.flight_recorder.model import (
    GroupRecord,
    Operation,
    OperationLaunch,
    ProcessGroup,
    RankRecord,
)
from wattwatch.watcher.diagnosis.model import DiagnosisVerdict, Evidence, HangCause, LogError, RankExitReport, RankLog
from wattwatch.watcher.diagnosis.signals.from_job import exit_reports_signal, logs_signal
from wattwatch.watcher.diagnosis.stacks.log_errors import MAX_LINE_CHARACTERS, MAX_LINES, MAX_TAIL_BYTES, parse_rank_log

TRACEBACK = """\
step 40 loss 2.1
[rank3]: Traceback (most recent call last):
[rank3]:   File "/srv/train.py", line 90, in main
[rank3]:     step(batch)
[rank3]:   File "/srv/train.py", line 41, in step
[rank3]:     {code}
[rank3]:   File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 7, in linear
[rank3]:     return f(x)
[rank3]:            ^^^^
[rank3]: {message}
"""
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:1"


def log_of(text: str, rank: int = 3, age_seconds: float | None = None) -> RankLog:
    log = parse_rank_log(text.encode(), rank, f"rank-{rank:05d}.log.txt")
    assert log is not None
    return replace(log, age_seconds=age_seconds)


def failure(text: str) -> LogError:
    found = log_of(text).failure
    assert found is not None
    return found


def raised(message: str) -> str:
    return TRACEBACK.format(code="y = linear(x)", message=message)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("ValueError: shard 7 holds no tokens", HangCause.PROGRAM),
        ("KeyError: 'tokens'", HangCause.PROGRAM),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", HangCause.PROGRAM),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", HangCause.PROGRAM),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", HangCause.GPU),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", HangCause.GPU),
        ("OSError: [Errno 28] No space left on device: '/nfs/ckpt/model.safetensors'", HangCause.STORAGE),
        ("OSError: [Errno 116] Stale file handle", HangCause.STORAGE),
        ("MemoryError", HangCause.HOST),
        ("ValueError: Caught ValueError in DataLoader worker process 0.", HangCause.DATA),
    ],
)
def test_an_exception_says_what_is_to_blame_and_where(message: str, cause: HangCause) -> None:
    found = failure(raised(message))
    assert (found.message, found.cause, found.is_consequence) == (message, cause.value, False)
    assert found.frame is not None
    assert (found.frame.function, found.frame.line) == ("step", 41)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("terminate called after throwing an instance of 'gloo::EnforceNotMet'", HangCause.RANK),
        (
            "[E410 14:46:34.1 ProcessGroupNCCL.cpp:1896] watchdog thread terminated with exception: CUDA error: x",
            HangCause.GPU,
        ),
        ("Killed", HangCause.HOST),
        ("Fatal Python error: Segmentation fault", HangCause.RANK),
        ("ncclInternalError: Internal check failed.", None),
    ],
)
def test_a_line_of_native_code(line: str, cause: HangCause | None) -> None:
    found = failure(f"step 40\n{line}\n")
    assert (found.cause, found.is_consequence) == (None if cause is None else cause.value, False)


@pytest.mark.parametrize(
    "line",
    [
        "[rank1]:[E1122 06:40:01.9 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=126, OpType=_ALLGATHER_BASE) ran for 600079 milliseconds before timing out.",
        "[rank3]:[E410 14:46:34.6 ProcessGroupNCCL.cpp:698] [Rank 3] To avoid data inconsistency, we are taking the "
        "entire process down.",
        raised(CLOSED),
        raised("torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"),
        raised("RuntimeError: Timed out waiting 1800000ms for recv operation to complete"),
        raised("BrokenPipeError: [Errno 32] Broken pipe"),
    ],
)
def test_a_rank_that_lost_another_rank_is_not_to_blame(line: str) -> None:
    assert failure(line).is_consequence
    signal = logs_signal(Evidence(logs=(log_of(line),)))
    assert signal is not None
    assert not signal.ranks


def test_an_error_during_cleanup_does_not_hide_the_original_error() -> None:
    text = raised("ValueError: no tokens") + (
        "\nDuring handling of the above exception, another exception occurred:\n\n" + raised(CLOSED)
    )
    assert (failure(text).message, failure(text).is_consequence) == ("ValueError: no tokens", False)
    wrapped = raised(CLOSED) + (
        "\nThe above exception was the direct cause of the following exception:\n\n" + raised("Exit: training failed")
    )
    assert failure(wrapped).is_consequence


def test_a_worker_of_a_loader_raised() -> None:
    text = raised("ValueError: Caught ValueError in DataLoader worker process 0.") + (
        "Original Traceback (most recent call last):\n"
        '  File "/usr/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop\n'
        "    data = fetcher.fetch(index)\n"
        '  File "/srv/shards.py", line 12, in __getitem__\n'
        "    raise ValueError(path)\n"
        "ValueError: shard 7 is cut off\n"
    )
    found = failure(text)
    assert (found.message, found.cause) == ("ValueError: shard 7 is cut off", HangCause.DATA.value)
    assert found.frame is not None
    assert found.frame.function == "__getitem__"


def test_an_error_that_the_rank_survived_does_not_count() -> None:
    went_on = raised("ValueError: retried") + "".join(f"step {number}\n" for number in range(40))
    assert log_of(went_on).failure is None
    ignored = "Exception ignored in: <function x>\n" + raised("ValueError: at exit").partition("\n")[2]
    assert log_of(ignored).failure is None
    assert log_of("step 1\nstep 2\n").failure is None


def test_a_hostile_log_is_cut_and_stripped_of_terminal_escapes() -> None:
    text = "\x1b]0;owned\x07\x1b[2J" + raised("ValueError: \x1b[31mred\x1b[0m\x00\u202e" + "x" * 100_000)
    log = log_of(text + "bar 1%\rbar 2%\r\n")
    assert log.failure is None or len(log.failure.message) <= MAX_LINE_CHARACTERS
    shown = "".join(log.lines)
    assert shown.isprintable()
    assert "owned" not in shown
    assert len(log.lines) <= MAX_LINES
    assert max(map(len, log.lines)) <= MAX_LINE_CHARACTERS + 3


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_are_read(seed: int) -> None:
    data = random.Random(seed).randbytes(MAX_TAIL_BYTES * 2) if seed % 2 else b'  File "' * 3000 + b"\x1b[" * 2000
    assert parse_rank_log(data, 0, "x") is not None
    assert parse_rank_log(b"", 0, "x") is None
    assert parse_rank_log(b"\n\r\n \n", 0, "x") is None


def test_the_first_that_failed_by_itself_is_named() -> None:
    own, lost = raised("ValueError: no tokens"), raised(CLOSED)
    nodes = dict.fromkeys(range(8), "node-01")
    logs = (log_of(lost, 1), log_of(own, 2), log_of(lost, 3))
    found = diagnose(Evidence(logs=logs, node_of_rank=nodes))
    assert [each.rank for each in found.culprits] == [2]
    assert (found.verdict, found.cause) == (DiagnosisVerdict.NEVER_ARRIVED, HangCause.PROGRAM)
    two = (log_of(own, 2, 60.0), log_of(own, 5, 50.0))
    assert [each.rank for each in diagnose(Evidence(logs=two, node_of_rank=nodes)).culprits] == [2]
    at_once = (log_of(own, 2, 60.0), log_of(own, 5, 59.5))
    assert [each.rank for each in diagnose(Evidence(logs=at_once, node_of_rank=nodes)).culprits] == [2, 5]


def test_if_most_ranks_raised_the_same_error_none_is_named() -> None:
    logs = tuple(log_of(raised("ValueError: bad configuration"), rank) for rank in range(4))
    found = diagnose(Evidence(logs=logs, node_of_rank=dict.fromkeys(range(4), "node-01")))
    assert found.culprits == ()
    assert found.cause is HangCause.PROGRAM


def record_of(rank: int, size: int) -> RankRecord:
    operation = Operation("gloo", "all_reduce", ((size,),), ((size,),), ("Float",), ("Float",))
    part = GroupRecord(
        ProcessGroup("0", (0, 1, 2, 3)), 4, None, None, (OperationLaunch(3, 4, operation, None, False, True),)
    )
    return RankRecord(rank, f"recorder-{rank}.json", "2.10", "", (part,))


def test_the_rank_whose_size_no_other_rank_has_is_wrong() -> None:
    aborted = log_of(
        "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 32 vs 8. Received ...", 3
    )
    assert aborted.failure is not None
    assert aborted.failure.message.startswith("op.preamble.length")
    receiver = logs_signal(Evidence(tuple(record_of(rank, 64) for rank in (0, 1, 2)), logs=(aborted,)))
    sender = logs_signal(
        Evidence(tuple(record_of(rank, 256 if rank == 2 else 64) for rank in (0, 1, 2)), logs=(aborted,))
    )
    unclear = logs_signal(Evidence(logs=(aborted,)))
    assert receiver is not None
    assert sender is not None
    assert unclear is not None
    assert [set(each.ranks) for each in (receiver, sender, unclear)] == [{3}, {2}, {3}]
    assert unclear.weight < receiver.weight
    assert receiver.verdict is DiagnosisVerdict.MISMATCH


def test_an_exit_report_implies_the_cause() -> None:
    report = RankExitReport(2, 5, "/nfs/ckpt: No space left on device")
    signal = exit_reports_signal(Evidence(exit_reports=(report,), node_of_rank=dict.fromkeys(range(8), "n")))
    assert signal is not None
    assert signal.cause is HangCause.STORAGE
