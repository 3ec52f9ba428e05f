"""`wattwatch triage` on unusual output, on the states of the paper, on pipes, and on what cannot be a source."""

from __future__ import annotations

import json
import os
import re
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.watcher.command_shell import CommandResult, Shell
from tests.watcher.power_examples import POWER_EXAMPLES, PowerExample, json_sample
from wattwatch.watcher.cli import inspect
from wattwatch.watcher.recordings import inputs

DATA = Path(__file__).parents[2] / "data"
CORPUS = Path(__file__).parents[4] / "shared" / "corpus" / "smi_odd"
EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((DATA / "triage" / "odd_outputs.toml").read_text("utf-8"))
TEXTS: dict[str, str] = {
    case["name"]: case["text"].lstrip("\n") or "\n"
    for case in tomllib.loads((DATA / "smi" / "odd_outputs.toml").read_text("utf-8"))["case"]
    if case["name"][:2] in EXPECTED and not (case["name"].startswith("62") and not case["text"])
}
KEYS = [
    "source", "state", "confidence", "shape", "suspects", "power_fraction", "alternative", "settle", "why", "advice",
    "gpus",
]  # fmt: skip
# Lines of a real capture: two boards that train.
TRAINING = b"""index, name, power.draw [W], power.limit [W], utilization.gpu [%], memory.used [MiB], memory.total [MiB]
0, NVIDIA H100 80GB HBM3, 641.10 W, 700.00 W, 100 %, 71000 MiB, 81559 MiB
1, NVIDIA H100 80GB HBM3, 655.70 W, 700.00 W, 99 %, 71000 MiB, 81559 MiB
"""


def check(answer: CommandResult, expected: dict[str, Any]) -> None:
    (said,) = answer.json
    assert list(said) == KEYS
    assert said["state"] == expected["state"], said["why"]
    assert answer.exit_code == expected["exit"]
    assert 0 < said["confidence"] <= expected.get("most", 1.0)
    assert expected.get("words", "") in said["why"]
    assert said["why"].strip()
    assert said["advice"].strip()
    assert bool(said["settle"]) == (said["alternative"] is not None or said["state"] == "unknown") or (
        said["state"] == "gpu_fault"
    )
    if said["state"] == "gpu_fault":
        assert ["?" if s["gpu"] is None else s["gpu"] for s in said["suspects"]] == expected["gpus"]
        assert "may be well" not in said["advice"]
    if "boards" in expected:
        assert len(said["gpus"]) == expected["boards"]
    for board in said["gpus"]:
        assert board["power_watts"] != 0 or "power_watts" not in board["reasons"]


def test_every_odd_output_has_an_expectation() -> None:
    assert {name[:2] for name in TEXTS} == set(EXPECTED)


@pytest.mark.parametrize("name", TEXTS)
def test_an_odd_output_gets_the_verdict_of_its_report(name: str, shell: Shell) -> None:
    check(shell.run("triage", "--json", stdin=TEXTS[name].encode()), EXPECTED[name[:2]])


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of public reports is not laid beside this checkout")
def test_the_original_reports_get_these_verdicts_too(shell: Shell) -> None:
    for path in sorted(CORPUS.glob("[0-9]*")):
        answer = shell.run("triage", "--json", path)
        expected = EXPECTED.get(path.name[:2])
        if expected is None or path.name.startswith("33"):  # another moment than in our cases: judged, and never bad
            assert answer.exit_code in (0, 3), path.name
        else:
            check(answer, {**expected, "boards": len(answer.json[0]["gpus"])})
        assert shell.run("triage", path).exit_code == answer.exit_code


# The paper's pictures


