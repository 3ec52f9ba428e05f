"""`wattwatch config`: the effective configuration of a file, and the reference of all keys.

The reference is made from the models that validate the file, so it cannot differ from them. docs/configuration.md is
the output of `wattwatch config --reference --markdown`; a test compares the two.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import click
from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from wattwatch.watcher.cli.shared import json_option, print_json
from wattwatch.watcher.config.settings import (
    TABLES,
    UNIT_SECONDS,
    Config,
    JobSection,
    Section,
    load_config,
    parse_duration,
)

REPEATED_TABLES: Final = frozenset({"jobs", "receivers", "routes", "profiles"})  # written [[jobs]]
TEXT_WIDTH: Final = 110
# A URL of a receiver is itself the secret. It belongs in a file, but somebody will put it in the wrong place.
URL_PATTERN: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*:/+)(?:[^/@\s]*@)?(?P<host>[^/?#\s]*)(?P<rest>\S*)", re.IGNORECASE
)
PLURALS: Final = {"text": "texts", "path": "paths"}
MASK: Final = "***"
# The only URL that is shown with its path: people open it, and it is in every alert.
PUBLIC_URLS: Final = frozenset({"external_url"})
INTRODUCTION: Final = """\
Durations are written with their unit: `"500ms"`, `"90s"`, `"2m"`, `"1h30m"`, `"8h"`, `"1d"`. Lists of nodes are in
ClusterShell syntax: `"gpu-[01-16]"`. Secrets are never in wattwatch.toml. Instead, a key such as `token_file` contains
the path of another file, and the first line of that file is the secret. A relative path is looked up first in
`$CREDENTIALS_DIRECTORY`, where systemd puts credentials. Unknown keys are errors. `wattwatch check -c FILE`
tests a configuration, and `wattwatch config FILE` prints it with all defaults."""


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key of wattwatch.toml. The field names are keys of the JSON output."""

    key: str  # "watcher.listen", "jobs[].name"
    type: str
    required: bool
    default: str | None  # as written in TOML; None: required, or not set by default
    meaning: str


@click.command("config")
@click.argument("path", metavar="[FILE]", required=False, type=click.Path(path_type=Path))
@click.option("-c", "--config", "option_path", type=click.Path(path_type=Path), help="Same as FILE.")
@click.option("--reference", is_flag=True, help="Print every key with its type, default and meaning.")
@click.option("--markdown", is_flag=True, help="With --reference: print Markdown.")
@json_option("Print one JSON object; with --reference, a JSON list of the keys.")
def config_command(path: Path | None, option_path: Path | None, reference: bool, markdown: bool, as_json: bool) -> None:
    """Print the effective configuration of FILE: every key, with defaults filled in, as TOML.

    Secrets are never printed: of a file with a secret, only the path is shown, and URLs are shown without user names
    and paths.

    Exit code: 0 printed, 2 the configuration is not valid, or wrong usage.
    """
    if path is not None and option_path is not None:
        raise click.UsageError("give FILE or -c FILE, not both")
    path = path or option_path
    if reference == (path is not None):
        raise click.UsageError("give either FILE, such as /etc/wattwatch/wattwatch.toml, or --reference")
    if path is None:
        if as_json:
            print_json([asdict(key) for key in config_keys()])
        else:
            click.echo(reference_markdown() if markdown else reference_text(), nl=False)
        return
    config = load_config(path)
    if as_json:
        print_json(effective_values(config))
    else:
        click.echo(effective_toml(config, path), nl=False)


# The effective configuration


def effective_values(config: Config) -> dict[str, Any]:
    """All values by table, with secrets masked: durations as text, and None for what is not set."""
    values: dict[str, Any] = {}
    for table in TABLES:
        content = getattr(config, table)
        values[table] = [_values(each) for each in content] if table in REPEATED_TABLES else _values(content)
    return values


def _values(section: Section) -> dict[str, Any]:
    values = {
        name: _value(name, getattr(section, name), is_duration=_is_duration(field))
        for name, field in type(section).model_fields.items()
    }
    if isinstance(section, JobSection) and section.checkpoint_directory is None:
        directory = section.effective_checkpoint_directory
        values["checkpoint_directory"] = None if directory is None else str(directory)
    return values


def _value(name: str, value: Any, *, is_duration: bool) -> Any:
    if isinstance(value, tuple):
        return [_value(name, each, is_duration=is_duration) for each in value]
    if is_duration and value is not None:
        return format_toml_duration(value)
    if isinstance(value, Enum):
        return str(value.value)
    return mask_urls(name, str(value)) if isinstance(value, (str, Path)) else value


