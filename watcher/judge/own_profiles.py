"""The user's own numbers for a board, in place of the shipped ones: what they do not say stays as it is shipped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from watcher.judge.profiles import Band, Profile, profile_for

# A user names the middle of the communication band; the paper's own reading spreads about this much around it.
COMMUNICATION_SPREAD: Final = 0.1
# compute_watts is the lower end of a plateau: the plateau itself lies this much of it higher.
LOWER_END_SHARE: Final = 0.85


@dataclass(frozen=True, slots=True)
class OwnProfile:
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

    def of_board(self, board: str | None) -> Profile:
        """The profile at `limit_watts`: bands and certainty of the shipped profile for a board of this name, each
        watt at the same share of the way from floor to limit. None, and a name that nothing is shipped for: of the
        generic one."""
        return _of_board(self, board)


@cache
def _of_board(own: OwnProfile, board: str | None) -> Profile:
    shipped = profile_for(board, own.limit_watts)

    def move(watts: float) -> float:
        share = (watts - shipped.floor_watts) / (shipped.limit_watts - shipped.floor_watts)
        return own.floor_watts + share * (own.limit_watts - own.floor_watts)

    def band(old: Band | None) -> Band | None:
        if old is None or _is_compute(own, shipped, old):
            return None
        return Band(move(old.low_watts), move(old.high_watts))

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
        light=tuple(Band(move(each.low_watts), move(each.high_watts)) for each in shipped.light),
        source="wattwatch.toml",
    )
    middle = own.communication_watts
    if middle is None:
        return profile
    measured = Band(middle * (1 - COMMUNICATION_SPREAD), middle * (1 + COMMUNICATION_SPREAD))
    return replace(profile, communication=measured, bands_from="", bands_certain=1.0)


def _is_compute(own: OwnProfile, shipped: Profile, band: Band) -> bool:
    """The user's own plateau lies in a band that was measured on other work, or below it."""
    if own.compute_watts is None or abs(own.compute_watts - shipped.compute_watts) < 1.0:
        return False
    return own.compute_watts / LOWER_END_SHARE <= band.high_watts


def own_profile(profiles: Sequence[OwnProfile], board: str | None) -> Profile | None:
    """The first that matches this board; None: none does, and the shipped one holds."""
    if board is None:
        return None
    return next((own.of_board(board) for own in profiles if own.matches(board)), None)
