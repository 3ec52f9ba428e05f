"""The state file: atomic transactions, one writer, bounded size, and clear errors when it cannot be used."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wattwatch.watcher.common.state_store import (
    APPLICATION_ID,
    MIGRATIONS,
    Delivery,
    EpisodeRow,
    StateStore,
    StateStoreError,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "state.db"


@pytest.fixture
def store(path: Path) -> Iterator[StateStore]:
    store = StateStore(path)
    yield store
    store.close()


def episode(number: int, closed: float | None = None, scope: str = "") -> EpisodeRow:
    return EpisodeRow(f"e{number}", "llama", "JobHung", scope, float(number), closed, b"{}")


def delivery(number: int, receiver: str = "slack") -> Delivery:
    return Delivery(receiver, f"e{number}-1", f"e{number}", b"payload", float(number))


def test_what_was_recorded_is_still_there_after_reopening(path: Path) -> None:
    store = StateStore(path)
    store.record([episode(1), episode(2, closed=9.0)], [delivery(1), delivery(1, "webhook")])
    store.close()
    store = StateStore(path)
    assert store.open_episodes() == [episode(1)]
    assert store.closed_episodes(10) == [episode(2, closed=9.0)]
    assert store.waiting_deliveries() == [delivery(1), delivery(1, "webhook")]
    store.close()


def test_episodes_and_deliveries_are_recorded_together_or_not_at_all(store: StateStore) -> None:
    store.record([episode(1)], [])
    with pytest.raises(StateStoreError):  # a second open episode of the same finding
        store.record([episode(3, scope="node-01"), episode(2)], [delivery(2)])
    assert store.open_episodes() == [episode(1)]
    assert store.waiting_deliveries() == []


def test_an_episode_can_close_and_reopen_in_one_transaction(store: StateStore) -> None:
    store.record([episode(1)], [])
    store.record([episode(2), episode(1, closed=5.0)], [])
    assert [row.id for row in store.open_episodes()] == ["e2"]


def test_recording_the_same_rows_twice_adds_nothing(store: StateStore) -> None:
    for _ in range(2):
        store.record([episode(1)], [delivery(1)])
    assert len(store.open_episodes()) == len(store.waiting_deliveries()) == 1


def test_a_finished_delivery_is_no_longer_waiting_and_its_payload_is_erased(store: StateStore, path: Path) -> None:
    store.record([], [delivery(1), delivery(2)])
    store.record_outcome(delivery(1), "delivered", 50.0)
    assert store.waiting_deliveries() == [delivery(2)]
    with sqlite3.connect(path) as other:  # other processes may read
        assert other.execute("SELECT outcome, payload FROM deliveries WHERE key = 'e1-1'").fetchone() == (
            "delivered",
            b"",
        )
    other.close()


def test_pruning_removes_old_rows_and_keeps_open_and_waiting_ones(store: StateStore) -> None:
    store.record([episode(1), episode(2, closed=10.0), episode(3, closed=90.0)], [delivery(n) for n in (1, 2, 3)])
    store.record_outcome(delivery(2), "delivered", 10.0)
    store.record_outcome(delivery(3), "gone", 90.0)
    store.prune(before_wall_seconds=50.0)
    assert [row.id for row in store.open_episodes() + store.closed_episodes(10)] == ["e1", "e3"]
    assert store.waiting_deliveries() == [delivery(1)]


def test_the_number_of_closed_episodes_is_bounded(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wattwatch.watcher.common.state_store.MAX_CLOSED_EPISODES", 3)
    store.record([episode(number, closed=100.0 + number) for number in range(10)], [])
    store.prune(before_wall_seconds=0.0)
    assert [row.id for row in store.closed_episodes(10)] == ["e7", "e8", "e9"]


def test_only_one_process_may_use_it(store: StateStore, path: Path) -> None:
    with pytest.raises(StateStoreError, match="another wattwatch process is using this file"):
        StateStore(path)


def test_a_killed_process_leaves_no_lock(path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from wattwatch.watcher.common.state_store import StateStore\n"
        "store = StateStore(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode == -9
    StateStore(path).close()


def test_only_the_owner_can_read_the_file(store: StateStore, path: Path) -> None:
    assert path.stat().st_mode & 0o077 == 0


def refusal_message(path: Path) -> str:
    before = path.read_bytes()
    with pytest.raises(StateStoreError) as error:
        StateStore(path)
    assert path.read_bytes() == before, "it was changed"
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    with pytest.raises(StateStoreError):  # the failed attempt left no lock behind
        StateStore(path)
    return str(error.value)


def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database, but long enough to have a header" * 100)
    assert f"mv {path} {path}.old" in refusal_message(path)


def test_a_damaged_database_is_refused_and_left_alone(path: Path) -> None:
    store = StateStore(path)
    store.record([episode(number, scope=f"node-{number}") for number in range(500)], [])
    store.close()
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)
    assert f"mv {path} {path}.old" in refusal_message(path)


def test_a_database_of_a_newer_version_is_refused(path: Path) -> None:
    StateStore(path).close()
    other = sqlite3.connect(path)
    other.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    other.close()
    assert "a newer wattwatch wrote this file" in refusal_message(path)


def test_a_database_of_another_program_is_refused(path: Path) -> None:
    path.parent.mkdir()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE bookmarks (url TEXT)")
    other.commit()
    other.close()
    assert "this database belongs to another program" in refusal_message(path)


def test_a_state_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateStoreError, match="cannot be used as the state directory"):
        StateStore(tmp_path / "file" / "state" / "state.db")


def test_an_empty_file_is_a_new_database(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    StateStore(path).close()
    other = sqlite3.connect(path)
    assert other.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    other.close()


def test_a_write_after_close_raises_our_own_error(path: Path) -> None:
    store = StateStore(path)
    store.close()
    with pytest.raises(StateStoreError):
        store.record([episode(1)], [])


def test_learned_rows_are_replaced_and_deleted(path: Path, store: StateStore) -> None:
    store.save_learned({"a": b"1", "b": b"2"})
    store.save_learned({"a": b"3", "b": None, "c": None})
    store.close()
    again = StateStore(path)
    assert again.load_learned() == {"a": b"3"}
    again.close()


def test_a_learned_row_of_a_foreign_type_is_read_as_empty(path: Path) -> None:
    StateStore(path).close()
    other = sqlite3.connect(path)
    other.execute("INSERT INTO learned VALUES ('a', 12), ('b', 'text')")
    other.commit()
    other.close()
    store = StateStore(path)
    assert store.load_learned() == {"a": b"", "b": b""}
    store.close()


def test_a_file_of_the_previous_version_is_migrated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wattwatch.watcher.common.state_store.MIGRATIONS", MIGRATIONS[:1])
    old = StateStore(path)
    old.record([episode(1)], [])
    old.close()
    monkeypatch.undo()
    store = StateStore(path)
    assert store.open_episodes() == [episode(1)]
    assert store.load_learned() == {}
    store.close()
