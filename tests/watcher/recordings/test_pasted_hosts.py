"""The output of several hosts in one text, or in several files: kept apart, or joined into one job on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.watcher.command_shell import Shell
from wattwatch.watcher.recordings.inputs import GpuLog, HostOrder, read_input
from wattwatch.watcher.recordings.pasted_hosts import count_undated_outputs, split_by_host

QUERY = "index, utilization.gpu [%], power.draw [W], memory.used [MiB]\n"  # of arXiv 2608.05944, section 3
BUSY = 100.0


def readings(idle: int | None = None, watts: float = 190.0, count: int = 8) -> str:
    """One sample of a host at the power floor, in which GPU `idle` runs nothing."""
    return "".join(f"{i}, {0 if i == idle else 100} %, {watts + i % 3:.2f} W, 83968 MiB\n" for i in range(count))


def named(idle: int | None = None, watts: float = 190.0) -> str:
    header = "index, name, utilization.gpu [%], power.draw [W], power.limit [W], memory.used [MiB]\n"
    return header + "".join(
        f"{i}, NVIDIA B300 SXM6 AC, {0 if i == idle else 100} %, {watts + i % 3:.2f} W, 1100.00 W, 83968 MiB\n"
        for i in range(8)
    )


def table(percent: int = 100, watts: int = 120, date: str = "", driver: str = "535.54.03", bus: int = 0x1A) -> str:
    dated = f"{date}\n" if date else ""
    return (
        dated + "+-----------------------------------------------------------------------------+\n"
        f"| NVIDIA-SMI {driver}   Driver Version: {driver}   CUDA Version: 12.2 |\n"
        + "".join(
            f"|   {i}  NVIDIA H100 80GB HBM3    On  | 00000000:{bus + i:02X}:00.0 Off |                  0 |\n"
            f"| N/A   61C    P0   {watts + i}W / 700W |  71000MiB / 81559MiB |    {percent}%      Default |\n"
            for i in range(2)
        )
    )


def hosts(text: str) -> list[str]:
    found = split_by_host(text.encode())
    return [] if found is None else list(found.outputs)


# What names a host


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node 0:\n```\n{0}```\nnode 1:\n```\n{1}```\n", ["node 0", "node 1"]),
        ("On the first node:\n{0}and on the second node (same moment):\n{1}", ["first node", "second node"]),
        ("=== gpu-01 ===\n{0}\n=== gpu-02 ===\n{1}", ["gpu-01", "gpu-02"]),
        ("10.0.0.7:\n{0}\n10.0.0.8:\n{1}", ["10.0.0.7", "10.0.0.8"]),
        ("-----\ngpu-01\n-----\n{0}-----\ngpu-02\n-----\n{1}", ["gpu-01", "gpu-02"]),
        ("gpu-01 | CHANGED | rc=0 >>\n{0}\ngpu-02 | CHANGED | rc=0 >>\n{1}", ["gpu-01", "gpu-02"]),
        ("[1] 10:00:01 [SUCCESS] gpu-01\n{0}[2] 10:00:01 [SUCCESS] ann@gpu-02\n{1}", ["gpu-01", "gpu-02"]),
        ("==> out/gpu-01.txt <==\n{0}\n==> out/gpu-02.txt <==\n{1}", ["gpu-01.txt", "gpu-02.txt"]),
        ("ann@gpu-01:~$ nvidia-smi\n{0}ann@gpu-02:~$ nvidia-smi\n{1}ann@gpu-02:~$ ", ["gpu-01", "gpu-02"]),
        ("$ ssh gpu-01 nvidia-smi\n{0}$ ssh -q ann@gpu-02 nvidia-smi\n{1}", ["gpu-01", "gpu-02"]),
        ("{0}and on node 2:\n{1}", ["host 1", "node 2"]),
    ],
    ids=["headings", "prose", "echo", "address", "dshbak", "ansible", "pssh", "head", "prompts", "ssh", "no first"],
)  # fmt: skip
@pytest.mark.parametrize("as_table", [True, False], ids=["table", "csv"])
def test_hosts_with_equal_gpus_are_told_apart_by_what_names_them(text: str, names: list[str], as_table: bool) -> None:
    outputs = (table(), table(0, 115)) if as_table else (QUERY + readings(), QUERY + readings(0))
    pasted = text.format(*outputs)
    assert hosts(pasted) == names
    assert hosts("".join(f"> {line}\n" for line in pasted.splitlines())) == names or not as_table
    log = read_input("f", pasted.encode())
    assert isinstance(log, GpuLog)
    assert [spec.name for spec in log.specs] == names
    assert log.host_order is HostOrder.GIVEN
    first, second = (event.sample for event in log.events)
    assert first is not None
    assert second is not None
    assert [gpu.utilization_percent for gpu in first.gpus or ()][:1] == [100.0]
    assert [gpu.utilization_percent for gpu in second.gpus or ()][:1] == [0.0]


def test_the_header_of_gpustat_names_its_host() -> None:
    text = "".join(
        f"{host}  Mon Mar 11 09:31:00 2019  535.1\n"
        f"[0] Tesla V100-SXM2-32GB | 61'C, {percent} %, 70 / 300 W | 28888 / 32510 MB |\n"
        for host, percent in (("dgx-1", 100), ("dgx-2", 0))
    )
    log = read_input("f", text.encode())
    assert isinstance(log, GpuLog)
    assert [spec.name for spec in log.specs] == ["dgx-1", "dgx-2"]
    samples = [event.sample for event in log.events]
    assert [sample.gpus[0].utilization_percent for sample in samples if sample and sample.gpus] == [100.0, 0.0]
    assert all(sample is not None and sample.wall_seconds > 0 for sample in samples)


def test_a_host_that_is_named_twice_has_two_samples() -> None:
    text = "".join(f"gpu-0{i}:\n{table()}" for i in (1, 2, 1, 2))
    log = read_input("f", text.encode())
    assert isinstance(log, GpuLog)
    assert [spec.name for spec in log.specs] == ["gpu-01", "gpu-02"]
    assert len(log.events) == 4


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({}, {"driver": "570.86.15"}),
        ({}, {"bus": 0x5A}),
    ],
    ids=["driver", "PCI id"],
)
def test_hosts_are_told_apart_by_their_gpus(a: dict[str, object], b: dict[str, object]) -> None:
    text = table(**a) + table(**b)  # type: ignore[arg-type]
    assert hosts(text) == ["host 1", "host 2"]
    assert hosts(text + text) == ["host 1", "host 2"]


@pytest.mark.parametrize(
    "text",
    [
        table(),
        table() + table(),
        f"Before:\n{table()}After:\n{table()}",
        f"step-100:\n{table()}step-200:\n{table()}",
        f"sample 1\n{table()}sample 2\n{table()}",
        f"node 1:\n{table()}on the same node, a minute later:\n{table()}",
        f"ann@login:~$ ssh gpu-01\nann@gpu-01:~$ nvidia-smi\n{table()}",
        f"GPU 0:\n{table()}GPU 1:\n{table()}",
        f"Our server hung.\n{table()}We restarted it:\n{table()}",
    ],
    ids=["one", "two", "before and after", "steps", "samples", "same node", "login", "gpus", "prose"],
)
def test_one_host_stays_one_host(text: str) -> None:
    assert hosts(text) == []


def test_uuids_tell_hosts_apart(shell: Shell) -> None:
    def csv(host: str, header: bool) -> str:
        rows = "".join(f"{i}, GPU-{host}-{i}, 100 %, 190.00 W, 80000 MiB\n" for i in range(4))
        return f"{'index, uuid, utilization.gpu [%], power.draw [W], memory.used [MiB]' if header else ''}\n{rows}"

    assert hosts(csv("a", True) + csv("b", True)) == ["host 1", "host 2"]
    assert hosts(csv("a", True) + csv("a", True)) == []
    assert count_undated_outputs((csv("a", True) + csv("a", True)).encode()) == 0
    answer = shell.run("triage", "-", stdin=(csv("a", True) + csv("b", False)).encode())
    assert (answer.exit_code, answer.out) == (3, "")
    assert "with UUID GPU-a-0, but also a GPU at an unknown PCI id with UUID GPU-b-0" in answer.err


# Where nothing tells


def test_outputs_that_may_be_of_several_hosts_are_counted() -> None:
    one, two = "Tue Dec  1 03:15:39 2026", "Tue Dec  1 03:15:49 2026"
    assert count_undated_outputs(table().encode()) == 0
    assert count_undated_outputs((table() + table()).encode()) == 2
    assert count_undated_outputs((table(date=one) + table(date=two)).encode()) == 0  # a loop on one host
    assert count_undated_outputs((table(date=one) + table(date=one)).encode()) == 2
    assert count_undated_outputs((QUERY + readings() + QUERY + readings()).encode()) == 2
    assert count_undated_outputs((QUERY + readings() + readings()).encode()) == 0  # one command, as with -l 1


def test_a_verdict_on_outputs_that_may_be_of_several_hosts_says_so(shell: Shell) -> None:
    text = (table(100, 640) + table(100, 640)).encode()
    (said,) = shell.run("triage", "--json", "-", stdin=text).json
    assert "2 outputs without dates or UUIDs, which were read as 2 samples of one host" in said["why"]
    (said,) = shell.run("triage", "--json", "--job", "-", stdin=text).json
    assert "The 2 outputs in - were each read as a separate node." in said["why"]
    assert [(gpu["node"], gpu["index"], gpu["rank"]) for gpu in said["gpus"]] == [
        ("host 1", 0, 0), ("host 1", 1, 1), ("host 2", 0, 2), ("host 2", 1, 3),
    ]  # fmt: skip


# One job


def pdsh(*outputs: tuple[str, str]) -> bytes:
    return "".join(f"{host}: {line}\n" for host, text in outputs for line in text.splitlines()).encode()


DEADLOCK = pdsh(("gpu-10", QUERY + readings(0)), ("gpu-9", QUERY + readings()))


def test_the_first_gpu_of_the_second_node_is_rank_8_and_does_not_save(shell: Shell) -> None:
    """Host by host, the deadlock looks like a checkpoint, which rank 0 writes. pdsh prints hosts as they answer."""
    answer = shell.run("triage", "--json", "--job", "-", stdin=DEADLOCK)
    (said,) = answer.json
    assert (said["source"], said["state"], answer.exit_code) == ("job", "hang", 2)
    assert said["suspects"] == [{"node": "gpu-10", "gpu": 0, "rank": 8}]
    assert "Ranks are numbered in the order of the host names." in said["why"]


def test_files_of_one_job_are_joined_in_the_order_given(shell: Shell, tmp_path: Path) -> None:
    for directory, idle in (("a", None), ("b", 0)):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "smi.csv").write_text(named(idle))
    a, b = tmp_path / "a" / "smi.csv", tmp_path / "b" / "smi.csv"
    (said,) = shell.run("triage", "--json", "--job", a, b).json
    assert said["state"] == "hang"
    assert said["suspects"] == [{"node": str(b), "gpu": 0, "rank": 8}]
    assert len(said["gpus"]) == 16
    (said,) = shell.run("triage", "--json", "--job", b, a).json
    assert said["state"] == "checkpoint"
    assert [said["state"] for said in shell.run("triage", "--json", a, b).json] == ["hang", "checkpoint"]
    answer = shell.run("triage", "--job", a, a)
    assert (answer.exit_code, answer.out) == (3, "")
    assert "given twice" in answer.err


def test_of_one_host_no_rank_is_named_and_the_doubt_is_said(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text(named(0))
    (said,) = shell.run("triage", "--json", tmp_path / "n.csv").json
    assert said["state"] == "checkpoint"
    assert {gpu["rank"] for gpu in said["gpus"]} == {None}
    assert "GPU 0 is idle and the other GPUs are only waiting" in said["why"]
    assert "rank" not in said["why"].lower()
    assert "not the first node" in said["advice"]
    assert "--job" in said["advice"]
    (tmp_path / "n.csv").write_text(named(3))
    (said,) = shell.run("triage", "--json", tmp_path / "n.csv").json
    assert (said["state"], said["suspects"]) == ("hang", [{"node": "n.csv", "gpu": 3, "rank": None}])


def test_a_job_is_not_judged_without_one_of_its_files(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(named())
    answer = shell.run("triage", "--job", tmp_path / "a.csv", tmp_path / "none.csv")
    assert (answer.exit_code, answer.out) == (3, "")
    assert "every file must be readable" in answer.err


def test_a_node_that_could_not_be_read_is_named(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(named(3))
    (tmp_path / "b.txt").write_text("Failed to initialize NVML: Driver/library version mismatch\n")
    (whole,) = shell.run("triage", "--json", tmp_path / "a.csv").json
    (part,) = shell.run("triage", "--json", "--job", tmp_path / "a.csv", tmp_path / "b.txt").json
    assert "b.txt" in part["why"]
    assert part["confidence"] < whole["confidence"]


def test_hosts_and_files_are_not_one_job(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(named())
    answer = shell.run("triage", "--job", tmp_path / "a.csv", "gpu-01")
    assert (answer.exit_code, answer.out) == (2, "")
    assert "give either hosts or files" in answer.err


def test_a_file_that_names_its_jobs_is_refused(shell: Shell, tmp_path: Path) -> None:
    gpus = '{"gpus": [{"index": 0, "util_pct": 100, "power_w": 600}]}'
    (tmp_path / "jobs.json").write_text(f'{{"samples": [{{"samples": [{gpus}]}}, {{"samples": [{gpus}]}}]}}')
    answer = shell.run("triage", "--job", tmp_path / "jobs.json")
    assert (answer.exit_code, answer.out) == (3, "")
    assert "already contains 2 jobs" in answer.err


def test_samples_of_two_moments_are_not_one_picture(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(table(100, 115, "Tue Dec  1 03:15:39 2026"))
    (tmp_path / "b.txt").write_text(table(100, 115, "Tue Dec  1 05:15:39 2026"))
    (said,) = shell.run("triage", "--json", "--job", tmp_path / "a.txt", tmp_path / "b.txt").json
    assert "2 h apart" in said["why"]
    (tmp_path / "b.txt").write_text(table(100, 115, "Tue Dec  1 03:15:41 2026"))
    (close,) = shell.run("triage", "--json", "--job", tmp_path / "a.txt", tmp_path / "b.txt").json
    assert "apart" not in close["why"]
    assert said["confidence"] < close["confidence"]


def test_labels_of_srun_are_hosts(shell: Shell) -> None:
    text = "".join(f"{task}: {line}\n" for line in (QUERY + readings()).splitlines() for task in (1, 0)).encode()
    answer = shell.run("triage", "--json", "--job", "-", stdin=text)
    assert [gpu["node"] for gpu in answer.json[0]["gpus"]] == ["task 0"] * 8 + ["task 1"] * 8
