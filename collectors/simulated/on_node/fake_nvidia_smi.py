"""A fake `nvidia-smi` for simulated nodes: prints the real tool's formats from the node's state file.

Supports --query-gpu, --query-compute-apps (csv; noheader, nounits), -L, the default table and -l/-lms loops. It hangs,
or fails with the driver's own message and exit code, when the state file says so. Runs with `python -S -E`: only the
standard library, so that it starts within about ten milliseconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

Gpu = dict[str, Any]
POLL_SECONDS = 0.05
MEBIBYTE = 1 << 20

FAILURES = {
    "no_driver": (
        9,
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
        "Make sure that the latest NVIDIA driver is installed and running.\n",
    ),
    "mismatch": (18, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n"),
    "unknown": (255, "Failed to initialize NVML: Unknown Error\n"),
    "no_devices": (6, "No devices were found\n"),
}
EVENT_BITS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}
SURVIVES_LOSS = {"index", "uuid", "gpu_uuid", "name", "gpu_name", "pci.bus_id", "gpu_bus_id", "count"} | {
    "driver_version",
    "power.limit",
    "enforced.power.limit",
    "timestamp",
}
UNITS = {
    "power.draw": "W",
    "power.draw.average": "W",
    "power.draw.instant": "W",
    "power.limit": "W",
    "enforced.power.limit": "W",
    "utilization.gpu": "%",
    "utilization.memory": "%",
    "memory.used": "MiB",
    "memory.total": "MiB",
    "memory.free": "MiB",
    "clocks.current.sm": "MHz",
    "clocks.sm": "MHz",
    "used_gpu_memory": "MiB",
    "used_memory": "MiB",
}


def read_state() -> dict[str, Any]:
    try:
        with open(os.environ["WATTWATCH_NODE_STATE"], encoding="utf-8") as file:
            content: dict[str, Any] = json.load(file)
    except (OSError, ValueError):
        return {"smi": "no_driver"}
    return content


def wait_while_hung() -> dict[str, Any]:
    """The real tool hangs in the kernel and ignores signals; this one at least ends with its node or its parent."""
    state = read_state()
    parent = os.getppid()
    while state.get("smi") == "hang":
        if os.getppid() != parent:
            sys.exit(1)
        time.sleep(POLL_SECONDS)
        state = read_state()
    return state


def field_text(gpu: Gpu, state: dict[str, Any], field: str) -> str | None:
    """The value without its unit; None for a field that the driver does not know."""
    if field.startswith(("clocks_event_reasons.", "clocks_throttle_reasons.")):
        reason = field.split(".", 1)[1]
        if reason == "active":
            return f"0x{gpu['throttle']:016x}"
        if reason not in EVENT_BITS:
            return None
        return "Active" if gpu["throttle"] & EVENT_BITS[reason] else "Not Active"
    watts, limit = f"{gpu['power_mw'] / 1000:.2f}", f"{gpu['limit_mw'] / 1000:.2f}"
    known = {
        "timestamp": time.strftime("%Y/%m/%d %H:%M:%S.000", time.localtime(state["wall_seconds"])),
        "driver_version": state["driver"],
        "count": str(len(state["gpus"])),
        "index": str(gpu["index"]),
        "uuid": gpu["uuid"],
        "gpu_uuid": gpu["uuid"],
        "name": gpu["name"],
        "gpu_name": gpu["name"],
        "pci.bus_id": gpu["bus"],
        "gpu_bus_id": gpu["bus"],
        "power.draw": watts,
        "power.draw.average": watts,
        "power.draw.instant": watts,
        "power.limit": limit,
        "enforced.power.limit": limit,
        "utilization.gpu": str(gpu["util"]),
        "utilization.memory": str(gpu["mem_util"]),
        "memory.used": str(gpu["mem_used"] // MEBIBYTE),
        "memory.total": str(gpu["mem_total"] // MEBIBYTE),
        "memory.free": str((gpu["mem_total"] - gpu["mem_used"]) // MEBIBYTE),
        "temperature.gpu": str(gpu["temp"]),
        "clocks.current.sm": str(gpu["sm_clock"]),
        "clocks.sm": str(gpu["sm_clock"]),
        "pstate": f"P{gpu['pstate']}",
        "persistence_mode": "Enabled",
        "mig.mode.current": "Disabled",
        "ecc.errors.uncorrected.volatile.total": str(gpu.get("ecc_errors", 0)),
        "compute_mode": "Default",
    }
    return known.get(field)


def cell(gpu: Gpu, state: dict[str, Any], field: str, with_units: bool) -> str:
    if gpu.get("lost") and field not in SURVIVES_LOSS:
        return "[GPU is lost]"
    text = field_text(gpu, state, field) or "[N/A]"
    return f"{text} {UNITS[field]}" if with_units and field in UNITS else text


def heading(field: str, with_units: bool) -> str:
    return f"{field} [{UNITS[field]}]" if with_units and field in UNITS else field


def query_text(state: dict[str, Any], fields: list[str], options: list[str]) -> tuple[int, str]:
    units = "nounits" not in options
    for field in fields:
        if field_text(state["gpus"][0], state, field) is None:
            return 2, f'Field "{field}" is not a valid field to query.\n\n'
    lines = [] if "noheader" in options else [", ".join(heading(field, units) for field in fields)]
    lines += [", ".join(cell(gpu, state, field, units) for field in fields) for gpu in state["gpus"]]
    return 0, "\n".join(lines) + "\n"


def processes_text(state: dict[str, Any], fields: list[str], options: list[str]) -> tuple[int, str]:
    units = "nounits" not in options
    lines = [] if "noheader" in options else [", ".join(heading(field, units) for field in fields)]
    for gpu in state["gpus"]:
        for pid in [] if gpu.get("lost") else gpu["pids"]:
            memory = f"{gpu['mem_used'] // MEBIBYTE}" + (" MiB" if units else "")
            known = {"pid": str(pid), "process_name": "python3", "used_gpu_memory": memory, "used_memory": memory}
            lines.append(", ".join(known.get(field) or cell(gpu, state, field, units) for field in fields))
    return 0, "".join(line + "\n" for line in lines)


def list_text(state: dict[str, Any]) -> tuple[int, str]:
    return 0, "".join(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})\n" for gpu in state["gpus"])


TABLE_HEAD = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver:<22} Driver Version: {driver:<14} CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|"""
TABLE_ROW = """\
| {index:>3}  {name:<30.30} On  |   {bus:>16} Off |                    0 |
| N/A  {temp:>3}C    P{pstate}  {watts:>13}W / {limit:>4}W | {used:>7}MiB / {total:>6}MiB |{util:>7}%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+"""
TABLE_ROW_LOST = """\
| {index:>3}  {name:<30.30} On  |   {bus:>16} Off |                 ERR! |
| N/A  ERR!   P{pstate}          ERR! / {limit:>4}W | GPU is lost            |    ERR!      Default |
|                                         |                        |                 ERR! |
+-----------------------------------------+------------------------+----------------------+"""
PROCESS_HEAD = """
+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|"""
PROCESS_ROW = "|{index:>5}   N/A  N/A {pid:>16}      C   {name:<34.34}{used:>8}MiB |"
TABLE_END = "+-----------------------------------------------------------------------------------------+"


