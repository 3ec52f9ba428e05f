"""Errors in the configuration: where, what was expected, and what was probably meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wattwatch.watcher.config.profiles_file import read_profiles
from wattwatch.watcher.config.settings import (
    CaptureSettings,
    Config,
    ConfigError,
    load_config,
    parse_duration,
    read_secret,
)

MINIMUM = """
[[jobs]]
name = "pretrain"
nodes = "gpu-[01-16]"
run_directory = "/nfs/runs/pretrain"
"""


def loaded(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "wattwatch.toml"
    path.write_text(text)
    return load_config(path)


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    return caught.value.problems


def test_three_keys_are_enough_to_watch_a_cluster(tmp_path: Path) -> None:
    config = loaded(tmp_path, MINIMUM)
    spec = config.jobs[0].spec(config.watcher.interval)
    assert len(spec.nodes) == 16
    assert spec.nodes[0] == "gpu-01"
    assert spec.checkpoint_directory == "/nfs/runs/pretrain/checkpoints"
    assert spec.interval_seconds == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MINIMUM + 'run_dir = "/x"\n', "jobs[0].run_dir: unknown key; did you mean 'run_directory'?"),
        ("[watchr]\n" + MINIMUM, "watchr: unknown key; did you mean 'watcher'?"),
        ('[watcher]\nintervall = "1s"\n' + MINIMUM, "watcher.intervall: unknown key; did you mean 'interval'?"),
        ("[ssh]\nzzz = 1\n" + MINIMUM, "ssh.zzz: unknown key; expected one of"),
        ("[watcher]\ninterval = 5\n" + MINIMUM, 'watcher.interval: expected a duration like "30s"'),
        ('[watcher]\ninterval = "10ms"\n' + MINIMUM, 'watcher.interval: expected between "200ms" and "60s"'),
        ('[watcher]\nlisten = "9560"\n' + MINIMUM, 'watcher.listen: expected "host:port"'),
        ("[ssh]\nport = 99999\n" + MINIMUM, "ssh.port: expected 65535 or less, got 99999"),
        ('[ssh]\nport = "22"\n' + MINIMUM, "ssh.port: expected a whole number, got '22'"),
        ("jobs = 5\n", "jobs: expected [[jobs]] tables, got 5"),
        ("[[jobs]]\nname = ''\nnodes = 'b'\n", "jobs[0].name: expected at least 1 character, got ''"),
        ("[[jobs]]\nname = 'a'\nnodes = 'b'\nlogs = 'l'\n", "jobs[0].logs: expected a list, got 'l'"),
        ("[[jobs]]\nname = 'a'\nnodes = 'b'\ncapture = 'no'\n", "jobs[0].capture: expected true or false, got 'no'"),
        ("[[jobs]]\nname = 'a'\nnodes = 'b'\nrun_directory = 7\n", "jobs[0].run_directory: expected a path, got 7"),
        ("ssh = 1\n" + MINIMUM, "ssh: expected a table, got 1"),
        ("[[jobs]]\nname = 'a'\n", 'jobs[0].nodes: missing; expected: nodes of the job, such as "gpu-[01-16]"'),
        ("[[jobs]]\nname = 'a'\nnodes = ''\n", "jobs[0].nodes: no nodes"),
        ("[[jobs]]\nname = 'a'\nnodes = 'gpu-[01-'\n", "jobs[0].nodes: not a node list"),
        (MINIMUM + MINIMUM, "jobs[1].name: 'pretrain' is also the name of jobs[0]"),
        (MINIMUM + "log_pattern = 'step (\\d+)'\n", "jobs[0].log_pattern: expected a group named step"),
        (MINIMUM + "log_pattern = '(?P<step>'\n", "jobs[0].log_pattern: not a regular expression"),
        ("[[jobs]]\nname = 'a/b'\nnodes = 'n1'\n", "jobs[0].name: expected a name without slashes"),
        ("", "jobs: there is no [[jobs]] table"),
        ("[[jobs]\n", "not valid TOML: "),
        (
            MINIMUM + "flight_recorder_file = '/nfs/fr_'\n",
            "jobs[0].flight_recorder_file: unknown key; did you mean 'flight_recorder_files'?",
        ),
        (
            MINIMUM + "flight_recorder_files = 'fr_'\n",
            "jobs[0].flight_recorder_files: expected an absolute path prefix",
        ),
        (
            MINIMUM + "flight_recorder_pipe = '/tmp/fr_'\n",
            "jobs[0]: flight_recorder_pipe is set, so flight_recorder_files (the path prefix of the dumps) must be "
            "set too",
        ),
        (
            MINIMUM + "[[receivers]]\nname = 'ops'\ntype = 'slak'\nurl_file = 'u'\n",
            "receivers[0].type: expected 'slack' or 'webhook', got 'slak'",
        ),
        (
            MINIMUM
            + "[[receivers]]\nname = 'ops'\ntype = 'slack'\nurl_file = 'u'\n"
            + "[[routes]]\nreceiver = 'opps'\n",
            "routes[0].receiver: there is no receiver 'opps'; did you mean 'ops'?",
        ),
    ],
)
def test_each_problem_is_reported_with_its_location(tmp_path: Path, text: str, expected: str) -> None:
    assert any(problem.startswith(expected) for problem in problems(tmp_path, text)), problems(tmp_path, text)


def test_capture_settings_are_taken_from_the_job(tmp_path: Path) -> None:
    job = loaded(tmp_path, MINIMUM).jobs[0]
    assert (job.capture, job.capture_settings) == (True, CaptureSettings())
    job = loaded(
        tmp_path,
        MINIMUM + "flight_recorder_files = '/nfs/fr_'\nflight_recorder_pipe = '/tmp/fr_'\nnccl_ras_port = 28029\n",
    ).jobs[0]
    assert job.capture_settings == CaptureSettings("/nfs/fr_", "/tmp/fr_", 28029)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    assert len(problems(tmp_path, '[watcher]\nlissten = "x"\ninterval = 1\n[[jobs]]\nname = "a"\n')) == 3


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nonexistent/wattwatch.toml: cannot read the file: No such file"):
        load_config(Path("/nonexistent/wattwatch.toml"))


def test_only_a_regular_file_or_an_open_pipe_is_read(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # opening it would wait for a writer that never comes
    for path, words in (
        (fifo, "it is a FIFO, not a regular file"),
        (Path("/dev/zero"), "it is a device"),  # it never ends
        (tmp_path, "it is a directory; give the path of a file in it"),
    ):
        for read in (load_config, read_profiles):
            with pytest.raises(ConfigError, match=f"{path}: cannot read the file: {words}"):
                read(path)
        with pytest.raises(OSError, match=words):
            read_secret(path)
    reader, writer = os.pipe()
    os.write(writer, MINIMUM.encode())
    os.close(writer)
    assert load_config(Path(f"/dev/fd/{reader}")).jobs[0].name == "pretrain"
    os.close(reader)


def test_a_binary_file_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "wattwatch.toml"
    path.write_bytes(b"\xff\xfe[\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("2m", 120), ("1h30m", 5400), ("500ms", 0.5), ("1.5h", 5400), ("1d", 86400)]
)
def test_durations_are_parsed_with_their_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "-5s", "5 s", "s", "5x", 90, None, True])
def test_a_duration_without_a_unit_is_an_error(text: object) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        parse_duration(text)


def test_a_secret_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text("https://hooks.example/T/B/x\n\n")
    assert read_secret(path) == "https://hooks.example/T/B/x"


def test_a_relative_secret_comes_from_the_credentials_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slack_webhook").write_text("https://hooks.example/1")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_secret(Path("slack_webhook")) == "https://hooks.example/1"


def test_an_empty_secret_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"url is empty"):
        read_secret(path)
