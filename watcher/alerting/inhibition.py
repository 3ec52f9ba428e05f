"""Which finding is the root cause of which other one, so that one incident is one page.

Pure, and computed over all findings of one evaluation at once. Alertmanager flushes the source and the target of an
inhibition separately, so that they race (https://github.com/prometheus/alertmanager/issues/2229).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from wattwatch.watcher.alerting.episode import SEVERITY_RANK, finding_label, finding_severity
from wattwatch.watcher.detection.alerts import ALERT_KINDS, InhibitionScope
from wattwatch.watcher.detection.model import AlertName, Finding

EpisodeKey = tuple[str, str, str]

# A lost node or GPU stops its job at the next exchange between ranks. A job that continued for longer than this did so
# without it, and whatever stops it later is news: it must not be hidden behind a cause that people already know.
# Two minutes was chosen, not measured; it covers the longest step of a usual job.
MAX_CONSEQUENCE_DELAY_SECONDS: Final = 120.0
# A driver may report a lost GPU only after its timeouts, so a cause may be noticed after its consequence. One that is
# noticed later than this is not taken for the cause of what had long begun. Chosen, like the delay above.
MAX_CAUSE_NOTICE_SECONDS: Final = 120.0

# alerts.toml lists the strongest cause first, and an alert only inhibits alerts below it: there can be no cycle.
CAUSE_ORDER: Final = {
    alert: position for position, alert in enumerate(name for name, kind in ALERT_KINDS.items() if kind.inhibits)
}
NO_EARLIER_CAUSES: Final[Mapping[EpisodeKey, str]] = MappingProxyType({})


def cause_order(finding: Finding) -> int:
    """Sort key that puts causes before their consequences; messages are sent in this order."""
    return CAUSE_ORDER.get(finding.alert, len(CAUSE_ORDER))


def root_causes(
    findings: Iterable[Finding], earlier_causes: Mapping[EpisodeKey, str] = NO_EARLIER_CAUSES
) -> Mapping[EpisodeKey, Finding]:
    """For each finding that another one explains, the finding at the top of the chain: the one that is reported.

    `earlier_causes`: the label of the cause of each finding that has been inhibited without a break. Such a finding
    keeps its cause even if a restarted detector now dates it outside MAX_CONSEQUENCE_DELAY_SECONDS.
    """
    active = sorted(findings, key=lambda finding: (cause_order(finding), finding.key))
    by_job: dict[str, list[Finding]] = {}
    for finding in active:
        by_job.setdefault(finding.job, []).append(finding)
    found: dict[EpisodeKey, Finding] = {}
    for source in active:
        if source.alert not in CAUSE_ORDER:
            break  # sorted: no finding after this one inhibits anything
        kind = ALERT_KINDS[source.alert]
        for target in active if kind.inhibition_scope is InhibitionScope.WATCHER else by_job[source.job]:
            if target.alert not in kind.inhibits or target.key in found:
                continue
            in_time = began_in_time(target, source) or earlier_causes.get(target.key) == finding_label(source)
            if in_time and can_explain(target, source):
                found[target.key] = source
    return {key: follow_to_root(source, found) for key, source in found.items()}


def follow_to_root(source: Finding, found: Mapping[EpisodeKey, Finding]) -> Finding:
    """Terminates because an alert only inhibits alerts below it in the table."""
    while source.key in found:
        source = found[source.key]
    return source


def can_explain(target: Finding, source: Finding) -> bool:
    """Whether `source` explains `target`, which is one of the alerts that it inhibits."""
    if not is_in_scope(target, source):
        return False
    # A GPU fault kills the processes of its own node. A crash elsewhere has another cause.
    is_crash = source.alert is AlertName.GPU_FAULT and target.alert is AlertName.JOB_CRASHED
    if is_crash and not has_suspect_on_node(target, source):
        return False
    # A suspicion must not hide something more severe than itself.
    return source.confirmed or SEVERITY_RANK[finding_severity(target)] <= SEVERITY_RANK[finding_severity(source)]


def find_successors(absent: Finding, present: Iterable[Finding]) -> tuple[Finding, ...]:
    """What has replaced a finding that is no longer there: a hang ends in a crash, a slow job hangs.

    The detector reports one state of a job at a time, so the absent finding has not recovered. A crash has no
    successor: it ends only when the job runs again.
    """
    if absent.alert is AlertName.JOB_CRASHED:
        return ()
    return tuple(
        each
        for each in present
        if each.job == absent.job
        and each.confirmed
        and ALERT_KINDS[each.alert].stops_job
        and each.alert is not absent.alert
        and (ALERT_KINDS[absent.alert].stops_job or absent.alert in ALERT_KINDS[each.alert].inhibits)
    )


def began_in_time(target: Finding, source: Finding) -> bool:
    """Whether `target` began at a time at which `source` can be its cause. The end of a job ends all its problems at
    any time."""
    if not ALERT_KINDS[target.alert].stops_job or source.alert is AlertName.JOB_COMPLETED:
        return True
    delay = target.since_seconds - source.since_seconds
    return -MAX_CAUSE_NOTICE_SECONDS <= delay <= MAX_CONSEQUENCE_DELAY_SECONDS


def has_suspect_on_node(crash: Finding, gpu_fault: Finding) -> bool:
    """Whether one of the processes that exited ran on the node of the faulty GPU. True if no process is known."""
    node = gpu_fault.scope.partition("/")[0]
    return not crash.suspects or any(suspect.node == node for suspect in crash.suspects)


def is_in_scope(target: Finding, source: Finding) -> bool:
    """Whether `target` is where consequences of `source` may be; the scopes are described in alerts.toml."""
    scope = ALERT_KINDS[source.alert].inhibition_scope
    if scope is InhibitionScope.WATCHER:
        # Other problems of the watcher, such as a full disk, have a scope, and do not keep it from reaching nodes.
        return not source.scope
    if target.job != source.job:
        return False
    if scope is InhibitionScope.JOB:
        return True
    if scope is InhibitionScope.NODE and not target.scope:
        return True
    return scope_contains(source.scope, target.scope) or scope_contains(target.scope, source.scope)


def scope_contains(outer: str, inner: str) -> bool:
    """A node contains itself and its GPUs. Two GPUs of one node do not contain each other."""
    return inner == outer or inner.startswith(outer + "/")


def takes_consequence_severity(source: Finding) -> bool:
    """Whether a more severe consequence raises the severity of this finding."""
    return ALERT_KINDS[source.alert].raises_severity
