"""Ranks and counts in words, short enough for a pager however large the job is. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

RUNS_MOST: Final = 8
OF_SEVERAL: Final = {"has": "have", "is": "are", "waits": "wait"}
VERB: Final = re.compile(r"^(has|is|waits)\b|(?<= and )waits\b")


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
    more = f" and {rest:,} more" if rest else ""
    return f"{'rank' if len(every) == 1 else 'ranks'} {', '.join(shown) or 'none'}{more}"


def printable(words: str) -> str:
    """Names come from dumps of any origin: nothing in them that a terminal obeys, and nothing that turns what is read
    around. Line ends and tabs stay."""
    if words.isprintable():
        return words
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in words)


def agreeing(words: str, number: int) -> str:
    """What is said of one rank, said of `number`: `has not launched it` -> `have not launched it`."""
    return words if number == 1 else VERB.sub(lambda found: OF_SEVERAL[found[0]], words)


def capital(sentence: str) -> str:
    """A sentence begins with a capital letter, and nothing else of it changes."""
    return sentence[:1].upper() + sentence[1:]


SUBJECT: Final = re.compile(r"rank (\d{1,9}): (.+)", re.DOTALL)


def grouped_by_rank(sentences: Iterable[str]) -> list[str]:
    """`rank 0: no answer`, `rank 1: no answer` -> `2 ranks (0-1): no answer`; each in the place of its first."""
    ranks: dict[str, list[int]] = {}
    for sentence in sentences:
        found = SUBJECT.fullmatch(sentence)
        about, of = (found[2], [int(found[1])]) if found else (sentence, [])
        ranks.setdefault(about, []).extend(of)
    return [_of_all(about, of) for about, of in ranks.items()]


def _of_all(about: str, ranks: list[int]) -> str:
    if len(ranks) < 2:
        return f"rank {ranks[0]}: {about}" if ranks else about
    return f"{counted(len(set(ranks)), 'rank')} ({ranks_in_words(ranks).partition(' ')[2]}): {about}"


def counted(number: int, what: str) -> str:
    """`1 rank`, `15 ranks`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
