"""Files that hold no readings of one host's boards: what they are is said, and what reads them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.watcher.command_shell import Shell
from wattwatch.watcher.recordings.inputs import GpuLog, read_input

LOGS = Path(__file__).parents[2] / "data" / "logs"
HEADER = "index, name, power.draw [W], power.limit [W], utilization.gpu [%], memory.used [MiB]\n"


def rows(watts: float = 640.0, count: int = 4) -> list[str]:
    return [f"{i}, NVIDIA H100 80GB HBM3, {watts:.2f} W, 700.00 W, 100 %, 71000 MiB\n" for i in range(count)]


def table(name: str, bus: int) -> str:
    return (
        "| NVIDIA-SMI 535.1   Driver Version: 535.1   CUDA Version: 12.2 |\n"
        f"|   0  {name}          On  |   00000000:{bus:02X}:00.0 Off |           0 |\n"
        "| N/A   34C    P0             640W /  700W |   71000MiB /  81559MiB |    100%      Default |\n"
    )


@pytest.mark.parametrize(
    "log", [path for path in sorted(LOGS.iterdir()) if path.suffix == ".log"], ids=lambda p: p.name
)
def test_a_training_log_is_recognized_and_the_advice_names_progress(log: Path, shell: Shell) -> None:
    triage, replay = shell.run("triage", "--json", log), shell.run("replay", log)
    (said,) = triage.json
    assert (triage.exit_code, replay.exit_code, said["state"]) == (3, 3, "unknown")
    for words in (said["why"] + said["advice"], replay.err):
        assert "a log of training steps" in words
        assert "run `wattwatch progress FILE`" in words
        assert "--progress advancing if steps advance, or --progress stalled if they do not" in words
    assert "node" not in said["advice"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the input is empty"),
        (b" \n\n", "the input is empty"),
        (bytes(range(256)) * 99, "binary"),
        (b"hello\n", "no GPU row found"),
    ],
)
def test_a_file_without_gpus_does_not_blame_the_node(data: bytes, words: str, shell: Shell) -> None:
    (said,) = shell.run("triage", "--json", "-", stdin=data).json
    assert words in said["why"]
    assert said["advice"].startswith("Give the output of nvidia-smi")


def test_a_recording_without_its_header_is_an_error(shell: Shell, tmp_path: Path) -> None:
    record = b'{"n":"a","t":1.5,"line":"{\\"v\\":1}"}\n'
    torn = b'ne":"x"}\n' + record * 3
    for data in (record * 3, torn, gzip.compress(record * 3)):
        path = tmp_path / "r.gz"
        path.write_bytes(data)
        for command in ("triage", "replay"):
            answer = shell.run(command, path)
            assert (answer.exit_code, answer.out) == (3, "")
            assert "the beginning of this wattwatch recording is missing" in answer.err


@pytest.mark.parametrize("cut", [0, 5])
def test_a_log_in_gzip_is_read(cut: int, shell: Shell, tmp_path: Path) -> None:
    data = gzip.compress((HEADER + "".join(rows() * 3)).encode())
    (tmp_path / "log.csv.gz").write_bytes(data[: len(data) - cut])
    (said,) = shell.run("triage", "--json", tmp_path / "log.csv.gz").json
    assert (said["state"], len(said["gpus"])) == ("compute", 4)
    assert shell.run("replay", tmp_path / "log.csv.gz").exit_code == 0


@pytest.mark.parametrize(
    "text",
    [
        table("NVIDIA H100 80GB HBM3", 27) + table("NVIDIA H200", 27),
        table("NVIDIA H100 80GB HBM3", 27) + table("NVIDIA H100 80GB HBM3", 59),
        HEADER + "".join(rows()) + HEADER + "".join(rows()).replace("H100 80GB HBM3", "H200"),
    ],
)
def test_two_hosts_in_one_paste_are_kept_apart_by_what_their_gpus_are(text: str, shell: Shell) -> None:
    answer = shell.run("triage", "--json", "-", stdin=text.encode())
    assert [said["source"] for said in answer.json] == ["-: host 1", "-: host 2"]
    assert all("previous sample" not in said["why"] for said in answer.json)
    assert (
        "and each host was judged separately. If the hosts run one job, add --job."
        in shell.run("triage", "-", stdin=text.encode()).out
    )


def test_rows_of_two_hosts_that_nothing_separates_are_an_error(shell: Shell) -> None:
    text = HEADER + "".join(rows()) + "".join(rows()).replace("H100 80GB HBM3", "H200")
    answer = shell.run("triage", "-", stdin=text.encode())
    assert (answer.exit_code, answer.out) == (3, "")
    assert "-: this is the output of several hosts: GPU 0 is NVIDIA H100 80GB HBM3 at" in answer.err
    assert "wattwatch triage HOST" in answer.err


def test_two_tables_of_one_host_are_two_samples(shell: Shell) -> None:
    text = table("NVIDIA H100 80GB HBM3", 27) * 2
    assert shell.run("triage", "--json", "-", stdin=text.encode()).json[0]["state"] == "compute"


def test_lines_with_host_prefixes_are_one_job_per_host(shell: Shell) -> None:
    """As pdsh and clush print them, in any order."""
    lines = [f"{host}: {line}" for line in (HEADER, *rows()) for host in ("gpu-02", "gpu-01")]
    answer = shell.run("triage", "--json", "-", stdin="".join(lines).encode())
    assert [(said["source"], said["state"], len(said["gpus"])) for said in answer.json] == [
        ("-: gpu-02", "compute", 4), ("-: gpu-01", "compute", 4),
    ]  # fmt: skip
    log = read_input("f", "".join(f"gpu-01: {line}" for line in (HEADER, *rows())).encode())
    assert isinstance(log, GpuLog)
    assert [spec.name for spec in log.specs] == ["f"]


def test_the_deciding_check_names_the_option(shell: Shell) -> None:
    text = HEADER + "".join(rows(200.0)).replace("100 %", "[N/A]")
    (said,) = shell.run("triage", "--json", "-", stdin=text.encode()).json
    assert said["state"] == "unknown"
    assert "--progress" in said["advice"] + (said["settle"] or "")
    assert "a log or a run directory" not in said["advice"]


def test_a_compressed_log_that_is_cut_off_says_so(shell: Shell, tmp_path: Path) -> None:
    data = gzip.compress((HEADER + "".join(rows() * 3)).encode())
    (tmp_path / "log.csv.gz").write_bytes(data)
    (said,) = shell.run("triage", "--json", tmp_path / "log.csv.gz").json
    assert "cut off" not in said["why"]
    (tmp_path / "log.csv.gz").write_bytes(data[:-5])
    (said,) = shell.run("triage", "--json", tmp_path / "log.csv.gz").json
    assert "The compressed file is cut off" in said["why"]
    assert "The compressed file is cut off" in shell.run("replay", tmp_path / "log.csv.gz").out
