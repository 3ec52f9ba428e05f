"""`wattwatch triage`: one verdict from whatever a person has at hand, and an exit code for a script."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from collectors.simulated.cluster import SimulatedCluster
from collectors.simulated.scenario import named
from watcher.commands.triage import triage_command

DATA = Path(__file__).parents[1] / "data"
ODD = {case["name"]: case for case in tomllib.loads((DATA / "smi/odd_outputs.toml").read_text("utf-8"))["case"]}
CORPUS = Path(__file__).parents[3] / "shared" / "corpus"
KEYS = {
    "source", "state", "confidence", "shape", "suspects", "power_fraction", "alternative", "why", "advice", "gpus",
}  # fmt: skip
OK, WARNING, CRITICAL, UNKNOWN = 0, 1, 2, 3

# By the number of the odd output: what triage must say of it, and how the command must end.
STATES = {
    "01": ("unknown", UNKNOWN), "02": ("unknown", UNKNOWN), "03": ("unknown", UNKNOWN), "04": ("unknown", UNKNOWN),
    "06": ("unknown", UNKNOWN), "08": ("unknown", UNKNOWN), "09": ("compute", OK), "11": ("gpu_fault", CRITICAL),
    "13": ("gpu_fault", CRITICAL), "14": ("gpu_fault", CRITICAL), "15": ("gpu_fault", CRITICAL),
    "17": ("gpu_fault", CRITICAL), "18": ("gpu_fault", CRITICAL), "20": ("gpu_fault", CRITICAL),
    "22": ("gpu_fault", CRITICAL), "24": ("gpu_fault", CRITICAL), "26": ("unknown", UNKNOWN),
    "27": ("unknown", UNKNOWN), "28": ("unknown", UNKNOWN), "29": ("gpu_fault", CRITICAL),
    "30": ("gpu_fault", CRITICAL), "31": ("unknown", UNKNOWN), "33": ("unknown", UNKNOWN),
    "35": ("unknown", UNKNOWN), "36": ("unknown", UNKNOWN), "38": ("unknown", UNKNOWN), "39": ("unknown", UNKNOWN),
    "40": ("unknown", UNKNOWN), "42": ("compute", OK), "48": ("idle", OK), "50": ("unknown", UNKNOWN),
    "51": ("unknown", UNKNOWN), "56": ("unknown", UNKNOWN), "58": ("unknown", UNKNOWN), "59": ("unknown", UNKNOWN),
    "67": ("unknown", UNKNOWN), "68": ("unknown", UNKNOWN), "70": ("checkpoint", OK),
}  # fmt: skip


def triage(arguments: Sequence[str], text: str | bytes | None = None) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, the objects of --json, and what went to stderr."""
    result = CliRunner().invoke(triage_command, ["--json", *arguments], input=text)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.exit_code, json.loads(result.stdout), result.stderr


def case_of(number: str) -> dict[str, Any]:
    return next(case for name, case in ODD.items() if name.startswith(f"{number} "))


@pytest.mark.parametrize("number", STATES)
def test_each_odd_output_gets_the_state_that_it_implies(number: str) -> None:
    state, code = STATES[number]
    ended, (said,), _ = triage(["-"], case_of(number)["text"])
    assert (said["state"], ended) == (state, code), said["why"]
    assert said["why"]
    assert said["advice"]


@pytest.mark.parametrize("name", ODD)
def test_no_odd_output_ends_in_a_traceback(name: str) -> None:
    ended, said, _ = triage(["-"], ODD[name].get("text", ""))
    assert ended in (OK, WARNING, CRITICAL, UNKNOWN)
    assert all(set(each) == KEYS for each in said)


def table_row(i: int, watts: int, percent: int, held: int = 55_000) -> str:
    return f"{i}, NVIDIA H100 80GB HBM3, {watts}.00 W, 700.00 W, {percent} %, {held} MiB, 81559 MiB"


HEADER = "index, name, power.draw [W], enforced.power.limit [W], utilization.gpu [%], memory.used [MiB], memory.total"
DEADLOCK = "\n".join([HEADER, *(table_row(i, 120 + i, 0 if i == 3 else 100) for i in range(8))])


def test_a_deadlock_is_critical_and_names_the_rank() -> None:
    ended, (said,), _ = triage(["-"], DEADLOCK)
    assert (ended, said["state"], said["shape"]) == (CRITICAL, "hang", "one_low_rest_busy")
    assert said["suspects"] == [{"node": "-", "gpu": 3, "rank": 3}]
    assert said["alternative"]["state"] == "checkpoint"
    assert 0.15 < said["power_fraction"] < 0.20
    assert len(said["gpus"]) == 8


def test_an_unsure_hang_is_a_warning() -> None:
    two_groups = "\n".join([HEADER, *(table_row(i, 120 + i, 100 if i < 4 else 0) for i in range(8))])
    ended, (said,), _ = triage(["-"], two_groups)
    assert (ended, said["state"]) == (WARNING, "hang")
    assert said["confidence"] < 0.5


def test_the_users_word_on_progress_decides() -> None:
    busy = "\n".join([HEADER, *(table_row(i, 125, 100) for i in range(8))])
    assert triage(["--progress", "stalled", "-"], busy)[1][0]["state"] == "hang"
    assert triage(["--progress", "stalled", "-"], busy)[1][0]["confidence"] >= 0.9
    ended, (said,), _ = triage(["--progress", "advancing", "-"], busy)
    assert (ended, said["state"]) == (OK, "communication")


