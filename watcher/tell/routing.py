"""Which receivers a finding concerns. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from watcher.config import RouteSection
from watcher.judge.finding import Finding, Severity


def receivers_for(
    finding: Finding, severity: Severity, routes: Sequence[RouteSection], receivers: Iterable[str]
) -> frozenset[str]:
    """Names of those with a route that matches; all of them where there is no route at all."""
    names = frozenset(receivers)
    if not routes:
        return names
    return names & {route.receiver for route in routes if matches(route, finding, severity)}


def matches(route: RouteSection, finding: Finding, severity: Severity) -> bool:
    """A list that is absent matches everything. `severity` is the one it is told with, which may be lent."""
    return (
        (not route.severities or severity in route.severities)
        and (not route.alerts or finding.alert in route.alerts)
        and (not route.jobs or finding.job in route.jobs)
    )
