"""Which finding explains which: pairs of findings, and the one that is reported."""

from __future__ import annotations

import pytest

from tests.watcher.alerting.fakes import finding
from wattwatch.watcher.alerting.inhibition import (
    CAUSE_ORDER,
    find_successors,
    root_causes,
    takes_consequence_severity,
)
from wattwatch.watcher.detection.model import AlertName, Finding, Suspect

NODE_DOWN = finding(AlertName.NODE_UNREACHABLE, "node-02")
GPU_LOST = finding(AlertName.GPU_FAULT, "node-02/GPU-a")
HUNG = finding(AlertName.JOB_HUNG)


@pytest.mark.parametrize(
    ("given", "cause", "target", "explained"),
    [
        ("a lost node hangs its job", NODE_DOWN, HUNG, True),
        ("a lost node crashes its job", NODE_DOWN, finding(AlertName.JOB_CRASHED), True),
        ("a lost node hides its GPUs", NODE_DOWN, GPU_LOST, True),
        (
            "a lost node does not explain a GPU of another node",
            NODE_DOWN,
            finding(AlertName.GPU_FAULT, "node-01/b"),
            False,
        ),
        ("node-02 is not node-021", NODE_DOWN, finding(AlertName.PROBE_BLIND, "node-021"), False),
        ("a lost node of another job", NODE_DOWN, finding(AlertName.JOB_HUNG, job="qwen"), False),
        ("a lost node does not make the loss NaN", NODE_DOWN, finding(AlertName.LOSS_NOT_FINITE), False),
        ("a lost GPU crashes its job", GPU_LOST, finding(AlertName.JOB_CRASHED), True),
        ("a lost GPU blinds the probe of its node", GPU_LOST, finding(AlertName.PROBE_BLIND, "node-02"), True),
        (
            "a lost GPU does not throttle its neighbor",
            GPU_LOST,
            finding(AlertName.GPU_THROTTLED, "node-02/b"),
            False,
        ),
        ("a blind probe hangs no job", finding(AlertName.PROBE_BLIND, "node-02"), HUNG, False),
        ("a crash leaves the others spinning", finding(AlertName.JOB_CRASHED), HUNG, True),
        ("a hang stalls the save", HUNG, finding(AlertName.CHECKPOINT_STALLED), True),
        ("a hang makes it slow", HUNG, finding(AlertName.JOB_SLOW), True),
        ("a hang and its straggler", HUNG, finding(AlertName.STRAGGLER, "node-01"), True),
        ("a starving job is slow", finding(AlertName.JOB_STARVING), finding(AlertName.JOB_SLOW), True),
        (
            "a throttled GPU makes it slow",
            finding(AlertName.GPU_THROTTLED, "node-02/a"),
            finding(AlertName.JOB_SLOW),
            True,
        ),
        ("a slow job has a straggler", finding(AlertName.JOB_SLOW), finding(AlertName.STRAGGLER, "node-01"), True),
        ("completion ends everything of the job", finding(AlertName.JOB_COMPLETED), NODE_DOWN, True),
        ("completion of another job", finding(AlertName.JOB_COMPLETED, job="qwen"), NODE_DOWN, False),
        ("a watcher without network cannot judge nodes", finding(AlertName.WATCHER_DEGRADED, job=""), NODE_DOWN, True),
        ("a job that is still evaluated", finding(AlertName.WATCHER_DEGRADED, job=""), HUNG, False),
        ("a full disk hides no node", finding(AlertName.WATCHER_DEGRADED, "store", job=""), NODE_DOWN, False),
        ("a hang two minutes after the node was lost", NODE_DOWN, finding(since=120.0), True),
        ("a hang of a job that had continued without the node", NODE_DOWN, finding(since=121.0), False),
        ("a crash long after the GPU fault", GPU_LOST, finding(AlertName.JOB_CRASHED, since=600.0), False),
        (
            "a stalled save long after the GPU fault",
            GPU_LOST,
            finding(AlertName.CHECKPOINT_STALLED, since=600.0),
            False,
        ),
        ("a slow job, however long after", GPU_LOST, finding(AlertName.JOB_SLOW, since=6000.0), True),
        ("a hang shortly before its cause was noticed", NODE_DOWN, finding(since=-120.0), True),
        ("a hang that had lasted ten minutes when the node was lost", NODE_DOWN, finding(since=-600.0), False),
        (
            "a process killed on the node of the faulty GPU",
            GPU_LOST,
            finding(AlertName.JOB_CRASHED, suspects=(Suspect("node-01", 3, 3), Suspect("node-02", 1, 9))),
            True,
        ),
        (
            "a process killed on another node",
            GPU_LOST,
            finding(AlertName.JOB_CRASHED, suspects=(Suspect("node-01", 3, 3),)),
            False,
        ),
        ("the end of a job, hours later", finding(AlertName.JOB_COMPLETED), finding(since=9999.0), True),
        ("two of the same alert", NODE_DOWN, finding(AlertName.NODE_UNREACHABLE, "node-03"), False),
        ("a suspicion explains a warning", finding(confirmed=False), finding(AlertName.JOB_SLOW), True),
        (
            "a suspicion hides nothing more severe",
            finding(confirmed=False),
            finding(AlertName.CHECKPOINT_STALLED),
            False,
        ),
    ],
)
def test_a_cause_explains_its_consequence_and_nothing_else(
    given: str, cause: Finding, target: Finding, explained: bool
) -> None:
    expected = {target.key: cause} if explained else {}
    assert root_causes([target, cause]) == expected, given
    assert root_causes([cause, target]) == expected, given


