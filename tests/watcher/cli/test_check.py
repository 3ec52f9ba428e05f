"""`wattwatch check` names everything that must be fixed, and changes nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collectors.ssh.real_sshd import Site, free_port, site
from tests.collectors.ssh.test_check import tool
from tests.watcher.command_shell import Shell


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made


def configuration(here: Site, nodes: str, more: str = "", job: str = "") -> Path:
    path = here.directory / "wattwatch.toml"
    path.write_text(
        f'[watcher]\nstate_directory = "{here.directory}/state"\n[ssh]\nconfig_file = "{here.config}"\n'
        f'connect_timeout = "5s"\n[[jobs]]\nname = "train"\nnodes = "{nodes}"\n{job}\n{more}'
    )
    return path


def lines(said: Any, part: str) -> dict[str, tuple[bool | None, str]]:
    return {line["name"]: (line["ok"], line["detail"]) for line in said if line["part"] == part}


def receiver(here: Site, port: int) -> str:
    (here.directory / "url").write_text(f"http://127.0.0.1:{port}/hook\n")
    return f'[[receivers]]\nname = "ops"\ntype = "webhook"\nurl_file = "{here.directory}/url"\n'


def test_a_working_node_and_a_reachable_receiver_pass(here: Site, shell: Shell) -> None:
    here.server("node", tool(here.directory, "printf 'NVIDIA B300\\nNVIDIA B300\\n'"))
    run = here.directory / "run"
    run.mkdir()
    before = sorted(path.name for path in here.directory.iterdir())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = configuration(
            here,
            "node",
            receiver(here, listener.getsockname()[1]),
            f'run_directory = "{run}"\ncheckpoint_directory = "{run}"',
        )
        answer = shell.run("check", "-c", config, "--json")
        said = answer.json
        assert [line for line in said if line["ok"] is False] == []
        assert lines(said, "configuration") == {str(config): (True, "train: 1 node")}
        assert lines(said, "receiver ops") == {"reach": (True, "the receiver is reachable; no test message was sent")}
        node = lines(said, "node node")
        assert node["GPU tools"] == (True, "nvidia-smi lists 2 NVIDIA B300")
        assert node[f"path {run}"][0] is True
        (note,) = (line for line in said if line["note"])
        assert (note["name"], note["ok"]) == ("capture of train", True)
        assert note["detail"].startswith(f"there are no worker sockets in {run}/worker yet")
        text = shell.run("check", "-c", config)
        assert "note    capture of train: there are no worker sockets" in text.out
    assert text.exit_code == answer.exit_code
    assert answer.exit_code == (1 if any(line["ok"] is None for line in said) else 0)
    assert "nvidia-smi lists 2 NVIDIA B300" in text.out
    added = {path.name for path in here.directory.iterdir()} - set(before) - {"url", "wattwatch.toml"}
    assert added == set()
    assert list(run.iterdir()) == []


def test_an_unreachable_node_fails_and_the_other_is_still_checked(here: Site, shell: Shell) -> None:
    here.server("node-1", tool(here.directory, "printf 'NVIDIA B300\\n'"))
    with here.config.open("a") as file:
        file.write(f"Host node-2\n  HostName 127.0.0.1\n  Port {free_port()}\n")
    answer = shell.run("check", "-c", configuration(here, "node-[1-2]"), "--json")
    assert answer.exit_code == 2
    assert lines(answer.json, "node node-1")["login"][0] is True
    ok, words = lines(answer.json, "node node-2")["login"]
    assert ok is False
    assert "connection refused" in words
    assert lines(answer.json, "receivers")["none"][0] is None


def test_missing_paths_are_a_warning(here: Site, shell: Shell) -> None:
    here.server("node", tool(here.directory, "printf 'NVIDIA B300\\n'"))
    answer = shell.run("check", "-c", configuration(here, "node", job='logs = ["/absent/*.log"]'), "--json")
    assert answer.exit_code == 1
    assert lines(answer.json, "node node")["path /absent/*.log"][0] is None


def test_an_unreachable_receiver_fails(here: Site, shell: Shell) -> None:
    here.server("node", tool(here.directory, "printf 'NVIDIA B300\\n'"))
    answer = shell.run("check", "-c", configuration(here, "node", receiver(here, free_port())), "--json")
    assert answer.exit_code == 2
    ok, words = lines(answer.json, "receiver ops")["reach"]
    assert ok is False
    assert "Connection refused" in words


BAD = """
[watcher]
intervall = "1s"
[ssh]
port = 99999
[[jobs]]
name = "train"
node = "gpu-01"
"""


def test_every_problem_of_a_bad_configuration_is_named_with_the_nearest_key(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "wattwatch.toml"
    path.write_text(BAD)
    answer = shell.run("check", "-c", path)
    assert answer.exit_code == 2
    for words in ("did you mean 'interval'?", "ssh.port: ", "did you mean 'nodes'?", "jobs[0].nodes: missing"):
        assert words in answer.err
    assert all(line.startswith(f"{path}: ") for line in answer.err.splitlines())
    answer = shell.run("check", "-c", path, "--json")
    assert answer.exit_code == 2
    assert {(line["part"], line["ok"]) for line in answer.json} == {("configuration", False)}
    assert len(answer.json) == len(shell.run("check", "-c", path).err.splitlines())


def test_a_missing_file_fails_before_any_node_is_contacted(here: Site, shell: Shell) -> None:
    path = configuration(here, "node", '[[receivers]]\nname = "ops"\ntype = "slack"\nurl_file = "/absent/url"\n')
    answer = shell.run("check", "-c", path, "--json")
    assert answer.exit_code == 2
    assert any("/absent/url" in line["detail"] for line in answer.json if line["part"] == "configuration")
    assert lines(answer.json, "node node") == {}


def test_a_state_directory_that_is_absent_is_not_called_writable(here: Site, shell: Shell) -> None:
    path = configuration(here, "node")
    absent = here.directory / "state"
    assert not absent.exists()
    (detail,) = lines(shell.run("check", "-c", path, "--json").json, "state directory").values()
    assert detail == (
        True,
        f"{absent} does not exist yet; `wattwatch serve` can create it, because {here.directory} is writable",
    )
    absent.mkdir()
    (detail,) = lines(shell.run("check", "-c", path, "--json").json, "state directory").values()
    assert detail == (True, f"{absent} is writable")


def test_a_state_directory_that_cannot_be_created_is_named(here: Site, shell: Shell) -> None:
    path = configuration(here, "node")
    path.write_text(path.read_text().replace(f'"{here.directory}/state"', f'"{path}/state"'))  # below a file
    answer = shell.run("check", "-c", path, "--json")
    assert answer.exit_code == 2
    assert lines(answer.json, "state directory") == {
        "": (False, f"cannot write to {path}: allow this user to write there, or change watcher.state_directory")
    }
