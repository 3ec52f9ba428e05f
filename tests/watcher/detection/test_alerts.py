"""The table of alert kinds: complete, in an order without cycles, with the values that alerts have always had."""

from __future__ import annotations

from wattwatch.watcher.detection.alerts import ALERT_KINDS, InhibitionScope, Recovery
from wattwatch.watcher.detection.findings import PERSISTENT_RULES
from wattwatch.watcher.detection.model import AlertName, Severity


def test_every_alert_name_has_one_row() -> None:
    assert sorted(ALERT_KINDS) == sorted(AlertName)


def test_an_alert_inhibits_only_alerts_below_its_own_row() -> None:
    rows = list(ALERT_KINDS)
    for place, kind in enumerate(ALERT_KINDS.values()):
        assert kind.inhibits <= set(rows[place + 1 :])
        assert (kind.inhibition_scope is not None) is bool(kind.inhibits)


def test_the_end_of_a_job_inhibits_every_other_alert_of_it() -> None:
    completed = ALERT_KINDS[AlertName.JOB_COMPLETED]
    assert completed.inhibits == set(AlertName) - {AlertName.JOB_COMPLETED, AlertName.WATCHER_DEGRADED}
    assert completed.inhibition_scope is InhibitionScope.JOB


def test_what_stops_a_job_is_critical_and_over_when_steps_advance() -> None:
    stopping = {kind.name for kind in ALERT_KINDS.values() if kind.stops_job}
    assert stopping == {AlertName.JOB_HUNG, AlertName.JOB_CRASHED, AlertName.CHECKPOINT_STALLED}
    assert {ALERT_KINDS[name].severity for name in stopping} == {Severity.CRITICAL}
    assert {ALERT_KINDS[name].recovery for name in stopping} == {Recovery.STEPS}


def test_evidence_is_captured_while_ranks_still_wait() -> None:
    captured = {kind.name for kind in ALERT_KINDS.values() if kind.captures_evidence}
    assert captured == {AlertName.JOB_HUNG, AlertName.CHECKPOINT_STALLED}


def test_every_alert_with_a_persistence_has_a_rule() -> None:
    persisting = {kind.name for kind in ALERT_KINDS.values() if kind.persistence_seconds}
    assert persisting | {AlertName.LOSS_NOT_FINITE} == {rule.alert for rule in PERSISTENT_RULES}


def test_every_alert_has_advice_that_is_a_sentence() -> None:
    assert all(kind.advice.endswith(".") for kind in ALERT_KINDS.values())
