"""Words that the terminal, the page and an alert share: ranks, counts and places, short enough for a pager however
large the job is, and text of other origin made harmless. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

RUNS_MOST: Final = 8
NODES_MOST: Final = 3
OF_SEVERAL: Final = {"has": "have", "is": "are", "waits": "wait"}
VERB: Final = re.compile(r"^(has|is|waits)\b|(?<= and )waits\b")
BREAKS: Final = str.maketrans(dict.fromkeys("\n\t", "\N{REPLACEMENT CHARACTER}"))
# Sentences of a capture's `missing` that many ranks or nodes may share.
SUBJECT: Final = re.compile(
    r"(?:\S+: )?rank (?P<rank>\d{1,9}): (?P<what>.+)|(?P<node>\S+): (?P<of_node>NCCL RAS.+)", re.DOTALL
)
OF_ONE: Final = re.compile(r"process \d+")
# Where one member of a group stands against a slot, by the value of its `Place`.
PLACE_WORDS: Final = {
    "waiting": "waits in it",
    "behind": "waits elsewhere",
    "silent": "in its own code",
    "ahead": "finished it",
    "absent": "no record",
}


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


def one_line(words: str) -> str:
    """As `printable`, where line ends and tabs would break what they stand in."""
    return printable(words).translate(BREAKS)


def agreeing(words: str, number: int) -> str:
    """What is said of one rank, said of `number`: `has not launched it` -> `have not launched it`."""
    return words if number == 1 else VERB.sub(lambda found: OF_SEVERAL[found[0]], words)


def capital(sentence: str) -> str:
    """A sentence begins with a capital letter, and nothing else of it changes."""
    return sentence[:1].upper() + sentence[1:]


def grouped_by_rank(sentences: Iterable[str]) -> list[str]:
    """`rank 0: no answer`, `node-02: rank 1: no answer` -> `2 ranks (0-1): no answer`; each in the place of its first.
    So with what nodes say of NCCL RAS. What differs from process to process, its number, is left out of those."""
    together: dict[str, list[tuple[str, re.Match[str] | None]]] = {}
    for sentence in sentences:
        found = SUBJECT.fullmatch(sentence)
        what = sentence if found is None else OF_ONE.sub("process", found["what"] or found["of_node"])
        together.setdefault(what, []).append((sentence, found))
    return [_of_all(what, rows) for what, rows in together.items()]


def _of_all(what: str, rows: list[tuple[str, re.Match[str] | None]]) -> str:
    ranks = {int(found["rank"]) for _, found in rows if found is not None and found["rank"]}
    nodes = dict.fromkeys(found["node"] for _, found in rows if found is not None and found["node"])
    if len(ranks) > 1:
        return f"{counted(len(ranks), 'rank')} ({ranks_in_words(ranks).partition(' ')[2]}): {what}"
    if len(nodes) > 1:
        more = f" and {len(nodes) - NODES_MOST:,} more" if len(nodes) > NODES_MOST else ""
        return f"{counted(len(nodes), 'node')} ({', '.join([*nodes][:NODES_MOST])}{more}): {what}"
    return rows[0][0]


def counted(number: int, what: str) -> str:
    """`1 rank`, `15 ranks`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
