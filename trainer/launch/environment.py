"""The environment of ranks and gate: what the table says, and above it what the job's owner says."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from trainer.plain import from_plain


@dataclass(frozen=True, slots=True)
class Variable:
    """A row of environment.toml. All names mean the same to torch."""

    names: tuple[str, ...]
    value: str
    why: str
    source: str


@cache
def variables() -> tuple[Variable, ...]:
    text = resources.files("trainer.launch").joinpath("environment.toml").read_text()
    return tuple(from_plain(Variable, row) for row in tomllib.loads(text)["variable"])


def rank_environment(owner: Mapping[str, str], flight: str) -> dict[str, str]:
    """`owner` is [launch.environment]; `flight` the prefix of flight-recorder dumps.

    torch reads the new name first: had we set that one, the owner's old one would mean nothing. So a name that the
    owner sets rules its row.
    """
    found: dict[str, str] = {}
    for row in variables():
        chosen = next((owner[name] for name in row.names if name in owner), row.value.replace("{flight}", flight))
        found |= dict.fromkeys(row.names, chosen)
    return found | dict(owner)
