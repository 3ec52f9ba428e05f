"""Which ranks a command works on: the option `--ranks 0-7`, or the rank that a launcher put into the environment."""

from __future__ import annotations

import os
from typing import Any, Final

import click

# torchrun's names first: under `srun torchrun` both are set, and Slurm counts its own tasks, not ranks.
WORLD_VARIABLES: Final = ("WORLD_SIZE", "SLURM_NTASKS")
RANK_VARIABLES: Final = ("RANK", "SLURM_PROCID")
MAX_RANK: Final = 1_000_000  # chosen: a typing error such as 0-1000000000 must not fill the memory


class RanksOption(click.ParamType[tuple[int, ...]]):
    """A set of ranks such as `3`, `0-7` or `0-3,8`, as a sorted tuple."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        ranks: set[int] = set()
        for part in str(value).split(","):
            first, _, last = part.partition("-")
            if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
                self.fail(
                    f"{part!r} is not a rank or a range of ranks: write, for example, '3', '0-7' or '0-3,8'", param, ctx
                )
            if int(last or first) >= MAX_RANK:
                self.fail(f"{part!r}: ranks must be below {MAX_RANK:,}", param, ctx)
            ranks.update(range(int(first), int(last or first) + 1))
        return tuple(sorted(ranks))


def select_ranks(world: int, ranks: tuple[int, ...] | None) -> tuple[int, ...]:
    """The ranks that were asked for; without any, the rank in the environment; without that, all ranks of the world.

    Raises click.BadParameter for a rank outside the world.
    """
    if ranks is None:
        rank = next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name, "").isdecimal()), None)
        ranks = tuple(range(world)) if rank is None else (int(rank),)
    if ranks[-1] >= world:
        raise click.BadParameter(
            f"rank {ranks[-1]} does not exist: the highest rank of this job is {world - 1}", param_hint="'--ranks'"
        )
    return ranks
