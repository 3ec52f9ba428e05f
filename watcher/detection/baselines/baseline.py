"""What was learned about GPUs: each value with its grounds, when it cannot be true, and how it replaces profile
figures.

A baseline belongs to one GPU of one host: idle power and floor of one model differ by up to 60 W between sites. Full
compute power (the plateau) belongs to one job on that GPU as well. learner.py learns them; the state file keeps them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import orjson
from pydantic import TypeAdapter, ValidationError

from wattwatch.watcher.common.formatting import describe_invalid_value, format_count
from wattwatch.watcher.detection.baselines.profiles import PowerProfile, generic_profile
from wattwatch.watcher.detection.model import RankGpu

GpuId = tuple[str, str]  # node and GpuSample.key
UNIDENTIFIED_GPU: Final = "?"  # GpuSample.key of GPUs that report no identity: nothing is learned about them
MAX_WATTS: Final = 10_000.0  # of anything that can be read at all; larger values are corrupt
LIMIT_TOLERANCE_WATTS: Final = 0.5  # drivers round power limits
# Cooling, dust and rooms change. Half a year is chosen, not measured.
MAX_BASELINE_AGE_SECONDS: Final = 180 * 86400.0

# On every model with both figures known, a spinning GPU draws what an idle one with a context draws and at most this
# much more. The ratio matters on small GPUs, where 35 W is the whole range.
MAX_SPIN_ABOVE_IDLE_WATTS: Final = 35.0
MAX_SPIN_TO_IDLE_RATIO: Final = 1.35
# A GPU that draws more than this is between two kernels, not idle: no context on any model seen draws more.
HIGHEST_FLOOR_WATTS: Final = 290.0
HIGHEST_FLOOR_FRACTION: Final = 0.35  # of the power limit
# How far a verdict may rest on a floor that was observed on these very GPUs: the best source there is.
OBSERVED_FLOOR_CONFIDENCE: Final = 0.9

# Sites of one model idle up to a third apart; a GPU that idles with its clocks up is still below the profile's floor.
IDLE_SHARES: Final = (0.4, 2.0)
CONTEXT_ABOVE_FLOOR: Final = 1.25
# A context only adds power: less than this share of bare idle is a bad reading, not a floor.
CONTEXT_ABOVE_IDLE: Final = 0.8
# Work draws at least this much more than waiting. Power above the limit by more than this is not a reading of this GPU.
PLATEAU_ABOVE_FLOOR: Final = 1.25
PLATEAU_ABOVE_LIMIT: Final = 1.15
# GPUs that idle at low clocks (P8) draw far less than when they spin, and not every tool reports clocks. So a learned
# floor may lower the floor of the model's own profile only this far, that of the generic profile further.
MIN_FLOOR_SHARE: Final = 0.75
MIN_FLOOR_SHARE_GENERIC: Final = 0.5
# Where compute begins, as a share of the learned plateau: steady work varies by a few per cent between averages.
PLATEAU_LOWER_END: Final = 0.85
# From this ratio on, waiting and work can be told apart on any model.
MIN_PLATEAU_TO_FLOOR: Final = 1.6


class BaselineKind(StrEnum):
    IDLE = "idle"  # nobody uses the GPU: no process, only the driver's memory, 0 %
    CONTEXT = "context"  # memory in use, 0 %: before the first kernel, or idle between two steps
    PLATEAU = "plateau"  # busy while steps advance


class LearningPhase(StrEnum):
    """When the samples were taken. The values are stored (SQLite, recordings) and printed."""

    EMPTY = "with nothing running"
    START_UP = "at start-up"
    BETWEEN_STEPS = "at rest between steps"
    ADVANCING = "while steps advanced"


@dataclass(frozen=True, slots=True)
class Baseline:
    """One learned value and its grounds. Field names are part of the stored format."""

    node: str
    board: str  # GpuSample.key
    kind: BaselineKind
    job: str  # whose samples; a plateau is valid for this job only
    watts: float  # median of the samples
    samples: int
    phase: LearningPhase
    wall_seconds: float  # Unix time of the last sample
    name: str | None = None  # the GPU's model name at that time
    limit_watts: float | None = None
    energy_joules: float | None = None  # energy counter at that time; a smaller one means the driver was reloaded
    driver: str | None = None  # driver version at that time

    @property
    def key(self) -> str:
        """Row key of the store: one value per kind and GPU, of a plateau per job too."""
        job = self.job if self.kind is BaselineKind.PLATEAU else ""
        return orjson.dumps([self.node, self.board, self.kind, job]).decode()


@dataclass(frozen=True, slots=True)
class JobBaseline:
    """What was learned about the GPUs of one job at their limits. The classifier uses it instead of the model's
    profile."""

    profile: PowerProfile  # with idle power, floor and plateau replaced by learned values
    floors: Mapping[GpuId, float]  # most power when spinning or idle with a context; GPUs not in it: the profile's
    floor_source: str  # "GPUs that only wait draw up to 221 W, learned on this host ..."; "" where none was learned
    plateau_watts: float | None = None


class BaselineTable:
    """All learned values by GPU. Tracks which changed since they were last saved."""

    def __init__(self, values: Iterable[Baseline] = (), unusable_keys: Iterable[str] = ()) -> None:
        """`unusable_keys`: keys of stored rows that hold no usable value; they are deleted with the next save."""
        self._gpus: dict[GpuId, dict[str, Baseline]] = {}
        self._unsaved: dict[str, Baseline | None] = dict.fromkeys(unusable_keys)
        self.version = 0  # increases with every change
        for value in values:
            self._gpus.setdefault((value.node, value.board), {})[value.key] = value

    def for_gpu(self, gpu: GpuId) -> tuple[Baseline, ...]:
        return tuple(self._gpus.get(gpu, {}).values())

    def get(self, gpu: GpuId, kind: BaselineKind, job: str = "") -> Baseline | None:
        """`job` matters for a plateau only."""
        for value in self._gpus.get(gpu, {}).values():
            if value.kind is kind and (kind is not BaselineKind.PLATEAU or value.job == job):
                return value
        return None

    def values(self) -> tuple[Baseline, ...]:
        return tuple(value for gpu in self._gpus.values() for value in gpu.values())

    def put(self, value: Baseline) -> None:
        self._gpus.setdefault((value.node, value.board), {})[value.key] = value
        self._unsaved[value.key] = value
        self.version += 1

    def drop(self, value: Baseline) -> None:
        """The value is no longer valid and is learned again."""
        if self._gpus.get((value.node, value.board), {}).pop(value.key, None) is not None:
            self._unsaved[value.key] = None
            self.version += 1

    def unsaved(self, most: int | None = None) -> Mapping[str, bytes | None]:
        """Up to `most` changed rows for the store; None: delete the row."""
        changed = itertools.islice(self._unsaved.items(), most)
        return {key: None if value is None else orjson.dumps(value) for key, value in changed}

    def mark_saved(self, keys: Iterable[str]) -> None:
        for key in tuple(keys):
            self._unsaved.pop(key, None)


BASELINE_ADAPTER = TypeAdapter(Baseline)


def load_baselines(rows: Mapping[str, bytes], wall_seconds: float) -> tuple[BaselineTable, tuple[str, ...]]:
    """Stored rows as a table, and one sentence for each row that is unusable and is learned again. Rows older than
    MAX_BASELINE_AGE_SECONDS at `wall_seconds` (Unix time) are dropped silently."""
    values: list[Baseline] = []
    unusable: list[str] = []
    warnings: list[str] = []
    for key, content in rows.items():
        try:
            value = BASELINE_ADAPTER.validate_json(content)
        except (ValidationError, TypeError) as error:
            problem = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                problem = ": ".join((*map(str, first["loc"]), describe_invalid_value(first)))
            warnings.append(
                f"a stored power baseline cannot be read, so it is being learned again ({key[:100]}): {problem}"
            )
            unusable.append(key)
            continue
        if value.key != key or not is_valid_baseline(value):
            warnings.append(
                f"a stored power baseline is invalid, so it is being learned again ({key[:100]}): {value.watts:.0f} W"
            )
            unusable.append(key)
        elif value.wall_seconds < wall_seconds - MAX_BASELINE_AGE_SECONDS:
            unusable.append(key)
        else:
            values.append(value)
    return BaselineTable(values, unusable), tuple(warnings)


def is_valid_baseline(value: Baseline) -> bool:
    """The numbers are finite and in range."""
    numbers = (value.wall_seconds, value.limit_watts, value.energy_joules)
    finite = all(math.isfinite(number) for number in numbers if number is not None)
    return finite and 0 < value.watts < MAX_WATTS and value.samples >= 1


# What cannot be true is not learned.


def max_spin_watts(idle_watts: float) -> float:
    """The most a spinning GPU draws, given what it draws idle with a context."""
    return min(idle_watts + MAX_SPIN_ABOVE_IDLE_WATTS, MAX_SPIN_TO_IDLE_RATIO * idle_watts)


def implausible_reason(value: Baseline, base: PowerProfile, table: BaselineTable) -> str | None:
    """Why a value cannot be true of this GPU, given its profile `base` and what else was learned; None: it may be."""
    gpu = (value.node, value.board)
    watts = value.watts
    if watts <= 0:
        return "the GPU reported no power"
    model_known = base.name != generic_profile().name
    plateau = table.get(gpu, BaselineKind.PLATEAU, value.job)
    if value.kind is BaselineKind.PLATEAU:
        floor = expected_floor_watts(table, gpu, base)
        if watts < PLATEAU_ABOVE_FLOOR * floor:
            return f"{watts:.0f} W is too low for compute: this GPU draws up to {floor:.0f} W while it only waits"
        if value.limit_watts is not None and watts > PLATEAU_ABOVE_LIMIT * value.limit_watts:
            return f"{watts:.0f} W is above the power limit of {value.limit_watts:.0f} W"
        return None
    highest = HIGHEST_FLOOR_WATTS if value.limit_watts is None else HIGHEST_FLOOR_FRACTION * value.limit_watts
    least, most = 0.0, highest
    if value.kind is BaselineKind.IDLE:
        if model_known:
            least, most = IDLE_SHARES[0] * base.idle_watts, IDLE_SHARES[1] * base.idle_watts
    else:
        idle = table.get(gpu, BaselineKind.IDLE)
        least = 0.0 if idle is None else CONTEXT_ABOVE_IDLE * idle.watts
        most = CONTEXT_ABOVE_FLOOR * base.floor_watts if model_known else highest
    if not least <= watts <= most:
        kind = "idle power" if value.kind is BaselineKind.IDLE else "idle power with a CUDA context"
        return f"{watts:.0f} W is implausible as this GPU's {kind}: expected {least:.0f} to {most:.0f} W"
    if plateau is not None and PLATEAU_ABOVE_FLOOR * max_spin_watts(watts) > plateau.watts:
        return f"{watts:.0f} W is too close to the compute power of {plateau.watts:.0f} W"
    return None


# Learned values in place of the profile's.


def expected_floor_watts(table: BaselineTable, gpu: GpuId, base: PowerProfile) -> float:
    """The most a GPU draws when spinning or idle with a context: learned, else from the profile; never below what bare
    idle implies."""
    context, idle = table.get(gpu, BaselineKind.CONTEXT), table.get(gpu, BaselineKind.IDLE)
    if context is not None:
        return max(max_spin_watts(context.watts), _lowest_floor_watts(base))
    return base.floor_watts if idle is None else max(base.floor_watts, max_spin_watts(idle.watts))


def _lowest_floor_watts(base: PowerProfile) -> float:
    """The floor guessed for small GPUs is the highest of their class; others of that size idle at a tenth of the
    limit."""
    generic = generic_profile()
    if base.name != generic.name:
        return MIN_FLOOR_SHARE * base.floor_watts
    return MIN_FLOOR_SHARE_GENERIC * min(base.floor_watts, generic.floor_watts / generic.limit_watts * base.limit_watts)


def is_same_limit(value: Baseline, limit_watts: float | None) -> bool:
    if value.limit_watts is None or limit_watts is None:
        return value.limit_watts is limit_watts
    return abs(value.limit_watts - limit_watts) <= LIMIT_TOLERANCE_WATTS


def find_job_baseline(
    table: BaselineTable, job: str, gpus: Sequence[RankGpu], base: PowerProfile
) -> JobBaseline | None:
    """What was learned about these GPUs of a job. `base`: their profile at their limit. None: nothing was learned."""
    floors: dict[GpuId, float] = {}
    contexts: list[Baseline] = []
    idles: list[float] = []
    plateaus: list[float] = []
    for ranked in gpus:
        gpu = (ranked.node, ranked.gpu.key)
        context, idle = table.get(gpu, BaselineKind.CONTEXT), table.get(gpu, BaselineKind.IDLE)
        plateau = table.get(gpu, BaselineKind.PLATEAU, job)
        if context is not None or idle is not None:
            floors[gpu] = expected_floor_watts(table, gpu, base)
        if context is not None:
            contexts.append(context)
        if idle is not None:
            idles.append(idle.watts)
        if plateau is not None and is_same_limit(plateau, ranked.gpu.power_limit_watts):
            plateaus.append(plateau.watts)
    if not floors and not plateaus:
        return None
    half = len(gpus) / 2
    floor = statistics.median(floors.values()) if len(floors) >= half else base.floor_watts
    plateau_watts = statistics.median(plateaus) if len(plateaus) >= half else None
    if plateau_watts is not None and plateau_watts < PLATEAU_ABOVE_FLOOR * floor:
        plateau_watts = None
    profile = replace(base, floor_watts=floor, idle_watts=statistics.median(idles) if idles else base.idle_watts)
    if base.name == generic_profile().name and len(contexts) >= half:
        # A measured floor is better than one guessed from the limit, which may leave no gap below compute power.
        profile = replace(profile, certain=max(base.certain, generic_profile().certain))
    if plateau_watts is not None:
        profile = _with_plateau(profile, plateau_watts, floor_measured=len(contexts) >= half)
    source = _describe_floor_source(contexts, floor) if len(contexts) >= half else ""
    return JobBaseline(profile, floors, source, plateau_watts)


def _with_plateau(profile: PowerProfile, watts: float, *, floor_measured: bool) -> PowerProfile:
    """The power of the job's own compute is compute; a range that contains it was measured on other work."""
    communication, starvation = profile.communication, profile.starvation
    gap_is_sure = floor_measured and watts >= MIN_PLATEAU_TO_FLOOR * profile.floor_watts
    return replace(
        profile,
        compute_watts=PLATEAU_LOWER_END * watts,
        communication=None if communication is not None and watts <= communication.high_watts else communication,
        starvation=None if starvation is not None and watts <= starvation.high_watts else starvation,
        certain=max(profile.certain, OBSERVED_FLOOR_CONFIDENCE) if gap_is_sure else profile.certain,
    )


def _describe_floor_source(contexts: Sequence[Baseline], floor: float) -> str:
    where = "this host" if len({value.node for value in contexts}) == 1 else "these hosts"
    samples = round(statistics.median(value.samples for value in contexts))
    each = " per GPU" if len(contexts) > 1 else ""
    phases = " and ".join(sorted({value.phase.value for value in contexts}))
    count = format_count(samples, "sample")
    return f"GPUs that only wait draw up to {floor:.0f} W, learned on {where} from {count}{each} {phases}"
