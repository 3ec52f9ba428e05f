"""`wattwatch config`: the effective configuration without secrets, and the reference in docs/configuration.md."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.watcher.command_shell import Shell
from wattwatch.watcher.cli.config import config_keys, format_toml_duration, reference_markdown
from wattwatch.watcher.config.settings import TABLES, Config, load_config, parse_duration

DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration.md"
EXAMPLE = Path(__file__).parents[3] / "deploy" / "wattwatch.toml"


def test_the_committed_reference_is_current() -> None:
    assert DOCUMENT.read_text("utf-8") == reference_markdown(), "run `make docs`"


def test_every_key_has_a_type_and_a_meaning() -> None:
    keys = list(config_keys())
    assert len(keys) == sum(len(section.model_fields) for section in TABLES.values())
    assert set(TABLES) == set(Config.model_fields)
    assert [key.key for key in keys if not key.type or not key.meaning] == []
    assert [key.key for key in keys if key.required and key.default is not None] == []


def test_the_reference_lists_defaults_as_they_are_written_in_the_file(shell: Shell) -> None:
    text = shell.run("config", "--reference").out
    assert '  interval  (duration; default: "1s")' in text
    assert "  port  (whole number from 1 to 65535; default: not set)" in text
    assert "  nodes  (text; required)" in text
    rows = {row["key"]: row for row in shell.run("config", "--reference", "--json").json}
    assert rows["jobs[].nccl_ras_port"]["default"] == "28028"
    assert rows["ssh.renew_after"] == {
        "key": "ssh.renew_after", "type": "duration", "required": False, "default": '"8h"',
        "meaning": "age at which a connection is replaced; the new connection is opened before the old one is closed",
    }  # fmt: skip


def test_the_effective_configuration_is_a_configuration_with_the_same_values(shell: Shell, tmp_path: Path) -> None:
    answer = shell.run("config", EXAMPLE)
    assert answer.exit_code == 0
    copy = tmp_path / "wattwatch.toml"
    copy.write_text(answer.out)
    before, after = load_config(EXAMPLE), load_config(copy)
    assert [job.spec(1.0) for job in after.jobs] == [job.spec(1.0) for job in before.jobs]
    assert (after.watcher, after.ssh, after.receivers) == (before.watcher, before.ssh, before.receivers)
    assert (after.routes, after.profiles) == (before.routes, before.profiles)
    assert "# reminder is not set" in answer.out


def test_the_json_output_has_the_same_values(shell: Shell) -> None:
    values = shell.run("config", EXAMPLE, "--json").json
    written = tomllib.loads(shell.run("config", EXAMPLE).out)
    assert values["ssh"]["renew_after"] == written["ssh"]["renew_after"] == "8h"
    assert values["watcher"]["reminder"] is None
    assert values["jobs"][0]["checkpoint_directory"] == "/nfs/runs/pretrain/checkpoints"


def test_secrets_are_never_printed(shell: Shell, tmp_path: Path) -> None:
    token, url = tmp_path / "token", tmp_path / "slack_url"
    token.write_text("s3cret-token\n")
    url.write_text("https://hooks.slack.example/services/T0/B0/s3cret\n")
    path = tmp_path / "wattwatch.toml"
    path.write_text(
        f'[watcher]\ntoken_file = "{token}"\nexternal_url = "https://ops:s3cret@watch.example/gpus?key=s3cret"\n'
        '[[jobs]]\nname = "a"\nnodes = "n1"\n'
        f'[[receivers]]\nname = "right"\ntype = "slack"\nurl_file = "{url}"\n'
        '[[receivers]]\nname = "wrong"\ntype = "slack"\nurl_file = "https://hooks.slack.example/services/T0/s3cret"\n'
    )
    for arguments in ([], ["--json"]):
        answer = shell.run("config", path, *arguments)
        assert answer.exit_code == 0
        assert "s3cret" not in answer.text
        assert str(token) in answer.out
        assert str(url) in answer.out
        assert "https://***@watch.example/gpus" in answer.out
        assert "hooks.slack.example/***" in answer.out


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--reference", "wattwatch.toml"]])
def test_a_file_or_the_reference_must_be_given_and_not_both(arguments: list[str], shell: Shell) -> None:
    answer = shell.run("config", *arguments)
    assert (answer.exit_code, answer.out) == (2, "")
    assert "--reference" in answer.err


def test_an_invalid_configuration_is_an_error_with_its_problems(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "wattwatch.toml"
    path.write_text("[watcher]\nintervall = 1\n")
    answer = shell.run("config", path)
    assert (answer.exit_code, answer.out) == (2, "")
    assert "did you mean 'interval'?" in answer.err


@pytest.mark.parametrize(
    ("seconds", "text"), [(28800, "8h"), (90, "90s"), (120, "2m"), (0.2, "200ms"), (1.5, "1500ms"), (86400, "1d")]
)
def test_durations_are_written_as_they_are_read(seconds: float, text: str) -> None:
    assert format_toml_duration(seconds) == text
    assert parse_duration(text) == seconds


def test_the_file_may_be_given_with_the_option_of_the_other_commands(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "wattwatch.toml"
    path.write_text('[[jobs]]\nname = "a"\nnodes = "n1"\nlogs = ["/x.log"]\n')
    plain, option = (shell.run("config", *arguments) for arguments in ([str(path)], ["-c", str(path)]))
    assert (option.exit_code, option.out) == (0, plain.out)
    assert shell.run("config", str(path), "-c", str(path)).exit_code == 2
