"""Notifies systemd (sd_notify(3)): one datagram on the socket named in $NOTIFY_SOCKET; nothing if it is not set."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


class SystemdNotifier:
    """Sends the state of the service to systemd. Never raises: a lost notification must not stop the service."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # "@name" is a socket in the abstract namespace, which the kernel writes with a leading zero byte.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_seconds = watchdog_seconds(environment)

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def watchdog(self, status: str) -> None:
        """Restart the watchdog's timer. Call it only while every thread that must run does."""
        self._send(f"WATCHDOG=1\nSTATUS={status}")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=stopping")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(1.0)
            channel.sendto(message.encode(), self._address)


def watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """WatchdogSec= of the unit; None if it is not set, or is meant for another process."""
    microseconds, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not microseconds.isdigit() or int(microseconds) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(microseconds) / 1e6
