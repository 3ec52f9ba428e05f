"""One gather over TCP: every gate process sends its report to rank 0's process and receives all reports in return.

Lines of JSON:

    member -> {"wattwatch_gate": 1, "key": ...}      member <- {"welcome": {...}}
    member -> {"report": {...}}                      member <- {"reports": [...]}

Without torch's store, which takes seconds to import and whose timeout does not say who is missing; and without pickle:
what comes over the network is decoded field by field. If a process never connects, rank 0 waits until the deadline and
continues with the reports that it has.
"""

from __future__ import annotations

import contextlib
import errno
import json
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from wattwatch.trainer.dataclass_json import InvalidDataError, parse_dataclass
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.gate.model import NodeReport

GATHER_PROTOCOL_VERSION: Final = 1
MAX_LINE_BYTES: Final = 64 * 1024 * 1024  # chosen: a report is about 1 KB per rank, the answer contains all of them
MAX_HELLO_BYTES: Final = 4096  # before a peer has shown the key: port scanners connect too
SEND_SECONDS: Final = 5.0
ANSWER_GRACE_SECONDS: Final = 10.0  # for rank 0's answer beyond our deadline: it may have started later than we did
FIRST_RETRY_SECONDS: Final = 0.01
MAX_RETRY_SECONDS: Final = 0.25


