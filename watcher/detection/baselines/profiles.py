"""Power of a GPU model when it idles, waits and works: shipped profiles (profiles.toml), with what was measured and
published of them (measurements.toml), or the user's own.

`profile_for` finds the profile of a model at its power limit; `user_profile_for` the user's [[profiles]] table, which
comes first where it matches.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Final

# Power of memory and clocks does not shrink with the limit: on small GPUs idling with a context takes up to 0.6 of it
# (T4 0.59, K80 0.57, A10 0.44, L4 0.4), which leaves no gap between waiting and work.
SMALL_LIMIT_WATTS: Final = 150.0
SMALL_FLOOR_SHARE: Final = 0.6
SMALL_COMPUTE_SHARE: Final = 0.9
SMALL_CONFIDENCE: Final = 0.3
# The user states the middle of the range of communication; the published measurement spreads about this much around it.
COMMUNICATION_SPREAD: Final = 0.1
# compute_watts is the lower end of compute power: the plateau itself is higher by this ratio.
PLATEAU_LOWER_SHARE: Final = 0.85
MEASUREMENT_TOLERANCE: Final = 0.03  # GPUs of one model that do the same work differ by a few per cent


@dataclass(frozen=True, slots=True)
class PowerBand:
    low_watts: float
    high_watts: float

    def __contains__(self, watts: float) -> bool:
        return self.low_watts <= watts <= self.high_watts

    def __str__(self) -> str:
        low, high = f"{self.low_watts:,.0f}", f"{self.high_watts:,.0f}"
        return f"{low} W" if low == high else f"{low}-{high} W"


@dataclass(frozen=True, slots=True)
class PowerProfile:
    """One GPU model at one power limit. `scaled` gives the same model at another limit."""

    name: str
    match: str  # regular expression on the GPU's name
    limit_watts: float
    idle_watts: float  # no process
    floor_watts: float  # the most when spinning in a collective or idle with a context
    compute_watts: float  # lower end of compute power
    communication: PowerBand | None
    starvation: PowerBand | None
    light: tuple[PowerBand, ...]  # where healthy training on this model was seen below compute power
    certain: float  # 0..1: how far a verdict may rest on these figures alone
    source: str
    bands_from: str = ""  # model whose bands were scaled to this one; "": its own, or none
    bands_certain: float = 1.0  # 0..1: how far a verdict may rest on the bands

    def matches(self, name: str) -> bool:
        return re.search(self.match, name) is not None

    def scaled(self, limit_watts: float | None) -> PowerProfile:
        """The profile at another power limit. Idle power and floor are properties of the silicon and stay; what is
        above them moves with the range between floor and limit."""
        if limit_watts is None or limit_watts == self.limit_watts or limit_watts <= self.floor_watts:
            return self
        ratio = (limit_watts - self.floor_watts) / (self.limit_watts - self.floor_watts)

        def move(watts: float) -> float:
            return self.floor_watts + (watts - self.floor_watts) * ratio

        def band(old: PowerBand | None) -> PowerBand | None:
            return None if old is None else PowerBand(move(old.low_watts), move(old.high_watts))

        return replace(
            self,
            limit_watts=limit_watts,
            compute_watts=move(self.compute_watts),
            communication=band(self.communication),
            starvation=band(self.starvation),
            light=tuple(PowerBand(move(each.low_watts), move(each.high_watts)) for each in self.light),
        )


@cache
def shipped_profiles() -> tuple[PowerProfile, ...]:
    """The rows of profiles.toml in order; the last one matches every GPU. Models whose bands were never measured get
    those of `bands_from`, scaled."""
    table = tomllib.loads(resources.files(__package__).joinpath("profiles.toml").read_text("utf-8"))
    rows = _read_rows(table["profile"])
    scaled = table["scaled"]
    measured = next(row for row in rows if row.name == scaled["bands_from"])
    measured = replace(measured, communication=PowerBand(*scaled["communication_watts"]))
    return tuple(
        row if row.communication else with_scaled_bands(measured, row, float(scaled["certain"])) for row in rows
    )


def with_scaled_bands(measured: PowerProfile, model: PowerProfile, certain: float) -> PowerProfile:
    """`model` with the bands of `measured`, each at the same fraction of the way from floor to limit."""

    def move(watts: float) -> float:
        share = (watts - measured.floor_watts) / (measured.limit_watts - measured.floor_watts)
        return model.floor_watts + share * (model.limit_watts - model.floor_watts)

    def band(old: PowerBand | None) -> PowerBand | None:
        return None if old is None else PowerBand(move(old.low_watts), move(old.high_watts))

    return replace(
        model,
        communication=band(measured.communication),
        starvation=model.starvation or band(measured.starvation),
        bands_from=measured.name,
        bands_certain=certain,
    )


# What was published about a model: the grounds of its profile


@dataclass(frozen=True, slots=True)
class PowerMeasurement:
    """Power that was published for a GPU model in a known state."""

    profile: str  # name of the profile
    state: str  # "idle", "context", "waiting", "checkpoint", "starvation", "communication" or "compute"
    watts: PowerBand
    above_idle: bool  # the watts are what the state adds to idle power
    limit_watts: float | None  # None: not published
    gpus: int | None
    what: str
    source: str


@cache
def published_measurements() -> tuple[PowerMeasurement, ...]:
    """The rows of measurements.toml in order."""
    return tuple(
        PowerMeasurement(
            profile=row["profile"],
            state=row["state"],
            watts=PowerBand(*map(float, row["watts"])),
            above_idle=row.get("above_idle", False),
            limit_watts=row.get("limit_watts"),
            gpus=row.get("gpus"),
            what=row["what"],
            source=row["source"],
        )
        for row in _measurements_table()["measurement"]
    )


@cache
def _measurements_table() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("measurements.toml").read_text("utf-8"))


def reasons_for_wider_ranges(profile_name: str) -> dict[str, str]:
    """By state: why the range that is used is wider than what was measured. Empty for models without such reasons."""
    return dict(_measurements_table()["widened"].get(profile_name, {}))


def describe_widened_range(profile: PowerProfile, state: str, watts: float) -> str | None:
    """A clause that says where `state` was measured on this model, if `watts` are counted as `state` only because its
    range was widened; else None. Only for the shipped ranges at the limit at which they were measured."""
    shipped = next((each for each in shipped_profiles() if each.name == profile.name), None)
    if shipped is None or state not in reasons_for_wider_ranges(profile.name):
        return None
    if (shipped.limit_watts, shipped.compute_watts) != (profile.limit_watts, profile.compute_watts):
        return None
    measured = [
        each.watts
        for each in published_measurements()
        if (each.profile, each.state, each.above_idle) == (profile.name, state, False)
    ]
    slack = MEASUREMENT_TOLERANCE * watts
    if not measured or any(band.low_watts - slack <= watts <= band.high_watts + slack for band in measured):
        return None
    *first, last = (str(band) for band in sorted(measured, key=lambda band: band.low_watts))
    ranges = f"{', '.join(each.removesuffix(' W') for each in first)} and {last}" if first else last
    return (
        f"on this model {state} was measured at {ranges}, and the range is wider than that: see "
        f"`wattwatch profiles {profile.name}`"
    )


def _read_rows(rows: list[dict[str, Any]]) -> tuple[PowerProfile, ...]:
    return tuple(
        PowerProfile(
            name=row["name"],
            match=row["match"],
            limit_watts=float(row["limit_watts"]),
            idle_watts=float(row["idle_watts"]),
            floor_watts=float(row["floor_watts"]),
            compute_watts=float(row["compute_watts"]),
            communication=PowerBand(*row["communication_watts"]) if "communication_watts" in row else None,
            starvation=PowerBand(*row["starvation_watts"]) if "starvation_watts" in row else None,
            light=(PowerBand(*row["light_watts"]),) if "light_watts" in row else (),
            certain=float(row["certain"]),
            source=row["source"],
        )
        for row in rows
    )


def generic_profile() -> PowerProfile:
    """The row that matches every GPU: fractions of the limit, to be scaled."""
    return shipped_profiles()[-1]


def find_profile(model: str) -> PowerProfile | None:
    """The shipped profile of a GPU model as a person writes it: the name of a profile ("h100-pcie") or of a GPU, in any
    case ("B300", "nvidia b300 sxm6 ac"). None for a model without one; the generic profile by its name only."""
    text = model.strip()
    for profile in shipped_profiles():
        if text.lower() == profile.name:
            return profile
    for profile in shipped_profiles()[:-1]:
        if any(profile.matches(each) for each in (text, text.upper(), f"RTX {text}")):
            return profile
    return None


def unknown_model_text(model: str) -> str:
    names = ", ".join(profile.name for profile in shipped_profiles())
    return f"there is no power profile for {model!r}; choose one of {names}"


@cache
def highest_communication_watts() -> float:
    """The most power that communication takes on any GPU model with a profile, measured or scaled."""
    return max(band.high_watts for each in shipped_profiles() if (band := each.communication) is not None)


@cache
def profile_for(name: str | None, limit_watts: float | None) -> PowerProfile:
    """The shipped profile of a GPU model at its limit. An unknown model gets the generic one, scaled as a whole."""
    for profile in shipped_profiles()[:-1]:
        if name is not None and profile.matches(name):
            return profile.scaled(limit_watts)
    generic = generic_profile()
    if limit_watts is None:
        return generic
    if limit_watts <= SMALL_LIMIT_WATTS:
        generic = replace(
            generic,
            floor_watts=SMALL_FLOOR_SHARE * generic.limit_watts,
            compute_watts=SMALL_COMPUTE_SHARE * generic.limit_watts,
            communication=None,
            starvation=None,
            certain=SMALL_CONFIDENCE,
        )
    share = limit_watts / generic.limit_watts

    def band(old: PowerBand | None) -> PowerBand | None:
        return None if old is None else PowerBand(old.low_watts * share, old.high_watts * share)

    return replace(
        generic,
        limit_watts=limit_watts,
        idle_watts=generic.idle_watts * share,
        floor_watts=generic.floor_watts * share,
        compute_watts=generic.compute_watts * share,
        communication=band(generic.communication),
        starvation=band(generic.starvation),
    )


@dataclass(frozen=True, slots=True)
class UserProfile:
    """A [[profiles]] table of the user. Watts at `limit_watts`; None is taken from the shipped profile."""

    name: str
    match: str  # regular expression on the GPU's name
    limit_watts: float
    idle_watts: float
    floor_watts: float
    compute_watts: float | None = None
    communication_watts: float | None = None

    def matches(self, gpu_name: str) -> bool:
        return re.search(self.match, gpu_name) is not None

    def profile_for_gpu(self, gpu_name: str | None) -> PowerProfile:
        """The profile at `limit_watts`: bands and certainty of the shipped profile for a GPU of this name, each figure
        at the same fraction of the way from floor to limit. None, and a name without a shipped profile: of the generic
        one."""
        return _merge_with_shipped(self, gpu_name)


@cache
def _merge_with_shipped(own: UserProfile, gpu_name: str | None) -> PowerProfile:
    shipped = profile_for(gpu_name, own.limit_watts)

    def move(watts: float) -> float:
        share = (watts - shipped.floor_watts) / (shipped.limit_watts - shipped.floor_watts)
        return own.floor_watts + share * (own.limit_watts - own.floor_watts)

    def band(old: PowerBand | None) -> PowerBand | None:
        if old is None or _is_compute(own, shipped, old):
            return None
        return PowerBand(move(old.low_watts), move(old.high_watts))

    profile = replace(
        shipped,
        name=own.name,
        match=own.match,
        limit_watts=own.limit_watts,
        idle_watts=own.idle_watts,
        floor_watts=own.floor_watts,
        compute_watts=move(shipped.compute_watts) if own.compute_watts is None else own.compute_watts,
        communication=band(shipped.communication),
        starvation=band(shipped.starvation),
        light=tuple(PowerBand(move(each.low_watts), move(each.high_watts)) for each in shipped.light),
        source="wattwatch.toml",
    )
    middle = own.communication_watts
    if middle is None:
        return profile
    measured = PowerBand(middle * (1 - COMMUNICATION_SPREAD), middle * (1 + COMMUNICATION_SPREAD))
    return replace(profile, communication=measured, bands_from="", bands_certain=1.0)


def _is_compute(own: UserProfile, shipped: PowerProfile, band: PowerBand) -> bool:
    """The user's compute power is inside a shipped band, or below it: the band was measured on other work."""
    if own.compute_watts is None or abs(own.compute_watts - shipped.compute_watts) < 1.0:
        return False
    return own.compute_watts / PLATEAU_LOWER_SHARE <= band.high_watts


def user_profile_for(profiles: Sequence[UserProfile], gpu_name: str | None) -> PowerProfile | None:
    """The first of the user's profiles that matches this GPU; None: use the shipped one."""
    if gpu_name is None:
        return None
    return next((own.profile_for_gpu(gpu_name) for own in profiles if own.matches(gpu_name)), None)
