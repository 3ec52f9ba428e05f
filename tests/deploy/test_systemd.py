"""The unit, checked by systemd's own tools, and the example configuration for it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.tools import DEADLINE_SECONDS, require_tool
from wattwatch.watcher.cli.main import COMMANDS
from wattwatch.watcher.config.settings import load_config

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "wattwatch.service"
WORST_SCORE = 15  # tenths: 1.5


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [require_tool("systemd-analyze"), *arguments], text=True, capture_output=True, timeout=DEADLINE_SECONDS
    )


def test_systemd_reads_the_unit_without_a_warning(tmp_path: Path) -> None:
    """With a program that exists here: wattwatch is installed elsewhere, on the user's machine."""
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text("utf-8")), "utf-8")
    result = analyze("verify", str(copy))
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "")


def test_the_unit_has_a_low_exposure_score() -> None:
    result = analyze("security", "--offline=true", f"--threshold={WORST_SCORE}", "--no-pager", str(UNIT))
    assert result.returncode == 0, result.stdout
    score = re.search(r"exposure level for wattwatch.service: ([0-9.]+)", result.stdout)
    assert score is not None
    assert float(score[1]) * 10 <= WORST_SCORE
    assert score[1] in (DEPLOY / "README.md").read_text("utf-8")


def test_the_unit_starts_the_daemon_and_nothing_else() -> None:
    """A second Exec line would break credentials under DynamicUser (https://github.com/systemd/systemd/issues/24291)."""
    lines = re.findall(r"(?m)^(Exec\w+)=(.*)$", UNIT.read_text("utf-8"))
    assert lines == [("ExecStart", "/opt/wattwatch/bin/wattwatch serve -c /etc/wattwatch/wattwatch.toml")]
    assert "serve" in COMMANDS


def test_the_example_configuration_is_valid_and_uses_the_credentials_of_the_unit() -> None:
    config = load_config(DEPLOY / "wattwatch.toml")
    assert config.jobs[0].node_names[-1] == "gpu-16"
    credentials = set(re.findall(r"(?m)^LoadCredential=(\w+):", UNIT.read_text("utf-8")))
    named = {str(config.watcher.token_file), str(config.receivers[0].url_file), config.ssh.identity_files[0].name}
    assert named == credentials


def test_the_readme_names_every_file_of_the_folder() -> None:
    readme = (DEPLOY / "README.md").read_text("utf-8")
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.name != "README.md":
            assert f"`{path.relative_to(DEPLOY)}`" in readme
