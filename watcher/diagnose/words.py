"""Ranks and counts in words, short enough for a pager however large the job is. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

RUNS_MOST: Final = 8


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-7, 9`; past RUNS_MOST runs the number of the others."""
    runs: list[list[int]] = []
    every = sorted(set(ranks))
    for rank in every:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:RUNS_MOST]]
    rest = sum(map(len, runs[RUNS_MOST:]))
    more = f" and {rest} more" if rest else ""
    return f"{'rank' if len(every) == 1 else 'ranks'} {', '.join(shown) or 'none'}{more}"


def printable(words: str) -> str:
    """Names come from dumps of any origin: nothing in them that a terminal obeys, and nothing that turns what is read
    around. Line ends and tabs stay."""
    if words.isprintable():
        return words
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in words)


def counted(number: int, what: str) -> str:
    """`1 rank`, `15 ranks`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
