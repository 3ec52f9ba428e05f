"""`wattwatch diagnose DIR|JOB`: which rank blocks a hung job, where, and how sure that is.

DIR is evaluated here; for a JOB the running watcher is asked for the diagnosis it has made.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click
import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wattwatch.watcher.cli.api_client import get_json, open_api_client
from wattwatch.watcher.cli.shared import (
    CRITICAL,
    EXIT_CODE_COLORS,
    OK,
    UNKNOWN,
    WARNING,
    api_options,
    exit_unknown,
    json_option,
    print_error,
    text_console,
)
from wattwatch.watcher.common.formatting import (
    MEMBER_STATE_TEXT,
    agree_with_count,
    format_count,
    format_ranks,
    group_by_rank,
    single_line,
)
from wattwatch.watcher.diagnosis.model import Diagnosis, Evidence
from wattwatch.watcher.diagnosis.serialization import culprits_first
from wattwatch.watcher.diagnosis.signals.signal import source_label

# An API that lacks one of these keys is another service, or another version of this one.
REQUIRED_KEYS: Final = ("verdict", "conclusive", "culprits", "confidence", "step", "groups", "why", "evidence")
# Limits of the text; --json has everything. Chosen so that a diagnosis of a large job fits on two screens.
MAX_GROUPS: Final = 3
MAX_ROWS: Final = 12
MAX_WAITS: Final = 6
MAX_MISSING: Final = 8


class DiagnoseUsageError(click.UsageError):
    """Exit code 2 means that a culprit is proven, so wrong usage of this command exits with 3 (unknown)."""

    exit_code = UNKNOWN


class DiagnoseCommand(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise DiagnoseUsageError(error.format_message(), ctx) from error


@click.command("diagnose", cls=DiagnoseCommand)
@click.argument("source", metavar="DIR|JOB")
@json_option("Print one JSON object.")
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With DIR: also write a report to this file, as an HTML page.",
)
@api_options("With JOB: ")
def diagnose_command(source: str, as_json: bool, page: Path | None, url: str, token_file: Path | None) -> None:
    """Find the rank that blocks a hung job, and the collective that it is in or has not reached;
    say how certain that is.

    DIR is a capture of the watcher, a run directory of wattwatch-train, or any directory with some of these: torch
    flight-recorder dumps (pickle or JSON, NCCL or gloo), Python stacks (faulthandler or py-spy dump), NCCL RAS reports.
    Dumps from strangers are safe: no code in them is executed. For a JOB, the diagnosis comes from a running watcher.

    \b
    Exit code: 0 the flight records are complete and no rank is stuck in a collective
               1 a culprit is suspected, but not proven
               2 the flight records prove the culprit
               3 unknown, or wrong usage
    """
    if page is not None and not is_path(source):
        exit_unknown(
            f"--html works only with a DIR. Open the report of this job at {url}/api/v1/jobs/{source}/diagnosis/report"
        )
    document = diagnose_directory(Path(source), page) if is_path(source) else fetch_diagnosis(source, url, token_file)
    try:
        if not isinstance(document, dict) or any(key not in document for key in REQUIRED_KEYS):
            raise TypeError("not a diagnosis")
        code = diagnosis_exit_code(document)
        if as_json:
            click.echo(escape_unprintable(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()))
        else:
            print_diagnosis(source, document, code)
    except (KeyError, TypeError, ValueError, AttributeError):
        exit_unknown(f"{source}: the answer of {url} is not a diagnosis that this version of wattwatch can read")
    sys.exit(code)


def escape_unprintable(document: str) -> str:
    """The same JSON with control characters escaped, which a terminal would obey, and right-to-left overrides too."""
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in document)


def is_path(source: str) -> bool:
    """Whether DIR|JOB is a directory. The name of a job may be anything, so an existing path is taken as a path."""
    return "/" in source or source in (".", "..") or Path(source).exists()


def diagnose_directory(directory: Path, page: Path | None) -> dict[str, Any]:
    """The diagnosis of the evidence in a directory, as a document; also written as an HTML page if one is given."""
    from wattwatch.watcher.diagnosis.diagnose import diagnose
    from wattwatch.watcher.diagnosis.loading.evidence import NoEvidenceError, load_evidence
    from wattwatch.watcher.diagnosis.serialization import diagnosis_document

    try:
        evidence = load_evidence(directory)
    except NoEvidenceError as error:
        if directory.name == str(directory):  # could be meant as the name of a job
            exit_unknown(
                f"{error}. {directory} was read as a path, because it exists in the current directory. To ask the "
                f"watcher about the job {directory}, run the command in another directory."
            )
        exit_unknown(str(error))
    diagnosis = diagnose(evidence)
    if page is not None:
        write_report(page, directory, evidence, diagnosis)
    return diagnosis_document(diagnosis)


def write_report(page: Path, directory: Path, evidence: Evidence, diagnosis: Diagnosis) -> None:
    from wattwatch.watcher.diagnosis.loading.directory import list_evidence_files
    from wattwatch.watcher.diagnosis.report.page import EvidenceFile, IncidentReport, render_incident_report

    try:
        files = []
        # Names in the evidence are made printable, so they are not always the names on disk.
        paths = {found.name: found.path for found in list_evidence_files(directory).files}
        for name in diagnosis.evidence:
            data = paths.get(name, directory / name).read_bytes()
            files.append(EvidenceFile(name, len(data), hashlib.sha256(data).hexdigest()))
        job = evidence.live.job if evidence.live is not None else directory.resolve().name
        incident = IncidentReport(
            job, diagnosis, evidence.live, stacks=evidence.stacks, files=tuple(files), directory=str(directory)
        )
        page.write_text(render_incident_report(incident), "utf-8")
        print_error(f"report written to {page}")
    except OSError as error:
        exit_unknown(f"{error.filename or page}: cannot write the report: {error.strerror or error}")


def fetch_diagnosis(job: str, url: str, token_file: Path | None) -> Any:
    with open_api_client(url, token_file) as client:
        hint = f" ({job} is not a directory here, so it was read as the name of a job)"
        return get_json(client, f"/api/v1/jobs/{quote(job, safe='')}/diagnosis", hint)


def diagnosis_exit_code(document: Mapping[str, Any]) -> int:
    if document.get("nothing_open"):
        return OK
    if document["culprits"]:
        return CRITICAL if document["conclusive"] else WARNING
    return UNKNOWN if document["verdict"] == "unknown" else WARNING


# The text for a terminal. Names in a diagnosis come from dumps of any origin: every one goes through `safe_markup`.


def print_diagnosis(source: str, document: Mapping[str, Any], code: int) -> None:
    console = text_console()
    proven = "proven by the flight records" if document["conclusive"] else f"confidence {document['confidence']:.2f}"
    # A confidence beside "UNKNOWN" would be read as that of a finding.
    unknown = document["verdict"] == "unknown" and not document["culprits"]
    certainty = "" if document.get("nothing_open") or unknown else f" ({proven}; cause: {cause_text(document)})"
    verdict = f"[bold {EXIT_CODE_COLORS[code]}]{safe_markup(headline(document))}[/]"
    console.print(f"[bold]{safe_markup(source)}[/]: {verdict}{certainty}")
    console.print(f"  finding   {safe_markup(document.get('summary') or '')}")
    console.print(f"  why       {safe_markup(document['why'])}")
    for label, agrees in (("evidence", True), ("against", False)):
        sources = [source_label(each["source"]) for each in document.get("testimonies", ()) if each["agrees"] is agrees]
        if sources:
            console.print(f"  {label:<9} {safe_markup(', '.join(sources))}")
    console.print(f"  do next   {safe_markup(document.get('advice') or '')}")
    for group in document["groups"][:MAX_GROUPS]:
        _group(console, group)
    _waits(console, document.get("waits", ()), document["culprits"])
    _stacks(console, document.get("stacks", ()))
    _logs(console, document.get("logs", ()))
    _missing(console, document)


def cause_text(document: Mapping[str, Any]) -> str:
    """What is to blame, in words."""
    cause = document.get("cause") or "unknown"
    if cause == "rank":
        return "this rank's process" if len(document["culprits"]) == 1 else "these ranks' processes"
    return "the training code" if cause == "program" else safe_markup(cause)


def headline(document: Mapping[str, Any]) -> str:
    """The verdict in capitals. "UNKNOWN" would mislead for a job that makes progress, and if a rank is named."""
    if document.get("nothing_open"):
        return "NO HANG"
    verdict = str(document["verdict"])
    return "SUSPECTED" if verdict == "unknown" and document["culprits"] else verdict.replace("_", " ").upper()


def safe_markup(text: object) -> str:
    """The text on one line, without control characters, and with rich's markup escaped."""
    return escape(single_line(str(text)))


