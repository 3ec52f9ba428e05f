"""How attempts end, as a sentence, and what comes next. Nothing is started here."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from wattwatch.trainer.launch.attempt import TracebackFilter, parse_rank_failures
from wattwatch.trainer.launch.links import LostNode, describe_program_exit
from wattwatch.trainer.launch.outcome import (
    EXIT_CODES,
    AttemptEvidence,
    AttemptOutcome,
    AttemptResult,
    LaunchDecision,
    NextAction,
    OutcomeKind,
    RankFailure,
    TorchrunExit,
    decide_next,
    determine_outcome,
    retry_delay_seconds,
)
from wattwatch.trainer.launch.placement import Placement
from wattwatch.trainer.run_directory import RankExit
from wattwatch.trainer.settings import LaunchMethod

PLACEMENT = Placement(LaunchMethod.SSH, ("node-a", "node-b"), 2, "node-a", 29500)


def killed(rank: int, time: int = 100, number: int = signal.SIGKILL) -> RankFailure:
    return RankFailure(rank, -number, 1000 + rank, time)


def test_a_killed_rank_is_named_with_its_signal_and_step() -> None:
    evidence = AttemptEvidence((killed(3),), {0: RankExit(5, "peer closed", 17)}, heartbeats={3: (1003, 17)})
    assert determine_outcome(evidence, PLACEMENT).sentence == (
        "rank 3 on node-b was killed by SIGKILL after step 17; the other ranks failed as a result"
    )


def test_a_heartbeat_of_another_process_does_not_count_for_the_killed_one() -> None:
    evidence = AttemptEvidence((killed(3),), {0: RankExit(5, "peer closed", 9)}, heartbeats={3: (77, 500)})
    assert "after step 9" in determine_outcome(evidence, PLACEMENT).sentence


def test_a_peer_that_failed_a_second_earlier_by_its_clock_is_not_the_cause() -> None:
    evidence = AttemptEvidence(
        (RankFailure(0, 5, 1, 99), killed(3, 100)), {0: RankExit(5, "connection closed by peer", 17)}
    )
    assert determine_outcome(evidence, PLACEMENT).kind is OutcomeKind.KILLED


def test_the_earliest_of_ranks_with_reasons_is_the_cause() -> None:
    endings = {1: RankExit(5, "No space left on device", 20), 2: RankExit(5, "collective timed out", 20)}
    cause = determine_outcome(
        AttemptEvidence((RankFailure(2, 5, 1, 1900), RankFailure(1, 5, 1, 100)), endings), PLACEMENT
    )
    assert cause.sentence == (
        "rank 1 on node-a exited with code 5 after step 20: No space left on device; the other ranks failed as a result"
    )


def test_a_lost_node_explains_the_failures_of_its_peers() -> None:
    evidence = AttemptEvidence(
        (RankFailure(0, 5, 1, 100),), {0: RankExit(5, "peer closed", 17)}, (LostNode(1, "ssh ended: timeout"),)
    )
    assert determine_outcome(evidence, PLACEMENT).sentence == "node-b was lost: ssh ended: timeout"


def test_a_rank_that_torchrun_asked_to_exit_is_not_the_cause() -> None:
    endings = {0: RankExit(4, "SIGTERM", 7)}
    cause = determine_outcome(AttemptEvidence((RankFailure(0, 4, 1, 100), killed(1, 101)), endings), PLACEMENT)
    assert cause.kind is OutcomeKind.KILLED
    assert determine_outcome(
        AttemptEvidence((killed(0, 100, signal.SIGTERM), killed(1, 101)), {}), PLACEMENT
    ).sentence.startswith("rank 1")


def test_all_stopped_on_request_is_a_stop() -> None:
    endings = {rank: RankExit(4, "stop file", 12) for rank in range(4)}
    cause = determine_outcome(AttemptEvidence((), endings), PLACEMENT)
    assert (cause.code, cause.sentence) == (4, "stopped on request: stop file")


def test_a_rank_without_an_exit_file_is_reported_with_the_end_of_its_log() -> None:
    evidence = AttemptEvidence(
        (RankFailure(1, 1, 1, 100),), {}, logs={1: "the last line of its log is: ImportError: x"}
    )
    assert (
        determine_outcome(evidence, PLACEMENT).sentence
        == "rank 1 on node-a exited with code 1; the last line of its log is: ImportError: x"
    )


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '[{"rank": "0"}]'])
def test_a_truncated_report_is_ignored(text: str) -> None:
    assert parse_rank_failures(text) == ()


def decide(
    cause: AttemptOutcome, retries: int = 3, began: int = 0, reached: int = 0, saved: int = 0, steps: int | None = 100,
    interrupted: bool = False,
) -> LaunchDecision:  # fmt: skip
    return decide_next(AttemptResult(cause, began, reached, saved, steps, interrupted), retries)


KILLED = AttemptOutcome(OutcomeKind.KILLED, None, "killed")
DONE = AttemptOutcome(OutcomeKind.DONE, 0, "all ranks exited with code 0")


def stated(code: int) -> AttemptOutcome:
    return AttemptOutcome(OutcomeKind.STATED, code, "stated")


def test_only_the_checkpoint_of_the_last_step_means_done() -> None:
    assert decide(DONE, saved=100).action is NextAction.DONE
    assert decide(DONE, saved=99, retries=0).action is NextAction.FAILED
    assert "the last step is not saved" in decide(DONE, saved=99, retries=0).why


def test_exit_code_0_of_ranks_that_ran_out_of_data_is_a_failure_that_is_retried() -> None:
    assert decide(DONE, saved=0, reached=50).action is NextAction.RETRY
    assert decide(DONE, saved=0, steps=None).action is NextAction.RETRY


def test_a_rank_that_crashes_after_the_last_save_does_not_undo_the_work() -> None:
    decision = decide(KILLED, saved=100)
    assert decision.action is NextAction.DONE
    assert "after that: killed" in decision.why


@pytest.mark.parametrize("cause", [KILLED, stated(5), AttemptOutcome(OutcomeKind.NODE_LOST, None, "lost")])
def test_failures_that_may_not_happen_again_are_retried_until_no_retries_are_left(cause: AttemptOutcome) -> None:
    assert decide(cause, retries=1).action is NextAction.RETRY
    assert decide(cause, retries=0).action is NextAction.FAILED


def test_refused_and_stopped_are_not_retried() -> None:
    assert decide(stated(2)).action is NextAction.REFUSED
    assert decide(AttemptOutcome(OutcomeKind.SILENT, 2, "usage")).action is NextAction.REFUSED
    assert decide(stated(4)).action is NextAction.STOPPED


def test_an_internal_error_is_retried_only_if_a_step_was_done() -> None:
    for cause in (stated(3), AttemptOutcome(OutcomeKind.SILENT, 1, "silent")):
        assert decide(cause, began=10, reached=10, saved=10).action is NextAction.FAILED
        assert decide(cause, began=10, reached=11, saved=10).action is NextAction.RETRY


def test_a_second_interrupt_ends_the_launch() -> None:
    assert decide(KILLED, interrupted=True).action is NextAction.INTERRUPTED


def test_every_final_action_has_its_own_exit_code() -> None:
    assert EXIT_CODES == {
        NextAction.DONE: 0,
        NextAction.REFUSED: 2,
        NextAction.STOPPED: 4,
        NextAction.INTERRUPTED: 130,
        NextAction.FAILED: 5,
    }


def test_the_retry_delay_doubles_up_to_ten_minutes() -> None:
    assert [retry_delay_seconds(10, retry) for retry in (1, 2, 3, 7, 1000)] == [10, 20, 40, 600, 600]
    assert retry_delay_seconds(3600, 2) == 3600
    assert retry_delay_seconds(0, 5) == 0


def test_the_last_line_of_stderr_is_the_reason_unless_a_signal_ended_the_program() -> None:
    assert (
        describe_program_exit("ssh", 255, "Warning: x\nConnection refused\n")
        == "ssh exited with code 255: Connection refused"
    )
    assert describe_program_exit("srun", -9, "srun: a warning\n") == "srun was killed by SIGKILL"
    assert describe_program_exit("ssh", 1, "") == "ssh exited with code 1"


TIMED_OUT = RankExit(
    5, "a collective failed: another rank has exited or does not respond (Timed out waiting 60000ms)", 13
)


def test_a_rank_that_hangs_and_is_killed_in_the_cleanup_is_reported_as_hung_not_as_killed() -> None:
    evidence = AttemptEvidence(
        (RankFailure(0, 5, 1, 100), killed(1, 130)), {0: TIMED_OUT}, heartbeats={1: (1001, 13)}, exit_times={0: 99.8}
    )
    two = Placement(LaunchMethod.LOCAL, ("localhost",), 2, "127.0.0.1", 29500)
    cause = determine_outcome(evidence, two)
    assert cause.kind is OutcomeKind.HUNG
    assert cause.sentence == (
        "rank 1 on localhost hung after step 13 and had to be killed; rank 0 failed while waiting for it: a collective "
        "failed: another rank has exited or does not respond (Timed out waiting 60000ms)"
    )


def test_the_rank_of_another_node_without_an_exit_file_is_the_one_that_hung() -> None:
    endings = {
        0: TIMED_OUT,
        1: RankExit(5, "asked to exit, but still waiting in a collective", 13),
        2: RankExit(4, "SIGTERM", 13),
    }
    evidence = AttemptEvidence(
        (RankFailure(0, 5, 1, 100),), endings, heartbeats={3: (1003, 12)}, exit_times={0: 100.0, 1: 120.0, 2: 121.0}
    )
    assert determine_outcome(evidence, PLACEMENT).sentence.startswith(
        "rank 3 on node-b hung after step 12 and had to be killed"
    )


def test_a_rank_that_was_killed_first_remains_the_cause_when_its_peers_fail() -> None:
    for clock_difference in (-3, 0, 3):
        evidence = AttemptEvidence(
            (RankFailure(0, 5, 1, 100), killed(1, 100 + clock_difference)), {0: TIMED_OUT}, exit_times={0: 100.0}
        )
        assert determine_outcome(evidence, PLACEMENT).kind is OutcomeKind.KILLED
    crashed = AttemptEvidence((killed(1, 130, signal.SIGSEGV), RankFailure(0, 5, 1, 100)), {0: TIMED_OUT})
    assert "SIGSEGV" in determine_outcome(crashed, PLACEMENT).sentence, "no clean-up sends that"


IN_USE = "torch.distributed.DistNetworkError: the server socket has failed to listen: EADDRINUSE"


def test_a_torchrun_that_fails_before_any_rank_started_is_reported_with_its_error() -> None:
    evidence = AttemptEvidence(torchruns=(TorchrunExit(0, 143, "asked"), TorchrunExit(1, 1, IN_USE)), begun=False)
    cause = determine_outcome(evidence, PLACEMENT)
    assert (cause.kind, cause.code) == (OutcomeKind.TORCHRUN, 1)
    assert cause.sentence == f"torchrun on node-b failed before any rank started: {IN_USE}"


def test_a_torchrun_that_dies_while_its_ranks_run_is_named_with_code_or_signal() -> None:
    killed_one = AttemptEvidence(torchruns=(TorchrunExit(0, -signal.SIGKILL, None),))
    assert determine_outcome(killed_one, PLACEMENT).sentence == "torchrun on node-a was killed by SIGKILL"
    failed = AttemptEvidence(torchruns=(TorchrunExit(0, 1, "OSError: x"),))
    assert determine_outcome(failed, PLACEMENT).sentence == "torchrun on node-a failed with exit code 1: OSError: x"


def test_a_torchrun_that_fails_before_any_rank_started_is_retried_once() -> None:
    cause = AttemptOutcome(OutcomeKind.TORCHRUN, 1, "torchrun failed")
    assert decide_next(AttemptResult(cause, 0, 0, 0, None, False), 3).action is NextAction.RETRY
    assert decide_next(AttemptResult(cause, 0, 0, 0, None, False, same_as_before=True), 3).action is NextAction.FAILED


def stop(reached: int, saved: int, by: str = "") -> str:
    cause = AttemptOutcome(OutcomeKind.STATED, 4, "stopped on request: x", "SIGUSR1")
    return decide_next(AttemptResult(cause, 0, reached, saved, 60, False, stopped_by=by), 3).line


def test_a_stop_is_reported_with_who_asked_and_what_is_saved() -> None:
    assert (
        stop(56, 56, "Ctrl-C") == "stopped by Ctrl-C at step 56 of 60, which is saved; run the same command to continue"
    )
    assert stop(56, 50).startswith(
        "stopped by SIGUSR1 at step 56 of 60, but the last saved step is 50; run the same command"
    )
    assert (
        stop(3, 0)
        == "stopped by SIGUSR1 at step 3 of 60; nothing is saved, so the same command will start from the beginning"
    )


def test_a_rank_that_failed_on_a_collective_is_not_the_cause_if_another_has_its_own_reason() -> None:
    endings = {0: RankExit(5, "a collective failed", 20, follows=True), 1: RankExit(5, "No space left on device", 20)}
    cause = determine_outcome(
        AttemptEvidence((RankFailure(0, 5, 1, 99), RankFailure(1, 5, 1, 100)), endings), PLACEMENT
    )
    assert "No space left on device" in cause.sentence


def test_the_terminal_shows_no_traceback_and_continues_with_the_ranks_next_line() -> None:
    log = (
        "2026-01-01 10:00:00 rank=0 step=13/60 loss=1.0\nTraceback (most recent call last):\n"
        '  File "loop.py", line 1, in train\nRuntimeError: Connection closed by peer\n\n'
        "During handling of the above exception, another exception occurred:\nmore\n"
        "2026-01-01 10:00:01 rank=0 a collective failed\nplain words"
    )
    tracebacks = TracebackFilter()
    assert [line.rpartition("rank=0 ")[2] for line in filter(tracebacks.is_shown, log.splitlines())] == [
        "step=13/60 loss=1.0", "a collective failed", "plain words",
    ]  # fmt: skip
    assert tracebacks.hidden_lines == 6


def test_a_stop_is_attributed_to_the_rank_that_was_asked() -> None:
    others = RankExit(4, "asked to stop (through another rank); step 25 is done and saved", 25)
    exits = {0: others, 1: replace(others, why="asked to stop (SIGTERM); step 25 is done"), 2: others, 3: others}
    assert determine_outcome(AttemptEvidence((), exits), PLACEMENT).stopped_by == "SIGTERM to rank 1"
    exits[1] = replace(others, why="asked to stop (stop file /run/stop); step 25 is done")
    assert determine_outcome(AttemptEvidence((), exits), PLACEMENT).stopped_by == "the stop file"
