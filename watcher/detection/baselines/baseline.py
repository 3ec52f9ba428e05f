"""What was learned of boards, each value with where it came from. Data only: learner.py learns.

A value belongs to one board of one host: idle and floor differ by up to 60 W between sites of one model. The plateau
belongs to one job on it as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import orjson
from pydantic import TypeAdapter, ValidationError

from wattwatch.watcher.detection.baselines.profiles import PowerProfile

GpuId = tuple[str, str]  # node and GpuSample.key
MAX_WATTS: Final = 10_000.0
LIMIT_TOLERANCE_WATTS: Final = 0.5
UNIDENTIFIED_GPU: Final = "?"  # the key of boards that say nothing of who they are: no value is of one of them
# Fans, dust and rooms change: what was learned so long ago says little.
MAX_BASELINE_AGE_SECONDS: Final = 180 * 86400.0


class BaselineKind(StrEnum):
    IDLE = "idle"  # nobody on the board: no process, no memory but the driver's, 0 %
    CONTEXT = "context"  # memory held, 0 %: before the first kernel, or at rest between two steps
    PLATEAU = "plateau"  # busy while steps advance


class LearningPhase(StrEnum):
    """When the samples were taken."""

    EMPTY = "with nothing running"
    START_UP = "at start-up"
    BETWEEN_STEPS = "at rest between steps"
    ADVANCING = "while steps advanced"


@dataclass(frozen=True, slots=True)
class Baseline:
    """One value and its grounds."""

    node: str
    board: str
    kind: BaselineKind
    job: str  # whose samples: for a plateau the job that it is of
    watts: float  # median of the samples
    samples: int
    phase: LearningPhase
    wall_seconds: float  # when the last sample was taken
    name: str | None = None  # of the board, then
    limit_watts: float | None = None
    energy_joules: float | None = None  # its counter then: a smaller one means that the driver was loaded anew
    driver: str | None = None  # its version then

    @property
    def key(self) -> str:
        """One value of a kind a board; of a plateau one a job."""
        return orjson.dumps(
            [self.node, self.board, self.kind, self.job if self.kind is BaselineKind.PLATEAU else ""]
        ).decode()


@dataclass(frozen=True, slots=True)
class JobBaseline:
    """What holds for the boards of one job, at their limits: a scene takes it instead of the board's profile."""

    profile: PowerProfile  # idle, floor and plateau replaced by what was learned
    floors: Mapping[GpuId, float]  # at most this when spinning or waiting; boards that are not in it: the profile's
    floor_words: str  # "floor 221 W learned on this host from 240 samples at start-up"; "" where none was learned
    plateau_watts: float | None = None


class BaselineTable:
    """All values, by board. Remembers what changed since it was last kept."""

    def __init__(self, values: Iterable[Baseline] = (), useless_rows: Iterable[str] = ()) -> None:
        """`useless_rows`: keys of kept rows that are no values; they go."""
        self._boards: dict[GpuId, dict[str, Baseline]] = {}
        self._unkept: dict[str, Baseline | None] = dict.fromkeys(useless_rows)
        self.version = 0  # changes with each change
        for value in values:
            self._boards.setdefault((value.node, value.board), {})[value.key] = value

    def of_board(self, board: GpuId) -> tuple[Baseline, ...]:
        return tuple(self._boards.get(board, {}).values())

    def get(self, board: GpuId, kind: BaselineKind, job: str = "") -> Baseline | None:
        """`job` counts for a plateau alone."""
        for value in self._boards.get(board, {}).values():
            if value.kind is kind and (kind is not BaselineKind.PLATEAU or value.job == job):
                return value
        return None

    def values(self) -> tuple[Baseline, ...]:
        return tuple(value for board in self._boards.values() for value in board.values())

    def put(self, value: Baseline) -> None:
        self._boards.setdefault((value.node, value.board), {})[value.key] = value
        self._unkept[value.key] = value
        self.version += 1

    def drop(self, value: Baseline) -> None:
        """It holds no longer and is learned anew."""
        if self._boards.get((value.node, value.board), {}).pop(value.key, None) is not None:
            self._unkept[value.key] = None
            self.version += 1

    def unsaved(self, most: int | None = None) -> Mapping[str, bytes | None]:
        """What changed and was not kept yet, as rows for the store, `most` of them; None: the row goes."""
        changed = itertools.islice(self._unkept.items(), most)
        return {key: None if value is None else orjson.dumps(value) for key, value in changed}

    def kept(self, keys: Iterable[str]) -> None:
        for key in tuple(keys):
            self._unkept.pop(key, None)


BASELINE_ADAPTER = TypeAdapter(Baseline)


def load_baselines(rows: Mapping[str, bytes], wall_seconds: float) -> tuple[BaselineTable, tuple[str, ...]]:
    """What was kept, and one sentence for each row that is no value: it is left out, and learned anew. So is, without a
    word, what is OLD_SECONDS old at `wall_seconds`."""
    values: list[Baseline] = []
    useless: list[str] = []
    warnings: list[str] = []
    for key, content in rows.items():
        try:
            value = BASELINE_ADAPTER.validate_json(content)
        except (ValidationError, TypeError) as error:
            first = str(error).splitlines()[0]
            warnings.append(f"a learned value cannot be read and is learned anew ({key[:100]}): {first}")
            useless.append(key)
            continue
        if value.key != key or not is_valid_baseline(value):
            warnings.append(f"a learned value makes no sense and is learned anew ({key[:100]}): {value.watts:.0f} W")
            useless.append(key)
        elif value.wall_seconds < wall_seconds - MAX_BASELINE_AGE_SECONDS:
            useless.append(key)
        else:
            values.append(value)
    return BaselineTable(values, useless), tuple(warnings)


def is_valid_baseline(value: Baseline) -> bool:
    """Its numbers can be what they say they are."""
    told = (value.wall_seconds, value.limit_watts, value.energy_joules)
    finite = all(math.isfinite(number) for number in told if number is not None)
    return finite and 0 < value.watts < MAX_WATTS and value.samples >= 1
