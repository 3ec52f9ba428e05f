"""How the program for a node travels: one command line without program in it, and the program on its stdin."""

from __future__ import annotations

import json
import zlib
from functools import lru_cache
from importlib import resources

from collectors.probe.payload import PYTHONS
from watcher.diagnose.capture.plan import CapturePlan, NodePlan

NO_PYTHON = 127  # exit status of the command where there is no Python 3.8 or later
MARGIN_SECONDS = 1.5  # for the way there and back, within the capture's deadline


def command_and_stdin(plan: CapturePlan, node: NodePlan, seconds: float) -> tuple[str, bytes]:
    """`seconds`: until the answer must be here. The command passes any login shell, as the probe's does."""
    asked = {
        "run_directory": plan.run_directory,
        "ranks": node.ranks,
        "stands_in_for": node.stands_in_for,
        "processes": node.processes,
        "recorder_files": plan.settings.recorder_files,
        "recorder_pipe": plan.settings.recorder_pipe,
        "saving": plan.saving,
        "py_spy": plan.py_spy,
        "deadline_seconds": max(1.0, seconds - MARGIN_SECONDS),
        "rank_bytes": plan.rank_bytes,
        "node_bytes": plan.node_bytes,
    }
    stdin = _program() + json.dumps(asked).encode("ascii")
    size = len(stdin)
    check = "import sys,zlib,json;sys.exit(sys.version_info<(3,8))"
    start = (
        f"import os,zlib;b=bytearray();"
        f"[b.extend(os.read(0,{size}-len(b)) or os._exit(0)) for _ in iter(lambda:len(b)<{size},False)];"
        f"z=zlib.decompressobj();exec(z.decompress(bytes(b)));"
    )
    command = (
        f"exec /bin/sh -c 'for p in {PYTHONS}; do "
        f'"$p" -I -S -c "{check}" </dev/null >/dev/null 2>&1 && exec "$p" -I -S -u -c "{start}"; '
        f"done; exit {NO_PYTHON}'"
    )
    return command, stdin


@lru_cache(maxsize=1)
def _program() -> bytes:
    program = resources.files(__package__).joinpath("on_node.py").read_text("utf-8")
    # The plan follows the compressed program: zlib keeps it as unused_data.
    return zlib.compress((program + "\nmain(json.loads(bytes(z.unused_data)))\n").encode("utf-8"), 9)