def test_an_inhibited_finding_keeps_its_cause_while_it_lasts() -> None:
    """A restarted detector gives a hang a later start; if it is the same hang, it keeps its cause."""
    later = finding(since=600.0)
    assert root_causes([NODE_DOWN, later], {later.key: "NodeUnreachable node-02"}) == {later.key: NODE_DOWN}
    assert root_causes([NODE_DOWN, later], {later.key: "NodeUnreachable node-03"}) == {}


@pytest.mark.parametrize(
    ("given", "gone", "there", "replaced"),
    [
        ("a hang that crashes", HUNG, finding(AlertName.JOB_CRASHED), True),
        ("a hang that turns out to be a stalled save", HUNG, finding(AlertName.CHECKPOINT_STALLED), True),
        ("a slow job that hangs", finding(AlertName.JOB_SLOW), HUNG, True),
        ("a slow job that may hang", finding(AlertName.JOB_SLOW), finding(confirmed=False), False),
        ("a hang, and another job that crashes", HUNG, finding(AlertName.JOB_CRASHED, job="qwen"), False),
        ("a hang, and a slow job", HUNG, finding(AlertName.JOB_SLOW), False),
        ("a crash, and the others wait", finding(AlertName.JOB_CRASHED), HUNG, False),
        ("a silent node, and a hang", NODE_DOWN, HUNG, False),
    ],
)
def test_a_finding_is_replaced_only_by_a_confirmed_stop_of_the_same_job(
    given: str, gone: Finding, there: Finding, replaced: bool
) -> None:
    assert find_successors(gone, [there]) == ((there,) if replaced else ()), given


def test_a_chain_of_causes_is_reported_as_its_first_cause() -> None:
    chain = [finding(AlertName.STRAGGLER, "node-01"), finding(AlertName.CHECKPOINT_STALLED), HUNG, NODE_DOWN]
    assert set(root_causes(chain).values()) == {NODE_DOWN}
    assert len(root_causes(chain)) == 3


def test_a_cause_explains_only_alerts_below_it_so_no_cycle_can_inhibit_everything() -> None:
    everything = [finding(alert, scope) for alert in AlertName for scope in ("", "node-01", "node-01/a")]
    causes = root_causes(everything)
    assert all(
        CAUSE_ORDER[source.alert] < CAUSE_ORDER.get(AlertName(key[1]), len(CAUSE_ORDER))
        for key, source in causes.items()
    )
    assert any(each.key not in causes for each in everything)


def test_completion_and_watcher_problems_take_no_severity_from_their_consequences() -> None:
    assert takes_consequence_severity(NODE_DOWN)
    assert not takes_consequence_severity(finding(AlertName.JOB_COMPLETED))
    assert not takes_consequence_severity(finding(AlertName.WATCHER_DEGRADED, job=""))
    assert not takes_consequence_severity(finding(AlertName.LOSS_NOT_FINITE))
