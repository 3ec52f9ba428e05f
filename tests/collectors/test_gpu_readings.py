"""A GPU reading is declared once, in `GpuSample`, and travels by name from the node to the sample."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.collectors.test_nvml import SOUND, row
from tests.tools import DEADLINE_SECONDS
from wattwatch.collectors import samples
from wattwatch.collectors.nvml import UNNAMED_COLUMNS, NvmlColumns, gpu_from_nvml, missing_from_nvml
from wattwatch.collectors.probe.payload import NVML_READINGS
from wattwatch.collectors.probe_reader import UNNAMED_OLD_QUERY_FIELDS, UNNAMED_QUERY_FIELDS
from wattwatch.collectors.samples import GPU_READINGS, GpuSample
from wattwatch.collectors.smi import FALLBACK_QUERY_FIELDS, QUERY_FIELDS

DECLARATION = """\
    default_power_limit_watts: float | None = gpu_reading(
        nvml_key="default_limit_mw", nvml_calls=(("nvmlDeviceGetPowerManagementDefaultLimit",),),
        nvml_divisor=1000.0, steady=True,
        column="default_power_limit", query="power.default_limit",
    )
"""
BEFORE = "    reasons: Mapping[str, ReadingStatus] = field("
PROGRAM = """\
from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.simulated.cluster import SimulatedCluster
from wattwatch.collectors.simulated.scenario import get_scenario
from wattwatch.collectors.smi import QUERY_FIELDS, read_gpu_output, read_query_csv
from wattwatch.collectors.ssh.fleet import Fleet
from wattwatch.collectors.ssh.model import SshSettings

with SimulatedCluster([get_scenario("healthy")]) as cluster:
    request = ProbeRequest(interval_seconds=0.5)
    fleet = Fleet({cluster.nodes[0].name: request}, SshSettings(config_file=cluster.ssh_config), cluster.clock)
    fleet.start()
    gpus = None
    for _ in range(6000):
        fleet.wait(0.1)
        gpus = next((sample.gpus for sample in fleet.drain() if sample.gpus), gpus)
        if gpus:
            break
    fleet.stop()
    print(sorted({gpu.default_power_limit_watts for gpu in gpus}))

cells = {"index": "0", "uuid": "GPU-1", "power.draw": "640.00", "enforced.power.limit": "700.00", "pstate": "P0",
         "mig.mode.current": "Disabled", "clocks_event_reasons.active": "0x0", "power.default_limit": "650.00"}
answer = ", ".join(cells.get(name, "1") for name in QUERY_FIELDS)
print([gpu.default_power_limit_watts for gpu in read_query_csv(answer.encode()).snapshots[0].gpus])
log = b"index, power.draw [W], power.default_limit [W]\\n0, 640.00 W, [N/A]\\n"
print(read_gpu_output(log).snapshots[0].gpus[0].reasons)
"""


def test_a_new_reading_takes_one_declaration_and_no_other_change(tmp_path: Path) -> None:
    package = tmp_path / "wattwatch"
    shutil.copytree(Path(samples.__file__).parent, package / "collectors")
    (package / "__init__.py").touch()
    source = package / "collectors" / "samples.py"
    text = source.read_text("utf-8")
    assert text.count(BEFORE) == 1
    source.write_text(text.replace(BEFORE, DECLARATION + BEFORE), "utf-8")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + PROGRAM
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
        timeout=DEADLINE_SECONDS,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "[1100.0]",
        "[650.0]",
        "{'default_power_limit_watts': <ReadingStatus.UNSUPPORTED: 'unsupported'>}",
    ]


def test_rows_are_read_by_the_names_of_their_columns_whatever_their_order() -> None:
    columns = NvmlColumns(tuple(reversed(UNNAMED_COLUMNS)))
    shuffled = list(reversed(row()))
    errors = {"temp": 15}
    for failed in (None, errors):
        assert gpu_from_nvml(shuffled, failed, (99.0, 1.0), 100.0, columns) == gpu_from_nvml(
            row(), failed, (99.0, 1.0), 100.0
        )
    assert missing_from_nvml([None, 7], {"handle": 15}, NvmlColumns(("uuid", "index"))) == missing_from_nvml(
        [7], {"handle": 15}
    )


def test_a_column_that_this_version_does_not_know_is_ignored_and_one_that_is_missing_was_not_queried() -> None:
    gpu = gpu_from_nvml([3, 61, "later"], None, None, 100.0, NvmlColumns(("index", "temp", "vapor_pressure")))
    assert gpu == GpuSample(3, temperature_celsius=61.0)


def test_every_column_of_old_recordings_still_has_a_reading() -> None:
    named: dict[str, Any] = {reading.nvml_key: name for name, reading in GPU_READINGS.items()}
    assert set(UNNAMED_COLUMNS) - {"index"} <= set(named)
    assert set(SOUND) == set(UNNAMED_COLUMNS)
    assert {key for key, *_ in NVML_READINGS} == set(named)
    assert set(UNNAMED_QUERY_FIELDS) <= set(QUERY_FIELDS)
    assert set(UNNAMED_OLD_QUERY_FIELDS) <= set(FALLBACK_QUERY_FIELDS)
