"""Captures each kind of hung job anew for the tests that need no live one: `python -m tests...save_captures`.

Writes tests/data/captures/KIND. Paths of this machine are replaced, and the manifest's sums follow.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

from tests.collectors.ssh.real_sshd import site
from tests.collectors.ssh.running_fleet import running_fleet
from tests.watcher.diagnosis.hung_jobs import KINDS, hung_job
from wattwatch.collectors.clock import Clock
from wattwatch.watcher.diagnosis.capture.collector import CapturePlan, NodeCapturePlan, capture_evidence

REPOSITORY: Final = Path(__file__).parents[4]
CAPTURES: Final = REPOSITORY / "tests" / "data" / "captures"
NODE: Final = "node-01"


def save(kind: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        (place / "site").mkdir()
        with site(place / "site") as here:
            here.server(NODE)
            with running_fleet(here.settings(), (NODE,)) as watch, hung_job(kind, place) as job:
                watch.until_lines(1, NODE)
                plan = CapturePlan(kind, (NodeCapturePlan(NODE),), str(job.run_directory))
                capture_evidence(plan, watch.fleet.channels, place / "capture", Clock())
        replaced = {
            str(job.run_directory): "/nfs/runs/pretrain",
            sysconfig.get_paths()["purelib"]: "/usr/lib/python3/site-packages",
            sysconfig.get_paths()["stdlib"]: "/usr/lib/python3",
            str(REPOSITORY): "/srv/wattwatch",
        }
        shutil.rmtree(CAPTURES / kind, ignore_errors=True)
        neutral(place / "capture", CAPTURES / kind, replaced)


def neutral(source: Path, target: Path, replaced: dict[str, str]) -> None:
    target.mkdir(parents=True)
    manifest = json.loads((source / "manifest.json").read_text())
    for path in source.iterdir():
        data = path.read_bytes()
        if not data.startswith(b"\x80"):  # a pickle's lengths would no longer be true
            for old, new in replaced.items():
                data = data.replace(old.encode(), new.encode())
        (target / path.name).write_bytes(data)
        if path.name in manifest["files"]:
            manifest["files"][path.name] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    text = json.dumps(manifest, indent=1) + "\n"
    for old, new in replaced.items():
        text = text.replace(old, new)
    (target / "manifest.json").write_text(text)


if __name__ == "__main__":
    for kind in sys.argv[1:] or KINDS:
        save(kind)
