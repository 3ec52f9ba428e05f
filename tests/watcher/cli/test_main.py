"""The command `wattwatch` as a whole: what it lists, and how errors reach people."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from pathlib import Path

import click
import pytest

from tests.watcher.command_shell import Shell
from wattwatch.watcher.cli.main import COMMANDS, main

README = Path(__file__).parents[3] / "README.md"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_exists_has_help_and_is_in_the_readme(name: str, shell: Shell) -> None:
    module, attribute, words = COMMANDS[name]
    assert isinstance(getattr(importlib.import_module(module), attribute), click.Command)
    assert f"| `wattwatch {name}` |" in README.read_text("utf-8")
    assert words.endswith(".")
    answer = shell.run(name, "--help")
    assert answer.exit_code == 0
    assert answer.out.startswith("Usage: ")
    assert f" {name} " in answer.out.splitlines()[0]


def test_the_readme_lists_exactly_the_commands_that_exist() -> None:
    named = [
        line.split("`")[1].split()[1]
        for line in README.read_text("utf-8").splitlines()
        if line.startswith("| `wattwatch ")
    ]
    assert named == list(COMMANDS)


def test_help_lists_every_command_with_its_line(shell: Shell) -> None:
    for answer in (shell.run("--help"), shell.run("-h")):
        assert answer.exit_code == 0
        for name, (_, _, words) in COMMANDS.items():
            assert f"  {name} " in answer.out
            assert words.split(":")[0].split(",")[0] in answer.out


def test_version_is_the_packages(shell: Shell) -> None:
    answer = shell.run("--version")
    assert (answer.exit_code, answer.out) == (0, f"wattwatch {version('wattwatch')}\n")


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["triage", "--frobnicate"], ["check"], ["serve"], ["--nonsense"]]
)
def test_wrong_usage_is_an_error_with_exit_code_2(arguments: list[str], shell: Shell) -> None:
    answer = shell.run(*arguments)
    assert answer.exit_code == 2
    assert "Error: " in answer.err


@pytest.mark.parametrize("command", ["check", "serve"])
def test_an_unusable_configuration_is_exit_code_2(command: str, shell: Shell, tmp_path: Path) -> None:
    answer = shell.run(command, "-c", tmp_path / "none.toml")
    assert answer.exit_code == 2
    assert str(tmp_path / "none.toml") in answer.err
    assert len(answer.err.splitlines()) == 1


class Broken(click.Command):
    def invoke(self, ctx: click.Context) -> None:
        raise ZeroDivisionError("a bug")


class Interrupted(click.Command):
    def invoke(self, ctx: click.Context) -> None:
        raise KeyboardInterrupt


broken = Broken("broken")
interrupted = Interrupted("interrupted")


def test_an_internal_error_is_one_sentence_and_says_how_to_get_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMMANDS, "broken", (__name__, "broken", "A bug."))
    monkeypatch.delenv("WATTWATCH_DEBUG", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["broken"])
    err = capsys.readouterr().err
    assert ended.value.code == 3
    assert "please report it: ZeroDivisionError: a bug" in err
    assert "WATTWATCH_DEBUG=1" in err
    assert "Traceback" not in err
    monkeypatch.setenv("WATTWATCH_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["broken"])


def test_an_interruption_is_not_an_error(monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    monkeypatch.setitem(COMMANDS, "interrupted", (__name__, "interrupted", "Ctrl-C."))
    answer = shell.run("interrupted")
    assert answer.exit_code == 130
    assert answer.err.strip() == "interrupted"
