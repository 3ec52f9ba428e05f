"""What a board draws when it idles, waits and works: shipped profiles (profiles.toml), or a user's own."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Final

# What memory and clocks cost does not shrink with the limit: on small boards resting with a context takes up to 0.6 of
# it (T4 0.59, K80 0.57, A10 0.44, L4 0.4), and leaves no room for watts to tell waiting from work.
SMALL_LIMIT_WATTS: Final = 150.0
SMALL_FLOOR_SHARE: Final = 0.6
SMALL_COMPUTE_SHARE: Final = 0.72
SMALL_CERTAIN: Final = 0.3


@dataclass(frozen=True, slots=True)
class Band:
    low_watts: float
    high_watts: float

    def __contains__(self, watts: float) -> bool:
        return self.low_watts <= watts <= self.high_watts


@dataclass(frozen=True, slots=True)
class Profile:
    """One board at one limit. `scaled` gives the same board at another."""

    name: str
    match: str  # regex on the board's name
    limit_watts: float
    idle_watts: float  # no process
    floor_watts: float  # at most this when spinning in a collective or waiting with a context
    compute_watts: float  # lower end of plain compute
    communication: Band | None
    starvation: Band | None
    light: tuple[Band, ...]  # where healthy training of this board was seen below its compute plateau
    certain: float  # 0..1: how far a verdict may rest on these numbers alone
    source: str
    bands_from: str = ""  # the bands are those of this board, scaled; "": its own, or none
    bands_certain: float = 1.0  # 0..1: how far a verdict may rest on the bands

    def matches(self, name: str) -> bool:
        return re.search(self.match, name) is not None

    def scaled(self, limit_watts: float | None) -> Profile:
        """For a board with another power limit. Idle and floor are silicon and stay; what is above them moves with
        the room between floor and limit."""
        if limit_watts is None or limit_watts == self.limit_watts or limit_watts <= self.floor_watts:
            return self
        room = (limit_watts - self.floor_watts) / (self.limit_watts - self.floor_watts)

        def move(watts: float) -> float:
            return self.floor_watts + (watts - self.floor_watts) * room

        def band(old: Band | None) -> Band | None:
            return None if old is None else Band(move(old.low_watts), move(old.high_watts))

        return replace(
            self,
            limit_watts=limit_watts,
            compute_watts=move(self.compute_watts),
            communication=band(self.communication),
            starvation=band(self.starvation),
            light=tuple(Band(move(each.low_watts), move(each.high_watts)) for each in self.light),
        )


@cache
def shipped_profiles() -> tuple[Profile, ...]:
    """The table of profiles.toml, in order; the last one matches every board. Boards whose bands nobody has measured
    get those of `bands_from`, scaled."""
    table = tomllib.loads(resources.files(__package__).joinpath("profiles.toml").read_text("utf-8"))
    rows = _rows(table["profile"])
    scaled = table["scaled"]
    measured = next(row for row in rows if row.name == scaled["bands_from"])
    measured = replace(measured, communication=Band(*scaled["communication_watts"]))
    return tuple(row if row.communication else with_bands_of(measured, row, float(scaled["certain"])) for row in rows)


def with_bands_of(measured: Profile, board: Profile, certain: float) -> Profile:
    """`board` with the bands of `measured`: each lies at the same share of the way from floor to limit."""

    def move(watts: float) -> float:
        share = (watts - measured.floor_watts) / (measured.limit_watts - measured.floor_watts)
        return board.floor_watts + share * (board.limit_watts - board.floor_watts)

    def band(old: Band | None) -> Band | None:
        return None if old is None else Band(move(old.low_watts), move(old.high_watts))

    return replace(
        board,
        communication=band(measured.communication),
        starvation=board.starvation or band(measured.starvation),
        bands_from=measured.name,
        bands_certain=certain,
    )


def _rows(rows: list[dict[str, Any]]) -> tuple[Profile, ...]:
    return tuple(
        Profile(
            name=row["name"],
            match=row["match"],
            limit_watts=float(row["limit_watts"]),
            idle_watts=float(row["idle_watts"]),
            floor_watts=float(row["floor_watts"]),
            compute_watts=float(row["compute_watts"]),
            communication=Band(*row["communication_watts"]) if "communication_watts" in row else None,
            starvation=Band(*row["starvation_watts"]) if "starvation_watts" in row else None,
            light=(Band(*row["light_watts"]),) if "light_watts" in row else (),
            certain=float(row["certain"]),
            source=row["source"],
        )
        for row in rows
    )


def generic_profile() -> Profile:
    """The row that matches every board: shares of the limit, to be scaled."""
    return shipped_profiles()[-1]


@cache
def profile_for(name: str | None, limit_watts: float | None) -> Profile:
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
            certain=SMALL_CERTAIN,
        )
    share = limit_watts / generic.limit_watts

    def band(old: Band | None) -> Band | None:
        return None if old is None else Band(old.low_watts * share, old.high_watts * share)

    return replace(
        generic,
        limit_watts=limit_watts,
        idle_watts=generic.idle_watts * share,
        floor_watts=generic.floor_watts * share,
        compute_watts=generic.compute_watts * share,
        communication=band(generic.communication),
        starvation=band(generic.starvation),
    )
