"""What a run directory of wattwatch-train tells beside flight records: how ranks ended, and where each was. Rim."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from watcher.diagnose.directory.listing import ATTEMPT, read_end, read_object
from watcher.diagnose.evidence import RankEnding, RankLog, RankSeen, Seen
from watcher.diagnose.flight.files import rank_of
from watcher.diagnose.traces.rank_logs import TAIL_BYTES, read_log

OBJECT_BYTES_MOST: Final = 1024 * 1024  # a heartbeat, an ending, run.json


@dataclass(frozen=True, slots=True)
class RunEvidence:
    seen: Seen | None
    endings: tuple[RankEnding, ...]
    node_of_rank: dict[int, str]
    missing: tuple[str, ...]
    logs: tuple[RankLog, ...] = ()


def read_run(directory: Path) -> RunEvidence:
    """Of RUN, or of RUN/flight and RUN/flight/attempt-02; of any other directory nothing. Never raises."""
    run = next(
        (place for place in (directory, *directory.resolve().parents[:2]) if (place / "run.json").exists()), None
    )
    if run is None:
        return RunEvidence(None, (), {}, ())
    missing: list[str] = []
    record = read_object(run / "run.json", missing, OBJECT_BYTES_MOST)
    attempt = _attempt(directory, run)
    endings = tuple(
        ending
        for path in sorted((run / "logs" / f"attempt-{attempt:02d}").glob("rank-*.ending.json"))
        if (ending := read_ending(path, run, missing)) is not None
    )
    logs = tuple(
        log
        for path in sorted((run / "logs" / f"attempt-{attempt:02d}").glob("rank-*.log"))
        if (log := _log(path, run, missing)) is not None
    )
    beats = [read_object(path, missing, OBJECT_BYTES_MOST) for path in sorted((run / "heartbeat").glob("rank-*.json"))]
    ranks = tuple(each for beat in beats if (each := _seen(beat, attempt)) is not None)
    nodes = _nodes(record) | {each.rank: each.node for each in ranks if each.node}
    if not ranks:
        return RunEvidence(None, endings, nodes, tuple(missing), logs)
    steps = [each.step for each in ranks if each.step is not None]
    walls = [wall for beat in beats if (wall := _number(beat.get("t_wall"))) is not None]
    name = str(record.get("run") or run.name)
    seen = Seen(name, max(walls, default=0.0), "unknown", "unknown", min(steps, default=None), ranks)
    return RunEvidence(seen, endings, nodes, tuple(missing), logs)


def _attempt(directory: Path, run: Path) -> int:
    """The one that was pointed at, else the newest that left anything."""
    if found := ATTEMPT.fullmatch(directory.resolve().name):
        return int(found[1])
    names = [path.name for room in ("flight", "logs") for path in (run / room).glob("attempt-*")]
    return max((int(found[1]) for name in names if (found := ATTEMPT.fullmatch(name))), default=1)


def _log(path: Path, run: Path, missing: list[str]) -> RankLog | None:
    """Its end; the age of a log that may still be written tells nothing."""
    rank = rank_of(path.name)
    try:
        data = None if rank is None else read_end(path, TAIL_BYTES)
    except OSError as error:
        missing.append(f"{path.name}: cannot be read: {error.strerror or error}")
        return None
    return None if rank is None or data is None else read_log(data, rank, str(path.relative_to(run)))


def read_ending(path: Path, run: Path, missing: list[str]) -> RankEnding | None:
    """Of the file that a rank left; `run`: what its name is told against. What it cannot read is told in `missing`."""
    data, rank = read_object(path, missing, OBJECT_BYTES_MOST), rank_of(path.name)
    code = _whole(data.get("code"))
    if rank is None or code is None:
        return None
    why = str(data.get("why", ""))[:500]
    source = str(path.relative_to(run))
    return RankEnding(rank, code, why, _whole(data.get("step")), data.get("follows") is True, source)


def _seen(beat: dict[str, Any], attempt: int) -> RankSeen | None:
    """An earlier attempt's heartbeat says nothing of this one."""
    rank = _whole(beat.get("rank"))
    if rank is None or _whole(beat.get("restart")) not in (None, attempt - 1):
        return None
    phase = beat.get("phase")
    return RankSeen(
        rank,
        str(beat.get("host") or ""),
        step=_whole(beat.get("step")),
        phase=phase if isinstance(phase, str) else None,
        data_wait_ms=_number(beat.get("data_wait_ms")),
        blocks_left=_whole(beat.get("blocks_left")),
    )


def _nodes(record: dict[str, Any]) -> dict[int, str]:
    nodes, world = record.get("nodes"), _whole(record.get("world"))
    if not isinstance(nodes, list) or not nodes or not world or not 0 < world <= 1_000_000 or world % len(nodes):
        return {}
    return {rank: str(nodes[rank * len(nodes) // world]) for rank in range(world)}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    return number if number is not None and math.isfinite(number) else None
