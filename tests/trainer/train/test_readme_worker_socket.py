"""The lines in README.md for other trainers start a server where the watcher expects it, open only to its user."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import pytest

from tests.tools import DEADLINE_SECONDS
from wattwatch.trainer.run_directory import RunDirectory

README = Path(__file__).parents[3] / "README.md"
ASK = """
import socket
with socket.socket(socket.AF_UNIX) as each:
    each.settimeout(600)
    each.connect(f"{RUN}/worker/rank-00003.sock")
    each.sendall(b"POST /handler/dump_traceback HTTP/1.0\\r\\nContent-Length: 0\\r\\n\\r\\n")
    print(each.recv(4096).split(b"\\r\\n")[0].decode())
server.shutdown()
"""


@pytest.fixture
def run() -> Iterator[Path]:
    """A short path, as a socket needs it."""
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(util.find_spec("torch") is None, reason="torch is not installed: pip install 'wattwatch[trainer]'")
def test_the_lines_in_the_readme_start_a_server_where_the_watcher_expects_it(run: Path) -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    program = lines.replace('"/nfs/runs/pretrain"', repr(str(run))) + ASK
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env={"RANK": "3"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert answer.stdout.strip() == "HTTP/1.1 200 OK", answer.stderr
    assert stat.S_IMODE((run / "worker").stat().st_mode) == 0o700
    assert RunDirectory(run).worker_socket(3).parent == run / "worker"
    assert RunDirectory(run).worker_socket(3).name == "rank-00003.sock"
