"""The state that survives a restart of the watcher, in one SQLite file: alert episodes, the delivery queue of messages,
and what was learned about GPUs and jobs.

A change of an episode and the messages that it causes are written in one transaction, so that kill -9 leaves both or
neither. One process writes the file (a lock file beside it enforces that), with WAL and synchronous=FULL: once
`record` has returned, the data is on disk. The number of rows is bounded: closed episodes and finished deliveries are
pruned, and the payload of a delivered message is erased at once.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

APPLICATION_ID: Final = 0x77617474  # "watt": distinguishes our file from any other SQLite database
BUSY_SECONDS: Final = 5.0  # how long to wait for a reader, such as a backup, before a write fails
# Chosen, not measured: years of a busy cluster, in a file of some tens of megabytes.
MAX_CLOSED_EPISODES: Final = 10_000
MAX_FINISHED_DELIVERIES: Final = 100_000

# One step per version, applied in order; PRAGMA user_version counts the steps applied. Never edit a released step: the
# files of existing installations have gone through it as it was. The columns `settled_*` mean finished deliveries.
MIGRATIONS: Final = (
    """
    CREATE TABLE episodes (
        id TEXT PRIMARY KEY,
        job TEXT NOT NULL,
        alert TEXT NOT NULL,
        scope TEXT NOT NULL,
        opened_wall_seconds REAL NOT NULL,
        closed_wall_seconds REAL,
        content BLOB NOT NULL
    );
    CREATE UNIQUE INDEX one_open_episode ON episodes (job, alert, scope) WHERE closed_wall_seconds IS NULL;
    CREATE INDEX closed_episodes ON episodes (closed_wall_seconds) WHERE closed_wall_seconds IS NOT NULL;
    CREATE TABLE deliveries (
        number INTEGER PRIMARY KEY,
        receiver TEXT NOT NULL,
        key TEXT NOT NULL,
        episode_id TEXT NOT NULL,
        payload BLOB NOT NULL,
        enqueued_wall_seconds REAL NOT NULL,
        settled_wall_seconds REAL,
        outcome TEXT,
        UNIQUE (receiver, key)
    );
    CREATE INDEX waiting_deliveries ON deliveries (number) WHERE settled_wall_seconds IS NULL;
    CREATE INDEX settled_deliveries ON deliveries (settled_wall_seconds) WHERE settled_wall_seconds IS NOT NULL;
    """,
    """
    CREATE TABLE learned (
        key TEXT PRIMARY KEY,
        content BLOB NOT NULL
    );
    """,
)


class StateStoreError(Exception):
    """The file cannot be used, or a write failed. The message is one sentence: file, cause, what to do."""


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One alert episode. `content` is the alert manager's own encoding of it; the other fields are there to query."""

    id: str
    job: str
    alert: str
    scope: str
    opened_wall_seconds: float
    closed_wall_seconds: float | None
    content: bytes


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message for one receiver, as it was when it was enqueued.

    `key` is the same at every attempt, so that a receiver can recognize a repeated delivery.
    """

    receiver: str
    key: str
    episode_id: str
    payload: bytes
    enqueued_wall_seconds: float


class StateStore:
    """One SQLite connection behind a lock; any thread may call. Raises StateStoreError, never sqlite3's own errors."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file, migrates it to this version and checks its integrity."""
        self._path = path
        self._lock = threading.Lock()
        self._owner = acquire_lock(path)
        try:
            self._connection = open_database(path)
        except BaseException:
            self._owner.close()
            raise

    def open_episodes(self) -> list[EpisodeRow]:
        return self._episodes("closed_wall_seconds IS NULL ORDER BY opened_wall_seconds", ())

    def closed_episodes(self, limit: int) -> list[EpisodeRow]:
        """The `limit` most recently closed episodes, oldest first."""
        rows = self._episodes("closed_wall_seconds IS NOT NULL ORDER BY closed_wall_seconds DESC LIMIT ?", (limit,))
        return rows[::-1]

    def waiting_deliveries(self) -> list[Delivery]:
        """Messages that are neither delivered nor given up, in the order in which they were enqueued."""
        with self._statements() as connection:
            rows = connection.execute(
                "SELECT receiver, key, episode_id, payload, enqueued_wall_seconds FROM deliveries"
                " WHERE settled_wall_seconds IS NULL ORDER BY number"
            ).fetchall()
        return [Delivery(*row) for row in rows]

    def record(self, episodes: Sequence[EpisodeRow], deliveries: Sequence[Delivery]) -> None:
        """Writes episodes and their messages in one transaction: all on disk on return, nothing of it on an error."""
        with self._statements() as connection:
            # One transaction may close an episode and open the next one of the same alert. Closed rows go first, or the
            # unique index `one_open_episode` rejects the new one.
            for row in sorted(episodes, key=lambda row: row.closed_wall_seconds is None):
                connection.execute(
                    "INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
                    " closed_wall_seconds = excluded.closed_wall_seconds, content = excluded.content",
                    (
                        row.id,
                        row.job,
                        row.alert,
                        row.scope,
                        row.opened_wall_seconds,
                        row.closed_wall_seconds,
                        row.content,
                    ),
                )
            connection.executemany(
                "INSERT INTO deliveries (receiver, key, episode_id, payload, enqueued_wall_seconds)"
                " VALUES (?, ?, ?, ?, ?) ON CONFLICT (receiver, key) DO NOTHING",
                [(d.receiver, d.key, d.episode_id, d.payload, d.enqueued_wall_seconds) for d in deliveries],
            )

    def record_outcome(self, delivery: Delivery, outcome: str, wall_seconds: float) -> None:
        """Ends a delivery: `outcome` is "delivered", or why it was given up. Erases the payload."""
        with self._statements() as connection:
            connection.execute(
                "UPDATE deliveries SET settled_wall_seconds = ?, outcome = ?, payload = x''"
                " WHERE receiver = ? AND key = ?",
                (wall_seconds, outcome, delivery.receiver, delivery.key),
            )

    def load_learned(self) -> dict[str, bytes]:
        """Learned baselines by key, in detection's own encoding. Content of a foreign type comes out empty."""
        with self._statements() as connection:
            rows = connection.execute("SELECT key, content FROM learned").fetchall()
        return {str(key): content if isinstance(content, bytes) else b"" for key, content in rows}

    def save_learned(self, rows: Mapping[str, bytes | None]) -> None:
        """Inserts or replaces these rows; None deletes the row. One transaction."""
        with self._statements() as connection:
            connection.executemany(
                "INSERT INTO learned VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET content = excluded.content",
                [(key, content) for key, content in rows.items() if content is not None],
            )
            connection.executemany(
                "DELETE FROM learned WHERE key = ?", [(key,) for key, content in rows.items() if content is None]
            )

    def prune(self, before_wall_seconds: float) -> None:
        """Deletes episodes closed and deliveries finished before this time, and those beyond the limits on rows.

        Open episodes and waiting deliveries always stay.
        """
        with self._statements() as connection:
            for table, column, max_rows in (
                ("episodes", "closed_wall_seconds", MAX_CLOSED_EPISODES),
                ("deliveries", "settled_wall_seconds", MAX_FINISHED_DELIVERIES),
            ):
                connection.execute(f"DELETE FROM {table} WHERE {column} < ?", (before_wall_seconds,))
                connection.execute(
                    f"DELETE FROM {table} WHERE {column} IS NOT NULL AND rowid NOT IN"
                    f" (SELECT rowid FROM {table} WHERE {column} IS NOT NULL ORDER BY {column} DESC LIMIT {max_rows})"
                )
        # Gives freed pages back to the file system; not allowed inside a transaction.
        with self._statements(transaction=False) as connection:
            connection.execute("PRAGMA incremental_vacuum").fetchall()

    def close(self) -> None:
        with self._lock:
            self._connection.close()
            self._owner.close()

    def _episodes(self, condition: str, values: tuple[int, ...]) -> list[EpisodeRow]:
        with self._statements() as connection:
            rows = connection.execute(
                "SELECT id, job, alert, scope, opened_wall_seconds, closed_wall_seconds, content FROM episodes"
                f" WHERE {condition}",
                values,
            ).fetchall()
        return [EpisodeRow(*row) for row in rows]

    @contextmanager
    def _statements(self, transaction: bool = True) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                if not transaction:
                    yield self._connection
                    return
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield self._connection
                    self._connection.execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise StateStoreError(f"{self._path}: {error}: check the free space and health of the disk") from None


