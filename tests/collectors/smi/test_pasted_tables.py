"""The default table, cut, clipped, wrapped and copied in every way: no value that is printed whole is lost, and none
that is not printed is invented."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.collectors.smi.pasted import (
    COPIED_AS,
    MEBIBYTE,
    R535,
    R550,
    STYLES,
    Gpu,
    Style,
    differences,
    random_gpus,
    table,
    wrapped,
    wrapped_at_spaces,
)
from wattwatch.collectors.samples import ReadingStatus
from wattwatch.collectors.smi import SmiReport, read_gpu_output


def read(lines: list[str]) -> SmiReport:
    return read_gpu_output(("\n".join(lines) + "\n").encode())


@pytest.mark.parametrize("style", STYLES, ids=["390", "535", "550"])
@pytest.mark.parametrize("seed", range(6))
def test_a_table_is_read_wholly_whatever_its_cells_cut(style: Style, seed: int) -> None:
    gpus = random_gpus(8, seed)
    lines, printed = table(gpus, style)
    assert_as_printed(read(lines), gpus, {(value.place, value.field) for value in printed})


@pytest.mark.parametrize("power", range(3, 16))
@pytest.mark.parametrize("memory", [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 22])
def test_cells_of_every_width(power: int, memory: int) -> None:
    gpus = random_gpus(3, power * 31 + memory)
    lines, printed = table(gpus, replace(R550, power_chars=power, memory_chars=memory))
    report = read(lines)
    assert_as_printed(report, gpus, {(value.place, value.field) for value in printed})
    for gpu in report.snapshots[0].gpus:
        assert gpu.fault is None  # a narrow cell is no evidence of a fault
        for name in ("power_watts", "power_limit_watts", "memory_used_bytes", "memory_total_bytes"):
            assert getattr(gpu, name) is not None or gpu.reading(name).reason in {
                ReadingStatus.UNPARSED,
                ReadingStatus.UNSUPPORTED,  # cut before its slash
            }


@pytest.mark.parametrize("style", STYLES, ids=["390", "535", "550"])
def test_lines_clipped_at_every_width(style: Style) -> None:
    """As `watch` clips them in a narrow terminal, and as a selection that ends too early does."""
    gpus = random_gpus(4, 3)
    lines, printed = table(gpus, style)
    for width in range(20, len(lines[0])):
        report = read([line[:width] for line in lines])
        visible = {(value.place, value.field) for value in printed if value.end <= width}
        if any(field == "temperature_celsius" for _, field in visible):
            assert_as_printed(report, gpus, visible, width)


@pytest.mark.parametrize("style", STYLES, ids=["390", "535", "550"])
def test_lines_wrapped_at_every_width(style: Style) -> None:
    gpus = random_gpus(8, 5)
    lines, printed = table(gpus, style)
    visible = {(value.place, value.field) for value in printed}
    for width in range(34, len(lines[0]) + 40):
        report = read(wrapped(lines, width))
        assert_as_printed(report, gpus, visible, width)
        trimmed = read([line.rstrip() for line in wrapped(lines, width)])
        assert_as_printed(trimmed, gpus, visible, width)


@pytest.mark.parametrize("width", range(50, 92))
def test_lines_wrapped_by_a_mail_program(width: int) -> None:
    gpus = random_gpus(8, width)
    lines, printed = table(gpus, R550, processes=False)
    quoted = [f"> {line}" for line in wrapped_at_spaces(lines, width)]
    report = read(quoted)
    # A row may be broken within a name, or twice: what is read must be as printed.
    assert {(gpu.power_watts, gpu.utilization_percent) for gpu in report.snapshots[-1].gpus} - {(None, None)} <= {
        (float(gpu.watts), float(gpu.utilization)) for gpu in gpus
    } | {(float(gpu.watts), None) for gpu in gpus}
    if width >= 72:
        assert_as_printed(report, gpus, {(value.place, value.field) for value in printed}, width)


@pytest.mark.parametrize("copied_as", COPIED_AS)
@pytest.mark.parametrize("style", STYLES, ids=["390", "535", "550"])
def test_the_same_table_from_anywhere(copied_as: str, style: Style) -> None:
    gpus = random_gpus(8, 7)
    lines, printed = table(gpus, style)
    report = read_gpu_output(COPIED_AS[copied_as]("\n".join(lines) + "\n"))
    assert_as_printed(report, gpus, {(value.place, value.field) for value in printed})


@given(
    st.integers(0, 10_000),
    st.integers(1, 16),
    st.sampled_from(STYLES),
    st.sampled_from(sorted(COPIED_AS)),
    st.sampled_from([0, 60, 72, 80, 100, 120]),
)
@settings(max_examples=150, deadline=None)
def test_any_number_of_gpus_wrapped_and_then_dressed(
    seed: int, count: int, style: Style, copied_as: str, width: int
) -> None:
    gpus = random_gpus(count, seed)
    lines, printed = table(gpus, style)
    if copied_as == "blank lines":
        width = 0
    text = "\n".join(wrapped(lines, width) if width else lines) + "\n"
    if copied_as == "quoted-printable" and width:
        copied_as = "quoted"
    report = read_gpu_output(COPIED_AS[copied_as](text))
    assert_as_printed(report, gpus, {(value.place, value.field) for value in printed}, width)


@pytest.mark.parametrize("style", [R535, R550], ids=["535", "550"])
@pytest.mark.parametrize("width", [0, 60, 80])
def test_rows_of_mig_instances_and_processes_are_no_gpus(style: Style, width: int) -> None:
    gpus = [replace(gpu, mig=gpu.index != 1, utilization=97) for gpu in random_gpus(3, 11)]
    lines, printed = table(gpus, style)
    report = read(wrapped(lines, width) if width else lines)
    assert_as_printed(report, gpus, {(value.place, value.field) for value in printed})
    assert [gpu.mig for gpu in report.snapshots[0].gpus] == [True, False, True]
    assert report.snapshots[0].gpus[0].reading("utilization_percent").reason is ReadingStatus.MIG


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("clip", [0, 78])
def test_several_tables_are_samples_at_their_own_times(processes: bool, clip: int) -> None:
    """The date above a table counts, also where processes are listed before it."""
    log = []
    for minute in range(4):
        gpus = random_gpus(8, 13 + minute)
        gpus = [
            replace(gpu, name=random_gpus(8, 13)[0].name, bus=f"00000000:{i:02X}:00.0") for i, gpu in enumerate(gpus)
        ]
        log += [f"Tue Jan  1 10:{minute * 7:02}:00 2030       ", *table(gpus, R550, processes)[0]]
    report = read([line[:clip] if clip else line for line in log])
    assert [len(snapshot.gpus) for snapshot in report.snapshots] == [8] * 4
    times = [snapshot.time_seconds or 0.0 for snapshot in report.snapshots]
    assert [time - times[0] for time in times] == [0.0, 420.0, 840.0, 1260.0]


def test_memory_errors_are_counted_where_the_cell_is_whole() -> None:
    gpus = [replace(gpu, ecc=ecc) for gpu, ecc in zip(random_gpus(4, 17), (0, 1, 12, 0), strict=True)]
    lines, _ = table(gpus)
    assert [gpu.uncorrected_ecc_errors for gpu in read(lines).snapshots[0].gpus] == [0.0, 1.0, 12.0, 0.0]
    without_border = [line.rstrip("|").rstrip() for line in lines]
    assert [gpu.uncorrected_ecc_errors for gpu in read(without_border).snapshots[0].gpus] == [None] * 4


ROW = "|   {}  NVIDIA H100 80GB HBM3          On  | 00000000:{}A:00.0 Off |{:>21} |\n"
SOUND = (
    ROW.format(0, 1, 0) + "| N/A   34C    P0             588W / 700W |  57344MiB / 81920MiB |     99%      Default |\n"
)


@pytest.mark.parametrize(
    ("power", "memory", "utilization", "reason"),
    [
        ("ERR!    P0  ERR! / 700W", "GPU is lost", "ERR!", ReadingStatus.LOST),
        ("ERR!    P0  ERR! / 700W", "GPU is l...", "ERR!", ReadingStatus.LOST),
        ("ERR!  ERR!  ERR! / ERR!", "GPU requires reset", "ERR!", ReadingStatus.RESET_REQUIRED),
        ("34C    P0   588W / 700W", "Unknown Error", "ERR!", ReadingStatus.UNREADABLE),
        ("34C    P0   588W / 700W", "Not Supported", "99%", None),
        ("34C    P0   588W / 700W", "Not Suppor...", "99%", None),
        ("34C    P0   588W /  N/A", "Not Supported", "99%", None),
    ],
)
def test_a_sentence_in_place_of_the_memory(
    power: str, memory: str, utilization: str, reason: ReadingStatus | None
) -> None:
    readings = f"| N/A  {power} | {memory:<20} |{utilization:>8}      Default |"
    report = read_gpu_output((SOUND + ROW.format(1, 2, "N/A" if reason is None else "ERR!") + readings + "\n").encode())
    sound, odd = report.snapshots[0].gpus
    assert (sound.power_watts, sound.utilization_percent, sound.fault) == (588.0, 99.0, None)
    assert odd.fault is reason
    assert odd.memory_used_bytes is None
    if reason is None:
        assert (odd.power_watts, odd.utilization_percent) == (588.0, 99.0)


def test_a_gb10_has_no_memory_and_no_limit_and_is_read() -> None:
    """docs.nvidia.com/dgx/dgx-spark/known-issues.html; layout of github.com/snowflakedb/ArcticTraining/pull/345."""
    text = (
        "|   0  NVIDIA GB10                    On  |   0000000F:01:00.0 Off |                  N/A |\n"
        "| N/A   36C    P8              3W /  N/A  | Not Supported          |      0%      Default |\n"
        "|                                         |                        |                  N/A |\n"
    )
    (gpu,) = read_gpu_output(text.encode()).snapshots[0].gpus
    assert (gpu.power_watts, gpu.utilization_percent, gpu.temperature_celsius) == (3.0, 0.0, 36.0)
    assert gpu.reading("memory_used_bytes").reason is ReadingStatus.UNSUPPORTED
    assert gpu.fault is None


GB10 = """
| NVIDIA-SMI 580.142                Driver Version: 580.142        CUDA Version: 13.0     |
|   0  NVIDIA GB10                    On  |   0000000F:01:00.0 Off |                  N/A |
| N/A   52C    P0             21W /  N/A  | Not Supported          |     96%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
|    0   N/A  N/A           41234      C   VLLM::Worker_TP                      {:>8} |
|    0   N/A  N/A            2991      G   /usr/lib/xorg/Xorg                      91MiB |
+-----------------------------------------------------------------------------------------+
"""


def test_the_memory_of_a_gpu_without_memory_of_its_own_is_what_its_processes_hold() -> None:
    (gpu,) = read_gpu_output(GB10.format("88123MiB").encode()).snapshots[0].gpus
    assert gpu.memory_used_bytes == (88123 + 91) * MEBIBYTE
    assert gpu.memory_total_bytes is None
    (cut_off,) = read_gpu_output(GB10.format("88123...").encode()).snapshots[0].gpus
    assert cut_off.reading("memory_used_bytes").reason is ReadingStatus.UNSUPPORTED
    (none,) = read_gpu_output(GB10.split("|    0   N/A")[0].encode()).snapshots[0].gpus
    assert none.reading("memory_used_bytes").reason is ReadingStatus.UNSUPPORTED  # no list is no zero


def assert_as_printed(
    report: SmiReport, gpus: list[Gpu], visible: set[tuple[int, str]], context: object = None
) -> None:
    """Every visible value is read, and every value that is read is right."""
    hidden = frozenset(gpus[0].truth())
    assert differences(report, gpus, hidden) == [], context
    lost = [
        (place, field)
        for place, field in sorted(visible)
        if getattr(report.snapshots[-1].gpus[place], field) is None and gpus[place].truth()[field] is not None
    ]
    assert lost == [], context
