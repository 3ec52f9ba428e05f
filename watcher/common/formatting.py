"""Numbers, times, ranks and foreign text as people read them: in alerts, on the page, in the terminal and in reports.

Pure functions. A value that is unknown is formatted as a dash, never as 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

UNKNOWN_TEXT: Final = "–"
# Below this many seconds a duration keeps one decimal: 1.4 s and 2.4 s differ, 61.4 s and 62.4 s need not. Chosen at
# 9.95 rather than 10, so that 9.96 does not become "10.0 s". web/assets/page.js counts ages up by the same rules.
SECONDS_WITH_DECIMAL: Final = 9.95
DURATION_UNITS: Final = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))

MAX_RANK_RANGES: Final = 8  # chosen so that one line of a pager holds the ranks of any job
MAX_NODES_LISTED: Final = 3
MAX_VALUE_LENGTH: Final = 80  # of a wrong value that an error quotes
PLURAL_VERBS: Final = {"has": "have", "is": "are", "waits": "wait"}
SINGULAR_VERB: Final = re.compile(r"^(has|is|waits)\b|(?<= and )(waits|is|has)\b")
LINE_BREAKS: Final = str.maketrans(dict.fromkeys("\n\t", "\N{REPLACEMENT CHARACTER}"))
# Lines of a capture's `missing` list that many ranks or nodes may have in common.
RANK_OR_NODE_SENTENCE: Final = re.compile(
    r"(?:\S+: )?rank (?P<rank>\d{1,9}): (?P<what>.+)|(?P<node>\S+): (?P<of_node>NCCL RAS.+)", re.DOTALL
)
PROCESS_NUMBER: Final = re.compile(r"process \d+")
# What the ranks in one row of a process group do, by the value of their `MemberState`.
MEMBER_STATE_TEXT: Final = {
    "waiting": "waits in this collective",
    "behind": "waits in another operation",
    "silent": "not in a collective",
    "ahead": "finished this collective",
    "absent": "no record",
}


# Quantities


def format_duration(seconds: float | None) -> str:
    """The two largest units: "1.4 s", "42 s", "12 min 5 s", "3 h 20 min", "2 d 4 h". Negative values count as 0."""
    if seconds is None or seconds != seconds or seconds == float("inf"):
        return UNKNOWN_TEXT
    seconds = max(0.0, seconds)
    if seconds < SECONDS_WITH_DECIMAL:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    for (name, size), (smaller_name, smaller_size) in pairwise(DURATION_UNITS):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {name}" + (f" {rest} {smaller_name}" if rest else "")
    return f"{whole} s"


def format_hours(hours: float) -> str:
    """Three significant digits, which is enough to act on: "0.42", "12.5", "130"."""
    return f"{hours:.2f}" if hours < 10 else f"{hours:.1f}" if hours < 100 else f"{hours:.0f}"


def format_energy(kilowatt_hours: float) -> str:
    """ "48 Wh", "2.25 kWh"."""
    return f"{kilowatt_hours * 1000:.0f} Wh" if kilowatt_hours < 1 else f"{format_hours(kilowatt_hours)} kWh"


def format_number(value: float | None) -> str:
    """A whole number with separators: "30,849"."""
    return UNKNOWN_TEXT if value is None else f"{value:,.0f}"


def format_percent(fraction: float | None) -> str:
    """A fraction from 0 to 1 as "97 %"."""
    return UNKNOWN_TEXT if fraction is None else f"{fraction:.0%}".replace("%", " %")


def format_bytes(value: float | None) -> str:
    """ "62 GB"; decimal units, as vendors of disks and GPUs count."""
    if value is None:
        return UNKNOWN_TEXT
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def format_utc_time(wall_seconds: float) -> str:
    """ "2026-08-20 10:15:00 UTC"."""
    return datetime.fromtimestamp(wall_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# Ranks, nodes and counts


def format_count(number: int, noun: str) -> str:
    """ "1 rank", "15 ranks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# Types of pydantic's errors -> what a person should have written. The library's own words name Python's types ("Input
# should be a valid tuple"), which say nothing to the author of a TOML file.
EXPECTED_BY_ERROR_TYPE: Final[Mapping[str, str]] = {
    "string_type": "text",
    "string_sub_type": "text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "none_required": "no value",
    "tuple_type": "a list",
    "list_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "iterable_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "dataclass_type": "a table",
    "mapping_type": "a table",
    "path_type": "a path",
    "enum": "one of {expected}",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "string_too_short": "at least {min_length}",
    "string_too_long": "at most {max_length}",
    "too_short": "at least {min_length}",
    "too_long": "at most {max_length}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "url_parsing": "a URL",
    "url_scheme": "a URL that begins with {expected_schemes}",
    "date_parsing": "a date",
    "datetime_parsing": "a date and time",
}
LENGTH_NOUNS: Final = {"string_too_short": "character", "string_too_long": "character"}


