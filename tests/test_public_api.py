"""The public API of the package: exactly these names, quick to import, and usable without the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import wattwatch
from tests.watcher.recordings.test_format import record

DATA = Path(__file__).parent / "data"
EXPORTED = [
    "Diagnosis",
    "InputError",
    "NoEvidenceError",
    "Recording",
    "RecordingError",
    "Verdict",
    "diagnose",
    "read_recording",
    "triage",
]
PASTED = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.86.15              Driver Version: 570.86.15      CUDA Version: 12.8     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:18:00.0 Off |                    0 |
| N/A   62C    P0            641W /  700W |   71000MiB /  81559MiB |    100%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:2A:00.0 Off |                    0 |
| N/A   60C    P0            655W /  700W |   71000MiB /  81559MiB |     99%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
"""


def test_exactly_these_names_are_exported() -> None:
    assert sorted(wattwatch.__all__) == EXPORTED
    assert set(EXPORTED) <= set(dir(wattwatch))
    for name in EXPORTED:
        assert getattr(wattwatch, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        wattwatch.nonsense  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, wattwatch; print([m for m in ('pydantic', 'paramiko', 'orjson', 'click') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_pasted_nvidia_smi_table_gets_a_verdict() -> None:
    (verdict,) = wattwatch.triage(PASTED)
    assert verdict.state == "compute"
    assert isinstance(verdict, wattwatch.Verdict)


def test_a_file_gets_the_verdict_of_its_content(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    path.write_text(PASTED)
    assert wattwatch.triage(path) == wattwatch.triage(str(path)) == wattwatch.triage(PASTED)


def test_what_is_known_about_the_steps_is_taken_into_account() -> None:
    idle = PASTED.replace("641W", "120W").replace("655W", "121W")
    (stalled,) = wattwatch.triage(idle, progress="stalled")
    (advancing,) = wattwatch.triage(idle, progress="advancing")
    assert stalled.state == "hang"
    assert advancing.state != "hang"


def test_the_gpu_model_can_be_named_where_the_readings_do_not() -> None:
    unnamed = "index, utilization.gpu [%], power.draw [W]\n" + "".join(f"{i}, 100 %, 640.00 W\n" for i in range(8))
    assert [wattwatch.triage(unnamed)[0].state, wattwatch.triage(unnamed, board="B300")[0].state] == [
        "unknown",
        "communication",
    ]
    with pytest.raises(ValueError, match="there is no power profile for 'b9000'"):
        wattwatch.triage(unnamed, board="b9000")


def test_text_without_readings_is_unknown_and_a_missing_file_an_error(tmp_path: Path) -> None:
    (verdict,) = wattwatch.triage("hello")
    assert verdict.state == "unknown"
    with pytest.raises(wattwatch.InputError, match="No such file"):
        wattwatch.triage(tmp_path / "none.csv")


def test_a_directory_of_dumps_gets_a_diagnosis(tmp_path: Path) -> None:
    diagnosis = wattwatch.diagnose(DATA / "flight_recorder" / "gloo_213_barrier_r3")
    assert diagnosis.verdict == "desync"
    assert diagnosis.conclusive
    with pytest.raises(wattwatch.NoEvidenceError):
        wattwatch.diagnose(tmp_path)


def test_a_recording_is_read(tmp_path: Path) -> None:
    recording = wattwatch.read_recording(record(tmp_path / "run.gz"))
    assert isinstance(recording, wattwatch.Recording)
    assert recording.specs
    assert any(event.sample is not None for event in recording.events)
    with pytest.raises(wattwatch.RecordingError):
        wattwatch.read_recording(tmp_path / "none.gz")
