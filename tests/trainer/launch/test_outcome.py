"""How attempts end, in words, and what comes next: nothing runs here."""

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

PLACES = Placement(LaunchMethod.SSH, ("node-a", "node-b"), 2, "node-a", 29500)


def killed(rank: int, time: int = 100, number: int = signal.SIGKILL) -> RankFailure:
    return RankFailure(rank, -number, 1000 + rank, time)


def test_a_killed_rank_is_named_with_its_signal_and_step_and_the_others_follow() -> None:
    traces = AttemptEvidence((killed(3),), {0: RankExit(5, "peer closed", 17)}, beats={3: (1003, 17)})
    assert determine_outcome(traces, PLACES).sentence == (
        "rank 3 on node-b was killed by SIGKILL after step 17; the others followed"
    )


def test_a_heartbeat_of_another_process_says_nothing_of_the_killed_one() -> None:
    traces = AttemptEvidence((killed(3),), {0: RankExit(5, "peer closed", 9)}, beats={3: (77, 500)})
    assert "after step 9" in determine_outcome(traces, PLACES).sentence


def test_a_peer_that_failed_a_second_earlier_by_its_clock_is_not_taken_for_the_cause() -> None:
    traces = AttemptEvidence(
        (RankFailure(0, 5, 1, 99), killed(3, 100)), {0: RankExit(5, "connection closed by peer", 17)}
    )
    assert determine_outcome(traces, PLACES).manner is OutcomeKind.KILLED


def test_the_earliest_of_ranks_with_reasons_is_the_cause() -> None:
    endings = {1: RankExit(5, "No space left on device", 20), 2: RankExit(5, "collective timed out", 20)}
    cause = determine_outcome(AttemptEvidence((RankFailure(2, 5, 1, 1900), RankFailure(1, 5, 1, 100)), endings), PLACES)
    assert cause.sentence == (
        "rank 1 on node-a ended with code 5 after step 20: No space left on device; the others followed"
    )


def test_a_lost_node_explains_all_that_its_peers_say() -> None:
    traces = AttemptEvidence(
        (RankFailure(0, 5, 1, 100),), {0: RankExit(5, "peer closed", 17)}, (LostNode(1, "ssh ended: timeout"),)
    )
    assert determine_outcome(traces, PLACES).sentence == "node-b was lost: ssh ended: timeout"


def test_a_rank_that_torchrun_asked_to_leave_is_not_the_cause() -> None:
    endings = {0: RankExit(4, "SIGTERM", 7)}
    cause = determine_outcome(AttemptEvidence((RankFailure(0, 4, 1, 100), killed(1, 101)), endings), PLACES)
    assert cause.manner is OutcomeKind.KILLED
    assert determine_outcome(
        AttemptEvidence((killed(0, 100, signal.SIGTERM), killed(1, 101)), {}), PLACES
    ).sentence.startswith("rank 1")


def test_all_stopped_on_request_is_a_stop() -> None:
    endings = {rank: RankExit(4, "stop file", 12) for rank in range(4)}
    cause = determine_outcome(AttemptEvidence((), endings), PLACES)
    assert (cause.code, cause.sentence) == (4, "stopped on request: stop file")


def test_a_silent_rank_is_shown_by_the_end_of_its_log() -> None:
    traces = AttemptEvidence((RankFailure(1, 1, 1, 100),), {}, logs={1: "its log ends with: ImportError: x"})
    assert (
        determine_outcome(traces, PLACES).sentence
        == "rank 1 on node-a ended with exit code 1; its log ends with: ImportError: x"
    )


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '[{"rank": "0"}]'])
def test_a_report_that_is_cut_is_none(text: str) -> None:
    assert parse_rank_failures(text) == ()


def decided(
    cause: AttemptOutcome, retries: int = 3, began: int = 0, reached: int = 0, saved: int = 0, steps: int | None = 100,
    interrupted: bool = False,
) -> LaunchDecision:  # fmt: skip
    return decide_next(AttemptResult(cause, began, reached, saved, steps, interrupted), retries)


KILLED = AttemptOutcome(OutcomeKind.KILLED, None, "killed")
DONE = AttemptOutcome(OutcomeKind.DONE, 0, "all ranks ended with exit code 0")


def said(code: int) -> AttemptOutcome:
    return AttemptOutcome(OutcomeKind.SAID, code, "said")


def test_only_the_last_steps_checkpoint_is_done() -> None:
    assert decided(DONE, saved=100).next is NextAction.DONE
    assert decided(DONE, saved=99, retries=0).next is NextAction.FAILED
    assert "the last step is not saved" in decided(DONE, saved=99, retries=0).why


