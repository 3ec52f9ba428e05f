"""Rank numbers, counts and sizes as text."""

from __future__ import annotations

from collections.abc import Iterable


def format_rank_list(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-7, 9`."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'ranks' if len(ordered) > 1 else 'rank'} {text}"


def format_count(number: int, noun: str) -> str:
    """`1 rank`, `1,500 ranks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_all(number: int, noun: str) -> str:
    """`the only step is`, `all 1,500 steps are`."""
    return f"the only {noun} is" if number == 1 else f"all {format_count(number, noun)} are"


def format_bytes_short(count: float | None) -> str:
    """`62.0 GB`, `4.2 MB`; `unknown` for None."""
    if count is None:
        return "unknown"
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
