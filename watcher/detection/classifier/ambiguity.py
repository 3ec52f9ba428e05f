"""The one check that tells a verdict and its alternative apart, from the pairs of ambiguity.toml.

It fits what the sample contains: a source that can be read is quoted with what it shows now, another with how to get
it, and what the user has already answered is skipped.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Final

from wattwatch.collectors.samples import ReadingStatus
from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.detection.model import JobSample, PowerState, Verdict

StatePair = frozenset[PowerState]
STEPS_SOURCE: Final = "steps"  # the only source that the user can answer for, with --progress
MODEL_SOURCE: Final = "model"  # asked for only where the sample names neither a model nor a power limit


@dataclass(frozen=True, slots=True)
class DecidingCheck:
    text: str
    source: str | None  # a key of `AmbiguityTable.sources`; None: a person has to look


@dataclass(frozen=True, slots=True)
class AmbiguityTable:
    """ambiguity.toml, typed."""

    pairs: Mapping[StatePair, tuple[DecidingCheck, ...]]
    otherwise: tuple[DecidingCheck, ...]  # for pairs that are not listed
    sources: Mapping[str, str]  # source -> how to get its answer
    missing: Mapping[str, str]
    alone: Mapping[PowerState, str]


@cache
def ambiguity_table() -> AmbiguityTable:
    table = tomllib.loads(resources.files(__package__).joinpath("ambiguity.toml").read_text("utf-8"))
    return AmbiguityTable(
        pairs={frozenset(map(PowerState, pair["between"])): _read_checks(pair) for pair in table["pair"]},
        otherwise=_read_checks(table["otherwise"]),
        sources=table["source"],
        missing=table["missing"],
        alone={PowerState(state): text for state, text in table["alone"].items()},
    )


def _read_checks(row: Mapping[str, Any]) -> tuple[DecidingCheck, ...]:
    return tuple(DecidingCheck(each["text"], each.get("source")) for each in row["checks"])


def with_deciding_check(
    verdict: Verdict, sample: JobSample, *, steps_reported: bool, model_known: bool = False
) -> Verdict:
    """The verdict with its deciding check. `steps_reported`: the user has said whether steps advance. `model_known`:
    what the GPUs draw is known, even if the sample does not name their model."""
    text = deciding_check(verdict, sample, steps_reported=steps_reported, model_known=model_known)
    return verdict if text is None else replace(verdict, deciding_check=text)


def deciding_check(
    verdict: Verdict, sample: JobSample, *, steps_reported: bool = False, model_known: bool = False
) -> str | None:
    """One sentence without a full stop; None where there is no alternative and the state is known."""
    state, other = verdict.state, verdict.alternative
    if other is None:
        return ambiguity_table().alone.get(state)
    checks = ambiguity_table().pairs.get(frozenset((state, other.state)), ambiguity_table().otherwise)
    answered = {STEPS_SOURCE} if steps_reported else set()
    if model_known or names_model(sample):
        answered.add(MODEL_SOURCE)
    unanswered = [check for check in checks if check.source not in answered]
    text = _check_text(unanswered[0] if unanswered else checks[-1], sample)
    asks_for_model = bool(unanswered) and unanswered[0].source == MODEL_SOURCE
    missing = _missing_reading(sample) if state is PowerState.UNKNOWN and not asks_for_model else None
    return text if missing is None else f"Because {missing}, {text[0].lower()}{text[1:]}"


def _check_text(check: DecidingCheck, sample: JobSample) -> str:
    if check.source is None:
        return check.text
    reading = _current_reading(check.source, sample)
    if reading is not None:
        return f"{check.text} ({reading})"
    return f"{check.text} ({ambiguity_table().sources[check.source]})"


def _current_reading(source: str, sample: JobSample) -> str | None:
    """What the source shows in this sample; None where it cannot be read."""
    if source == STEPS_SOURCE:
        progress = sample.progress
        if progress.step is None:
            return None
        since = "" if progress.age_seconds is None else f", last changed {progress.age_seconds:.0f} s ago"
        return f"now at step {progress.step:,}{since}"
    if source == MODEL_SOURCE:
        return None
    if source == "files":
        return _checkpoint_reading(sample)
    if source == "data_wait":
        waits = [s.data_wait_ms for s in sample.progress.sources if s.data_wait_ms is not None]
        return f"ranks report waits of up to {max(waits):,.0f} ms per step" if waits else None
    listed = [node.processes for node in sample.nodes]
    known = [len(processes) for processes in listed if processes is not None]
    if not known:
        return None
    found = f"{sum(known)} process{'' if sum(known) == 1 else 'es'} found"
    return f"{found}; processes can be listed on {len(known)} of {format_count(len(listed), 'node')}"


def _checkpoint_reading(sample: JobSample) -> str | None:
    if not sample.checkpoints:
        return None
    listing = min(sample.checkpoints, key=lambda each: each.age_seconds)
    if listing.error is not None:
        return f"{listing.directory}: {listing.error}"
    aged = [entry for entry in listing.entries if entry.age_seconds is not None]
    if not aged:
        return f"{listing.directory} contains no checkpoint yet"
    newest = min(aged, key=lambda entry: entry.age_seconds or 0.0)
    return f"newest: {newest.name}, {newest.bytes / 1e9:.1f} GB, last changed {newest.age_seconds:.0f} s ago"


def _missing_reading(sample: JobSample) -> str | None:
    """Why power and utilization cannot decide."""
    gpus = [ranked.gpu for ranked in sample.gpus]
    missing = ambiguity_table().missing
    if any(g.mig or g.reasons.get("utilization_percent") is ReadingStatus.MIG for g in gpus):
        return missing["mig"]
    if 2 * sum(not g.power_watts for g in gpus) > len(gpus):
        return missing["power"]
    if 2 * sum(g.utilization_percent is None for g in gpus) > len(gpus):
        return missing["utilization"]
    return None if names_model(sample) else missing["floor"]


def names_model(sample: JobSample) -> bool:
    """Whether some GPU of the sample has a model name or a power limit: without either, its watts mean nothing."""
    return any(ranked.gpu.name or ranked.gpu.power_limit_watts for ranked in sample.gpus)
