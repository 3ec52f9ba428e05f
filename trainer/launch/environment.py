"""The environment of ranks and gate: what the table says, and above it what the job's owner says."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from trainer.plain import from_plain

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Name:
    """Of a variable, in the torch releases from `since` to before `until`; "" is no bound."""

    name: str
    since: str = ""
    until: str = ""

    def known(self, torch: Version | None) -> bool:
        if torch is None:
            return True
        return (not self.since or version(self.since) <= torch) and (not self.until or torch < version(self.until))


@dataclass(frozen=True, slots=True)
class Variable:
    """A row of environment.toml. All names mean the same to a torch that knows them."""

    names: tuple[Name, ...]
    value: str
    why: str
    source: str


@cache
def variables() -> tuple[Variable, ...]:
    text = resources.files("trainer.launch").joinpath("environment.toml").read_text()
    return tuple(from_plain(Variable, row) for row in tomllib.loads(text)["variable"])


def version(text: str) -> Version:
    """`2.13.0+cpu` and `2.13.0a0` are (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def installed_torch() -> Version | None:
    """Here, which the gate compares with the nodes'; None: this host has none, and the nodes' is not known."""
    try:
        return version(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return None


def rank_environment(owner: Mapping[str, str], flight: str, torch: Version | None) -> dict[str, str]:
    """`owner` is [launch.environment]; `flight` the prefix of flight-recorder dumps.

    torch reads the new name first: had we set that one, the owner's old one would mean nothing. So a name that the
    owner sets rules its row.
    """
    found: dict[str, str] = {}
    for row in variables():
        given = next((owner[one.name] for one in row.names if one.name in owner), row.value.replace("{flight}", flight))
        found |= {one.name: given for one in row.names if one.known(torch)}
    return found | dict(owner)
