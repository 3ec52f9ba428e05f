"""Amounts and times in words, as messages and reports write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final


def format_hours(hours: float) -> str:
    """Three digits are enough to decide on."""
    return f"{hours:.2f}" if hours < 10 else f"{hours:.1f}" if hours < 100 else f"{hours:.0f}"


def format_energy(kilowatt_hours: float) -> str:
    """ "48 Wh", "2.25 kWh"."""
    return f"{kilowatt_hours * 1000:.0f} Wh" if kilowatt_hours < 1 else f"{format_hours(kilowatt_hours)} kWh"


def duration(seconds: float) -> str:
    """ "42 s", "12 min 5 s", "3 h 20 min", "2 d 4 h": the two largest units."""
    whole = max(0, round(seconds))
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for (name, size), (smaller_name, smaller) in pairwise(units):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {name}" + (f" {rest} {smaller_name}" if rest else "")
    return f"{whole} s"


# Numbers as people read them. What is not known is a dash.

UNKNOWN_TEXT: Final = "–"
MINUTE: Final = 60.0
HOUR: Final = 3600.0
DAY: Final = 86_400.0


def page_duration(seconds: float | None) -> str:
    """1.4 s, 48 s, 3 min 20 s, 2 h 05 min, 3 d 4 h."""
    if seconds is None or seconds != seconds or seconds == float("inf"):
        return UNKNOWN_TEXT
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest:02} s" if minutes < 10 else f"{minutes} min"
    if whole < DAY:
        hours, rest = divmod(whole, 3600)
        return f"{hours} h {rest // 60:02} min"
    days, rest = divmod(whole, 86_400)
    return f"{days} d {rest // 3600} h"


def format_number(value: float | None) -> str:
    """30,849."""
    return UNKNOWN_TEXT if value is None else f"{value:,.0f}"


def format_percent(value: float | None) -> str:
    """97 %, of 0..1."""
    return UNKNOWN_TEXT if value is None else f"{value:.0%}".replace("%", " %")


def format_bytes(value: float | None) -> str:
    """62 GB."""
    if value is None:
        return UNKNOWN_TEXT
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def format_utc_time(wall_seconds: float) -> str:
    """2026-08-20 10:15:00 UTC."""
    return datetime.fromtimestamp(wall_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# Words that the terminal, the page and an alert share: ranks, counts and places, short enough for a pager however
# large the job is, and text of other origin made harmless. Pure.

MAX_RANK_RANGES: Final = 8
MAX_NODES_LISTED: Final = 3
PLURAL_VERBS: Final = {"has": "have", "is": "are", "waits": "wait"}
SINGULAR_VERB: Final = re.compile(r"^(has|is|waits)\b|(?<= and )waits\b")
LINE_BREAKS: Final = str.maketrans(dict.fromkeys("\n\t", "\N{REPLACEMENT CHARACTER}"))
# Sentences of a capture's `missing` that many ranks or nodes may share.
RANK_OR_NODE_SENTENCE: Final = re.compile(
    r"(?:\S+: )?rank (?P<rank>\d{1,9}): (?P<what>.+)|(?P<node>\S+): (?P<of_node>NCCL RAS.+)", re.DOTALL
)
PROCESS_NUMBER: Final = re.compile(r"process \d+")
# Where one member of a group stands against a slot, by the value of its `Place`.
MEMBER_STATE_TEXT: Final = {
    "waiting": "waits in it",
    "behind": "waits elsewhere",
    "silent": "in its own code",
    "ahead": "finished it",
    "absent": "no record",
}


def format_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-7, 9`; past RUNS_MOST runs the number of the others."""
    runs: list[list[int]] = []
    every = sorted(set(ranks))
    for rank in every:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:MAX_RANK_RANGES]]
    rest = sum(map(len, runs[MAX_RANK_RANGES:]))
    more = f" and {rest:,} more" if rest else ""
    return f"{'rank' if len(every) == 1 else 'ranks'} {', '.join(shown) or 'none'}{more}"


def replace_unprintable(words: str) -> str:
    """Names come from dumps of any origin: nothing in them that a terminal obeys, and nothing that turns what is read
    around. Line ends and tabs stay."""
    if words.isprintable():
        return words
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in words)


def single_line(words: str) -> str:
    """As `printable`, where line ends and tabs would break what they stand in."""
    return replace_unprintable(words).translate(LINE_BREAKS)


def agree_with_count(words: str, number: int) -> str:
    """What is said of one rank, said of `number`: `has not launched it` -> `have not launched it`."""
    return words if number == 1 else SINGULAR_VERB.sub(lambda found: PLURAL_VERBS[found[0]], words)


def capitalize_first(sentence: str) -> str:
    """A sentence begins with a capital letter, and nothing else of it changes."""
    return sentence[:1].upper() + sentence[1:]


def group_by_rank(sentences: Iterable[str]) -> list[str]:
    """`rank 0: no answer`, `node-02: rank 1: no answer` -> `2 ranks (0-1): no answer`; each in the place of its first.
    So with what nodes say of NCCL RAS. What differs from process to process, its number, is left out of those."""
    together: dict[str, list[tuple[str, re.Match[str] | None]]] = {}
    for sentence in sentences:
        found = RANK_OR_NODE_SENTENCE.fullmatch(sentence)
        what = sentence if found is None else PROCESS_NUMBER.sub("process", found["what"] or found["of_node"])
        together.setdefault(what, []).append((sentence, found))
    return [_merged_sentence(what, rows) for what, rows in together.items()]


def _merged_sentence(what: str, rows: list[tuple[str, re.Match[str] | None]]) -> str:
    ranks = {int(found["rank"]) for _, found in rows if found is not None and found["rank"]}
    nodes = dict.fromkeys(found["node"] for _, found in rows if found is not None and found["node"])
    if len(ranks) > 1:
        return f"{format_count(len(ranks), 'rank')} ({format_ranks(ranks).partition(' ')[2]}): {what}"
    if len(nodes) > 1:
        more = f" and {len(nodes) - MAX_NODES_LISTED:,} more" if len(nodes) > MAX_NODES_LISTED else ""
        return f"{format_count(len(nodes), 'node')} ({', '.join([*nodes][:MAX_NODES_LISTED])}{more}): {what}"
    return rows[0][0]


def format_count(number: int, what: str) -> str:
    """`1 rank`, `15 ranks`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