@pytest.mark.parametrize("picture", POWER_EXAMPLES, ids=lambda picture: picture.name)
def test_the_states_of_the_paper_are_recognized(picture: PowerExample, shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "picture.json"
    path.write_bytes(json_sample(picture))
    answer = shell.run("triage", "--json", path)
    (said,) = answer.json
    assert (said["state"], said["shape"]) == (picture.state, picture.shape)
    assert answer.exit_code == picture.exit_code
    assert [s["rank"] for s in said["suspects"]] == picture.suspects
    assert {board["node"] for board in said["gpus"]} == {"node-01", "node-02"}
    assert [board["rank"] for board in said["gpus"]] == list(range(16))


def test_each_job_in_one_json_file_gets_a_verdict(shell: Shell, tmp_path: Path) -> None:
    jobs = [{"name": picture.name, **json.loads(json_sample(picture))} for picture in POWER_EXAMPLES]
    jobs[0]["samples"] = jobs[0]["samples"] * 30  # the others ended long before: that makes none of them stale
    path = tmp_path / "pictures.json"
    path.write_text(json.dumps({"what": "pictures", "samples": jobs}))
    answer = shell.run("triage", "--json", path)
    assert [said["source"] for said in answer.json] == [f"{path}: {picture.name}" for picture in POWER_EXAMPLES]
    assert [said["state"] for said in answer.json] == [picture.state for picture in POWER_EXAMPLES]
    assert [[s["rank"] for s in said["suspects"]] for said in answer.json] == [p.suspects for p in POWER_EXAMPLES]
    assert answer.exit_code == 2


def test_jobs_with_the_same_name_get_different_source_names(shell: Shell) -> None:
    job = json.loads(json_sample(POWER_EXAMPLES[0]))
    answer = shell.run("triage", "--json", "-", stdin=json.dumps([job, {**job, "name": "1"}]).encode())
    assert [said["source"] for said in answer.json] == ["-: 1", "-: 1 (2)"]


def test_what_the_user_knows_about_the_steps_decides(shell: Shell) -> None:
    checkpoint = next(p for p in POWER_EXAMPLES if p.name == "checkpoint")
    data = json_sample(checkpoint)
    (said,) = shell.run("triage", "--json", "--progress", "stalled", "-", stdin=data).json
    assert (said["state"], said["alternative"]["state"]) == ("hang", "checkpoint")
    # The user has just said that the counter does not move.
    assert said["advice"].startswith("Collect flight recorder dumps and stacks before anyone or the NCCL watchdog")
    (said,) = shell.run("triage", "--json", "--progress", "advancing", "-", stdin=data).json
    assert said["state"] == "checkpoint"
    assert shell.run("triage", "--progress", "fine", "-", stdin=data).exit_code == 2


def test_an_unknown_profile_is_wrong_usage_and_the_error_lists_the_known_ones(shell: Shell) -> None:
    answer = shell.run("triage", "--profile", "b9000", "-", stdin=TRAINING)
    assert answer.exit_code == 2
    assert "b9000" in answer.err
    assert "gb300" in answer.err
    assert answer.out == ""
    assert shell.run("triage", "--profile", "H100", "-", stdin=TRAINING).exit_code == 0


def test_two_samples_that_disagree_lower_the_confidence(shell: Shell) -> None:
    header, *rows = TRAINING.decode().splitlines()

    def burst(second: int, watts: str, busy: str) -> str:
        return "".join(
            f"2026/01/01 10:00:0{second}.000, {row}\n".replace("641.10", watts).replace("655.70", watts)
            .replace("100 %", busy).replace("99 %", busy) for row in rows
        )  # fmt: skip

    steady = f"timestamp, {header}\n" + burst(1, "650.00", "100 %") + burst(2, "650.00", "100 %")
    turned = f"timestamp, {header}\n" + burst(1, "120.00", "0 %") + burst(2, "650.00", "100 %")
    (sure,) = shell.run("triage", "--json", stdin=steady.encode()).json
    (unsure,) = shell.run("triage", "--json", stdin=turned.encode()).json
    assert sure["state"] == unsure["state"] == "compute"
    assert unsure["confidence"] < sure["confidence"]
    assert "The previous sample indicated idle." in unsure["why"]


# Sources


def test_each_source_gets_a_verdict_and_the_worst_one_sets_the_exit_code(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "good.csv").write_bytes(TRAINING)
    (tmp_path / "bad.csv").write_bytes(TRAINING.replace(b"641.10 W", b"[GPU is lost]"))
    (tmp_path / "blind.txt").write_text("Failed to initialize NVML: Unknown Error\n")
    good, bad, blind, none = (tmp_path / n for n in ("good.csv", "bad.csv", "blind.txt", "none.csv"))
    answer = shell.run("triage", "--json", good, bad, blind)
    assert [said["source"] for said in answer.json] == [str(good), str(bad), str(blind)]
    assert [said["state"] for said in answer.json] == ["compute", "gpu_fault", "unknown"]
    assert answer.exit_code == 2
    assert shell.run("triage", good, blind).exit_code == 3
    answer = shell.run("triage", good, none)
    assert (answer.exit_code, answer.err) == (3, f"{none}: cannot read the file: No such file or directory\n")
    assert "COMPUTE" in answer.out


def test_the_text_output_does_not_wrap_lines(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / ("a" * 90 + "[bold].csv")
    path.write_bytes(TRAINING.replace(b"641.10 W", b"[GPU requires reset]"))
    lines = shell.run("triage", path).out.splitlines()
    assert lines[0] == f"{path}: GPU FAULT (confidence 0.90)"
    assert [line.split()[0] for line in lines[1:]] == ["why", "suspect", "do"]
    assert "GPU 0" in lines[2]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the input is empty"),
        (os.urandom(4096).replace(b"{", b"").replace(b"[", b""), ""),
        (b"\x00" * 10_000, ""),
        (b"x" * 3_000_000, ""),
        (b'{"samples": [], "gpu_model": "NVIDIA B300"}', "no GPUs"),
        (b'{"gpus": null}', ""),
        (b"[" * 100_000, ""),
        (b'{"gpus": [{"index": 1e999}]}', ""),
        (b"\x1f\x8b\x08" + b"junk" * 50, ""),
        ("index, power.draw [W]\n0, ４２ W\n".encode(), ""),
    ],
    ids=["nothing", "noise", "zeros", "long line", "no samples", "null", "brackets", "infinity", "gzip", "wide digits"],
)  # fmt: skip
def test_garbage_gets_the_verdict_unknown(data: bytes, words: str, shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "garbage").write_bytes(data)
    answer = shell.run("triage", "--json", tmp_path / "garbage")
    (said,) = answer.json
    assert (said["state"], answer.exit_code) == ("unknown", 3)
    assert words in said["why"]
    assert len(said["why"]) < 1000


