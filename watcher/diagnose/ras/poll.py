"""Two reports some seconds apart: a hang can only be seen between two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from collectors.clock import Clock
from watcher.diagnose.ras.client import BYTE_LIMIT, DEADLINE_SECONDS, RAS_PORT, Channel, RasAnswer, ask, words_of

APART_SECONDS = 10.0  # longer than most steps; launches of a job that runs go on within it
PLACE = f"127.0.0.1:{RAS_PORT}"


@dataclass(frozen=True, slots=True)
class TwoPolls:
    answers: tuple[RasAnswer, ...]  # those with bytes, oldest first
    apart_seconds: float | None  # from the first answer to the second question, so at least; None: there are not two
    trouble: str | None  # in words: why there is none, or no second one, or none that is whole


def poll_twice(
    connect: Callable[[], Channel],
    clock: Clock,
    apart_seconds: float = APART_SECONDS,
    *,
    place: str = PLACE,
    deadline_seconds: float = DEADLINE_SECONDS,
    byte_limit: int = BYTE_LIMIT,
    stop: threading.Event | None = None,
) -> TwoPolls:
    """Ask, wait, ask again, each time on a connection of its own, as RAS closes it after a report.

    `connect` raises ConnectionRefusedError where nothing listens, PermissionError where it may not connect, another
    OSError otherwise. `stop` ends the wait early: then there is one report.
    """
    answers: list[RasAnswer] = []
    answered = asked = clock.monotonic()
    trouble: list[str] = []
    for number in (1, 2):
        if number == 2 and clock.wait(stop or threading.Event(), apart_seconds):
            trouble.append("stopped before the second report")
            break
        asked = clock.monotonic()
        answer = _ask_once(connect, clock, place, deadline_seconds, byte_limit)
        if number == 1:
            answered = clock.monotonic()
        if answer.trouble:
            trouble.append(answer.trouble if number == 1 else f"second report: {answer.trouble}")
        if answer.raw:
            answers.append(answer)
        if not answer.raw and number == 1:
            break
    apart = asked - answered if len(answers) == 2 else None
    return TwoPolls(tuple(answers), apart, "; ".join(trouble) or None)


def _ask_once(
    connect: Callable[[], Channel], clock: Clock, place: str, deadline_seconds: float, byte_limit: int
) -> RasAnswer:
    try:
        channel = connect()
    except ConnectionRefusedError:
        why = f"nothing listens on {place}: NCCL older than 2.24, or NCCL_RAS_ENABLE=0, or no NCCL job"
        return RasAnswer(b"", "text", why)
    except PermissionError as error:
        return RasAnswer(b"", "text", f"not allowed to connect to {place}: {error}")
    except (OSError, EOFError) as error:
        return RasAnswer(b"", "text", f"no connection to {place}: {words_of(error)}")
    answer = ask(channel, clock, deadline_seconds, byte_limit)
    if answer.trouble is None:
        return answer
    return RasAnswer(answer.raw, answer.form, f"NCCL RAS on {place}: {answer.trouble}")
