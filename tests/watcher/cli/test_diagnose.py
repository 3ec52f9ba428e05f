"""`wattwatch diagnose`: exit codes, the JSON of the contract, what people read, and bad input."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.watcher.command_shell import Shell
from tests.watcher.diagnosis.hung_job_evidence import WORLD, live, record, records
from wattwatch.watcher.cli.diagnose import diagnosis_exit_code, headline
from wattwatch.watcher.diagnosis.diagnose import diagnose
from wattwatch.watcher.diagnosis.model import Evidence
from wattwatch.watcher.diagnosis.serialization import diagnosis_document

DATA = Path(__file__).parents[2] / "data"
PROVEN = DATA / "flight_recorder" / "gloo_213_barrier_r3"
LIKELY = DATA / "worker_server"
CONTRACT = ["verdict", "conclusive", "culprits", "confidence", "step", "groups", "why", "evidence"]


def test_a_proven_culprit_is_critical(shell: Shell) -> None:
    answer = shell.run("diagnose", PROVEN)
    assert answer.exit_code == 2
    first, second = answer.out.splitlines()[:2]
    assert first.endswith("DESYNC (proven by the flight records; cause: the training code)")
    assert (
        second == "  finding   rank 3 is in barrier while 3 ranks are in all_gather at sequence number 7 of default_pg"
    )


def test_a_likely_culprit_is_a_warning_with_its_stack(shell: Shell) -> None:
    answer = shell.run("diagnose", LIKELY)
    assert answer.exit_code == 1
    assert (
        "rank 0 waits for rank 1 in all_reduce (sequence number 2 of default_pg); rank 1 has not launched it"
        in answer.out
    )
    assert "stack of rank 1, innermost frame first (rank1_dump_traceback.txt)" in answer.out
    assert "w (train/dbg2.py:18)" in answer.out
    assert "evidence  flight recorder, stacks" in answer.out


def test_the_headline_matches_the_verdict() -> None:
    named = diagnosis_document(diagnose(Evidence(live=live((3,)))))
    assert (named["verdict"], named["culprits"], headline(named)) == ("unknown", [3], "SUSPECTED")
    assert headline(diagnosis_document(diagnose(Evidence()))) == "UNKNOWN"
    assert headline(diagnosis_document(diagnose(Evidence(records({3: None}))))) == "NEVER ARRIVED"
    moves = diagnosis_document(diagnose(Evidence(tuple(record(rank, done=True) for rank in range(WORLD)))))
    assert headline(moves) == "NO HANG"


def test_a_job_that_makes_progress_is_no_hang(shell: Shell, tmp_path: Path) -> None:
    for number in (1, 2):
        shutil.copy(DATA / "ras" / f"healthy_poll{number}.json", tmp_path)
    page = tmp_path / "page.html"
    answer = shell.run("diagnose", tmp_path, "--html", page)
    assert answer.exit_code == 0
    assert answer.out.splitlines()[0] == f"{tmp_path}: NO HANG"
    assert "not proven" not in page.read_text()
    assert "<h1>The job is making progress" in page.read_text()


def test_the_json_of_the_contract(shell: Shell) -> None:
    found = shell.run("diagnose", PROVEN, "--json").json
    assert [key for key in CONTRACT if key not in found] == []
    assert (found["verdict"], found["conclusive"], found["culprits"], found["step"]) == ("desync", True, [3], None)
    assert 0.9 < found["confidence"] <= 1.0
    group = found["groups"][0]
    assert (group["group"], group["slot"], group["size"]) == ("default_pg", 7, 4)
    assert {(row["place"], tuple(row["ranks"])) for row in group["members"]} == {
        ("waiting", (0, 1, 2)),
        ("waiting", (3,)),
    }
    assert len(found["evidence"]) == 8
    assert found["cause"] == "program"
    assert found["nothing_open"] is False


def test_exit_codes_follow_the_monitoring_convention() -> None:
    cases = {
        0: Evidence(tuple(record(rank, done=True) for rank in range(WORLD))),
        1: Evidence(records()),
        2: Evidence(records({3: "barrier"})),
        3: Evidence(),
    }
    assert {code: diagnosis_exit_code(diagnosis_document(diagnose(evidence))) for code, evidence in cases.items()} == {
        code: code for code in cases
    }


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_bad_input_is_one_sentence_and_code_3(shell: Shell, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for source, words in (
        (tmp_path / "nothing", "No such file or directory"),
        (tmp_path / "file", "not a directory"),
        (tmp_path / "empty", "the directory is empty"),
        (".", "no flight records"),
    ):
        directory = tmp_path / "empty" if source == "." else source
        answer = shell.run("diagnose", directory, *arguments)
        assert answer.exit_code == 3
        assert answer.out == ""
        assert words in answer.err
        assert len(answer.err.splitlines()) == 1


def test_a_dump_that_would_execute_code_is_reported_and_not_executed(shell: Shell, tmp_path: Path) -> None:
    for rank in range(4):
        shutil.copy(PROVEN / f"fr_trace_{rank}", tmp_path / f"trace_rank_{rank}")
    target = tmp_path / "ran"
    (tmp_path / "trace_rank_1").write_bytes(
        b"\x80\x02cos\nsystem\nX"
        + len(f"touch {target}").to_bytes(4, "little")
        + f"touch {target}".encode()
        + b"\x85R."
    )
    answer = shell.run("diagnose", tmp_path)
    assert answer.exit_code in (1, 2)
    assert "trace_rank_1: " in answer.out
    assert not target.exists()


def test_names_from_dumps_cannot_control_the_terminal(shell: Shell, tmp_path: Path) -> None:
    for rank in range(4):
        dump = json.loads((PROVEN / f"fr_trace_json_{rank}.json").read_text())
        text = json.dumps(dump).replace("default_pg", "\x1b[2J[red]evil\\u001b[31m")
        (tmp_path / f"trace_rank_{rank}.json").write_text(text.replace("\x1b", "\\u001b"))
    answer = shell.run("diagnose", tmp_path)
    assert "\x1b" not in answer.text
    assert "[red]evil" in answer.out


def test_the_last_output_of_a_rank_is_shown_and_cannot_control_the_terminal(shell: Shell, tmp_path: Path) -> None:
    frame = '  File "/srv/train.py", line 9, in step'
    (tmp_path / "rank-00002.log.txt").write_text(f"{frame}\nValueError: \x1b[2J[red]evil\x1b]0;x\x07 {'x' * 5000}\n")
    answer = shell.run("diagnose", tmp_path)
    assert "last output of rank 2 (rank-00002.log.txt)" in answer.out
    assert "ValueError: [red]evil" in answer.out
    assert "\x1b" not in answer.text
    assert max(map(len, answer.out.splitlines())) < 2000


def test_a_file_name_that_is_not_text_is_shown_and_cannot_control_the_terminal(shell: Shell, tmp_path: Path) -> None:
    directory, page = tmp_path / "dumps", tmp_path / "page.html"
    shutil.copytree(DATA / "flight_recorder" / "nc_early_r3", directory)
    named = os.fsencode(directory) + b"/rank-3-\xff\x1b[2J\xe2\x80\xae.recorder"
    os.rename(os.fsencode(directory / "_dump_3"), named)
    answer = shell.run("diagnose", directory, "--json", "--html", page)
    assert answer.json["culprits"] == [3]
    assert not set(answer.text + page.read_text()) & set("\x1b\u202e")
    assert "rank-3-\ufffd\ufffd[2J\ufffd.recorder" in page.read_text()


def test_the_report_as_one_html_page(shell: Shell, tmp_path: Path) -> None:
    page = tmp_path / "incident.html"
    assert shell.run("diagnose", LIKELY, "--html", page).exit_code == 1
    text = page.read_text()
    assert "rank 1" in text
    assert "rank1_dump_traceback.txt" in text
    answer = shell.run("diagnose", LIKELY, "--html", tmp_path / "no" / "page.html")
    assert (answer.exit_code, answer.out) == (3, "")
    assert "cannot write the report: No such file or directory" in answer.err
    wrong = shell.run("diagnose", "pretrain", "--html", page)
    assert (wrong.exit_code, wrong.out) == (3, "")
    assert "--html works only with a DIR" in wrong.err


def test_the_path_of_the_report_goes_to_standard_error(shell: Shell, tmp_path: Path) -> None:
    page = tmp_path / "incident.html"
    answer = shell.run("diagnose", LIKELY, "--html", page, "--json")
    assert answer.json["culprits"] == [1]
    assert answer.err == f"report written to {page}\n"


@pytest.mark.parametrize("arguments", [[], ["--nonsense"], ["a", "b"], ["a", "--html"]])
def test_wrong_usage_exits_with_3(shell: Shell, arguments: list[str]) -> None:
    answer = shell.run("diagnose", *arguments)
    assert (answer.exit_code, answer.out) == (3, "")
    assert "Usage: " in answer.err


def test_a_directory_with_the_name_of_a_job_is_read_and_the_error_says_so(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pretrain").mkdir()
    monkeypatch.chdir(tmp_path)
    answer = shell.run("diagnose", "pretrain")
    assert answer.exit_code == 3
    assert "To ask the watcher about the job" in answer.err


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server with one answer, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_the_diagnosis_of_a_job_comes_from_the_running_watcher(shell: Shell) -> None:
    document = diagnosis_document(diagnose(Evidence(records({3: "barrier"}))))
    with answering(200, json.dumps(document).encode()) as (url, asked):
        answer = shell.run("diagnose", "pretrain", "--url", url)
        as_json = shell.run("diagnose", "pretrain", "--url", url, "--json")
    assert (answer.exit_code, as_json.exit_code) == (2, 2)
    assert "rank 3 is in barrier" in answer.out
    assert as_json.json == json.loads(json.dumps(document))
    assert asked == ["/api/v1/jobs/pretrain/diagnosis"] * 2


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b'{"title": "Not Found", "detail": "no job pretrain"}', "404 no job pretrain"),
        (200, b"[]", "is not a diagnosis"),
        (200, b"{}", "is not a diagnosis"),
        (200, b"<html>", "not a wattwatch API"),
        (500, b"oops", "500 oops"),
    ],
)
def test_a_watcher_that_has_no_diagnosis(shell: Shell, status: int, body: bytes, words: str) -> None:
    with answering(status, body) as (url, _):
        answer = shell.run("diagnose", "pretrain", "--url", url)
    assert answer.exit_code == 3
    assert words in answer.err
    assert answer.out == ""


def test_no_watcher(shell: Shell) -> None:
    answer = shell.run("diagnose", "pretrain", "--url", "http://127.0.0.1:1")
    assert answer.exit_code == 3
    assert "no watcher answers" in answer.err