def test_exit_0_of_ranks_that_ran_out_of_data_is_a_failure_that_is_tried_again() -> None:
    assert decided(DONE, saved=0, reached=50).next is NextAction.RETRY
    assert decided(DONE, saved=0, steps=None).next is NextAction.RETRY


def test_a_rank_that_crashes_after_the_last_save_does_not_undo_the_work() -> None:
    decision = decided(KILLED, saved=100)
    assert decision.next is NextAction.DONE
    assert "afterwards killed" in decision.why


@pytest.mark.parametrize("cause", [KILLED, said(5), AttemptOutcome(OutcomeKind.NODE_LOST, None, "lost")])
def test_what_may_pass_is_tried_again_and_counts_down(cause: AttemptOutcome) -> None:
    assert decided(cause, retries=1).next is NextAction.RETRY
    assert decided(cause, retries=0).next is NextAction.FAILED


def test_refused_and_stopped_are_not_tried_again() -> None:
    assert decided(said(2)).next is NextAction.REFUSED
    assert decided(AttemptOutcome(OutcomeKind.SILENT, 2, "usage")).next is NextAction.REFUSED
    assert decided(said(4)).next is NextAction.STOPPED


def test_an_error_of_the_program_is_tried_again_only_where_it_made_a_step() -> None:
    for cause in (said(3), AttemptOutcome(OutcomeKind.SILENT, 1, "silent")):
        assert decided(cause, began=10, reached=10, saved=10).next is NextAction.FAILED
        assert decided(cause, began=10, reached=11, saved=10).next is NextAction.RETRY


def test_who_asks_twice_does_not_get_another_attempt() -> None:
    assert decided(KILLED, interrupted=True).next is NextAction.INTERRUPTED


def test_exit_codes_tell_endings_apart() -> None:
    assert EXIT_CODES == {
        NextAction.DONE: 0,
        NextAction.REFUSED: 2,
        NextAction.STOPPED: 4,
        NextAction.INTERRUPTED: 130,
        NextAction.FAILED: 5,
    }


def test_waiting_doubles_to_ten_minutes() -> None:
    assert [retry_delay_seconds(10, retry) for retry in (1, 2, 3, 7, 1000)] == [10, 20, 40, 600, 600]
    assert retry_delay_seconds(3600, 2) == 3600
    assert retry_delay_seconds(0, 5) == 0


def test_what_ssh_complains_of_is_the_reason_and_what_came_before_a_signal_is_not() -> None:
    assert (
        describe_program_exit("ssh", 255, "Warning: x\nConnection refused\n")
        == "ssh ended with exit code 255: Connection refused"
    )
    assert describe_program_exit("srun", -9, "srun: a warning\n") == "srun was killed by SIGKILL"
    assert describe_program_exit("ssh", 1, "") == "ssh ended with exit code 1"


TIMED_OUT = RankExit(5, "a collective failed, another rank has gone or does not come: Timed out waiting 60000ms", 13)


def test_a_rank_that_hangs_and_is_killed_by_the_clean_up_is_named_as_hung_not_as_killed() -> None:
    traces = AttemptEvidence(
        (RankFailure(0, 5, 1, 100), killed(1, 130)), {0: TIMED_OUT}, beats={1: (1001, 13)}, ended_at={0: 99.8}
    )
    two = Placement(LaunchMethod.LOCAL, ("localhost",), 2, "127.0.0.1", 29500)
    cause = determine_outcome(traces, two)
    assert cause.manner is OutcomeKind.HUNG
    assert cause.sentence == (
        "rank 1 on localhost does not answer (hung after step 13); rank 0 gave up on it: a collective failed, another "
        "rank has gone or does not come: Timed out waiting 60000ms; rank 1 had to be ended"
    )


def test_a_rank_of_another_node_that_left_no_word_is_the_hung_one() -> None:
    endings = {
        0: TIMED_OUT,
        1: RankExit(5, "asked to leave, and still in a collective", 13),
        2: RankExit(4, "SIGTERM", 13),
    }
    traces = AttemptEvidence(
        (RankFailure(0, 5, 1, 100),), endings, beats={3: (1003, 12)}, ended_at={0: 100.0, 1: 120.0, 2: 121.0}
    )
    assert determine_outcome(traces, PLACES).sentence.startswith(
        "rank 3 on node-b does not answer (hung after step 12)"
    )