def test_what_cannot_be_a_source_is_an_error_in_one_sentence(shell: Shell, tmp_path: Path) -> None:
    for source, words in [
        (tmp_path, "is a directory"),
        (tmp_path / "none", "No such file"),
        ("none.csv", "No such file"),
        ("x" * 5000, "there is no such file"),
        ("two words", "there is no such file"),
        ("", "there is no such file"),
        (tmp_path / ("x" * 300), "name too long"),
    ]:
        answer = shell.run("triage", source)
        assert (answer.exit_code, answer.out) == (3, "")
        assert words in answer.err
        assert len(answer.err.splitlines()) == 1


def test_a_pipe_is_read_as_a_file(shell: Shell, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(TRAINING,))
    writer.start()
    answer = shell.run("triage", pipe)
    writer.join()
    assert answer.exit_code == 0
    assert "COMPUTE" in answer.out


def test_a_pipe_without_a_writer_does_not_block(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_PIPE_SECONDS", 0.3)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for command in ("triage", "replay"):
        answer = shell.run(command, pipe)
        assert (answer.exit_code, answer.out) == (3, "")
        assert "nothing was written to this pipe" in answer.err


def test_a_pipe_that_stays_open_is_judged_by_what_has_come(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `nvidia-smi -l 1`, which never ends."""
    monkeypatch.setattr(inputs, "MAX_PIPE_SECONDS", 1.0)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held_open = os.open(pipe, os.O_RDWR)
    os.write(held_open, TRAINING)
    (said,) = shell.run("triage", "--json", pipe).json
    os.close(held_open)
    assert said["state"] == "compute"
    assert "The input was still open" in said["why"]


def test_a_pipe_that_is_already_open_ends_with_its_writer(shell: Shell) -> None:
    """As of `wattwatch triage <(nvidia-smi)`, also where the writer has finished before it is read."""
    reader, writer = os.pipe()
    os.write(writer, TRAINING)
    os.close(writer)
    (said,) = shell.run("triage", "--json", f"/dev/fd/{reader}").json
    os.close(reader)
    assert said["state"] == "compute"
    assert "still open" not in said["why"]


def test_a_mistyped_file_name_is_not_only_called_a_host(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smi_output").write_bytes(TRAINING)
    config = tmp_path / "ssh_config"
    config.write_text(f"Host *\n UserKnownHostsFile {tmp_path}/known_hosts\n")
    (said,) = shell.run("triage", "--json", "-F", config, "smi_outptu").json
    assert said["state"] == "unknown"
    assert "'smi_outptu' is neither a file nor a host name that can be resolved" in said["why"]
    assert "Did you mean the file smi_output?" in said["advice"]
    answer = shell.run("triage", "smi.out")
    assert (answer.exit_code, answer.err) == (3, "smi.out: cannot read the file: No such file or directory\n")


# The GPU model, for input that does not name it

UNNAMED = b"index, utilization.gpu [%], power.draw [W], memory.used [MiB]\n" + b"".join(
    b"%d, 100 %%, %d.00 W, 83968 MiB\n" % (i, 638 + i) for i in range(8)
)


def test_the_papers_query_needs_the_gpu_model_for_a_power_range(shell: Shell) -> None:
    answer = shell.run("triage", "--json", "-", stdin=UNNAMED)
    (said,) = answer.json
    assert (said["state"], answer.exit_code) == ("unknown", 3)
    assert "--board" in said["advice"]
    assert "columns name and power.limit" in said["advice"]
    (said,) = shell.run("triage", "--json", "--board", "B300", "-", stdin=UNNAMED).json
    assert said["state"] == "communication"
    assert "GPU model as given with --board: B300." in said["why"]
    assert "--board" not in said["settle"]
    (said,) = shell.run("triage", "--json", "--board", "h100", "-", stdin=UNNAMED).json
    assert said["state"] == "compute"
    assert [gpu["name"] for gpu in said["gpus"]] == [None] * 8  # what was assumed is no reading


def test_a_model_that_the_input_names_is_not_replaced(shell: Shell) -> None:
    answer = shell.run("triage", "--json", "--board", "b300", "-", stdin=TRAINING)
    assert answer.json == shell.run("triage", "--json", "-", stdin=TRAINING).json
    assert "the input names its GPU model, NVIDIA H100 80GB HBM3; --board b300 is not used" in answer.err


def test_a_model_without_a_profile_is_wrong_usage(shell: Shell, tmp_path: Path) -> None:
    answer = shell.run("triage", "--board", "b9000", "-", stdin=UNNAMED)
    assert (answer.exit_code, answer.out) == (2, "")
    assert "there is no power profile for 'b9000'; choose one of b300," in answer.err
    assert shell.run("triage", "--board", "b300", "--profile", "h100", "-", stdin=UNNAMED).exit_code == 2
    profiles = tmp_path / "profiles.toml"
    profiles.write_text(
        '[[profiles]]\nname = "ours"\nmatch = "B300"\nlimit_watts = 1100\nidle_watts = 140\nfloor_watts = 200\n'
    )
    (said,) = shell.run("triage", "--json", "--board", "B300", "--profile", profiles, "-", stdin=UNNAMED).json
    assert "profile ours" in said["why"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "nvidia module is loaded"),
        ("No devices were found", "lspci"),
    ],
)
def test_the_advice_about_a_driver_is_not_to_replace_a_gpu(text: str, words: str, shell: Shell) -> None:
    (said,) = shell.run("triage", "--json", "-", stdin=text.encode()).json
    assert said["state"] == "gpu_fault"
    assert words in said["advice"]
    assert "replace the GPU" not in said["advice"]
    assert said["suspects"] == [{"node": "host", "gpu": None, "rank": None}]


def test_a_check_that_decides_between_nothing_is_not_said_to_decide(shell: Shell) -> None:
    out = shell.run("triage", "-", stdin=b"Failed to initialize NVML: Unknown Error\n").out
    assert "to find out" in out
    assert "to decide" not in out
    assert "otherwise" not in out


def test_a_host_that_cannot_be_reached_is_one_unknown_verdict(shell: Shell, tmp_path: Path) -> None:
    config = tmp_path / "ssh_config"
    config.write_text(
        "Host closed\n HostName 127.0.0.1\n Port 1\nHost nowhere\n HostName no-such-host.invalid\n"
        f"Host *\n UserKnownHostsFile {tmp_path}/known_hosts\n"
    )
    for hosts, words in [
        (["closed"], "refused"),
        (["nowhere"], "no-such-host.invalid"),
        (["--job", "closed", "nowhere"], ""),
    ]:
        answer = shell.run("triage", "--json", "-F", config, *hosts)
        (said,) = answer.json
        assert (said["state"], answer.exit_code) == ("unknown", 3)
        assert re.search(words, said["why"]), said["why"]
        assert said["gpus"] == []
    answer = shell.run("triage", "-F", tmp_path / "no_such_config", "closed")
    assert answer.exit_code in (2, 3)
    assert "no_such_config" in answer.text


def test_progress_reads_a_pipe_and_does_not_block_on_an_empty_one(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = next(path for path in sorted((DATA / "logs").iterdir()) if path.suffix == ".log")
    reader, writer = os.pipe()
    os.write(writer, log.read_bytes()[-4096:])
    os.close(writer)
    assert shell.run("progress", f"/dev/fd/{reader}").exit_code == 0
    os.close(reader)
    monkeypatch.setattr(inspect, "MAX_PIPE_SECONDS", 0.3)
    os.mkfifo(tmp_path / "pipe")
    answer = shell.run("progress", tmp_path / "pipe")
    assert (answer.exit_code, answer.out) == (3, "")
    assert "nothing was written to this pipe" in answer.err


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "WARNING: infoROM is corrupted at gpu 0000:9B:00.0",
            '"WARNING: infoROM is corrupted at gpu 0000:9B:00.0" (this is GPU 0).',
        ),
        ("Reboot the system to recover this GPU", '"Reboot the system to recover this GPU".'),
        (
            "Unable to determine the device handle for GPU0000:9B:00.0: Unknown Error",
            '"Unable to determine the device handle for GPU0000:9B:00.0: Unknown Error" (this is GPU 0), although the '
            "output lists that GPU.",
        ),
    ],
)
def test_what_the_tool_itself_says_of_a_gpu_beside_its_table_is_said(shell: Shell, message: str, said: str) -> None:
    for text in (f"{PLAIN_TABLE}{message}\n", f"{message}\n{PLAIN_TABLE}"):
        assert f"The tool that wrote the output warns: {said}" in " ".join(
            shell.run("triage", "-", stdin=text.encode()).out.split()
        )
        (found,) = shell.run("triage", "--json", "-", stdin=text.encode()).json
        assert f"The tool that wrote the output warns: {said}" in found["why"]
    lost = "Unable to determine the device handle for GPU 0000:1A:00.0: GPU is lost.  Reboot the system to recover\n"
    answer = shell.run("triage", "-", stdin=(PLAIN_TABLE + lost).encode())
    assert answer.exit_code == 2
    assert answer.out.count("GPU is lost") == 1
    assert "warns" not in shell.run("triage", "-", stdin=PLAIN_TABLE.encode()).out


def test_gpus_on_which_kernels_ran_are_not_said_to_be_without_work(shell: Shell) -> None:
    """As in a public report of training that is starved: https://github.com/wenet-e2e/wenet/issues/1709"""
    at_rest = PLAIN_TABLE.replace("640W", " 71W")
    for percent, words in (("   4%", "Kernels ran for 4 % of the last sample period"), ("   0%", "No kernel ran on")):
        table = at_rest.replace("   100%", f"  {percent}").encode()
        (said,) = shell.run("triage", "--json", "-", stdin=table).json
        assert said["why"].startswith(words)
        assert said["confidence"] < 0.6
        assert "not working now" not in said["advice"]


def test_steps_that_advance_at_the_power_of_waiting_may_be_slow_and_not_in_need_of_nothing(shell: Shell) -> None:
    """As of a GB10 that computes in a stuck low-power state."""
    table = PLAIN_TABLE.replace("640W", " 90W").encode()
    (said,) = shell.run("triage", "--json", "--progress", "advancing", "-", stdin=table).json
    assert said["state"] == "compute"
    assert "held at a low clock" in said["why"]
    assert "Compare the step time" in said["advice"]


PLAIN_TABLE = """\
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|=========================================+========================+======================|
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:9B:00.0 Off |                    0 |
| N/A   61C    P0            640W /  700W |  70123MiB /  81559MiB |    100%      Default |
+-----------------------------------------+------------------------+----------------------+
"""


def test_a_name_that_is_neither_file_nor_host_is_said_to_be_that(shell: Shell) -> None:
    answer = shell.run("triage", "no-such-thing")
    assert "'no-such-thing' is neither a file nor a host name that can be resolved (cannot resolve" in answer.out
    assert "next login" not in answer.out