def mask_urls(name: str, text: str) -> str:
    """The text with user names, passwords and paths of URLs replaced by ***."""

    def mask(found: re.Match[str]) -> str:
        rest = found["rest"].partition("?")[0] if name in PUBLIC_URLS else f"/{MASK}" if found["rest"] else ""
        user = f"{MASK}@" if "@" in found[0].removesuffix(found["rest"]) else ""
        return f"{found['scheme']}{user}{found['host']}{rest}"

    return URL_PATTERN.sub(mask, text)


def effective_toml(config: Config, path: Path) -> str:
    lines = [f"# Effective configuration of {path}. Keys that are commented out are not set."]
    for table, content in effective_values(config).items():
        head = f"[[{table}]]" if table in REPEATED_TABLES else f"[{table}]"
        for values in content if isinstance(content, list) else [content]:
            lines += ["", head]
            lines += [
                f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}"
                for name, value in values.items()
            ]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """A value as TOML. Its strings, lists, booleans and numbers are written as JSON's are, except DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def format_toml_duration(seconds: float) -> str:
    """The inverse of `parse_duration`: "8h" for 28800, "90s" for 90, "1500ms" for 1.5."""
    for unit, size in sorted(UNIT_SECONDS.items(), key=lambda item: -item[1]):
        count = seconds / size
        if count >= 1 and abs(count - round(count)) < 1e-9:
            return f"{round(count)}{unit}"
    return f"{seconds:f}".rstrip("0").rstrip(".") + "s"


# The reference


def config_keys() -> Iterator[ConfigKey]:
    for table, section in TABLES.items():
        for name, field in section.model_fields.items():
            yield ConfigKey(
                key=f"{table}{'[]' if table in REPEATED_TABLES else ''}.{name}",
                type=describe_type(field),
                required=field.is_required(),
                default=_default(field),
                meaning=field.description or "",
            )


def describe_type(field: FieldInfo) -> str:
    """The type of a key in words, with its limits: "whole number from 1 to 65535"."""
    text = _describe_annotation(field.annotation, [*field.metadata])
    low = next((m.ge for m in field.metadata if isinstance(m, Ge)), None)
    high = next((m.le for m in field.metadata if isinstance(m, Le)), None)
    above = next((m.gt for m in field.metadata if isinstance(m, Gt)), None)
    if low is not None and high is not None:
        return f"{text} from {low} to {high}"
    if low is not None:
        return f"{text}, at least {low}"
    return text if above is None else f"{text} above {above}"


def _describe_annotation(annotation: Any, metadata: list[Any]) -> str:
    if _has_duration_validator(metadata):
        return "duration"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe_annotation(arguments[0], list(arguments[1:]))
    if origin in (Union, UnionType):
        (inner,) = (each for each in arguments if each is not NoneType)
        return _describe_annotation(inner, [])
    if origin is tuple:
        element = _describe_annotation(arguments[0], [])
        return f"list of {PLURALS.get(element, element)}"
    if origin is Literal:
        return " or ".join(f'"{each}"' for each in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f'"{each.value}"' for each in annotation)
    return {str: "text", Path: "path", bool: "true or false", int: "whole number", float: "number"}[annotation]


def _is_duration(field: FieldInfo) -> bool:
    return describe_type(field) == "duration"


def _has_duration_validator(metadata: list[Any]) -> bool:
    return any(isinstance(each, BeforeValidator) and each.func is parse_duration for each in metadata)


def _default(field: FieldInfo) -> str | None:
    if field.is_required() or field.default is None:
        return None
    return toml_value(_value("", field.default, is_duration=_is_duration(field)))


def _heading(table: str) -> str:
    return f"[[{table}]]" if table in REPEATED_TABLES else f"[{table}]"


def _summary(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split())


def reference_text() -> str:
    lines: list[str] = []
    for table, section in TABLES.items():
        lines += [f"{_heading(table)}  {_summary(section)}", ""]
        for key in config_keys():
            if key.key.startswith((f"{table}.", f"{table}[].")):
                default = "required" if key.required else f"default: {key.default or 'not set'}"
                lines.append(f"  {key.key.rpartition('.')[2]}  ({key.type}; {default})")
                lines += textwrap.wrap(key.meaning, TEXT_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines.append("")
    return "\n".join(lines)


def reference_markdown() -> str:
    lines = [
        "# Configuration reference",
        "",
        "<!-- Generated from watcher/config/settings.py by `make docs`. Do not edit. -->",
        "",
        INTRODUCTION,
    ]
    for table, section in TABLES.items():
        lines += ["", f"## `{_heading(table)}`", "", _summary(section), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key in config_keys():
            if key.key.startswith((f"{table}.", f"{table}[].")):
                default = "required" if key.required else f"`{key.default}`" if key.default else "not set"
                cells = (f"`{key.key.rpartition('.')[2]}`", key.type, default, key.meaning)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