def test_another_profile_moves_the_bands() -> None:
    _, (said,), _ = triage(["--profile", "b300", "-"], "\n".join([HEADER, table_row(0, 640, 100)]))
    assert "profile b300" in said["why"]
    result = CliRunner().invoke(triage_command, ["--profile", "b30", "-"], input=DEADLOCK)
    assert result.exit_code == CRITICAL
    assert "known: b300" in result.stderr


def test_several_sources_get_one_verdict_each_and_the_worst_exit_code(tmp_path: Path) -> None:
    healthy = tmp_path / "healthy.csv"
    healthy.write_text("\n".join([HEADER, *(table_row(i, 640, 99) for i in range(8))]))
    hung = tmp_path / "hung.csv"
    hung.write_text(DEADLOCK)
    ended, said, _ = triage([str(healthy), str(hung)])
    assert [each["state"] for each in said] == ["compute", "hang"]
    assert [each["source"] for each in said] == [str(healthy), str(hung)]
    assert ended == CRITICAL


def test_a_log_is_judged_by_its_last_samples(tmp_path: Path) -> None:
    stamped = "timestamp, " + HEADER
    rows = [
        f"2026/07/14 09:00:{second:02}.000, " + table_row(i, 640 if second < 20 else 120, 0 if second >= 20 else 99)
        for second in range(30)
        for i in range(8)
    ]
    log = tmp_path / "gpu.log"
    log.write_text("\n".join([stamped, *rows]))
    _, (said,), _ = triage([str(log)])
    assert said["state"] == "idle"
    log.write_text("\n".join([stamped, *rows[: 21 * 8]]))
    _, (changing,), _ = triage([str(log)])
    assert "The sample before read as compute" in changing["why"]
    assert changing["confidence"] < said["confidence"]


def test_json_samples_are_a_source() -> None:
    gpus = [
        {"node": f"n{i // 4}", "index": i % 4, "rank": i, "util_pct": 0 if i == 5 else 100, "power_w": 190}
        for i in range(8)
    ]
    held = [{**gpu, "mem_used_mib": 82_000, "power_limit_w": 1100} for gpu in gpus]
    text = json.dumps({"gpu_model": "NVIDIA B300 SXM6 AC", "samples": [{"t_seconds": t, "gpus": held} for t in (0, 1)]})
    ended, (said,), _ = triage(["-"], text)
    assert (ended, said["state"]) == (CRITICAL, "hang")
    assert said["suspects"] == [{"node": "n1", "gpu": 1, "rank": 5}]


@pytest.mark.parametrize("text", ["", "hello", "{}", "[1, 2]", '{"samples": "no"}', "\x00\x01\x02", "{" * 2000])
def test_what_is_no_reading_is_unknown_with_a_reason(text: str) -> None:
    ended, (said,), _ = triage(["-"], text)
    assert (ended, said["state"]) == (UNKNOWN, "unknown")
    assert said["why"]


def test_a_file_that_is_not_there_is_one_sentence() -> None:
    ended, said, error = triage(["/no/such/file.csv"])
    assert (ended, said) == (UNKNOWN, [])
    assert error == "/no/such/file.csv: cannot be read: No such file or directory\n"


def test_people_read_the_verdict_first() -> None:
    result = CliRunner().invoke(triage_command, ["-"], input=DEADLOCK)
    first, *rest = result.stdout.splitlines()
    assert first == "-: HANG (confidence 0.77)"
    assert [line.split()[0] for line in rest if line.startswith("  ")][:4] == ["why", "suspect", "or", "next"]
    assert len(rest) < 24


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    with SimulatedCluster([named("deadlock")], speed=5) as started:
        yield started


def test_hosts_are_asked_twice_over_ssh_and_one_that_is_not_there_says_so(cluster: SimulatedCluster) -> None:
    """Before the cluster is told to begin its job is loading: memory held, nothing runs."""
    config = ["-F", str(cluster.ssh_config)]
    ended, said, _ = triage([*config, "deadlock-1", "deadlock-2"])
    assert [each["source"] for each in said] == ["deadlock-1", "deadlock-2"]
    assert [(each["state"], len(each["gpus"])) for each in said] == [("idle", 8), ("idle", 8)]
    assert ended == OK
    _, (job,), _ = triage([*config, "--job", "deadlock-1", "deadlock-2"])
    assert len(job["gpus"]) == 16
    assert job["gpus"][15]["rank"] == 15
    ended, (missing,), _ = triage([*config, "nobody@127.0.0.1"])
    assert (ended, missing["state"]) == (UNKNOWN, "unknown")
    assert "127.0.0.1" in missing["why"]


@pytest.mark.skipif(not CORPUS.exists(), reason="the corpus of public outputs is not part of the repository")
def test_the_corpus_of_odd_outputs_ends_in_no_traceback() -> None:
    for path in sorted((CORPUS / "smi_odd").iterdir()):
        if path.name != "index.md":
            ended, said, _ = triage([str(path)])
            number = path.name[:2]
            assert ended in (OK, WARNING, CRITICAL, UNKNOWN)
            expected = "idle" if number in ("42", "50") else STATES[number][0] if number in STATES else said[0]["state"]
            assert [each["state"] for each in said] == [expected], path.name


@pytest.mark.skipif(not CORPUS.exists(), reason="the corpus of public outputs is not part of the repository")
def test_the_published_pictures_get_their_state(tmp_path: Path) -> None:
    for sample in json.loads((CORPUS / "paper_samples.json").read_text("utf-8"))["samples"]:
        one = tmp_path / f"{sample['name']}.json"
        one.write_text(json.dumps(sample))
        _, (said,), _ = triage([str(one)])
        assert (said["state"], said["shape"]) == (sample["expected_state"], sample["expected_shape"]), sample["name"]
