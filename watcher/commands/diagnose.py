"""`wattwatch diagnose DIR|JOB`: who holds a hung job up, where, and how sure: from dumps, or from a running watcher."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click
import orjson

from watcher.commands.diagnosis_text import show
from watcher.commands.watcher_api import DEFAULT_URL, UNKNOWN, ask, give_up, watcher_api
from watcher.diagnose.diagnosis import Diagnosis
from watcher.diagnose.evidence import Evidence

OK: Final = 0
WARNING: Final = 1
CRITICAL: Final = 2
CONTRACT: Final = ("verdict", "conclusive", "culprits", "confidence", "step", "groups", "why", "evidence")


class WrongUse(click.UsageError):
    """Code 2 means a proof here, so wrong use is 3: it cannot be told."""

    exit_code = UNKNOWN


class DiagnoseCommand(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise WrongUse(error.format_message(), ctx) from error


@click.command("diagnose", cls=DiagnoseCommand)
@click.argument("source", metavar="DIR|JOB")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--html", "page", type=click.Path(path_type=Path), help="Of a DIR: write the incident as one page.")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Of a JOB: address of the watcher.")
@click.option("--token-file", type=click.Path(path_type=Path), help="Of a JOB: file with a bearer token.")
def diagnose_command(source: str, as_json: bool, page: Path | None, url: str, token_file: Path | None) -> None:
    """Who holds a hung job up, in which collective, and how sure that is.

    DIR is a capture of the watcher, a run directory of wattwatch-train, or any directory with flight-recorder dumps of
    torch (pickle or JSON, NCCL or gloo), Python stacks (faulthandler, py-spy dump) or reports of NCCL RAS: whatever
    there is. Dumps of other origin are safe: no code in them is run. JOB asks a running watcher what it concluded.

    \b
    Exit code: 0 whole records, and no rank waits in a collective
               1 something is found and not proven
               2 the records prove who it is
               3 it cannot be told, or wrong use
    """
    if page is not None and not is_path(source):
        give_up(f"--html needs a DIR; the page of a job is {url}/api/v1/jobs/{source}/diagnosis/report")
    document = of_directory(Path(source), page) if is_path(source) else of_job(source, url, token_file)
    try:
        if not isinstance(document, dict) or any(key not in document for key in CONTRACT):
            raise TypeError("no diagnosis")
        code = exit_code(document)
        if as_json:
            click.echo(escaped(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()))
        else:
            show(source, document, code)
    except (KeyError, TypeError, ValueError, AttributeError):
        give_up(f"{source}: the answer of {url} is no diagnosis, or one of another version")
    sys.exit(code)


def escaped(document: str) -> str:
    """The same JSON without a character that a terminal obeys, or that turns what is read around."""
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in document)


def is_path(source: str) -> bool:
    """A job's name may be anything: what is there, or can only be a path, is a path."""
    return "/" in source or source in (".", "..") or Path(source).exists()


def of_directory(directory: Path, page: Path | None) -> dict[str, Any]:
    """Writes the incident's page where one is asked for."""
    from watcher.diagnose.directory.read_evidence import NoEvidence, read_evidence
    from watcher.diagnose.document import document_of
    from watcher.diagnose.fuse import diagnose

    try:
        evidence = read_evidence(directory)
    except NoEvidence as error:
        if directory.name == str(directory):  # it could be meant as the name of a job
            give_up(f"{error}. (To ask the watcher for a job of that name: run this where no {directory} lies.)")
        give_up(str(error))
    diagnosis = diagnose(evidence)
    if page is not None:
        write_page(page, directory, evidence, diagnosis)
    return document_of(diagnosis)


def write_page(page: Path, directory: Path, evidence: Evidence, diagnosis: Diagnosis) -> None:
    from watcher.diagnose.directory.listing import list_directory
    from watcher.diagnose.report.page import EvidenceFile, Incident, incident_report

    try:
        files = []
        # A name that people are shown is not always the one on the disk.
        paths = {found.name: found.path for found in list_directory(directory).files}
        for name in diagnosis.evidence:
            data = paths.get(name, directory / name).read_bytes()
            files.append(EvidenceFile(name, len(data), hashlib.sha256(data).hexdigest()))
        job = evidence.seen.job if evidence.seen is not None else directory.resolve().name
        incident = Incident(
            job, diagnosis, evidence.seen, stacks=evidence.stacks, files=tuple(files), directory=str(directory)
        )
        page.write_text(incident_report(incident), "utf-8")
        click.echo(f"the incident's page is in {page}", err=True)
    except OSError as error:
        give_up(f"{error.filename or page}: the page cannot be written: {error.strerror or error}")


def of_job(job: str, url: str, token_file: Path | None) -> Any:
    with watcher_api(url, token_file) as client:
        return ask(client, f"/api/v1/jobs/{quote(job, safe='')}/diagnosis")


def exit_code(document: Mapping[str, Any]) -> int:
    """Of the monitoring-plugin convention."""
    if document.get("nothing_open"):
        return OK
    if document["culprits"]:
        return CRITICAL if document["conclusive"] else WARNING
    return UNKNOWN if document["verdict"] == "unknown" else WARNING
