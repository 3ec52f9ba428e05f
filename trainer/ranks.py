"""Which ranks: `3`, `0-7`, `0-3,8`; and what launchers say of world and rank in the environment."""

from __future__ import annotations

import os
from typing import Any, Final

import click

# torchrun's names first, then srun's
WORLD_VARIABLES: Final = ("WORLD_SIZE", "SLURM_NTASKS")
RANK_VARIABLES: Final = ("RANK", "SLURM_PROCID")


class RanksOption(click.ParamType[tuple[int, ...]]):
    """A set of ranks, in order."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        ranks: set[int] = set()
        for part in str(value).split(","):
            first, _, last = part.partition("-")
            if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
                self.fail(f"{part!r} is no range of ranks: write 3, 0-7 or 0-3,8", param, ctx)
            if int(last or first) >= 1_000_000:
                self.fail(f"{part!r}: no such rank", param, ctx)
            ranks.update(range(int(first), int(last or first) + 1))
        return tuple(sorted(ranks))


def select_ranks(world: int, ranks: tuple[int, ...] | None) -> tuple[int, ...]:
    """The ranks asked for, else the launcher's, else all. Raises click.BadParameter for one outside the world."""
    if ranks is None:
        own = next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name, "").isdecimal()), None)
        ranks = tuple(range(world)) if own is None else (int(own),)
    if ranks[-1] >= world:
        raise click.BadParameter(f"rank {ranks[-1]} is outside a world of {world}", param_hint="'--ranks'")
    return ranks


def format_rank_list(ranks: tuple[int, ...] | list[int]) -> str:
    """`rank 3`, `ranks 0-7, 9`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'ranks' if len(set(ranks)) > 1 else 'rank'} {words}"
