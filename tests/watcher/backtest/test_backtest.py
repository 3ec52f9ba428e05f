"""`wattwatch backtest DIR`: what it reads, what it counts, what it says of a bad label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.watcher.command_shell import Shell
from tests.watcher.power_examples import POWER_EXAMPLES, json_sample

HEADER = "timestamp, index, name, power.draw [W], power.limit [W], utilization.gpu [%], memory.used [MiB]\n"
H100 = "NVIDIA H100 80GB HBM3"


def labelled(state: str, picture: str, **more: Any) -> dict[str, Any]:
    sample: dict[str, Any] = json.loads(json_sample(next(p for p in POWER_EXAMPLES if p.name == picture)))
    return {"reported_state": state, **sample, **more}


def log(path: Path, *phases: tuple[int, float, float]) -> None:
    """Eight boards; each phase is seconds at these watts and this utilisation, a sample every 10 s."""
    rows, second = [], 0
    for seconds, watts, busy in phases:
        for _ in range(seconds // 10):
            stamp = f"2026/01/01 10:{second // 60:02}:{second % 60:02}.000"
            rows += [f"{stamp}, {i}, {H100}, {watts} W, 700 W, {busy} %, 61000 MiB\n" for i in range(8)]
            second += 10
    path.write_text(HEADER + "".join(rows))


def sidecar(path: Path, label: Any) -> None:
    path.with_name(path.name + ".label.json").write_text(json.dumps(label))


# Pictures.


def test_right_wrong_and_unscorable_cases_are_distinguished(shell: Shell, tmp_path: Path) -> None:
    no_watts = labelled("hang", "deadlock")
    for sample in no_watts["samples"]:
        for gpu in sample["gpus"]:
            del gpu["power_w"]
    cases = [
        labelled("compute", "compute", id="a"),
        labelled("hang", "deadlock", id="b"),
        labelled("hang", "checkpoint", id="c"),
        labelled("crash", "idle", id="d"),
        labelled("unknown", "idle", id="e"),
        {**no_watts, "id": "f"},
    ]
    (tmp_path / "cases.json").write_text(json.dumps({"cases": cases}))
    answer = shell.run("backtest", tmp_path, "--json")
    assert answer.exit_code == 0
    found = answer.json
    assert found["cases"] == {
        "scored": 3, "state_unknown_said": {"idle": 1}, "no_such_state": {"crash": 1}, "no_reading": {"hang": 1},
    }  # fmt: skip
    none, word = found["pictures"]["none"], found["pictures"]["word"]
    assert (none["exact"]["right"], none["exact"]["of"], none["false_hangs"]) == (2, 3, 0)
    assert none["confusion"] == {"compute": {"compute": 1}, "hang": {"hang": 1, "checkpoint": 1}}
    assert none["kinds"]["checkpoint"] == {"found": 0, "of": 0, "said_of_others": 1}
    assert [(w["case"], w["said"], w["alternative"]) for w in none["wrong"]] == [("c", "checkpoint", "hang")]
    assert [m["case"] for m in none["missed_hangs"]] == ["c", "f"]
    assert none["missed_hangs_said_too_surely"] == []
    assert word["exact"]["right"] == 3
    assert sum(each["of"] for each in none["reliability"]) == 3


def test_a_case_is_judged_without_the_profile_that_its_own_source_helped_to_make(shell: Shell, tmp_path: Path) -> None:
    gpus = [{"index": i, "util_pct": 96, "power_w": 22, "mem_used_mib": 60000} for i in range(4)]
    case = {"reported_state": "hang", "gpu_model": "NVIDIA GB10", "samples": [{"gpus": gpus}]}
    spark = "https://github.com/eugr/spark-vllm-docker/"  # the profile rests on issue 260 of it
    cases = [
        {**case, "id": "a", "source": spark + "issues/260"},
        {**case, "id": "b", "source_url": spark + "issues/7"},
        {**case, "id": "c", "source": "https://github.com/another/repository/issues/7"},
        {**case, "id": "d"},
    ]
    (tmp_path / "cases.json").write_text(json.dumps({"cases": cases}))
    answer = shell.run("backtest", tmp_path, "--json", "--progress", "none")
    found = answer.json["pictures"]["none"]
    assert found["exact"]["right"] == found["hangs_found"]["right"] == 4
    assert found["exact_model_left_out"]["right"] == found["hangs_found_model_left_out"]["right"] == 0
    assert found["exact_source_left_out"]["right"] == found["hangs_found_source_left_out"]["right"] == 2
    assert found["exact_by_source"] == {
        "sources": 3, "mean_rate": 1.0, "largest": "eugr/spark-vllm-docker",
        "without_largest": {"right": 2, "of": 2, "rate": 1.0},
    }  # fmt: skip
    assert found["claims"] == {"from_confidence": 0.6, "right": 0, "of": 0, "rate": None, "coverage": 0.0}
    text = shell.run("backtest", tmp_path, "--progress", "none").out
    assert "without source*: 2 of 4 (50.0%)" in text
    assert (
        "100.0% on average over 3 sources; "
        "without the source with the most cases (eugr/spark-vllm-docker): 2 of 2 (100.0%)" in text
    )


@pytest.mark.parametrize("label", ["reported_state", "expected_state", "state"])
def test_a_case_can_be_alone_or_in_a_collection_with_any_label_key(label: str, shell: Shell, tmp_path: Path) -> None:
    case = labelled("compute", "compute")
    case[label] = case.pop("reported_state")
    (tmp_path / "alone.json").write_text(json.dumps(case))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "many.json").write_text(json.dumps({"samples": [case, case]}))
    (tmp_path / "other.json").write_text('{"nothing": "here"}')
    found = shell.run("backtest", tmp_path, "--json", "--progress", "none").json
    assert list(found["pictures"]) == ["none"]
    assert found["pictures"]["none"]["exact"] == {"right": 3, "of": 3, "rate": 1.0}
    assert "without a label: other.json" in shell.run("backtest", tmp_path).out


def test_the_result_can_be_written_to_a_file_and_is_the_same_each_time(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.json").write_text(json.dumps(labelled("compute", "compute")))
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    text = shell.run("backtest", tmp_path / "data", "--out", first).out
    shell.run("backtest", tmp_path / "data", "--out", second)
    assert first.read_bytes() == second.read_bytes()
    assert "1 of 1 (100.0%)" in text
    assert "without GPU model" in text
    assert shell.run("backtest", tmp_path / "data", "--out", tmp_path / "no" / "where.json").exit_code == 3


# Logs.


def test_a_hang_in_a_log_is_scored_with_its_delay_and_false_alarms_are_counted_per_day(
    shell: Shell, tmp_path: Path
) -> None:
    for name, label in (
        ("hangs.csv", {"intervals": [{"state": "hang", "from_seconds": 300, "to_seconds": 900}]}),
        ("moves.csv", {"state": "compute"}),  # as somebody says who did not look
    ):
        log(tmp_path / name, (300, 560, 96), (600, 149, 100))
        sidecar(tmp_path / name, label)
    found = shell.run("backtest", tmp_path, "--json").json["logs"]
    hangs, moves = found["played"]
    assert [i["state"] for i in hangs["incidents"]] == ["hang"]
    (incident,) = hangs["incidents"]
    assert 20 <= incident["delay_seconds"] <= 90
    assert incident["delay_seconds"] < incident["confirmed_delay_seconds"] < 600
    words = f"first alert after {incident['delay_seconds']:.0f} s; confirmed after"
    assert words in shell.run("backtest", tmp_path).out
    assert hangs["false_alarms"] == []
    assert [a["alert"] for a in moves["false_alarms"]] == ["JobHung"]
    assert found["false_alarms_per_day"]["JobHung"] == pytest.approx(86400 / (2 * 890), rel=0.01)


def test_an_alert_outside_of_its_interval_does_not_count(shell: Shell, tmp_path: Path) -> None:
    log(tmp_path / "run.csv", (900, 560, 96))
    sidecar(tmp_path / "run.csv", {"intervals": [{"state": "hang", "from_seconds": 100, "to_seconds": 200}]})
    (incident,) = shell.run("backtest", tmp_path, "--json").json["logs"]["played"][0]["incidents"]
    assert incident["delay_seconds"] is None
    assert "0 of 1 reported" in shell.run("backtest", tmp_path).out


# Errors.


@pytest.mark.parametrize("label", ["hanging", "Hang", "", 5, ["hang"], {"state": "hang"}, True])
@pytest.mark.parametrize("key", ["reported_state", "state"])
def test_a_case_with_an_unknown_label_is_an_error(label: Any, key: str, shell: Shell, tmp_path: Path) -> None:
    case = labelled("hang", "deadlock", id="x7")
    del case["reported_state"]
    case[key] = label
    (tmp_path / "a.json").write_text(json.dumps([labelled("hang", "deadlock"), case]))
    answer = shell.run("backtest", tmp_path)
    assert (answer.exit_code, answer.out) == (3, "")
    assert f"a.json: case x7: unknown state {label!r}; known states: checkpoint, communication," in answer.err
    assert answer.err.count("\n") == 1


def test_a_label_beyond_the_end_of_its_log_is_an_error(shell: Shell, tmp_path: Path) -> None:
    log(tmp_path / "run.csv", (290, 560, 96))
    sidecar(tmp_path / "run.csv", {"intervals": [{"state": "hang", "from_seconds": 90000}]})
    answer = shell.run("backtest", tmp_path)
    assert (answer.exit_code, answer.out) == (3, "")
    assert "according to its label file hang begins at 90000 s" in answer.err


def test_cases_that_cannot_be_scored_are_listed_by_reason(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(labelled("crash", "idle")))
    answer = shell.run("backtest", tmp_path)
    assert answer.exit_code == 3
    assert "samples cannot show their true state: 1 (states: 1 crash)" in answer.out
    assert "none of the cases in it can be scored" in answer.err


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("{", "not valid JSON: EOF while parsing"),
        ("{}", 'expected "state", or "intervals"'),
        ('{"state": "asleep"}', "state"),
        ('{"intervals": [{"state": "hang", "from_seconds": 9, "to_seconds": 3}]}', "must be greater than"),
        ('{"state": "hang", "form": 1}', "form"),
        ('{"state": "compute", "intervals": [{"state": "hang", "from_seconds": 9}]}', "Remove one of them"),
        ('{"intervals": [{"state": "hang", "from_seconds": "10"}]}', "intervals.0.from_seconds"),
        ('{"state": 3}', "state"),
    ],
)
def test_a_bad_label_is_one_sentence_that_names_its_file(label: str, words: str, shell: Shell, tmp_path: Path) -> None:
    log(tmp_path / "run.csv", (60, 560, 96))
    (tmp_path / "run.csv.label.json").write_text(label)
    answer = shell.run("backtest", tmp_path)
    assert answer.exit_code == 3
    assert answer.out == ""
    assert "run.csv.label.json" in answer.err
    assert words in answer.err
    assert answer.err.count("\n") == 1


def test_a_label_without_its_log_a_log_without_boards_and_an_empty_directory(shell: Shell, tmp_path: Path) -> None:
    assert "no labeled data" in shell.run("backtest", tmp_path).err
    assert "not a directory" in shell.run("backtest", tmp_path / "none").err
    sidecar(tmp_path / "run.csv", {"state": "compute"})
    assert "there is no such file in the same directory" in shell.run("backtest", tmp_path).err
    (tmp_path / "run.csv").write_text("a,b\n1,2\n")
    assert "there are no GPU readings in this file" in shell.run("backtest", tmp_path).err


def test_a_case_whose_samples_cannot_be_read_is_named(shell: Shell, tmp_path: Path) -> None:
    case = labelled("hang", "deadlock", id="x7")
    case["samples"][1]["gpus"][0]["power_w"] = "much"
    (tmp_path / "a.json").write_text(json.dumps(case))
    answer = shell.run("backtest", tmp_path)
    assert (answer.exit_code, answer.out) == (3, "")
    assert "case x7" in answer.err
