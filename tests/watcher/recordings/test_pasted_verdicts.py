"""From a pasted output to its verdict: what was read decides, and what was not read is said."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.collectors.smi.pasted import R535, Gpu, table
from tests.collectors.smi.test_json_and_amd import amd_smi, gpustat, rocm_smi
from tests.collectors.smi.test_outline import text_of
from wattwatch.watcher.cli.triage import triage_exit_code
from wattwatch.watcher.detection.model import PowerState
from wattwatch.watcher.recordings.triage import TriageResult, triage_text_or_path


def gpus(name: str, watts: int, limit: int, total: int, utilization: int = 100, count: int = 8) -> list[Gpu]:
    return [
        Gpu(
            index=index,
            name=name,
            bus=f"00000000:{16 * index + 10:02X}:00.0",
            watts=watts + index,
            limit=limit,
            used=total * 3 // 4,
            total=total,
            utilization=utilization,
            temperature=34,
        )
        for index in range(count)
    ]


HUNG = gpus("NVIDIA H200", 120, 700, 143771)
HEALTHY = gpus("NVIDIA B200", 726, 1000, 196608, 97)


def verdict(text: str) -> TriageResult:
    (result,) = triage_text_or_path(text)
    return result


def pasted(them: list[Gpu]) -> str:
    """As nvidia-smi 535 prints it, which cuts limits and amounts of memory that are too wide for its cells."""
    return "\n".join(table(them, R535)[0]) + "\n"


def test_a_cut_amount_of_memory_does_not_hide_a_hang() -> None:
    assert "MiB / 1437..." in pasted(HUNG)
    result = verdict(pasted(HUNG))
    assert (result.verdict.state, triage_exit_code(result)) == (PowerState.HANG, 2)


def test_a_cut_limit_does_not_hide_work() -> None:
    assert "W / 1..." in pasted(HEALTHY)
    result = verdict(pasted(HEALTHY))
    assert (result.verdict.state, triage_exit_code(result)) == (PowerState.COMPUTE, 0)
    assert [gpu.gpu.power_limit_watts for gpu in result.sample.gpus] == [None] * 8


@pytest.mark.parametrize("form", ["table", "text"])
def test_a_memory_error_is_something_to_do(form: str) -> None:
    damaged = [replace(gpu, ecc=1) if gpu.index == 2 else gpu for gpu in HEALTHY]
    result = verdict(pasted(damaged) if form == "table" else text_of(damaged))
    assert result.verdict.state is PowerState.COMPUTE
    assert triage_exit_code(result) == 1
    assert "GPU 2 counts 1 uncorrected memory (ECC) error since the driver was loaded" in result.verdict.why
    assert "No action needed" not in result.verdict.advice
    assert "the counter does not show when" in result.verdict.why
    assert "Xid" in result.verdict.advice
    assert result.verdict.suspects == ()  # of nothing: when the error occurred is not known


def test_a_memory_error_of_unknown_age_is_named_beside_a_hang_but_is_no_suspect() -> None:
    damaged = [replace(gpu, ecc=12) if gpu.index == 5 else gpu for gpu in HUNG]
    result = verdict(pasted(damaged))
    assert (result.verdict.state, triage_exit_code(result)) == (PowerState.HANG, 2)
    assert "GPU 5 counts 12 uncorrected memory (ECC) errors" in result.verdict.why
    assert "step counter" in result.verdict.advice
    assert result.verdict.suspects == ()


def test_every_gpu_of_a_text_counts() -> None:
    result = verdict(text_of(HEALTHY))
    assert (result.verdict.state, len(result.sample.gpus)) == (PowerState.COMPUTE, 8)
    hung = verdict(text_of(HUNG).replace(": 11 %", ": 0 %"))  # what waits moves no memory
    assert hung.verdict.state is PowerState.HANG


def test_a_lost_gpu_in_words_is_a_fault_and_the_others_are_not() -> None:
    lines = pasted(HUNG).splitlines()
    row = next(number for number, line in enumerate(lines) if HUNG[2].bus in line) + 1
    cells = lines[row].split("|")
    lines[row] = f"| N/A  ERR!    P0             ERR! / 700W | GPU is lost          |    ERR!      Default |{cells[-1]}"
    result = verdict("\n".join(lines) + "\n")
    assert (result.verdict.state, triage_exit_code(result)) == (PowerState.GPU_FAULT, 2)
    assert [suspect.gpu for suspect in result.verdict.suspects] == [2]
    assert ": lost" in result.verdict.why


def test_a_text_about_something_else_is_unknown_and_no_fault() -> None:
    text = (
        "==============NVSMI LOG==============\nAttached GPUs : 1\n    Product Name : NVIDIA H200\n    Fabric\n"
        "        Health\n            Access Timeout Recovery : N/A\n"
    )
    result = verdict(text)
    assert (result.verdict.state, triage_exit_code(result)) == (PowerState.UNKNOWN, 3)
    assert result.verdict.suspects == ()


def test_amd_gpus_are_judged_from_their_json() -> None:
    busy = gpus("AMD Instinct MI300X", 600, 750, 196608, 97)
    result = verdict(json.dumps(rocm_smi(busy), indent=4))
    assert result.verdict.state is PowerState.COMPUTE
    assert len(result.sample.gpus) == 8
    metric = verdict(json.dumps(amd_smi(busy, True), indent=4))
    assert [gpu.gpu.power_watts for gpu in metric.sample.gpus] == [float(gpu.watts) for gpu in busy]


def test_json_of_gpustat_is_not_taken_for_samples_without_readings() -> None:
    result = verdict(json.dumps(gpustat(HEALTHY)))
    assert result.verdict.state is PowerState.COMPUTE
    assert [gpu.gpu.power_watts for gpu in result.sample.gpus] == [float(gpu.watts) for gpu in HEALTHY]


def test_a_topology_is_said_to_be_one() -> None:
    result = verdict("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-63\nGPU1\tNV18\t X \t0-63\n")
    assert (result.verdict.state, triage_exit_code(result)) == (PowerState.UNKNOWN, 3)
    assert "topo -m" in result.verdict.why


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "index, power.draw [W], name\n0, 300.00 W, NVIDIA L4\n",
            "Utilization cannot be read on 1 of 1 GPU (not given",
        ),
        ("index, utilization.gpu [%], power.draw [W]\n0, 97 %, 30", "Power cannot be read on 1 of 1 GPU (cut off"),
        (
            "index, power.draw [W], utilization.gpu [%]\n0, [N/A], [N/A]\n1, 9.10 W, [N/A]\n",
            "Power cannot be read on 1 of 2",
        ),
        (
            "index, power.draw [W], utilization.gpu [%]\n0, [N/A], 5 %\n1, 9.10 W, [N/A]\n",
            "Power cannot be read on 1 of 2 GPUs; Utilization cannot be read on 1 of 2 GPUs.",
        ),
        ("0, NVIDIA B200, 726.87, 97\n", "There is no header, so the columns were inferred"),
    ],
)
def test_what_is_missing_is_named(text: str, why: str) -> None:
    assert why in triage_text_or_path(text)[0].verdict.why


def listed(rows: list[tuple[str, str, str, str]]) -> TriageResult:
    header = "index, name, power.draw [W], power.limit [W], utilization.gpu [%], memory.used [MiB]\n"
    return verdict(
        header + "".join(f"{i}, {name}, {w}, {limit}, {u}, 70000\n" for i, (name, w, limit, u) in enumerate(rows))
    )


def test_a_busy_gpu_at_waiting_power_is_not_said_to_draw_compute_power() -> None:
    watts = ("980", "990", "250", "975")
    result = listed([("NVIDIA B200", each, "1000", "100") for each in watts])
    assert result.verdict.state is PowerState.COMPUTE
    assert result.verdict.confidence <= 0.65
    assert "1 of 4 GPUs draws less (250 W), no more than a GPU that only waits" in result.verdict.why
    assert "All 4 GPUs are busy and draw compute-level power" not in result.verdict.why


def test_the_share_of_the_limit_is_that_of_the_gpus_that_are_described() -> None:
    rows = [("NVIDIA A100-SXM4-40GB", "250", "400", "[N/A]"), ("NVIDIA A100-SXM4-40GB", "390", "400", "100")]
    assert "(1 GPU at 390 W, 98 % of its power limit; " in listed(rows).verdict.why


def test_a_likely_hang_is_never_answered_with_no_action_alone() -> None:
    header = "GPU  Temp (DieEdge)  AvgPwr  SCLK    MCLK    Fan  Perf  PwrCap  VRAM%  GPU%"
    row = "{}    45.0c           {}.0W  1500Mhz 1600Mhz 0%   auto  560.0W   90%   {}%"
    text = "\n".join([header, *(row.format(*each) for each in ((0, 180, 100), (1, 178, 100), (2, 95, 0)))])
    found = verdict(text + "\n").verdict
    assert found.alternative is not None
    assert (found.state, found.alternative.state) == (PowerState.COMMUNICATION, PowerState.HANG)
    assert found.advice.startswith("No action needed if the job's step counter is moving. If it is not, collect ")


def test_only_the_gpus_that_draw_it_are_said_to_draw_compute_level_power() -> None:
    working = gpus("NVIDIA B200", 950, 1000, 196608, 97)
    even = verdict(pasted(working)).verdict
    assert even.why.startswith("All 8 GPUs are busy and draw compute-level power")
    mixed = verdict(pasted([replace(working[0], watts=190), *working[1:]])).verdict
    assert mixed.state is PowerState.COMPUTE
    assert mixed.why.startswith("All 8 GPUs are busy, most at compute-level power, but 1 of 8 GPUs draws less (190 W)")
    assert mixed.confidence < even.confidence
    assert mixed.alternative is not None
    assert mixed.alternative.confidence <= mixed.confidence


def test_power_slightly_above_the_floor_is_not_called_no_more_than_the_floor() -> None:
    at = verdict(pasted(HUNG)).verdict.why
    above = verdict(pasted([replace(gpu, watts=168) for gpu in HUNG])).verdict.why
    assert "they draw no more power than GPUs that only wait" in at
    assert "they draw about as much power as GPUs that only wait" in above


def test_of_a_lost_gpu_no_readings_are_named_that_the_input_does_not_have() -> None:
    row = "2026/09/14 01:09:1{}.300, {}, {}, {}\n"
    lost = "[GPU is lost]"
    text = (
        "timestamp, index, power.draw [W], utilization.gpu [%]\n"
        + row.format(4, 0, "298.10 W", "97 %")
        + row.format(5, 0, lost, lost)
    )
    (result,) = triage_text_or_path(text)
    assert result.verdict.state is PowerState.GPU_FAULT
    assert "lost" in result.verdict.why
    assert "energy" not in result.verdict.why
    assert "memory" not in result.verdict.why


def test_a_container_without_access_is_not_told_that_its_driver_was_replaced() -> None:
    result = verdict("Failed to initialize NVML: Unknown Error\n").verdict
    assert result.state is PowerState.UNKNOWN
    assert "container" in result.why
    assert "driver" not in result.advice.lower()


def test_gpus_that_belong_to_no_job_are_named_beside_one_that_is_cut_off() -> None:
    header = "index, power.limit [W], memory.used [MiB], utilization.gpu [%], power.draw [W]\n"
    text = header + "".join(f"{i}, 450.00 W, 4 MiB, 0 %, 20.35 W\n" for i in range(6)) + "6, 450.00"
    (result,) = triage_text_or_path(text, progress="advancing")
    assert result.verdict.state is PowerState.UNKNOWN
    assert "Only 6 of 7 GPUs have valid power and utilization." in result.verdict.why
    assert result.verdict.why.endswith("Ignored: 6 GPUs without allocated memory.")
    assert "progress" not in result.verdict.advice  # the user has just given it


def test_two_samples_that_disagree_leave_the_verdict_at_least_as_sure_as_its_alternative() -> None:
    header = "timestamp, index, name, power.limit [W], memory.used [MiB], utilization.gpu [%], power.draw [W]\n"
    for earlier in range(50, 700, 50):
        for later in range(50, 700, 25):
            rows = "".join(
                f"2026/03/01 10:00:0{second}, {index}, NVIDIA H100 80GB HBM3, 700 W, 60000 MiB, {percent} %, {w}.00 W\n"
                for second, w, percent in ((0, earlier, 20), (1, later, 100))
                for index in range(2)
            )
            result = verdict(header + rows).verdict
            other = result.alternative
            assert result.state is PowerState.UNKNOWN or other is None or other.confidence <= result.confidence


def test_memory_that_is_read_on_one_gpu_only_is_not_said_to_be_free_on_any() -> None:
    header = "index, name, power.draw [W], power.limit [W], utilization.gpu [%], memory.used [MiB]\n"
    rows = (
        "0, NVIDIA B300 SXM6 AC, 112.00 W, 880.00 W, 0 %, 4 MiB\n",
        "1, NVIDIA B300 SXM6 AC, 112.00 W, 880.00 W, 0 %, ",
    )
    unknown, held = (verdict(header + rows[0] + rows[1] + each + "\n").verdict for each in ("[N/A]", "900 MiB"))
    assert "No job has memory allocated" not in unknown.why
    assert unknown.confidence <= held.confidence  # what is not known makes nothing surer
