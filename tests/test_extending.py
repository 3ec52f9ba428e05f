"""Extending is local: one of each kind, added to a copy of the tree in just the places that CONTRIBUTING.md lists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.test_architecture import classes_defined_twice
from tests.tools import DEADLINE_SECONDS

ROOT = Path(__file__).parents[1]
PACKAGES = ("collectors", "trainer", "watcher")


@dataclass(frozen=True, slots=True)
class Edit:
    """Text that goes into a file: after or before the one line that contains a text, at its end, or as a new file."""

    path: str
    text: str
    after: str = ""
    before: str = ""

    def apply(self, root: Path) -> None:
        file = root / self.path
        old = file.read_text("utf-8") if file.exists() else ""
        if not self.after + self.before:
            file.write_text(old + self.text, "utf-8")
            return
        lines = old.splitlines(keepends=True)
        (number,) = (number for number, line in enumerate(lines) if (self.after or self.before) in line)
        place = number + 1 if self.after else number
        file.write_text("".join([*lines[:place], self.text, *lines[place:]]), "utf-8")


@dataclass(frozen=True, slots=True)
class Extension:
    kind: str  # as the first column of the table in CONTRIBUTING.md names it
    edits: tuple[Edit, ...]
    program: str  # proves that the extension works; prints `expected`
    expected: str


# In front of each program: the extended copy instead of this checkout, and `run` for a command's JSON.
PRELUDE = """
import contextlib, io, json, sys
sys.path[:0] = [{root!r}, {tests!r}]  # the copy has no tests: their helpers come from here

def run(*arguments):
    from wattwatch.watcher.cli.main import main
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(list(arguments))
    return json.loads(printed.getvalue())
"""
EXTENSIONS = (
    Extension(
        "receiver",
        (
            Edit(
                "watcher/alerting/receivers/pager.py",
                '''
"""Posts one line of text."""

from wattwatch.watcher.alerting.message import AlertMessage
from wattwatch.watcher.alerting.receivers.base import RateLimit, Receiver


class Pager(Receiver):
    rate_limit = RateLimit(messages_per_second=1.0, burst=5.0)

    def render(self, message: AlertMessage, receiver_name: str) -> bytes:
        return f"{receiver_name}: {message}".encode()


RECEIVER = Pager()
''',
            ),
            Edit("watcher/config/settings.py", '    "pager": "one line of text",\n', after="RECEIVER_TYPES: Final = {"),
        ),
        """
from pathlib import Path
from wattwatch.watcher.alerting.receivers.base import find_receiver
from wattwatch.watcher.config.settings import load_config

Path("url").write_text("http://127.0.0.1:1/")
Path("wattwatch.toml").write_text(
    '[[jobs]]\\nname = "a"\\nnodes = "n1"\\n[[receivers]]\\nname = "night"\\ntype = "pager"\\nurl_file = "url"\\n'
)
(section,) = load_config(Path("wattwatch.toml")).receivers
receiver = find_receiver(section.type)
print(receiver.render("hung", section.name).decode(), receiver.classify_response(200, {}, "", 0.0))
""",
        "night: hung Delivered()",
    ),
    Extension(
        "log format",
        (
            Edit(
                "collectors/progress_formats.toml",
                """
[[formats]]
name = "sprocket"
hint = "cog="
step = '\\bcog=(?P<step>\\d+) of (?P<total>\\d+)'
source = "a trainer that does not exist"
""",
            ),
        ),
        """
from pathlib import Path

Path("train.log").write_text("".join(f"12:00:0{i} cog={i} of 900\\n" for i in range(1, 9)))
progress = run("progress", "--json", "train.log")
print(progress["format"], progress["step"], progress["total_steps"])
""",
        "sprocket 8 900",
    ),
    Extension(
        "checkpoint layout",
        (
            Edit(
                "collectors/checkpoint_layouts.toml",
                """
[[layouts]]
framework = "sprocket"
name = '^cog_(?P<step>\\d+)$'
holds = ['^weights\\.bin$']
needs = ["whole.txt"]
source = "a trainer that does not exist"
""",
            ),
        ),
        """
from pathlib import Path

for step, files in ((5, ["weights.bin", "whole.txt"]), (10, ["weights.bin"])):
    folder = Path(f"checkpoints/cog_{step}")
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_bytes(b"1")
found = {entry["step"]: entry["complete"] for entry in run("checkpoints", "--json", "checkpoints")}
print(found[5], found[10])
""",
        "True False",
    ),
    Extension(
        "GPU model",
        (
            Edit(
                "watcher/detection/baselines/profiles.toml",
                """
