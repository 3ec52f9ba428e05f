"""Ranks in words: "rank 3", "ranks 0-2, 5 and 9", "1,021 ranks"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

MOST_SPANS: Final = 4


def ranks_words(ranks: Iterable[int]) -> str:
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    spans = _spans(ordered)
    if len(spans) > MOST_SPANS:
        return f"{len(ordered):,} ranks"
    words = [_span_words(first, last) for first, last in spans]
    return f"ranks {words[0]}" if len(words) == 1 else f"ranks {', '.join(words[:-1])} and {words[-1]}"


def _spans(ordered: list[int]) -> list[tuple[int, int]]:
    spans = [(ordered[0], ordered[0])]
    for rank in ordered[1:]:
        first, last = spans[-1]
        if rank == last + 1:
            spans[-1] = (first, rank)
        else:
            spans.append((rank, rank))
    return spans


def _span_words(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}-{last}" if last > first + 1 else f"{first}, {last}"