def _group(console: Console, group: Mapping[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("  WHERE", "COLLECTIVE", "RANKS", "LINE"):
        table.add_column(title, overflow="fold")  # never cut a path, however narrow the terminal
    for row in group["members"][:MAX_ROWS]:
        cells = (
            MEMBER_STATE_TEXT.get(row["place"], row["place"]),
            row["operation"] or "-",
            format_ranks(row["ranks"]),
            row["line"] or "-",
        )
        first, *rest = map(safe_markup, cells)
        table.add_row(f"  {first}", *rest)
    console.print(
        f"\n{safe_markup(group['group'])} ({format_count(group['size'], 'rank')}), sequence number {group['slot']}"
    )
    console.print(table)
    if len(group["members"]) > MAX_ROWS:
        console.print(f"  rows not shown: {len(group['members']) - MAX_ROWS:,}; --json prints all")


def _waits(console: Console, waits: Sequence[Mapping[str, Any]], culprits: Sequence[int]) -> None:
    """Who waits for whom; those that wait for a culprit come first."""
    if not waits:
        return
    waits = culprits_first(waits, culprits)
    console.print("\nwaiting ranks")
    for wait in waits[:MAX_WAITS]:
        waiting, awaited = format_ranks(wait["ranks"]), format_ranks(wait["awaited"])
        verb = "waits" if len(wait["ranks"]) == 1 else "wait"
        why = agree_with_count(str(wait["why"]), len(wait["awaited"]))
        what = f"{wait['operation']} (sequence number {wait['slot']} of {wait['group']})"
        console.print(f"  {waiting} {verb} for {awaited} in {safe_markup(what)}; {awaited} {safe_markup(why)}")
    if len(waits) > MAX_WAITS:
        console.print(f"  not shown: {len(waits) - MAX_WAITS:,}; --json prints all")


def _stacks(console: Console, stacks: Iterable[Mapping[str, Any]]) -> None:
    for each in stacks:
        console.print(f"\nstack of rank {each['rank']}, innermost frame first ({safe_markup(each['source'])})")
        for frame in each["frames"]:
            line = "" if frame["line"] is None else f":{frame['line']}"
            console.print(f"  {safe_markup(frame['function'])} ({safe_markup(frame['file'])}{line})")


def _logs(console: Console, logs: Iterable[Mapping[str, Any]]) -> None:
    for each in logs:
        console.print(f"\nlast output of rank {each['rank']} ({safe_markup(each['source'])})")
        for line in each["lines"]:
            console.print(f"  {safe_markup(line)}")


def _missing(console: Console, document: Mapping[str, Any]) -> None:
    unread = [f"{each['source']}: {each['why']}" for each in document.get("unread", ())]
    lines = [*group_by_rank(map(str, document.get("missing", ()))), *unread]
    if lines:
        console.print("\nmissing evidence")
    for line in lines[:MAX_MISSING]:
        console.print(f"  {safe_markup(line)}")
    if len(lines) > MAX_MISSING:
        console.print(f"  not shown: {len(lines) - MAX_MISSING:,}; --json prints all")