def test_a_rank_that_was_killed_first_stays_the_cause_when_its_peers_give_up() -> None:
    for clock_difference in (-3, 0, 3):
        traces = AttemptEvidence(
            (RankFailure(0, 5, 1, 100), killed(1, 100 + clock_difference)), {0: TIMED_OUT}, ended_at={0: 100.0}
        )
        assert determine_outcome(traces, PLACES).manner is OutcomeKind.KILLED
    crashed = AttemptEvidence((killed(1, 130, signal.SIGSEGV), RankFailure(0, 5, 1, 100)), {0: TIMED_OUT})
    assert "SIGSEGV" in determine_outcome(crashed, PLACES).sentence, "no clean-up sends that"


IN_USE = "torch.distributed.DistNetworkError: the server socket has failed to listen: EADDRINUSE"


def test_a_torchrun_that_fails_before_any_rank_says_why() -> None:
    traces = AttemptEvidence(torchruns=(TorchrunExit(0, 143, "asked"), TorchrunExit(1, 1, IN_USE)), begun=False)
    cause = determine_outcome(traces, PLACES)
    assert (cause.manner, cause.code) == (OutcomeKind.TORCHRUN, 1)
    assert cause.sentence == f"torchrun on node-b failed before any rank: {IN_USE}"


def test_a_torchrun_that_dies_under_its_ranks_is_named_with_code_or_signal() -> None:
    killed_one = AttemptEvidence(torchruns=(TorchrunExit(0, -signal.SIGKILL, None),))
    assert determine_outcome(killed_one, PLACES).sentence == "torchrun on node-a was killed by SIGKILL"
    failed = AttemptEvidence(torchruns=(TorchrunExit(0, 1, "OSError: x"),))
    assert determine_outcome(failed, PLACES).sentence == "torchrun on node-a failed with exit code 1: OSError: x"


def test_a_torchrun_that_fails_before_any_rank_is_tried_once_more_only() -> None:
    cause = AttemptOutcome(OutcomeKind.TORCHRUN, 1, "torchrun failed")
    assert decide_next(AttemptResult(cause, 0, 0, 0, None, False), 3).next is NextAction.RETRY
    assert decide_next(AttemptResult(cause, 0, 0, 0, None, False, again=True), 3).next is NextAction.FAILED


def stop(reached: int, saved: int, by: str = "") -> str:
    cause = AttemptOutcome(OutcomeKind.SAID, 4, "stopped on request: x", "SIGUSR1")
    return decide_next(AttemptResult(cause, 0, reached, saved, 60, False, asked_by=by), 3).line


def test_a_stop_is_said_once_with_who_asked_and_what_is_saved() -> None:
    assert stop(56, 56, "Ctrl-C") == "stopped by Ctrl-C at step 56 of 60, saved; the same command goes on from there"
    assert stop(56, 50).startswith("stopped by SIGUSR1 at step 56 of 60, saved up to step 50; the same command goes on")
    assert stop(3, 0) == "stopped by SIGUSR1 at step 3 of 60, nothing is saved; the same command begins anew"


def test_who_follows_is_not_the_cause_where_another_has_a_reason_of_its_own() -> None:
    endings = {0: RankExit(5, "a collective failed", 20, follows=True), 1: RankExit(5, "No space left on device", 20)}
    cause = determine_outcome(AttemptEvidence((RankFailure(0, 5, 1, 99), RankFailure(1, 5, 1, 100)), endings), PLACES)
    assert "No space left on device" in cause.sentence


def test_a_screen_shows_no_traceback_and_goes_on_with_the_ranks_next_line() -> None:
    log = (
        "2026-01-01 10:00:00 rank=0 step=13/60 loss=1.0\nTraceback (most recent call last):\n"
        '  File "loop.py", line 1, in train\nRuntimeError: Connection closed by peer\n\n'
        "During handling of the above exception, another exception occurred:\nmore\n"
        "2026-01-01 10:00:01 rank=0 a collective failed\nplain words"
    )
    people = TracebackFilter()
    assert [line.rpartition("rank=0 ")[2] for line in filter(people.shown, log.splitlines())] == [
        "step=13/60 loss=1.0", "a collective failed", "plain words",
    ]  # fmt: skip
    assert people.hidden == 6


def test_a_stop_is_the_one_of_the_rank_that_was_asked() -> None:
    others = RankExit(4, "asked to stop (another rank was); step 25 is done, its state is saved", 25)
    told = {0: others, 1: replace(others, why="asked to stop (SIGTERM); step 25 is done"), 2: others, 3: others}
    assert determine_outcome(AttemptEvidence((), told), PLACES).asked_by == "SIGTERM to rank 1"
    told[1] = replace(others, why="asked to stop (/run/stop is there); step 25 is done")
    assert determine_outcome(AttemptEvidence((), told), PLACES).asked_by == "the stop file"