def describe_invalid_value(error: Mapping[str, Any]) -> str:
    """What is wrong with a value, from one error of pydantic: "expected a list, got 5"."""
    if error["type"] in ("value_error", "assertion_error"):
        return str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if error["type"] == "missing":
        return "missing"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return "unknown key"
    if error["type"] == "json_invalid":
        return f"not valid JSON: {error['ctx']['error']}"
    expected = EXPECTED_BY_ERROR_TYPE.get(str(error["type"]))
    value = single_line(repr(error.get("input")))
    got = value if len(value) <= MAX_VALUE_LENGTH else f"{value[:MAX_VALUE_LENGTH]}..."
    if expected is None:
        return f"not a valid value: {got}"
    details = {
        name: format_count(value, LENGTH_NOUNS.get(str(error["type"]), "item"))
        if name in ("min_length", "max_length")
        else f"{value:g}"
        if isinstance(value, float)
        else value
        for name, value in error.get("ctx", {}).items()
    }
    return f"expected {expected.format(**details)}, got {got}"


def format_ranks(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0-7, 9"; after MAX_RANK_RANGES ranges, how many more ranks there are."""
    ranges: list[list[int]] = []
    unique = sorted(set(ranks))
    for rank in unique:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    shown = [str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in ranges[:MAX_RANK_RANGES]]
    hidden = sum(map(len, ranges[MAX_RANK_RANGES:]))
    more = f" and {hidden:,} more" if hidden else ""
    return f"{'rank' if len(unique) == 1 else 'ranks'} {', '.join(shown) or 'none'}{more}"


def describe_unseen(gpus: Iterable[tuple[str, int | None, str]]) -> list[str]:
    """(node, rank, why) of GPUs without a reading -> one clause per node and reason: "ranks 8-15 on node-2: node does
    not answer"."""
    groups: dict[tuple[str, str], list[int | None]] = {}
    for node, rank, why in gpus:
        groups.setdefault((node, why), []).append(rank)
    clauses = []
    for (node, why), ranks in groups.items():
        known = [rank for rank in ranks if rank is not None]
        who = format_ranks(known) if len(known) == len(ranks) else format_count(len(ranks), "GPU")
        clauses.append(f"{who} on {node}: {why}")
    return clauses


def agree_with_count(text: str, number: int) -> str:
    """A text about one rank, made to fit `number` ranks: "has not launched it" -> "have not launched it"."""
    return text if number == 1 else SINGULAR_VERB.sub(lambda found: PLURAL_VERBS[found[0]], text)


def group_by_rank(sentences: Iterable[str]) -> list[str]:
    """Merges sentences that differ only in the rank or node they are about.

    "rank 0: no answer", "node-02: rank 1: no answer" -> "2 ranks (0-1): no answer", in the place of the first of them.
    Process ids, which differ from rank to rank, are left out of a merged sentence.
    """
    groups: dict[str, list[tuple[str, re.Match[str] | None]]] = {}
    for sentence in sentences:
        found = RANK_OR_NODE_SENTENCE.fullmatch(sentence)
        what = sentence if found is None else PROCESS_NUMBER.sub("process", found["what"] or found["of_node"])
        groups.setdefault(what, []).append((sentence, found))
    return [_merged_sentence(what, rows) for what, rows in groups.items()]


def _merged_sentence(what: str, rows: list[tuple[str, re.Match[str] | None]]) -> str:
    ranks = {int(found["rank"]) for _, found in rows if found is not None and found["rank"]}
    nodes = dict.fromkeys(found["node"] for _, found in rows if found is not None and found["node"])
    if len(ranks) > 1:
        return f"{format_count(len(ranks), 'rank')} ({format_ranks(ranks).partition(' ')[2]}): {what}"
    if len(nodes) > 1:
        more = f" and {len(nodes) - MAX_NODES_LISTED:,} more" if len(nodes) > MAX_NODES_LISTED else ""
        return f"{format_count(len(nodes), 'node')} ({', '.join([*nodes][:MAX_NODES_LISTED])}{more}): {what}"
    return rows[0][0]


# Text of foreign origin


def replace_unprintable(text: str) -> str:
    """Replaces control characters. Names come from dumps of any origin: an escape sequence would drive the terminal,
    and a right-to-left override would turn what follows around. Line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def single_line(text: str) -> str:
    """As `replace_unprintable`, and with line ends and tabs replaced too: for a text inside a line or a table cell."""
    return replace_unprintable(text).translate(LINE_BREAKS)


def capitalize_first(sentence: str) -> str:
    """With a capital letter at the beginning, and nothing else changed (`str.capitalize` would lower "NCCL")."""
    return sentence[:1].upper() + sentence[1:]
