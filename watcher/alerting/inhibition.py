"""Which finding is the root cause of which. Pure, and over all findings of one evaluation at once: no race."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from types import MappingProxyType
from typing import Final

from wattwatch.watcher.alerting.episode import JOB_STOPPING, SEVERITY_RANK, finding_label, finding_severity
from wattwatch.watcher.detection.model import AlertName, Finding

EpisodeKey = tuple[str, str, str]

# A lost node or board stops its job at the next exchange between ranks. A job that went on for longer than this went on
# without it, and what stops it later is news: it must not be lost behind a cause that people have got used to.
MAX_CONSEQUENCE_DELAY_SECONDS: Final = 120.0


class InhibitionScope(StrEnum):
    """How far from the cause's own scope its consequences go; see causes.toml."""

    WATCHER = "watcher"
    JOB = "job"
    NODE = "node"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class InhibitionRule:
    alert: AlertName
    reach: InhibitionScope
    explains: frozenset[AlertName]
    lends: bool


def read_inhibition_rules() -> tuple[InhibitionRule, ...]:
    """causes.toml, strongest first. Nothing explains itself or what stands above it, so there is no circle.

    A row without `explains` explains everything below it, and all alerts that have no row.
    """
    table = tomllib.loads(resources.files("wattwatch.watcher.alerting").joinpath("causes.toml").read_text("utf-8"))
    causes: list[InhibitionRule] = []
    for row in table["causes"]:
        above = {cause.alert for cause in causes} | {AlertName(row["alert"])}
        explains = frozenset(map(AlertName, row.get("explains", AlertName))) - above
        causes.append(InhibitionRule(AlertName(row["alert"]), InhibitionScope(row["reach"]), explains, row["lends"]))
    return tuple(causes)


INHIBITION_RULES: Final = read_inhibition_rules()
NO_EARLIER_CAUSES: Final[Mapping[EpisodeKey, str]] = MappingProxyType({})
RULE_ORDER: Final = {cause.alert: place for place, cause in enumerate(INHIBITION_RULES)}


def cause_order(finding: Finding) -> int:
    """Causes before consequences: in this order findings are told."""
    return RULE_ORDER.get(finding.alert, len(RULE_ORDER))


def root_causes(
    findings: Iterable[Finding], explained_before: Mapping[EpisodeKey, str] = NO_EARLIER_CAUSES
) -> Mapping[EpisodeKey, Finding]:
    """For each finding that another one explains, the one at the top: that one is told, and speaks for it.

    `explained_before`: by what (`name_of`) those are explained that have been true without a break: they stay so.
    """
    active = sorted(findings, key=lambda finding: (cause_order(finding), finding.key))
    of_job: dict[str, list[Finding]] = {}
    for finding in active:
        of_job.setdefault(finding.job, []).append(finding)
    found: dict[EpisodeKey, Finding] = {}
    for source in active:
        if source.alert not in RULE_ORDER:
            break
        cause = INHIBITION_RULES[RULE_ORDER[source.alert]]
        for target in active if cause.reach is InhibitionScope.WATCHER else of_job[source.job]:
            if target.alert not in cause.explains or target.key in found:
                continue
            in_time = began_in_time(target, source) or explained_before.get(target.key) == finding_label(source)
            if in_time and can_explain(target, source, cause):
                found[target.key] = source
    return {key: follow_to_root(source, found) for key, source in found.items()}


def follow_to_root(source: Finding, found: Mapping[EpisodeKey, Finding]) -> Finding:
    """Causes only explain what stands below them in causes.toml, so this ends."""
    while source.key in found:
        source = found[source.key]
    return source


def can_explain(target: Finding, source: Finding, cause: InhibitionRule) -> bool:
    """`source` is a finding of the kind `cause`, and `target` one of those it may explain."""
    if not is_in_scope(target, source, cause.reach):
        return False
    if (
        source.alert is AlertName.GPU_FAULT
        and target.alert is AlertName.JOB_CRASHED
        and not has_suspect_on_node(target, source)
    ):
        return False
    # A suspicion never hides something graver than itself.
    return source.confirmed or SEVERITY_RANK[finding_severity(target)] <= SEVERITY_RANK[finding_severity(source)]


def find_successors(gone: Finding, found: Iterable[Finding]) -> tuple[Finding, ...]:
    """What has taken the place of a finding that is not there: a crash ends a hang, and a hang hides that it was slow.

    The detector names one state of a job at a time, so the one that goes did not get better. Nothing but its running
    ends a crash.
    """
    if gone.alert is AlertName.JOB_CRASHED:
        return ()
    return tuple(
        each
        for each in found
        if each.job == gone.job
        and each.confirmed
        and each.alert in JOB_STOPPING
        and each.alert is not gone.alert
        and (gone.alert in JOB_STOPPING or gone.alert in INHIBITION_RULES[RULE_ORDER[each.alert]].explains)
    )


def began_in_time(target: Finding, source: Finding) -> bool:
    """Whether it can be a consequence by its time. The end of a job is the end of all its troubles."""
    if target.alert not in JOB_STOPPING or source.alert is AlertName.JOB_COMPLETED:
        return True
    return target.since_seconds - source.since_seconds <= MAX_CONSEQUENCE_DELAY_SECONDS


def has_suspect_on_node(target: Finding, source: Finding) -> bool:
    """Whether a process that is gone was on the node of the broken board; yes where nobody can say whose."""
    node = source.scope.partition("/")[0]
    return not target.suspects or any(suspect.node == node for suspect in target.suspects)


def is_in_scope(target: Finding, source: Finding, reach: InhibitionScope) -> bool:
    if reach is InhibitionScope.WATCHER:
        # Its other troubles, such as a full disk, have a scope of their own and make it no less able to see.
        return not source.scope
    if target.job != source.job:
        return False
    if reach is InhibitionScope.JOB:
        return True
    if reach is InhibitionScope.NODE and not target.scope:
        return True
    return scope_contains(source.scope, target.scope) or scope_contains(target.scope, source.scope)


def scope_contains(outer: str, inner: str) -> bool:
    """A node contains itself and its boards; two boards of one node do not contain each other."""
    return inner == outer or inner.startswith(outer + "/")


def takes_consequence_severity(source: Finding) -> bool:
    """Whether what follows from it may raise it."""
    place = RULE_ORDER.get(source.alert)
    return place is not None and INHIBITION_RULES[place].lends