class GatherError(Exception):
    """This process did not get the other reports; the message says why."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where rank 0's gate listens, and a key that keeps the gate of another job out."""

    host: str
    port: int
    key: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def open_gather_listener(rendezvous: Rendezvous) -> socket.socket:
    """Rank 0's listening socket. Raises UserError if the port is in use."""
    # Some distributions resolve a node's own name to 127.0.1.1, which other nodes cannot reach; a name may also lead
    # here by address translation. So for a name listen on all interfaces, as torch's store does.
    host = rendezvous.host if rendezvous.host == "localhost" or _is_address(rendezvous.host) else ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        try:
            return socket.create_server((host, rendezvous.port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # an address that is translated on the way is not ours to bind
                raise
            return socket.create_server(("", rendezvous.port), backlog=1024)
    except OSError as error:
        raise UserError(
            f"rank 0's gate cannot listen at {rendezvous}: {error.strerror or error}; set another port with "
            "--rendezvous on every node"
        ) from None


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return True
    return False


@dataclass(slots=True)
class _Peer:
    connection: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    welcomed: bool = False
    report: NodeReport | None = None


def gather_reports(
    listener: socket.socket, rendezvous: Rendezvous, welcome: dict[str, Any], own: NodeReport, until: float
) -> list[NodeReport]:
    """Rank 0's side. All reports, its own first; after `until` (time.monotonic()) those that arrived."""
    peers: dict[socket.socket, _Peer] = {}
    missing = set(range(own.settings.world)) - set(own.ranks)
    with selectors.DefaultSelector() as selector:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        try:
            # One thread and a selector: a peer that sends slowly, or nothing, must not delay the others.
            while missing and (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fileobj is listener:
                        with contextlib.suppress(OSError):  # the peer may have gone again
                            connection, _ = listener.accept()
                            # A peer that does not read its welcome or the answer costs this long, not forever.
                            connection.settimeout(SEND_SECONDS)
                            peers[connection] = _Peer(connection)
                            selector.register(connection, selectors.EVENT_READ)
                        continue
                    assert isinstance(key.fileobj, socket.socket)
                    peer = peers[key.fileobj]
                    if not _receive(peer, rendezvous, welcome):
                        selector.unregister(peer.connection)
                        peer.connection.close()
                        del peers[peer.connection]
                    elif peer.report is not None:
                        missing -= set(peer.report.ranks)
                        # Kept open for the answer; it has nothing more to say.
                        selector.unregister(peer.connection)
            reports = [own, *(peer.report for peer in peers.values() if peer.report is not None)]
            answer = json.dumps({"reports": [asdict(report) for report in reports]}).encode() + b"\n"
            for peer in peers.values():
                with contextlib.suppress(OSError):  # gone, or too slow: its own process will say so
                    late = _refusal_line("the report of this process arrived too late")
                    peer.connection.sendall(answer if peer.report is not None else late)
            return reports
        finally:
            for peer in peers.values():
                peer.connection.close()


def _receive(peer: _Peer, rendezvous: Rendezvous, welcome: dict[str, Any]) -> bool:
    """Reads what a peer has sent. False if it closed the connection, or is not a wattwatch gate process of this job."""
    try:
        data = peer.connection.recv(1 << 20)
    except OSError:
        return False
    peer.buffer += data
    if not data or len(peer.buffer) > (MAX_LINE_BYTES if peer.welcomed else MAX_HELLO_BYTES):
        return False
    while b"\n" in peer.buffer and peer.report is None:
        line, _, rest = peer.buffer.partition(b"\n")
        peer.buffer = rest
        try:
            message = json.loads(line)
            if not peer.welcomed:
                _check_hello(message, rendezvous)
                peer.connection.sendall(json.dumps({"welcome": welcome}).encode() + b"\n")
                peer.welcomed = True
            else:
                report = parse_dataclass(NodeReport, message.get("report"), "report")
                # The member sets `wall` just before sending, so this is the clock difference plus the transfer time.
                peer.report = replace(report, skew_seconds=time.time() - report.wall)
        except OSError:
            return False
        # Whatever a port scanner or another version sends: it is told, and the gather goes on.
        except (ValueError, AttributeError, RecursionError) as error:
            with contextlib.suppress(OSError):
                peer.connection.sendall(_refusal_line(str(error)))
            return False
    return True


def _check_hello(message: Any, rendezvous: Rendezvous) -> None:
    if not isinstance(message, dict) or message.get("wattwatch_gate") != GATHER_PROTOCOL_VERSION:
        raise InvalidDataError("rank 0 runs a different version of wattwatch")
    if message.get("key") != rendezvous.key:
        raise InvalidDataError("the gate at this address belongs to another job")


def _refusal_line(why: str) -> bytes:
    return json.dumps({"refused": why}).encode() + b"\n"


class GatherMember:
    """A member's side: connect, receive rank 0's welcome, send the own report, receive all reports."""

    def __init__(self, rendezvous: Rendezvous, until: float) -> None:
        """Retries until rank 0 listens: the order in which nodes start is arbitrary. Raises GatherError at `until`."""
        self._rendezvous, self._until = rendezvous, until
        pause, begun = FIRST_RETRY_SECONDS, time.monotonic()
        while True:
            try:
                self._connection = socket.create_connection((rendezvous.host, rendezvous.port), timeout=SEND_SECONDS)
                break
            except OSError as error:
                if time.monotonic() + pause > until:
                    raise GatherError(
                        f"rank 0 did not answer at {rendezvous} for {time.monotonic() - begun:.0f} s: "
                        f"{error.strerror or error}"
                    ) from None
                time.sleep(pause)
                pause = min(pause * 1.5, MAX_RETRY_SECONDS)
        self._buffer = bytearray()

    def welcome(self) -> dict[str, Any]:
        """What rank 0 tells all members: the gate id and its mark. Raises GatherError."""
        self._send({"wattwatch_gate": GATHER_PROTOCOL_VERSION, "key": self._rendezvous.key})
        welcome = self._read_message().get("welcome")
        if not isinstance(welcome, dict):
            raise GatherError(f"the program that listens at {self._rendezvous} is not a wattwatch gate")
        return welcome

    def exchange(self, report: NodeReport) -> list[NodeReport]:
        """Sends `report`; returns all reports, rank 0's first. Raises GatherError."""
        self._send({"report": asdict(replace(report, wall=time.time()))})
        try:
            return [parse_dataclass(NodeReport, item, "report") for item in self._read_message().get("reports", [])]
        except InvalidDataError as error:
            raise GatherError(f"{self._rendezvous} sent an invalid answer: {error}") from None

    def close(self) -> None:
        self._connection.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._attempt(lambda: self._connection.sendall(json.dumps(message).encode() + b"\n"))

    def _attempt(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except TimeoutError:
            raise GatherError(f"{self._rendezvous} stopped responding") from None
        except OSError as error:
            raise GatherError(f"the connection to {self._rendezvous} failed: {error.strerror or error}") from None

    def _read_message(self) -> dict[str, Any]:
        # Rank 0 answers all members at once, when the last report has arrived or its own deadline has passed.
        until = self._until + ANSWER_GRACE_SECONDS
        while b"\n" not in self._buffer:
            self._connection.settimeout(max(0.01, until - time.monotonic()))
            data = self._attempt(lambda: self._connection.recv(1 << 20))
            self._buffer += data
            if not data or len(self._buffer) > MAX_LINE_BYTES:
                raise GatherError(
                    f"{self._rendezvous} closed the connection: another program listens there, or rank 0's gate has "
                    "exited"
                )
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise GatherError(f"the program that listens at {self._rendezvous} is not a wattwatch gate")
        if "refused" in message:
            raise GatherError(f"{self._rendezvous} refused this process: {message['refused']}")
        return message
