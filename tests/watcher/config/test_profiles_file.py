"""The user's own profile: it judges no worse than the shipped one, whatever it leaves out."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.watcher.cli.test_calibrate import H100, a_log
from tests.watcher.command_shell import Shell
from tests.watcher.power_examples import POWER_EXAMPLES, PowerExample, json_sample
from wattwatch.watcher.config.profiles_file import read_profiles
from wattwatch.watcher.config.settings import ConfigError, load_config
from wattwatch.watcher.detection.baselines.profiles import UserProfile, profile_for

DEPLOYED = Path(__file__).parents[3] / "deploy" / "wattwatch.toml"
B300 = "NVIDIA B300 SXM6 AC"
TABLE = '[[profiles]]\nname = "own"\nmatch = "B300"\nlimit_watts = 1100\nidle_watts = 139\nfloor_watts = 235\n'


@pytest.fixture
def calibrated(shell: Shell, tmp_path: Path) -> Path:
    """What `calibrate --out` writes of a whole run on B300: idle, start-up, plateau."""
    log = a_log(
        tmp_path / "run.csv", (100, 139, 0, 4), (60, 190, 0, 2500), (200, 985, 99, 71000), name=B300, limit="1100.00 W"
    )
    out = tmp_path / "profiles.toml"
    answer = shell.run("calibrate", log, "--progress", "advancing", "--out", out)
    assert answer.exit_code == 0, answer.text
    assert "not learned" not in answer.out
    return out


@pytest.mark.parametrize("picture", POWER_EXAMPLES, ids=lambda picture: picture.name)
def test_the_states_of_the_paper_are_recognized_with_a_calibrated_profile(
    picture: PowerExample, shell: Shell, calibrated: Path
) -> None:
    (shipped,) = shell.run("triage", "--json", "-", stdin=json_sample(picture)).json
    answer = shell.run("triage", "--json", "--profile", calibrated, "-", stdin=json_sample(picture))
    (own,) = answer.json
    assert answer.err == ""
    assert (own["state"], own["shape"], own["suspects"]) == (shipped["state"], shipped["shape"], shipped["suspects"])
    assert own["confidence"] == pytest.approx(shipped["confidence"], abs=0.05)


def test_light_training_is_still_compute(shell: Shell, calibrated: Path) -> None:
    light = PowerExample("light", "compute", "all_busy", 0, (395.0,) * 16, (100.0,) * 16)
    arguments = ("triage", "--json", "--profile", calibrated, "-")
    (said,) = shell.run(*arguments, "--progress", "advancing", stdin=json_sample(light)).json
    assert said["state"] == "compute"
    # More power than this is communication on that model, so without word of the steps both are named.
    (said,) = shell.run(*arguments, stdin=json_sample(light)).json
    assert {said["state"], said["alternative"]["state"]} == {"communication", "compute"}


def test_a_profile_with_the_shipped_numbers_equals_the_shipped_profile() -> None:
    for name in (B300, H100, "Tesla T4", "a board of tomorrow"):
        shipped = profile_for(name, 700.0)
        own = UserProfile("own", "x", 700.0, shipped.idle_watts, shipped.floor_watts, shipped.compute_watts)
        of_board = own.profile_for_gpu(name)
        for part in ("floor_watts", "compute_watts", "certain", "bands_certain"):
            assert getattr(of_board, part) == pytest.approx(getattr(shipped, part))
        assert (of_board.bands_from, len(of_board.light)) == (shipped.bands_from, len(shipped.light))
        for part in ("communication", "starvation"):
            band, whole = getattr(of_board, part), getattr(shipped, part)
            assert (band is None) == (whole is None)
            assert band is None or (band.low_watts, band.high_watts) == pytest.approx(
                (whole.low_watts, whole.high_watts)
            )


def test_thresholds_follow_the_floor_and_compute_power_of_the_profile() -> None:
    shipped = profile_for(B300, 1100.0)
    lower = UserProfile("own", "B300", 1100.0, 100.0, 180.0).profile_for_gpu(B300)
    assert shipped.communication is not None
    assert lower.communication is not None
    assert 180 < lower.communication.low_watts < shipped.communication.low_watts
    assert 180 < lower.compute_watts < shipped.compute_watts
    # Its own compute lies where others communicate: that is no band of this board.
    assert UserProfile("own", "B300", 1100.0, 100.0, 180.0, 500.0).profile_for_gpu(B300).communication is None


def test_a_profile_is_used_only_for_gpus_that_it_matches(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "wattwatch.toml"
    path.write_text('[[jobs]]\nname = "a"\nnodes = "n"\n' + TABLE.replace("B300", "H100"), "utf-8")
    answer = shell.run("triage", "--profile", path, "-", stdin=json_sample(POWER_EXAMPLES[0]))
    assert f"-: no profile in {path} matches {B300}; the shipped profile is used" in answer.err
    assert answer.exit_code == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file has no [[profiles]] table"),
        ("[[profiles", "not valid TOML"),
        (TABLE.replace("floor", "flor"), "did you mean"),
        (TABLE.replace('"B300"', '"("'), "profiles[0].match: not a regular expression"),
        (TABLE + "compute_watts = 50\n", "compute_watts 50 is not above floor_watts 235"),
        (TABLE.replace("1100", "200"), "limit_watts 200 is not above floor_watts 235"),
    ],
)
def test_a_file_without_valid_profiles_is_an_error_in_one_sentence(
    text: str, says: str, shell: Shell, tmp_path: Path
) -> None:
    path = tmp_path / "profiles.toml"
    path.write_text(text, "utf-8")
    for command in ("triage", "replay"):
        answer = shell.run(command, "--profile", path, a_log(tmp_path / "log.csv", (3, 640, 100, 71000)))
        assert answer.exit_code == 2
        assert says in answer.err
        assert str(path) in answer.err
    assert shell.run("triage", "--profile", tmp_path / "none.toml", "-").exit_code == 2


def test_the_configuration_rejects_it_too(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "wattwatch.toml"
    path.write_text('[[jobs]]\nname = "a"\nnodes = "n"\n' + TABLE + "compute_watts = 50\n", "utf-8")
    with pytest.raises(ConfigError, match=r"profiles\[0\]: compute_watts 50 is not above floor_watts 235"):
        load_config(path)
    answer = shell.run("check", "-c", path)
    assert answer.exit_code == 2
    assert "compute_watts 50 is not above" in answer.text


def test_replay_accepts_the_same_profile_file_as_triage(shell: Shell, calibrated: Path, tmp_path: Path) -> None:
    log = a_log(tmp_path / "log.csv", (60, 985, 100, 71000), name=B300, limit="1100.00 W")
    answer = shell.run("replay", "--json", "--profile", calibrated, log)
    assert answer.exit_code == 0
    assert answer.json[0]["states"][-1]["state"] == "computing"


def test_the_commented_table_in_the_example_is_a_valid_profile(tmp_path: Path) -> None:
    _, commented = DEPLOYED.read_text("utf-8").split("# [[profiles]]\n")
    text = "[[profiles]]\n" + "".join(line.removeprefix("# ") + "\n" for line in commented.splitlines())
    assert tomllib.loads(text)
    path = tmp_path / "profiles.toml"
    path.write_text(text, "utf-8")
    (own,) = read_profiles(path)
    assert own.matches(H100)
