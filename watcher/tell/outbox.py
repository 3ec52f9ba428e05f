"""Messages on their way. What `enqueue` takes is already on disk and leaves it only when a receiver has taken it.

Each receiver has its own lane: a queue and a thread, so that a hanging one delays nobody else. A lane holds the
message it works on until the answer; killed at any point before the answer is recorded, the next process sends the
same bytes with the same Idempotency-Key again. At least once, in the order of each episode, never dropped for number.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import httpx

from collectors.clock import Clock
from watcher.config import ReceiverSection
from watcher.snapshot import DeliveryStats
from watcher.store import Delivery, Store, StoreError
from watcher.tell.answers import Answer, Delivered, Failure, GiveUp, TryAgain
from watcher.tell.posting import open_client, post

log = logging.getLogger("wattwatch.tell")

BACKOFF_FIRST_SECONDS: Final = 1.0
BACKOFF_MOST_SECONDS: Final = 60.0
# A message that failed this often lets those of other episodes pass: one that a receiver chokes on blocks nobody.
PATIENCE: Final = 5
# After this long nobody can act on it. It is counted and logged, never silently gone.
TOO_OLD_SECONDS: Final = 3 * 86400.0
# Slack allows one message a second and short bursts; more, and it may switch the webhook off.
SLACK_PER_SECOND: Final = 1.0
SLACK_BURST: Final = 4.0


class Pace:
    """A token bucket: `wait` says how long until one more may go."""

    def __init__(self, per_second: float, burst: float, now: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._tokens = burst
        self._seconds = now

    def wait(self, now: float) -> float:
        self._tokens = min(self._burst, self._tokens + (now - self._seconds) * self._per_second)
        self._seconds = now
        return max(0.0, (1.0 - self._tokens) / self._per_second)

    def take(self) -> None:
        self._tokens -= 1.0


@dataclass(slots=True)
class Waiting:
    """`since_seconds`: when it was enqueued, on the monotonic clock: a corrected wall clock ages no message."""

    delivery: Delivery
    since_seconds: float
    attempts: int = 0


class Lane:
    """One receiver's messages, oldest first, and the thread that delivers them."""

    def __init__(self, receiver: ReceiverSection, store: Store, clock: Clock) -> None:
        self.receiver = receiver
        self._store = store
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[str, Waiting] = {}  # by key, in order
        self._failures_in_a_row = 0
        self._paused_until = float("-inf")
        self._pace = Pace(SLACK_PER_SECOND, SLACK_BURST, clock.monotonic()) if receiver.type == "slack" else None
        self._stop_at: float | None = None
        self.sent = 0
        self.failed: Counter[Failure] = Counter()
        self._thread = threading.Thread(target=self._run, name=f"tell {receiver.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, deliveries: Iterable[Delivery]) -> None:
        now, wall = self._clock.monotonic(), self._clock.wall()
        with self._changed:
            for delivery in deliveries:
                age = max(0.0, wall - delivery.enqueued_wall_seconds)
                self._waiting[delivery.key] = Waiting(delivery, since_seconds=now - age)
            self._changed.notify()

    def waiting(self) -> tuple[Waiting, ...]:
        with self._changed:
            return tuple(self._waiting.values())

    def stop(self, deadline: float) -> None:
        """Deliver what is due until the deadline (of the clock), then end."""
        with self._changed:
            self._stop_at = deadline
            self._changed.notify()

    def join(self, real_seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(real_seconds)

    def _run(self) -> None:
        """1. Wait for a message that may go. 2. Post it without holding the lock. 3. Record what came of it."""
        with open_client() as client:
            while (waiting := self._next()) is not None:
                answer = self._attempt(client, waiting.delivery)
                with self._changed:
                    if isinstance(answer, TryAgain):
                        self._postpone(waiting, answer)
                    else:
                        self._failures_in_a_row = 0
                        self._settle(waiting.delivery, answer)

    def _attempt(self, client: httpx.Client, delivery: Delivery) -> Answer:
        try:
            return post(client, self.receiver, delivery, self._clock)
        except Exception as error:  # noqa: BLE001 - a lane that dies of a surprise would deliver nothing for ever
            return TryAgain(Failure.CUT, f"unexpected {type(error).__name__}")

    def _next(self) -> Waiting | None:
        """The next message to attempt, as soon as it may go; None when the lane ends."""
        with self._changed:
            while True:
                now = self._clock.monotonic()
                wait = self._wait(now)
                if self._stop_at is not None and (now >= self._stop_at or wait is None or wait > 0):
                    return None
                if wait is None or wait > 0:
                    self._changed.wait(None if wait is None else self._clock.real_seconds(wait))
                    continue
                waiting = self._first()
                if now - waiting.since_seconds > TOO_OLD_SECONDS:
                    self._settle(waiting.delivery, GiveUp(Failure.TOO_OLD, "three days were not enough to deliver it"))
                    continue
                if self._pace is not None:
                    self._pace.take()
                return waiting

    def _wait(self, now: float) -> float | None:
        """Seconds until a message may go; None while there is none."""
        if not self._waiting:
            return None
        pace = 0.0 if self._pace is None else self._pace.wait(now)
        return max(pace, self._paused_until - now)

    def _first(self) -> Waiting:
        """The oldest, unless it has failed often. Within an episode the order is never changed: firing, then over."""
        heads: dict[str, Waiting] = {}
        for waiting in self._waiting.values():
            if waiting.delivery.episode_id not in heads:
                heads[waiting.delivery.episode_id] = waiting
                if waiting.attempts < PATIENCE:
                    return waiting
        return min(heads.values(), key=lambda waiting: waiting.attempts)

    def _postpone(self, waiting: Waiting, answer: TryAgain) -> None:
        """Pause the receiver, not the message: what fails for one fails for the next. Full jitter, or as it asked."""
        self._failures_in_a_row += 1
        waiting.attempts += 1
        self.failed[answer.failure] += 1
        most = min(BACKOFF_MOST_SECONDS, BACKOFF_FIRST_SECONDS * 2.0 ** min(self._failures_in_a_row - 1, 16))
        wait = random.uniform(0.0, most) if answer.after_seconds is None else answer.after_seconds
        self._paused_until = self._clock.monotonic() + wait
        log.warning(
            "receiver %s: %s (%s); attempt %d, next in %.1f s",
            self.receiver.name,
            answer.detail,
            answer.failure.value,
            waiting.attempts,
            wait,
        )

    def _settle(self, delivery: Delivery, answer: Delivered | GiveUp) -> None:
        """Off the queue, then off the disk. If the disk fails, a restart sends it once more under the same key."""
        self._waiting.pop(delivery.key, None)
        outcome = "delivered"
        if isinstance(answer, GiveUp):
            self.failed[answer.failure] += 1
            outcome = f"{answer.failure.value}: {answer.detail}"
            log.error("receiver %s: message %s is lost: %s", self.receiver.name, delivery.key, outcome)
        else:
            self.sent += 1
        try:
            self._store.settle(delivery, outcome, self._clock.wall())
        except StoreError as error:
            log.error("receiver %s: message %s: %s", self.receiver.name, delivery.key, error)


class Outbox:
    """The lanes together. Starts with what an earlier process left undelivered."""

    def __init__(self, store: Store, receivers: Sequence[ReceiverSection], clock: Clock) -> None:
        self._clock = clock
        self._lanes = {receiver.name: Lane(receiver, store, clock) for receiver in receivers}
        self._lost: Counter[tuple[str, str]] = Counter()
        for delivery in store.waiting_deliveries():
            if delivery.receiver in self._lanes:
                self._lanes[delivery.receiver].add([delivery])
                continue
            self._lost[delivery.receiver, Failure.NOT_CONFIGURED.value] += 1
            log.error("receiver %s is no longer configured: message %s is lost", delivery.receiver, delivery.key)
            store.settle(delivery, Failure.NOT_CONFIGURED.value, clock.wall())

    def start(self) -> None:
        for lane in self._lanes.values():
            lane.start()

    def enqueue(self, deliveries: Sequence[Delivery]) -> None:
        """Hand over; each lane begins at once."""
        for name, lane in self._lanes.items():
            mine = [delivery for delivery in deliveries if delivery.receiver == name]
            if mine:
                lane.add(mine)

    def waiting(self) -> tuple[Delivery, ...]:
        return tuple(waiting.delivery for lane in self._lanes.values() for waiting in lane.waiting())

    def stats(self) -> DeliveryStats:
        now = self._clock.monotonic()
        ages = [max(0.0, now - waiting.since_seconds) for lane in self._lanes.values() for waiting in lane.waiting()]
        failed = dict(self._lost)
        for name, lane in self._lanes.items():
            for failure, count in dict(lane.failed).items():
                failed[name, failure.value] = failed.get((name, failure.value), 0) + count
        return DeliveryStats(
            sent={name: lane.sent for name, lane in self._lanes.items()},
            failed=failed,
            waiting=len(ages),
            oldest_waiting_seconds=max(ages, default=0.0),
        )

    def stop(self, timeout_seconds: float = 2.0) -> None:
        """What is due and can be delivered in time is; the rest stays on disk for the next start."""
        deadline = self._clock.monotonic() + timeout_seconds
        for lane in self._lanes.values():
            lane.stop(deadline)
        for lane in self._lanes.values():
            lane.join(self._clock.real_seconds(max(0.0, deadline - self._clock.monotonic())) + 0.1)