def acquire_lock(path: Path) -> IO[bytes]:
    """Locks the file for this process. Raises StateStoreError if another process holds the lock.

    An flock, not a pid file: the kernel releases it when the process ends, even after kill -9.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("ab")
    except OSError as error:
        raise StateStoreError(f"{path.parent}: cannot be used as the state directory: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise StateStoreError(
            f"{path}: another wattwatch process is using this file: stop that process, or set another state_directory"
        ) from None
    return lock


def open_database(path: Path) -> sqlite3.Connection:
    """Opens the file, checks that it is ours and intact, and migrates it.

    A file that cannot be used is never deleted or moved: it may hold open episodes, so that is the user's decision.
    """
    advice = f"to start with an empty database, move this file away: mv {path} {path}.old"
    try:
        if not path.exists():
            # sqlite3 would create it readable by everybody; messages name hosts and jobs.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise StateStoreError(f"{path}: cannot be opened: {error}") from None
    try:
        check_ownership_and_version(connection, path, advice)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        migrate(connection)
        problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise StateStoreError(f"{path}: the database is damaged ({str(problem).splitlines()[0]}): {advice}")
    except sqlite3.Error as error:
        connection.close()
        raise StateStoreError(f"{path}: cannot be used ({error}): {advice}") from None
    except StateStoreError:
        connection.close()
        raise
    return connection


def check_ownership_and_version(connection: sqlite3.Connection, path: Path, advice: str) -> None:
    """Raises StateStoreError for the database of another program and for one written by a newer wattwatch."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if tables and application != APPLICATION_ID:
        raise StateStoreError(f"{path}: this database belongs to another program: set another state_directory")
    if version > len(MIGRATIONS):
        raise StateStoreError(
            f"{path}: a newer wattwatch wrote this file (schema {version}; this version supports up to "
            f"schema {len(MIGRATIONS)}): install the newer version again; or, {advice}"
        )


def migrate(connection: sqlite3.Connection) -> None:
    """Applies the missing steps, each in one transaction with its version number: a process that is killed halfway
    continues from the last complete step."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        connection.executescript(
            f"BEGIN IMMEDIATE; PRAGMA application_id={APPLICATION_ID}; {script} PRAGMA user_version={number}; COMMIT;"
        )
