"""What a field of a flight record must be, checked whole columns at a time. Standard library only: the child loads it.

Values are another machine's, perhaps a hostile user's: types are compared exactly (True is no number), numbers must fit
64 bits, text is cut down to what can be printed, and no value is ever shown in a message.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Final

NOTHING: Final = type(None)
LONGEST_TEXT: Final = 4096  # a path; names of groups and operations are far shorter

KINDS: Final = {
    int: "a whole number",
    float: "a number with a fraction",
    str: "text",
    bool: "true or false",
    list: "a list",
    tuple: "a tuple",
    dict: "a table",
    bytes: "bytes",
    NOTHING: "nothing",
}


class Malformed(ValueError):
    """What was decoded is no flight record. The message is a sentence: which field, what it is, what it should be."""


def kind(value: object) -> str:
    return KINDS.get(type(value), "something else")


def wrong(field: str, value: object, expected: str) -> Malformed:
    return Malformed(f"{field} is {kind(value)} where {expected} was expected")


def expect(field: str, value: Any, *types: type) -> Any:
    """The value, when its type is exactly one of these."""
    if type(value) not in types:
        raise wrong(field, value, " or ".join(KINDS[each] for each in types))
    return value


def expect_column(field: str, values: Sequence[object], *types: type) -> None:
    """All values of one field of the entries, in order."""
    if not set(map(type, values)) <= set(types):
        at, value = next((i, value) for i, value in enumerate(values) if type(value) not in types)
        raise wrong(f"entries[{at}].{field}", value, " or ".join(KINDS[each] for each in types))


def expect_all(field: str, values: Iterable[object], *types: type) -> None:
    """What is inside lists: no place is told."""
    for found in set(map(type, values)) - set(types):
        raise Malformed(f"{field} holds {KINDS.get(found, 'something else')} where {KINDS[types[0]]} was expected")


def expect_range(field: str, values: Iterable[int]) -> None:
    try:
        array("q", values)  # the fastest way to look at many
    except OverflowError:
        raise Malformed(f"{field} holds a number that does not fit 64 bits") from None


def text(field: str, value: Any) -> str:
    """Printable: no line ends, no terminal codes, no half characters."""
    expect(field, value, str)
    if len(value) > LONGEST_TEXT:
        raise Malformed(f"{field} is a text of {len(value):,} characters where at most {LONGEST_TEXT:,} were expected")
    return value if value.isprintable() else "".join(c if c.isprintable() else "?" for c in value)


def flat(lists: Iterable[Iterable[Any]]) -> chain[Any]:
    return chain.from_iterable(lists)
