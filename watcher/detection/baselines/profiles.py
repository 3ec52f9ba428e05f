"""What a board draws when it idles, waits and works: shipped profiles (profiles.toml), or a user's own."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Final

# What memory and clocks cost does not shrink with the limit: on small boards resting with a context takes up to 0.6 of
# it (T4 0.59, K80 0.57, A10 0.44, L4 0.4), and leaves no room for watts to tell waiting from work.
SMALL_LIMIT_WATTS: Final = 150.0
SMALL_FLOOR_SHARE: Final = 0.6
SMALL_COMPUTE_SHARE: Final = 0.72
SMALL_CONFIDENCE: Final = 0.3


@dataclass(frozen=True, slots=True)
class PowerBand:
    low_watts: float
    high_watts: float

    def __contains__(self, watts: float) -> bool:
        return self.low_watts <= watts <= self.high_watts


@dataclass(frozen=True, slots=True)
class PowerProfile:
    """One board at one limit. `scaled` gives the same board at another."""

    name: str
    match: str  # regex on the board's name
    limit_watts: float
    idle_watts: float  # no process
    floor_watts: float  # at most this when spinning in a collective or waiting with a context
    compute_watts: float  # lower end of plain compute
    communication: PowerBand | None
    starvation: PowerBand | None
    light: tuple[PowerBand, ...]  # where healthy training of this board was seen below its compute plateau
    certain: float  # 0..1: how far a verdict may rest on these numbers alone
    source: str
    bands_from: str = ""  # the bands are those of this board, scaled; "": its own, or none
    bands_certain: float = 1.0  # 0..1: how far a verdict may rest on the bands

    def matches(self, name: str) -> bool:
        return re.search(self.match, name) is not None

    def scaled(self, limit_watts: float | None) -> PowerProfile:
        """For a board with another power limit. Idle and floor are silicon and stay; what is above them moves with
        the room between floor and limit."""
        if limit_watts is None or limit_watts == self.limit_watts or limit_watts <= self.floor_watts:
            return self
        room = (limit_watts - self.floor_watts) / (self.limit_watts - self.floor_watts)

        def move(watts: float) -> float:
            return self.floor_watts + (watts - self.floor_watts) * room

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
    """The table of profiles.toml, in order; the last one matches every board. Boards whose bands nobody has measured
    get those of `bands_from`, scaled."""
    table = tomllib.loads(resources.files(__package__).joinpath("profiles.toml").read_text("utf-8"))
    rows = _rows(table["profile"])
    scaled = table["scaled"]
    measured = next(row for row in rows if row.name == scaled["bands_from"])
    measured = replace(measured, communication=PowerBand(*scaled["communication_watts"]))
    return tuple(
        row if row.communication else with_scaled_bands(measured, row, float(scaled["certain"])) for row in rows
    )


def with_scaled_bands(measured: PowerProfile, board: PowerProfile, certain: float) -> PowerProfile:
    """`board` with the bands of `measured`: each lies at the same share of the way from floor to limit."""

    def move(watts: float) -> float:
        share = (watts - measured.floor_watts) / (measured.limit_watts - measured.floor_watts)
        return board.floor_watts + share * (board.limit_watts - board.floor_watts)

    def band(old: PowerBand | None) -> PowerBand | None:
        return None if old is None else PowerBand(move(old.low_watts), move(old.high_watts))

    return replace(
        board,
        communication=band(measured.communication),
        starvation=board.starvation or band(measured.starvation),
        bands_from=measured.name,
        bands_certain=certain,
    )


def _rows(rows: list[dict[str, Any]]) -> tuple[PowerProfile, ...]:
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
    """The row that matches every board: shares of the limit, to be scaled."""
    return shipped_profiles()[-1]


@cache
def profile_for(name: str | None, limit_watts: float | None) -> PowerProfile:
    """The shipped profile of a board, at its limit. An unknown board gets the generic one, scaled as a whole."""
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


# The user's own numbers for a board, in place of the shipped ones: what they do not say stays as it is shipped.

# A user names the middle of the communication band; the paper's own reading spreads about this much around it.
COMMUNICATION_SPREAD: Final = 0.1
# compute_watts is the lower end of a plateau: the plateau itself lies this much of it higher.
PLATEAU_LOWER_SHARE: Final = 0.85


@dataclass(frozen=True, slots=True)
class UserProfile:
    """What a [[profiles]] table says. Watts at `limit_watts`; None is as shipped."""

    name: str
    match: str  # regex on the board's name
    limit_watts: float
    idle_watts: float
    floor_watts: float
    compute_watts: float | None = None
    communication_watts: float | None = None

    def matches(self, board: str) -> bool:
        return re.search(self.match, board) is not None

    def of_board(self, board: str | None) -> PowerProfile:
        """The profile at `limit_watts`: bands and certainty of the shipped profile for a board of this name, each
        watt at the same share of the way from floor to limit. None, and a name that nothing is shipped for: of the
        generic one."""
        return _of_board(self, board)


@cache
def _of_board(own: UserProfile, board: str | None) -> PowerProfile:
    shipped = profile_for(board, own.limit_watts)

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
    """The user's own plateau lies in a band that was measured on other work, or below it."""
    if own.compute_watts is None or abs(own.compute_watts - shipped.compute_watts) < 1.0:
        return False
    return own.compute_watts / PLATEAU_LOWER_SHARE <= band.high_watts


def user_profile_for(profiles: Sequence[UserProfile], board: str | None) -> PowerProfile | None:
    """The first that matches this board; None: none does, and the shipped one holds."""
    if board is None:
        return None
    return next((own.of_board(board) for own in profiles if own.matches(board)), None)
