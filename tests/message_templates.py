"""The texts that the product composes for people, found in its source, and the rules that each must obey.

A number without a unit, or "all ranks" without how many were seen, cannot be checked by whoever reads it at night. So:

- a placeholder for a number has a unit or a noun beside it ("640 W", "4 of 8 GPUs", "rank 3");
- "all", "every", "none", "no" and "nobody" with GPUs, ranks, nodes, hosts, processes or workers come with the count
  that they were computed from ("all 8 GPUs", "none of 16 ranks"). What a named source lists is counted by naming it
  ("the report names no rank"), and instructions are not statements ("give every rank as many batches").
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PRODUCT: Final = Path(__file__).parent.parent
# Folders whose texts state what was measured. Settings, help texts and labels of the simulated cluster do not.
STATEMENTS: Final = (
    "collectors/*.py",
    "collectors/*.toml",
    "collectors/probe/*.py",
    "collectors/smi/*",
    "collectors/ssh/*.py",
    "watcher/alerting/**/*.py",
    "watcher/common/*.py",
    "watcher/detection/**/*",
    "watcher/diagnosis/**/*",
    "watcher/engine/*.py",
    "watcher/incidents/*.py",
    "watcher/recordings/*.py",
    "watcher/web/*.py",
    "watcher/web/templates/*",
    "watcher/cli/status.py",
    "watcher/cli/triage.py",
    "watcher/cli/replay.py",
)
MIN_WORDS: Final = 3
# Values of these keys, arguments and names are instructions, sources, patterns or labels of fields, not statements.
NOT_STATEMENTS: Final = re.compile(
    r"advice|help|description|next_step|deciding|source|note|pattern|regex|query|usage|example|question|_file\b", re.I
)
# Instructions, and a table of published facts whose texts are labels.
NOT_STATEMENT_FILES: Final = ("next_steps.toml", "ambiguity.toml", "measurements.toml")
PLACEHOLDER: Final = "\ue000"  # private use: cannot be in a text

_QUANTIFIER: Final = re.compile(
    r"\b(all|every|no|none of|nobody|no one)\b"
    r"(?P<between>(?: (?:of|the|these|those|its|their|other|single|one|unseen|healthy|busy|working|more))*)"
    r"(?P<noun> (?:GPU|rank|node|host|process|worker)(?:s|es)?\b"
    r"(?! (?:reading|model|row|query|state|group|socket|log)))?",
    re.I,
)
_SOURCE_VERB: Final = re.compile(
    r"\b(lists?|listed|reports?|reported|names?|named|contains?|has|have|had|finds?|found|gives?|knows?|shows?|read)$"
)
# "no process of the job is running on 4 nodes", "No GPU could be read from 12 rows"
_EXTENT: Final = re.compile(rf"(?: [\w-]+)* (?:on|of|from|in) (?:(?:any|the|its|of) )*{PLACEHOLDER}")
_NUMBER: Final = re.compile(r"^[<>=^+ ]?\d*,?(?:\.\d+)?[df%g]$|^,$")
_COUNT_SUFFIX: Final = re.compile(r"(?:_(?:seconds|watts|percent|bytes|count|celsius|mhz|hours|joules)$)|^len\(|^sum\(")
_UNIT: Final = re.compile(
    r"^(?:\s?(?:s|ms|W|kW|kWh|%|°C|MHz|MiB|GiB|TiB|KiB|MB|GB|TB|kB|B|h|min|d|Hz|GPU-hours?|days?|tokens/s|x)\b|\s?%|°C"
    rf"|/{PLACEHOLDER}|(?: to |-|–){PLACEHOLDER}|'s\b|st\b|nd\b|rd\b|th\b)"
)
_NOUN_AFTER: Final = re.compile(
    r"^ (?:of|more|other|times|as|further)\b|^ (?!(?:and|or|in|at|to|is|are|was|were|but|for|on|with|by)\b)[a-zA-Z(]"
)
# "rank 3", "step 40", "(port 22)": the number is a name.
_NAME_BEFORE: Final = re.compile(
    r"\b(?:ranks?|steps?|GPU|index|pid|process|lines?|port|status|code|version|byte|number|slot|signal|part|operation"
    r"|HTTP|driver|protocol|factor|Xid|confidence|attempt|task|group|error|ip|sp|position|level|schema|of"
    r"|expected|got)[ :#\"'(]*$",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Template:
    """One text with a placeholder character for each value, and the sources of these values, in order."""

    place: str  # file:line
    text: str
    values: tuple[tuple[str, str], ...] = ()  # (expression, format)


def templates() -> Iterator[Template]:
    """Every text of the product that states what was measured."""
    for pattern in STATEMENTS:
        for path in sorted(set(PRODUCT.glob(pattern))):
            if path.name in NOT_STATEMENT_FILES:
                continue
            place = str(path.relative_to(PRODUCT))
            if path.suffix == ".py":
                yield from python_templates(place, path.read_text("utf-8"))
            elif path.suffix == ".toml":
                yield from toml_templates(place, tomllib.loads(path.read_text("utf-8")))
            elif path.suffix == ".html":
                yield from html_templates(place, path.read_text("utf-8"))


def python_templates(place: str, source: str) -> Iterator[Template]:
    """The texts of a module, without docstrings, patterns, log lines and instructions."""
    collector = _Collector(place)
    collector.visit(ast.parse(source))
    yield from collector.found


class _Collector(ast.NodeVisitor):
    def __init__(self, place: str) -> None:
        self.place = place
        self.found: list[Template] = []

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # docstrings, of attributes too
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name.startswith(("re.", "log.", "logger.", "logging.")) or name.endswith("Field"):
            return
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if not NOT_STATEMENTS.search(keyword.arg or ""):
                self.visit(keyword.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not NOT_STATEMENTS.search(" ".join(map(ast.unparse, node.targets))):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not NOT_STATEMENTS.search(ast.unparse(node.target)):
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not NOT_STATEMENTS.search(node.name):
            for each in (*node.args.defaults, *node.body):
                self.visit(each)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._add(node.lineno, node.value, ())

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        text, values = "", []
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += str(part.value)
            elif isinstance(part, ast.FormattedValue):
                shown = "" if part.format_spec is None else ast.unparse(part.format_spec).removeprefix("f").strip("'\"")
                text += PLACEHOLDER
                values.append((ast.unparse(part.value), shown))
                self.visit(part.value)  # texts within its expressions
        self._add(node.lineno, text, tuple(values))

    def _add(self, line: int, text: str, values: tuple[tuple[str, str], ...]) -> None:
        if _is_prose(text):
            self.found.append(Template(f"{self.place}:{line}", " ".join(text.split()), values))


def toml_templates(place: str, table: Any, key: str = "") -> Iterator[Template]:
    if isinstance(table, dict):
        for name, value in table.items():
            if not NOT_STATEMENTS.search(name):
                yield from toml_templates(place, value, name)
    elif isinstance(table, list):
        for value in table:
            yield from toml_templates(place, value, key)
    elif isinstance(table, str) and _is_prose(table) and "(?" not in table:
        names = re.findall(r"\{(\w+)\}", table)
        text = re.sub(r"\{\w+\}", PLACEHOLDER, table)
        yield Template(f"{place} {key}", " ".join(text.split()), tuple((name, "") for name in names))


def html_templates(place: str, source: str) -> Iterator[Template]:
    source = re.sub(r"(?s)\{#.*?#\}|<style.*?</style>|<script.*?</script>", "", source)
    for number, line in enumerate(source.splitlines(), 1):
        values = tuple((value.strip(), "") for value in re.findall(r"\{\{(.*?)\}\}", line))
        text = re.sub(r"\{\{.*?\}\}", PLACEHOLDER, re.sub(r"\{%.*?%\}", "", line))
        text = re.sub(r"<[^>]*>", " ", text)
        if _is_prose(text):
            yield Template(f"{place}:{number}", " ".join(text.split()), values)


def _is_prose(text: str) -> bool:
    words = [word for word in text.split() if re.search(r"[A-Za-z]{2}", word)]
    return len(words) >= MIN_WORDS and "\\" not in text


def problems(template: Template) -> Iterator[str]:
    """What is wrong with a text; nothing if it is right."""
    yield from _uncounted(template.text)
    yield from _bare_numbers(template)


def _uncounted(text: str) -> Iterator[str]:
    for match in _QUANTIFIER.finditer(text):
        word = match.group(1).lower()
        if match["noun"] is None and word not in ("nobody", "no one"):
            continue
        if word in ("no", "none of") and _SOURCE_VERB.search(text[: match.start()].rstrip()):
            continue
        if _EXTENT.match(text[match.end() :]):
            continue
        yield f"{match.group(0)!r} without the count it was computed from"


def _bare_numbers(template: Template) -> Iterator[str]:
    pieces = template.text.split(PLACEHOLDER)
    if len(pieces) != len(template.values) + 1:
        return
    for number, (expression, shown) in enumerate(template.values):
        is_number = (bool(shown) and bool(_NUMBER.match(shown))) or bool(_COUNT_SUFFIX.search(expression))
        if not is_number or shown.endswith("%"):
            continue
        before = PLACEHOLDER.join(pieces[: number + 1])
        after = PLACEHOLDER.join(["", *pieces[number + 1 :]])[1:] if number + 1 < len(pieces) else ""
        if _UNIT.match(after) or _NOUN_AFTER.match(after) or _NAME_BEFORE.search(before):
            continue
        if after.startswith((PLACEHOLDER, f" {PLACEHOLDER}")):  # the unit is a value, too
            continue
        yield f"the number {{{expression}}} without a unit or noun"


# A number of its own: not a part of a name, path, version, time or address.
_RENDERED_NUMBER: Final = re.compile(r"(?<![\w.:/\-\[])\d[\d,]*(?:\.\d+)?(?![\w.:/\-]*\w[:/.]|\d)(?=[^\w]|$|[a-zA-Z%])")


def rendered_problems(text: str) -> Iterator[str]:
    """The same of a text as people read it."""
    shown = " ".join(text.split())
    yield from _uncounted(_RENDERED_NUMBER.sub(PLACEHOLDER, shown))
    for match in _RENDERED_NUMBER.finditer(shown):
        before, after = shown[: match.start()], shown[match.end() :]
        after = re.sub(r"^((?: to |-|–))\d[\d,]*(?:\.\d+)?", rf"\1{PLACEHOLDER}", after)
        if not (_UNIT.match(after) or _NOUN_AFTER.match(after) or _NAME_BEFORE.search(before)):
            yield f"the number {match.group(0)} without a unit or noun"
