"""One node over time: when to log in, when a connection counts as dead, when one takes over from another.

No thread, socket or clock of its own: the fleet tells it what happened and when, and does what it asks.

Renewal, make before break: the new probe runs beside the old one until it has read the GPUs. Its first line is held
back, because it primes the reader (energy counters, logs, kernel history). The two probes share the node's monotonic
clock and the phase of their lines, so the hand-over is exact: the old one delivers up to the last line that is in,
and of the new one each line that is at least half an interval younger than that. No round twice, none left out.

At most two probes are ever alive on a node: one that was not seen to end counts until its lease has run out there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

import paramiko

from wattwatch.collectors.probe.payload import LEASE_RENEWAL_SECONDS
from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.samples import HostStatus, NodeSample
from wattwatch.collectors.ssh.model import SLOW_RETRY_STATUSES, ConnectionFailure, NodeLink, unreachable
from wattwatch.collectors.ssh.stream import ProbeStream

SILENT_SECONDS: Final = 5.0  # or five intervals: the node counts as not seen
REPLACE_SECONDS: Final = 10.0  # or ten: the connection is given up
FIRST_LINE_SECONDS: Final = 30.0
PROBE_LEASE_SECONDS: Final = 75.0  # 60 on the node, and some for its own way out
MAX_PROBES: Final = 2
MAX_GARBAGE_BYTES: Final = 1 << 20  # without a line between: give the connection up
GREETING_BYTES: Final = 8 * 1024  # may come before the first line: shell start-up files print
MIN_BACKOFF_SECONDS: Final = 1.0
MAX_BACKOFF_SECONDS: Final = 60.0
SLOW_RETRY_SECONDS: Final = (60.0, 90.0)
STEADY_SECONDS: Final = 30.0  # a stream that lasted this long ends a row of failures
HANDOVER_LINES: Final = (2, 20)  # of the new probe: at least; at most, if it reads no GPU either


@dataclass(slots=True)
class NodeConnection:
    """What the fleet knows of one node. Fields are written by its thread only."""

    node: str
    request: ProbeRequest
    renew_after_seconds: float
    next_login_seconds: float
    stream: ProbeStream | None = None  # the one that delivers
    successor: ProbeStream | None = None  # the one that is to take over
    logging_in: str | None = None  # stage of the login under way
    trouble: ConnectionFailure | None = None  # why there is no line; None while there are
    renew_seconds: float = float("inf")
    last_line_seconds: float | None = None
    last_sample: NodeSample | None = None
    logins: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    lines: int = 0
    garbage_bytes: int = 0
    ghosts: dict[ProbeStream, float] = field(default_factory=dict)  # probes not seen to end: until when they may live
    leaving: list[ProbeStream] = field(default_factory=list)  # for the fleet to close

    # Times that follow the interval

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
        self.renew_seconds = now + self.renew_after_seconds * random.uniform(0.8, 1.2)

    def refused(self, refusal: ConnectionFailure, now: float) -> None:
        """A login failed, or a stream ended."""
        self.logging_in = None
        self.failures += 1
        if self.stream is None:
            self.trouble = refusal
        if refusal.status in SLOW_RETRY_STATUSES:
            wait = random.uniform(*SLOW_RETRY_SECONDS)
        else:
            most = min(MAX_BACKOFF_SECONDS, MIN_BACKOFF_SECONDS * 2.0 ** min(self.failures_in_a_row, 10))
            wait = random.uniform(0.0, most)
        self.failures_in_a_row += 1
        self.next_login_seconds = now + wait

    # Streams

    def tick(self, now: float) -> None:
        """Look at the streams: renew leases, and let go of those that ended, fell silent or say nothing of sense."""
        for stream in (self.stream, self.successor):
            if stream is None:
                continue
            if not stream.ended:
                stream.look_for_end()
            if not stream.ended and now - stream.lease_seconds >= LEASE_RENEWAL_SECONDS:
                stream.renew_lease(now)
            reason = self._reason_to_leave(stream, now)
            if reason is not None:
                self._lose(stream, reason, now)

    def _reason_to_leave(self, stream: ProbeStream, now: float) -> ConnectionFailure | None:
        garbage = stream.unread_garbage
        if stream.ended:
            words = stream.last_words()
            if garbage and stream.first_line_seconds is None:
                return ConnectionFailure(HostStatus.PARSE_ERROR, f"{words}; {self._garbage_words(stream)}")
            return unreachable(words)
        if garbage > MAX_GARBAGE_BYTES:
            return ConnectionFailure(HostStatus.PARSE_ERROR, self._garbage_words(stream))
        since = stream.last_line_seconds
        if since is None and now - stream.opened_seconds > max(FIRST_LINE_SECONDS, self.replace_seconds):
            waited = now - stream.opened_seconds
            if garbage:
                return ConnectionFailure(HostStatus.PARSE_ERROR, self._garbage_words(stream))
            return unreachable(f"logged in, and the probe has said nothing for {waited:.0f} s")
        if since is not None and now - since > self.replace_seconds:
            return unreachable(f"no line for {now - since:.0f} s: node or sshd frozen, or the network is cut")
        return None

    def _garbage_words(self, stream: ProbeStream) -> str:
        begin = f"; they begin {stream.excerpt.decode('utf-8', 'replace')!a}" if stream.excerpt else ""
        return (
            f"{stream.unread_garbage} bytes came and none was a line of the probe{begin}: "
            "a forced command, or a shell start-up file that prints?"
        )

    def _lose(self, stream: ProbeStream, reason: ConnectionFailure, now: float) -> None:
        if stream.first_line_seconds is not None and now - stream.first_line_seconds > STEADY_SECONDS:
            self.failures_in_a_row = 0
        self._leave(stream)
        if stream is self.stream:
            self.stream, self.successor = self.successor, None
            if self.stream is not None:
                self.stream.took_over = True
        else:
            self.successor = None
        self.refused(reason, now)

    def _leave(self, stream: ProbeStream) -> None:
        self.leaving.append(stream)
        foreign = stream.first_line_seconds is None and stream.unread_garbage > MAX_GARBAGE_BYTES  # no probe of ours
        if not stream.ended_by_peer and not foreign:
            self.ghosts[stream] = stream.lease_seconds + PROBE_LEASE_SECONDS

    def ended(self, stream: ProbeStream, seen: bool) -> None:
        """A stream that was left is closed; `seen`: the node said that the probe has ended."""
        if seen:
            self.ghosts.pop(stream, None)

    # Lines

    def take(self, stream: ProbeStream, line: bytes, now: float) -> NodeSample | None:
        """The sample that this line delivers, if it delivers one."""
        sample = stream.sample_of(line, now)
        if sample is None:
            return None
        if stream is not self.stream:
            return self._take_over(stream, sample, now)
        if self._said_before(sample):
            return None
        return self._deliver(sample, now)

    def _deliver(self, sample: NodeSample, now: float) -> NodeSample:
        self.lines += 1
        self.last_line_seconds = now
        self.last_sample = sample
        self.trouble = None
        return sample

    def _said_before(self, sample: NodeSample) -> bool:
        """Has the old probe delivered this round? Asked only of the first lines after a hand-over."""
        last, stream = self.last_sample, self.stream
        if last is None or stream is None or not stream.took_over:
            return False
        step = sample.node_seconds - last.node_seconds
        half = 0.5 * self.request.interval_seconds
        if step >= half:
            stream.took_over = False
        return -MAX_BACKOFF_SECONDS < step < half  # further back: the node has booted

    def _take_over(self, stream: ProbeStream, sample: NodeSample, now: float) -> NodeSample | None:
        """The successor's line: kept back until it sees as much as the old one, or the old one is silent."""
        least, most = HANDOVER_LINES
        seeing = sample.status is HostStatus.OK or sample.status is self._last_status()
        old = self.stream
        silent = old is None or now - (old.last_line_seconds or 0.0) > 3 * self.request.interval_seconds
        if not silent and (stream.lines < least or (not seeing and stream.lines < most)):
            return None
        stream.took_over = True
        self.stream, self.successor = stream, None
        if old is not None:
            self._leave(old)
        return None if self._said_before(sample) else self._deliver(sample, now)

    def _last_status(self) -> HostStatus | None:
        return None if self.last_sample is None else self.last_sample.status

    # As others see it

    def transport(self, now: float) -> paramiko.Transport | str:
        """Of the connection that delivers, for other channels on it; else a sentence why none is to be used now."""
        stream, link = self.stream, self.link(now, None)
        if stream is None or link.status is not HostStatus.OK:
            return link.detail or "there is no connection to it now"
        if self.last_line_seconds is not None and now - self.last_line_seconds > self.silent_seconds:
            return f"it has said nothing for {now - self.last_line_seconds:.0f} s"
        return stream.connection.transport

    def link(self, now: float, wall_skew: float | None) -> NodeLink:
        status, detail = self._standing(now)
        return NodeLink(
            self.node,
            status,
            detail,
            None if self.last_line_seconds is None else max(0.0, now - self.last_line_seconds),
            self.logins,
            self.failures,
            self.lines,
            self.garbage_bytes,
            wall_skew,
        )

    def _standing(self, now: float) -> tuple[HostStatus, str]:
        trouble, stream = self.trouble, self.stream
        age = None if self.last_line_seconds is None else now - self.last_line_seconds
        certain = trouble is not None and trouble.status is not HostStatus.UNREACHABLE
        if age is not None and age <= self.silent_seconds and not certain:
            return HostStatus.OK, ""  # a short gap is none: most reconnections take less
        if stream is not None:
            if stream.unread_garbage > GREETING_BYTES or (
                stream.unread_garbage and now - stream.opened_seconds > self.silent_seconds
            ):
                return HostStatus.PARSE_ERROR, self._garbage_words(stream)
            if stream.last_line_seconds is not None and age is not None:
                return HostStatus.UNREACHABLE, f"connected, and no line for {age:.0f} s"
        if trouble is not None:
            return trouble.status, f"{trouble.sentence}; {self._next_words(now)}"
        if stream is not None:
            return HostStatus.UNREACHABLE, "logged in, waiting for the probe's first line"
        return HostStatus.UNREACHABLE, f"not seen yet; {self._next_words(now)}"

    def _next_words(self, now: float) -> str:
        if self.stream is not None:
            return "logged in again, waiting for the probe's first line"
        if self.logging_in is not None:
            return f"trying again: {self.logging_in}"
        wait = self.next_login_seconds - now
        if len(self.ghosts) >= MAX_PROBES:
            wait = max(wait, min(self.ghosts.values()) - now)
            return f"{len(self.ghosts)} probes may still run there, so the next login is in {max(0.0, wait):.0f} s"
        return f"next login in {wait:.0f} s" if wait > 0 else "the next login waits for its turn"
