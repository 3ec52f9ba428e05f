"""SIGINT and SIGTERM to the launcher: once asks the job to save and end, twice ends it now."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Interruptions:
    """How often the user, or the batch system, has asked."""

    count: int = 0
    by: str = ""  # the first signal, as people call it


@contextlib.contextmanager
def interruptions() -> Iterator[Interruptions]:
    """Counts instead of raising, until the block ends."""
    counted = Interruptions()

    def came(number: int, _frame: object) -> None:
        counted.count += 1
        counted.by = counted.by or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    # SIGHUP too: a terminal that closes is no reason to leave ranks behind, nor to lose what they have not saved
    before = {number: signal.signal(number, came) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield counted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
