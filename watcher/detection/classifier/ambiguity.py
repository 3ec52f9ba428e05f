"""The one observation that would decide between a verdict and its alternative, from the pairs of settle.toml.

Specific to what this picture lacks: a witness that is in sight is named with what it says now, another with where to
get it, and one that the asker has told already is passed over.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Final

from wattwatch.collectors.samples import ReadingStatus
from wattwatch.watcher.detection.model import JobSample, PowerState, Verdict

StatePair = frozenset[PowerState]
STEPS_SOURCE: Final = "steps"  # the only witness whose word a person can pass


@dataclass(frozen=True, slots=True)
class DecidingCheck:
    words: str
    sees: str | None  # witness: a key of `source`; None: a person looks


@dataclass(frozen=True, slots=True)
class AmbiguityTable:
    """settle.toml, typed."""

    pairs: Mapping[StatePair, tuple[DecidingCheck, ...]]
    otherwise: tuple[DecidingCheck, ...]  # of a pair without its own
    source: Mapping[str, str]  # witness -> where it comes from
    lack: Mapping[str, str]
    alone: Mapping[PowerState, str]


@cache
def ambiguity_table() -> AmbiguityTable:
    table = tomllib.loads(resources.files(__package__).joinpath("settle.toml").read_text("utf-8"))
    return AmbiguityTable(
        pairs={frozenset(map(PowerState, pair["between"])): _deciding_checks(pair) for pair in table["pair"]},
        otherwise=_deciding_checks(table["otherwise"]),
        source=table["source"],
        lack=table["lack"],
        alone={PowerState(state): words for state, words in table["alone"].items()},
    )


def _deciding_checks(pair: Mapping[str, Any]) -> tuple[DecidingCheck, ...]:
    return tuple(DecidingCheck(each["words"], each.get("sees")) for each in pair["observe"])


def with_deciding_check(verdict: Verdict, sample: JobSample, *, told: bool) -> Verdict:
    """The verdict with what would settle it. `told`: the asker has given a word on the steps."""
    words = deciding_check(verdict, sample, told=told)
    return verdict if words is None else replace(verdict, deciding_check=words)


def deciding_check(verdict: Verdict, sample: JobSample, *, told: bool = False) -> str | None:
    """One sentence without a full stop; None where no other reading stands and something is known."""
    state, other = verdict.state, verdict.alternative
    if other is None:
        return ambiguity_table().alone.get(state)
    observations = ambiguity_table().pairs.get(frozenset((state, other.state)), ambiguity_table().otherwise)
    untold = [o for o in observations if not (told and o.sees == STEPS_SOURCE)]
    words = _check_text(untold[0] if untold else observations[-1], sample)
    lack = _missing_reading(sample) if state is PowerState.UNKNOWN else None
    return words if lack is None else f"{words}; {lack}"


def _check_text(observation: DecidingCheck, sample: JobSample) -> str:
    if observation.sees is None:
        return observation.words
    seen = _current_reading(observation.sees, sample)
    if seen is not None:
        return f"{observation.words} ({seen})"
    return f"{observation.words}: {ambiguity_table().source[observation.sees]}"


def _current_reading(witness: str, sample: JobSample) -> str | None:
    """What the witness says in this picture; None where it is out of sight."""
    if witness == "steps":
        progress = sample.progress
        if progress.step is None:
            return None
        since = "" if progress.age_seconds is None else f", for {progress.age_seconds:.0f} s"
        return f"it stands at {progress.step:,}{since}"
    if witness == "files":
        return _checkpoint_reading(sample)
    if witness == "data_wait":
        waits = [s.data_wait_ms for s in sample.progress.sources if s.data_wait_ms is not None]
        return f"they say up to {max(waits):,.0f} ms a step" if waits else None
    listed = [node.processes for node in sample.nodes]
    known = [len(processes) for processes in listed if processes is not None]
    return f"{sum(known)} listed on {len(known)} of {len(listed)} nodes" if known else None


def _checkpoint_reading(sample: JobSample) -> str | None:
    if not sample.checkpoints:
        return None
    listing = min(sample.checkpoints, key=lambda each: each.age_seconds)
    if listing.error is not None:
        return f"{listing.directory}: {listing.error}"
    aged = [entry for entry in listing.entries if entry.age_seconds is not None]
    if not aged:
        return f"{listing.directory} holds none yet"
    newest = min(aged, key=lambda entry: entry.age_seconds or 0.0)
    return f"{newest.name}: {newest.bytes / 1e9:.1f} GB, last change {newest.age_seconds:.0f} s ago"


def _missing_reading(sample: JobSample) -> str | None:
    """Why watts and utilisation leave it open."""
    boards = [ranked.gpu for ranked in sample.gpus]
    if any(b.mig or b.reasons.get("utilization_percent") is ReadingStatus.MIG for b in boards):
        return ambiguity_table().lack["mig"]
    if 2 * sum(not b.power_watts for b in boards) > len(boards):
        return ambiguity_table().lack["power"]
    if 2 * sum(b.utilization_percent is None for b in boards) > len(boards):
        return ambiguity_table().lack["utilization"]
    if not any(b.name or b.power_limit_watts for b in boards):
        return ambiguity_table().lack["floor"]
    return None
