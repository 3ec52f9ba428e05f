"""One node's connection over time: when to log in, when a connection counts as dead, how a new one takes over.

A state machine without thread, socket or clock: the fleet reports what happened and when, and carries out what this
decides.

Renewal is make-before-break: the new probe runs beside the old one until it has read the GPUs. Its first line is not
delivered, because it primes the reader (energy counters, logs, kernel history). Both probes share the node's monotonic
clock and print at the same instants, so the handover is exact: the old stream delivers everything up to its last line,
the new one every line that is at least half an interval newer than that. No sample is repeated or lost.

At most two probes are ever alive on a node: one whose end was not confirmed counts until its lease has expired there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

import paramiko

from wattwatch.collectors.probe.payload import LEASE_RENEWAL_SECONDS
from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.samples import HostStatus, NodeSample
from wattwatch.collectors.ssh.model import (
    SLOW_RETRY_STATUSES,
    ConnectionFailure,
    NodeLink,
    UnreachableCause,
    unreachable,
)
from wattwatch.collectors.ssh.stream import ProbeStream

# Chosen, not measured: five missed lines are no hiccup of a busy node any more, ten are no slow network either.
SILENT_SECONDS: Final = 5.0  # or five intervals: the node counts as unreachable
REPLACE_SECONDS: Final = 10.0  # or ten: the connection is replaced
FIRST_LINE_SECONDS: Final = 30.0
PROBE_LEASE_SECONDS: Final = 75.0  # the lease of 60 s on the node, and time for the probe to exit
MAX_PROBES: Final = 2
MAX_GARBAGE_BYTES: Final = 1 << 20  # without a line of the probe in between: close the connection
GREETING_BYTES: Final = 8 * 1024  # allowed before the first line: shell start-up files print
MIN_BACKOFF_SECONDS: Final = 1.0
MAX_BACKOFF_SECONDS: Final = 60.0
SLOW_RETRY_SECONDS: Final = (60.0, 90.0)
STEADY_SECONDS: Final = 30.0  # a stream that lasted this long resets the backoff
HANDOVER_LINES: Final = (2, 20)  # from the new probe: at least; at most, if it reads no GPU either


@dataclass(slots=True)
class NodeConnection:
    """State of one node's connection. Fields are written by the fleet's thread only."""

    node: str
    request: ProbeRequest
    renew_after_seconds: float
    next_login_seconds: float
    stream: ProbeStream | None = None  # the one that delivers samples
    successor: ProbeStream | None = None  # the one that will take over
    logging_in: str | None = None  # stage of the login in progress
    failure: ConnectionFailure | None = None  # why no lines arrive; None while they do
    renew_seconds: float = float("inf")
    last_line_seconds: float | None = None
    last_sample: NodeSample | None = None
    logins: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    lines: int = 0
    garbage_bytes: int = 0
    # Probes whose end was not confirmed -> until when they may still run.
    ghosts: dict[ProbeStream, float] = field(default_factory=dict)
    leaving: list[ProbeStream] = field(default_factory=list)  # streams that the fleet has to close

    # Limits that scale with the sampling interval

    @property
    def silent_seconds(self) -> float:
        return max(SILENT_SECONDS, 5 * self.request.interval_seconds)

    @property
    def replace_seconds(self) -> float:
        return max(REPLACE_SECONDS, 10 * self.request.interval_seconds)

    # Logins

    def wants_login(self, now: float) -> bool:
        if self.logging_in is not None or self.successor is not None or now < self.next_login_seconds:
            return False
        if self.stream is not None and now < self.renew_seconds:
            return False
        self.ghosts = {stream: until for stream, until in self.ghosts.items() if until > now}
        return len(self.ghosts) + (self.stream is not None) < MAX_PROBES

    def logged_in(self, stream: ProbeStream, now: float) -> None:
        self.logging_in = None
        self.logins += 1
        if self.stream is None:
            self.stream = stream
        else:
            self.successor = stream
        # Spread out, or all nodes that logged in together would renew together for ever.
        self.renew_seconds = now + self.renew_after_seconds * random.uniform(0.8, 1.2)

    def failed(self, failure: ConnectionFailure, now: float) -> None:
        """A login failed, or a stream ended."""
        self.logging_in = None
        self.failures += 1
        if self.stream is None:  # a failed renewal is not the node's state while the old stream still delivers
            self.failure = failure
        if failure.status in SLOW_RETRY_STATUSES:
            wait = random.uniform(*SLOW_RETRY_SECONDS)
        else:
            # Full jitter: after an outage of the network, a thousand nodes must not log in at the same moment. The
            # exponent is capped because 2.0 ** 1100 overflows.
            most = min(MAX_BACKOFF_SECONDS, MIN_BACKOFF_SECONDS * 2.0 ** min(self.failures_in_a_row, 10))
            wait = random.uniform(0.0, most)
        self.failures_in_a_row += 1
        self.next_login_seconds = now + wait

    # Streams

    def tick(self, now: float) -> None:
        """Renew leases, and drop streams that ended, went silent or send only garbage."""
        for stream in (self.stream, self.successor):
            if stream is None:
                continue
            if not stream.ended:
                stream.check_for_end()  # a channel may close without any further event
            if not stream.ended and now - stream.lease_seconds >= LEASE_RENEWAL_SECONDS:
                stream.renew_lease(now)
            reason = self._reason_to_drop(stream, now)
            if reason is not None:
                self._drop(stream, reason, now)

    def _reason_to_drop(self, stream: ProbeStream, now: float) -> ConnectionFailure | None:
        garbage = stream.unread_garbage
        if stream.ended:
            end = stream.describe_end()
            if garbage and stream.first_line_seconds is None:
                return ConnectionFailure(HostStatus.PARSE_ERROR, f"{end}; {self._describe_garbage(stream)}")
            cause = UnreachableCause.SESSION if stream.ended_by_peer else UnreachableCause.SILENT
            return unreachable(end, cause=cause)
        if garbage > MAX_GARBAGE_BYTES:
            return ConnectionFailure(HostStatus.PARSE_ERROR, self._describe_garbage(stream))
        since = stream.last_line_seconds
        # The first line takes longer: Python starts, pynvml is compiled, the driver is queried for the first time.
        if since is None and now - stream.opened_seconds > max(FIRST_LINE_SECONDS, self.replace_seconds):
            waited = now - stream.opened_seconds
            if garbage:
                return ConnectionFailure(HostStatus.PARSE_ERROR, self._describe_garbage(stream))
            return unreachable(
                f"logged in, but the probe has sent nothing for {waited:.0f} s", cause=UnreachableCause.SESSION
            )
        if since is not None and now - since > self.replace_seconds:
            return unreachable(
                f"the probe has sent no line for {now - since:.0f} s: "
                "the node or its sshd is frozen, or the network is down"
            )
        return None

    def _describe_garbage(self, stream: ProbeStream) -> str:
        begin = f" (they begin with {stream.excerpt.decode('utf-8', 'replace')!a})" if stream.excerpt else ""
        return (
            f"received {stream.unread_garbage} bytes that are not from the probe{begin}: "
            "check for a forced command, or for a shell start-up file that prints text"
        )

    def _drop(self, stream: ProbeStream, reason: ConnectionFailure, now: float) -> None:
        if stream.first_line_seconds is not None and now - stream.first_line_seconds > STEADY_SECONDS:
            self.failures_in_a_row = 0
        self._close_later(stream)
        if stream is self.stream:
            # The successor takes over early, before it has proven that it reads the GPUs: better than no stream.
            self.stream, self.successor = self.successor, None
            if self.stream is not None:
                self.stream.took_over = True
        else:
            self.successor = None
        self.failed(reason, now)

    def _close_later(self, stream: ProbeStream) -> None:
        self.leaving.append(stream)
        # Garbage without a single line means that our probe was never started: nothing of ours can survive there.
        foreign = stream.first_line_seconds is None and stream.unread_garbage > MAX_GARBAGE_BYTES
        # The lease that the probe last saw decides when it exits by itself.
        if not stream.ended_by_peer and not foreign:
            self.ghosts[stream] = stream.lease_seconds + PROBE_LEASE_SECONDS

    def closed(self, stream: ProbeStream, confirmed: bool) -> None:
        """A dropped stream is closed. `confirmed`: the node reported that the probe has ended."""
        if confirmed:
            self.ghosts.pop(stream, None)

    # Lines

    def receive(self, stream: ProbeStream, line: bytes, now: float) -> NodeSample | None:
        """The sample to deliver for this line, if there is one."""
        sample = stream.parse(line, now)
        if sample is None:
            return None
        if stream is not self.stream:
            return self._take_over(stream, sample, now)
        if self._already_delivered(sample):
            return None
        return self._deliver(sample, now)

    def _deliver(self, sample: NodeSample, now: float) -> NodeSample:
        self.lines += 1
        self.last_line_seconds = now
        self.last_sample = sample
        self.failure = None
        return sample

    def _already_delivered(self, sample: NodeSample) -> bool:
        """Whether the old probe has delivered this sample. Only the first lines after a handover can repeat one."""
        last, stream = self.last_sample, self.stream
        if last is None or stream is None or not stream.took_over:
            return False
        step = sample.node_seconds - last.node_seconds
        half = 0.5 * self.request.interval_seconds
        if step >= half:
            stream.took_over = False
        # A clock much further back means that the node has rebooted: then nothing is repeated.
        return -MAX_BACKOFF_SECONDS < step < half

    def _take_over(self, stream: ProbeStream, sample: NodeSample, now: float) -> NodeSample | None:
        """A line of the new stream: held back until it reads as much as the old one, or the old one is silent."""
        least, most = HANDOVER_LINES
        reads_gpus = sample.status is HostStatus.OK or sample.status is self._last_status()
        old = self.stream
        silent = old is None or now - (old.last_line_seconds or 0.0) > 3 * self.request.interval_seconds
        if not silent and (stream.lines < least or (not reads_gpus and stream.lines < most)):
            return None
        stream.took_over = True
        self.stream, self.successor = stream, None
        if old is not None:
            self._close_later(old)
        return None if self._already_delivered(sample) else self._deliver(sample, now)

    def _last_status(self) -> HostStatus | None:
        return None if self.last_sample is None else self.last_sample.status

    # For other threads

    def transport(self, now: float) -> paramiko.Transport | str:
        """Transport of the delivering connection, for more channels on it; else a sentence why none can be used now."""
        stream, link = self.stream, self.link(now, None)
        if stream is None or link.status is not HostStatus.OK:
            return link.detail or "not connected"
        if self.last_line_seconds is not None and now - self.last_line_seconds > self.silent_seconds:
            return f"the probe has sent no line for {now - self.last_line_seconds:.0f} s"
        return stream.connection.transport

    def link(self, now: float, wall_skew: float | None) -> NodeLink:
        status, detail, cause = self._status(now)
        return NodeLink(
            self.node,
            status,
            detail,
            None if self.last_line_seconds is None else max(0.0, now - self.last_line_seconds),
            self.logins,
            self.failures,
            self.lines,
            self.garbage_bytes,
            # Measured with the last line: it says nothing of a node that is silent, or after our clock was set.
            wall_skew if status is HostStatus.OK else None,
            cause,
        )

    def _status(self, now: float) -> tuple[HostStatus, str, UnreachableCause | None]:
        failure, stream = self.failure, self.stream
        age = None if self.last_line_seconds is None else now - self.last_line_seconds
        certain = failure is not None and failure.status is not HostStatus.UNREACHABLE
        if age is not None and age <= self.silent_seconds and not certain:
            return HostStatus.OK, "", None  # a shorter gap does not count: most reconnections take less
        if stream is not None:
            if stream.unread_garbage > GREETING_BYTES or (
                stream.unread_garbage and now - stream.opened_seconds > self.silent_seconds
            ):
                return HostStatus.PARSE_ERROR, self._describe_garbage(stream), None
            if stream.last_line_seconds is not None and age is not None:
                detail = f"connected, but the probe has sent no line for {age:.0f} s"
                return HostStatus.UNREACHABLE, detail, UnreachableCause.SILENT
        if failure is not None:
            return failure.status, f"{failure.sentence}; {self._describe_next_attempt(now)}", failure.cause
        if stream is not None:
            return HostStatus.UNREACHABLE, "logged in, waiting for the probe's first line", UnreachableCause.SESSION
        detail = f"not connected yet; {self._describe_next_attempt(now)}"
        return HostStatus.UNREACHABLE, detail, UnreachableCause.NOT_TRIED

    def _describe_next_attempt(self, now: float) -> str:
        if self.stream is not None:
            return "logged in again, waiting for the probe's first line"
        if self.logging_in is not None:
            return f"retrying: {self.logging_in}"
        wait = self.next_login_seconds - now
        if len(self.ghosts) >= MAX_PROBES:
            wait = max(wait, min(self.ghosts.values()) - now)
            return (
                f"{len(self.ghosts)} earlier probes may still be running on the node, "
                f"so the next login is in {max(0.0, wait):.0f} s"
            )
        return f"next login in {wait:.0f} s" if wait > 0 else "the next login is waiting for a free login slot"