def table_text(state: dict[str, Any]) -> tuple[int, str]:
    lines = [TABLE_HEAD.format(driver=state["driver"])]
    for gpu in state["gpus"]:
        watts, limit = gpu["power_mw"] // 1000, gpu["limit_mw"] // 1000
        used, total = gpu["mem_used"] // MEBIBYTE, gpu["mem_total"] // MEBIBYTE
        row = TABLE_ROW_LOST if gpu.get("lost") else TABLE_ROW
        lines.append(row.format(**gpu, watts=watts, limit=limit, used=used, total=total))
    lines.append(PROCESS_HEAD)
    lines += [
        PROCESS_ROW.format(index=gpu["index"], pid=pid, name="/usr/bin/python3", used=gpu["mem_used"] // MEBIBYTE)
        for gpu in state["gpus"]
        for pid in gpu["pids"]
    ]
    return 0, "\n".join([*lines, TABLE_END]) + "\n"


def run_query(arguments: dict[str, str]) -> tuple[int, str]:
    """Exit code and standard output."""
    state = wait_while_hung()
    if state.get("smi", "ok") in FAILURES:
        return FAILURES[state["smi"]]
    options = arguments.get("--format", "").split(",")
    if "--query-gpu" in arguments:
        return query_text(state, arguments["--query-gpu"].split(","), options)
    if "--query-compute-apps" in arguments:
        return processes_text(state, arguments["--query-compute-apps"].split(","), options)
    if "-L" in arguments:
        return list_text(state)
    return table_text(state)


def read_arguments(words: list[str]) -> dict[str, str]:
    """`--name=value`, `--name value` for the loop options, and bare flags."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        name, _, value = rest.pop(0).partition("=")
        if name in ("-l", "-lms", "--loop", "--loop-ms", "-i", "-f") and not value and rest:
            value = rest.pop(0)
        found[name] = value
    return found


def main(words: list[str]) -> int:
    arguments = read_arguments(words)
    seconds = float(arguments.get("-l") or arguments.get("--loop") or 0)
    seconds = seconds or float(arguments.get("-lms") or arguments.get("--loop-ms") or 0) / 1000
    while True:
        code, text = run_query(arguments)
        sys.stdout.write(text)
        sys.stdout.flush()
        if not seconds:
            return code
        time.sleep(seconds / float(os.environ.get("WATTWATCH_NODE_SPEED", "1")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
