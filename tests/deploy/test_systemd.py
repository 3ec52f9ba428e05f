"""The unit, as systemd's own tools judge it, and the example that goes with it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.tools import require_tool
from wattwatch.watcher.cli.main import COMMANDS
from wattwatch.watcher.config.settings import load_config

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "wattwatch.service"
WORST_SCORE = 15  # tenths: 1.5


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([require_tool("systemd-analyze"), *arguments], text=True, capture_output=True, timeout=60)


def test_systemd_reads_the_unit_without_a_word(tmp_path: Path) -> None:
    """With a program that exists here: where wattwatch will be installed is the user's machine."""
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text("utf-8")), "utf-8")
    said = analyze("verify", str(copy))
    assert (said.returncode, said.stderr, said.stdout) == (0, "", "")


def test_the_unit_leaves_little_open() -> None:
    said = analyze("security", "--offline=true", f"--threshold={WORST_SCORE}", "--no-pager", str(UNIT))
    assert said.returncode == 0, said.stdout
    score = re.search(r"exposure level for wattwatch.service: ([0-9.]+)", said.stdout)
    assert score is not None
    assert float(score[1]) * 10 <= WORST_SCORE
    assert score[1] in (DEPLOY / "README.md").read_text("utf-8")


def test_the_unit_starts_the_daemon_and_nothing_else() -> None:
    """A second Exec line would break credentials under DynamicUser (systemd#24291)."""
    lines = re.findall(r"(?m)^(Exec\w+)=(.*)$", UNIT.read_text("utf-8"))
    assert lines == [("ExecStart", "/opt/wattwatch/bin/wattwatch serve -c /etc/wattwatch/wattwatch.toml")]
    assert "serve" in COMMANDS


def test_the_example_configuration_is_one_and_uses_the_units_credentials() -> None:
    config = load_config(DEPLOY / "wattwatch.toml")
    assert config.jobs[0].node_names[-1] == "gpu-16"
    credentials = set(re.findall(r"(?m)^LoadCredential=(\w+):", UNIT.read_text("utf-8")))
    named = {str(config.watcher.token_file), str(config.receivers[0].url_file), config.ssh.identity_files[0].name}
    assert named == credentials


def test_everything_in_the_room_is_told_of_in_its_readme() -> None:
    readme = (DEPLOY / "README.md").read_text("utf-8")
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.name != "README.md":
            assert f"`{path.relative_to(DEPLOY)}`" in readme