[[profile]]
name = "x9000"
match = "X9000"
limit_watts = 2000
idle_watts = 200
floor_watts = 400
compute_watts = 1500
certain = 0.8
source = "a GPU that does not exist"
""",
                after='source = "spinning draws 0.59 of the power limit',  # above the last row, which matches every GPU
            ),
        ),
        """
from wattwatch.watcher.detection.baselines.profiles import profile_for

profile = profile_for("NVIDIA X9000 SXM", 2000.0)
print(profile.name, profile.floor_watts)
""",
        "x9000 400.0",
    ),
    Extension(
        "GPU reading",
        (
            Edit(
                "collectors/samples.py",
                """    fan_percent: float | None = gpu_reading(
        nvml_key="fan", nvml_calls=(("nvmlDeviceGetFanSpeed",),), column="fan", query="fan.speed", highest=100.0
    )
""",
                before="    reasons: Mapping[str, ReadingStatus] = field(",
            ),
        ),
        """
from wattwatch.collectors.smi import QUERY_FIELDS, read_gpu_output

log = b"index, power.draw [W], fan.speed [%]\\n0, 640.00 W, 38 %\\n"
print(read_gpu_output(log).snapshots[0].gpus[0].fan_percent, "fan.speed" in QUERY_FIELDS)
""",
        "38.0 True",
    ),
    Extension(
        "fault code",
        (Edit("watcher/detection/trackers/xid.toml", '150 = "the sprocket broke"\n', after="[faults]"),),
        """
from wattwatch.watcher.detection.trackers import gpu_health

print(gpu_health.fatal_xids()[150])
""",
        "the sprocket broke",
    ),
    Extension(
        "metric",
        (
            Edit(
                "watcher/web/metrics.toml",
                """
[wattwatch_job_slowest_step]
group = "job"
type = "gauge"
unit = "none"
labels = ["train_job"]
reads = "sample.progress.slowest_step"
help = "The lowest step over the ranks."
""",
            ),
        ),
        """
from tests.watcher.web import sample_snapshots
from wattwatch.watcher.web.metrics import SnapshotMetrics

body = SnapshotMetrics(60.0).render(sample_snapshots.cluster()).decode()
print(next(line.split("{")[0] for line in body.splitlines() if line.startswith("wattwatch_job_slowest_step{")))
""",
        "wattwatch_job_slowest_step",
    ),
    Extension(
        "alert",
        (
            Edit(
                "watcher/detection/alerts.toml",
                """
[[alert]]
name = "LossHigh"
severity = "warning"
recovery = "absence"
advice = "Lower the learning rate."
persistence_seconds = { with_steps = 5.0, without_steps = 5.0 }
""",
            ),
            Edit(
                "watcher/detection/model.py", '    LOSS_HIGH = "LossHigh"\n', after='LOSS_NOT_FINITE = "LossNotFinite"'
            ),
            Edit(
                "watcher/detection/findings.py",
                """
    PersistentRule(
        AlertName.LOSS_HIGH,
        lambda inputs: (inputs.observation.sample.progress.loss or 0.0) > 1.5,
        lambda inputs, hysteresis: _persistent_finding(
            AlertName.LOSS_HIGH, inputs.observation, hysteresis, "The loss is high.", ["loss above 1.5"]
        ),
    ),
""",
                after="PERSISTENT_RULES: Final = (",
            ),
        ),
        """
from tests.watcher.detection.simulated_seconds import COMPUTE, Job

job = Job()
job.play(40, COMPUTE)
for finding in job.findings:
    print(finding.alert.value, finding.severity.value, finding.summary, finding.advice)
""",
        "LossHigh warning The loss is high. Lower the learning rate.",
    ),
)


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the three folders with every extension in it at once."""
    root = tmp_path_factory.mktemp("extended")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "wattwatch", root / "wattwatch", symlinks=True)
    for extension in EXTENSIONS:
        for edit in extension.edits:
            edit.apply(root)
    return root


@pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda extension: extension.kind)
def test_an_extension_works_with_these_edits_alone(extension: Extension, extended: Path, tmp_path: Path) -> None:
    program = PRELUDE.format(root=str(extended), tests=str(ROOT)) + extension.program
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == extension.expected


def test_the_extended_tree_still_has_one_definition_per_class(extended: Path) -> None:
    assert classes_defined_twice(extended) == {}


def test_contributing_lists_these_places_and_no_others() -> None:
    """Rows of the table: | kind | `path` (what), `path` (what) | test |."""
    section = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## Extending", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ") and "`" in line]
    listed = {
        kind.strip(): set(re.findall(r"`((?:collectors|watcher|trainer)/[\w./]+)`", places)) for kind, places in rows
    }
    assert listed == {
        extension.kind: {edit.path.replace("pager.py", "NAME.py") for edit in extension.edits}
        for extension in EXTENSIONS
    }
