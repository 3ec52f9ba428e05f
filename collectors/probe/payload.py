"""How the probe gets to a node: one command line, and the bytes that follow it on the channel's stdin.

The command contains no program, only two numbers, so it works in every login shell (no backslash, `!`, quote or line
break inside its single quotes: csh and fish would fail on them) and within every length limit. stdin carries, in this
order: the shell probe as text, the Python probe compressed, the request as JSON. Python's bootstrap reads exactly
`size` bytes with os.read and leaves the rest of stdin for the lease; where there is no Python, /bin/sh reads the shell
probe from the same stdin, and that discards the rest.

`python3` is taken from PATH: a simulated node puts its own first.
"""

from __future__ import annotations

import json
import zlib
from functools import lru_cache
from importlib import resources, util
from pathlib import Path
from typing import Final

from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.samples import GPU_READINGS
from wattwatch.collectors.smi import FALLBACK_QUERY_FIELDS, QUERY_FIELDS, QUERY_FORMAT

LEASE_RENEWAL_SECONDS: Final = 20.0
"""Interval at which the control host writes LEASE_LINE. The probe exits after 60 s without this line, so two lines may
be lost."""
LEASE_LINE: Final = b"\n"

NVML_READINGS: Final = [
    (reading.nvml_key, reading.nvml_calls, reading.nvml_part, reading.steady)
    for reading in GPU_READINGS.values()
    if reading.nvml_key
]
"""The readings that the probe takes through NVML, as declared in `GpuSample`. They are the same for every node, so they
belong to the compressed program that every node gets, not to the request for one node."""

PYTHON_CANDIDATES: Final = "python3 python3.13 python3.12 python3.11 python3.10 python3.9 python3.8 python"


def probe_command(request: ProbeRequest) -> str:
    """The command line to run; `probe_payload(request)` must follow on its stdin."""
    shell, size = len(_shell_probe(request)), len(probe_payload(request))
    # -I and -S: neither PYTHON* variables nor site-packages of the node can break the start or slow it down.
    check = "import sys,zlib,ctypes,json;sys.exit(sys.version_info<(3,8))"
    bootstrap = (
        f"import os,zlib;b=bytearray();"
        f"[b.extend(os.read(0,{size}-len(b)) or os._exit(0)) for _ in iter(lambda:len(b)<{size},False)];"
        f"z=zlib.decompressobj();exec(z.decompress(bytes(b[{shell}:])));"
    )
    # The shell probe kills its own process group at the end. sshd starts us as its leader; otherwise setsid must.
    return (
        f"exec /bin/sh -c 'for p in {PYTHON_CANDIDATES}; do "
        f'"$p" -I -S -c "{check}" </dev/null >/dev/null 2>&1 && exec "$p" -I -S -u -c "{bootstrap}"; '
        f'done; read -r a b c d group e </proc/$$/stat; [ "$group" = $$ ] || exec setsid /bin/sh; exec /bin/sh\''
    )


@lru_cache(maxsize=4096)
def probe_payload(request: ProbeRequest) -> bytes:
    """The bytes to write to the command's stdin. The channel then stays open for the lease."""
    values = {
        "interval": request.interval_seconds,
        "query": list(QUERY_FIELDS),
        "form": QUERY_FORMAT,
        "runs": list(request.run_directories),
        "logs": [source.path for source in request.logs],
        "checkpoints": list(request.checkpoint_directories),
        "processes": request.process_pattern,
    }
    return _shell_probe(request) + _python_probe() + json.dumps(values).encode("ascii")


@lru_cache(maxsize=1)
def _python_probe() -> bytes:
    probe = resources.files(__package__).joinpath("node_probe.py").read_text("utf-8")
    # The request follows the compressed program, and zlib leaves it in unused_data: one program serves all nodes.
    start = f"\nmain(json.loads(bytes(z.unused_data)), {NVML_READINGS!r}, {_pynvml_source()!r})\n"
    return zlib.compress((probe + start).encode("utf-8"), 9)


def _pynvml_source() -> str:
    """The installed nvidia-ml-py, as source text. Not imported: this host needs no driver."""
    spec = util.find_spec("pynvml")
    return Path(spec.origin).read_text("utf-8") if spec is not None and spec.origin else ""


def _shell_probe(request: ProbeRequest) -> bytes:
    script = resources.files(__package__).joinpath("shell_probe.sh").read_text("utf-8")
    seconds = max(1, round(request.interval_seconds))  # POSIX sleep takes whole seconds
    settings = f"interval={seconds}\nfields={','.join(QUERY_FIELDS)}\nold_fields={','.join(FALLBACK_QUERY_FIELDS)}\n"
    settings += f"form={QUERY_FORMAT}\n"
    return (settings + script).encode("ascii")
