"""A diagnosis for people at a terminal, from its document. Names in it come from dumps of any origin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from watcher.diagnose.document import culprits_first
from watcher.diagnose.words import PLACE_WORDS, agreeing, grouped_by_rank, one_line, ranks_in_words

COLOURS: Final = {0: "green", 1: "yellow", 2: "red", 3: "magenta"}
GROUPS_MOST: Final = 3
ROWS_MOST: Final = 12
WAITS_MOST: Final = 6
MISSING_MOST: Final = 8


def show(source: str, document: Mapping[str, Any], code: int) -> None:
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    proven = "proven by the records" if document["conclusive"] else f"confidence {document['confidence']:.2f}"
    cause = plain(document.get("cause") or "unknown")
    sure = "" if document.get("nothing_open") else f" ({proven}; cause: {cause})"
    console.print(f"[bold]{plain(source)}[/]: [bold {COLOURS[code]}]{plain(headline(document))}[/]{sure}")
    console.print(f"  who       {plain(document.get('summary') or '')}")
    console.print(f"  why       {plain(document['why'])}")
    for side, words in (("agrees", True), ("against", False)):
        sources = [each["source"] for each in document.get("testimonies", ()) if each["agrees"] is words]
        if sources:
            console.print(f"  {side:<9} {plain(', '.join(sources))}")
    console.print(f"  next      {plain(document.get('advice') or '')}")
    for group in document["groups"][:GROUPS_MOST]:
        _group(console, group)
    _waits(console, document.get("waits", ()), document["culprits"])
    _stacks(console, document.get("stacks", ()))
    _logs(console, document.get("logs", ()))
    _missing(console, document)


def headline(document: Mapping[str, Any]) -> str:
    """The verdict in capitals; that it is unknown is no word for a job that moves, nor where somebody is named."""
    if document.get("nothing_open"):
        return "NO HANG"
    verdict = str(document["verdict"])
    return "SUSPECTED" if verdict == "unknown" and document["culprits"] else verdict.replace("_", " ").upper()


def plain(words: object) -> str:
    """Without what a terminal would obey, and without markup."""
    return escape(one_line(str(words)))


def _group(console: Console, group: Mapping[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("  WHERE", "COLLECTIVE", "RANKS", "LINE"):
        table.add_column(title, overflow="fold")  # a path is told whole, however narrow the terminal
    for row in group["members"][:ROWS_MOST]:
        cells = (
            PLACE_WORDS.get(row["place"], row["place"]),
            row["operation"] or "-",
            ranks_in_words(row["ranks"]),
            row["line"] or "-",
        )
        first, *rest = map(plain, cells)
        table.add_row(f"  {first}", *rest)
    console.print(f"\n{plain(group['group'])} ({group['size']:,} ranks), slot {group['slot']:,}")
    console.print(table)
    if len(group["members"]) > ROWS_MOST:
        console.print(f"  {len(group['members']) - ROWS_MOST:,} more rows: see --json")


def _waits(console: Console, waits: Sequence[Mapping[str, Any]], culprits: Sequence[int]) -> None:
    """Those that wait for a culprit first."""
    if not waits:
        return
    waits = culprits_first(waits, culprits)
    console.print("\nwho waits for whom")
    for wait in waits[:WAITS_MOST]:
        waiting, awaited = ranks_in_words(wait["ranks"]), ranks_in_words(wait["awaited"])
        verb = "waits" if len(wait["ranks"]) == 1 else "wait"
        why = agreeing(str(wait["why"]), len(wait["awaited"]))
        what = f"{wait['operation']} at slot {wait['slot']:,} of {wait['group']}"
        console.print(f"  {waiting} {verb} in {plain(what)} for {awaited}, which {plain(why)}")
    if len(waits) > WAITS_MOST:
        console.print(f"  {len(waits) - WAITS_MOST:,} more: see --json")


def _stacks(console: Console, stacks: Iterable[Mapping[str, Any]]) -> None:
    for each in stacks:
        console.print(f"\nrank {each['rank']} stands at ({plain(each['source'])}, innermost first)")
        for frame in each["frames"]:
            line = "" if frame["line"] is None else f":{frame['line']}"
            console.print(f"  {plain(frame['function'])} ({plain(frame['file'])}{line})")


def _logs(console: Console, logs: Iterable[Mapping[str, Any]]) -> None:
    for each in logs:
        console.print(f"\nrank {each['rank']} printed last ({plain(each['source'])})")
        for line in each["lines"]:
            console.print(f"  {plain(line)}")


def _missing(console: Console, document: Mapping[str, Any]) -> None:
    unread = [f"{each['source']}: {each['why']}" for each in document.get("unread", ())]
    lines = [*grouped_by_rank(map(str, document.get("missing", ()))), *unread]
    if lines:
        console.print("\nmissing")
    for line in lines[:MISSING_MOST]:
        console.print(f"  {plain(line)}")
    if len(lines) > MISSING_MOST:
        console.print(f"  {len(lines) - MISSING_MOST:,} more: see --json")
