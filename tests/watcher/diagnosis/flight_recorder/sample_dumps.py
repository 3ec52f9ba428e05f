"""Real flight records, and conversions of them to each of PyTorch's formats."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any, Final

DATA: Final = Path(__file__).parents[3] / "data" / "flight_recorder"
NCCL: Final = DATA / "nc_early_r3" / "_dump_3"
PIPELINE: Final = DATA / "nccl_gpu_error_1st" / "_dump_12"
GLOO: Final = DATA / "gloo_213_early_r3" / "fr_trace_3"
NEWER_TORCH: Final = ("1.4", "2.1", "2.4", "2.9", "2.10", "2.11")


def loaded(path: Path) -> dict[str, Any]:
    """The content of one of our own files: safe to unpickle."""
    dump: dict[str, Any] = pickle.loads(path.read_bytes())
    return dump


def in_format(dump: dict[str, Any], version: str) -> dict[str, Any]:
    """The dump as another version of torch would have written it. 2.11 is a future version with an extra field."""
    made = copy.deepcopy(dump)
    made["version"] = version
    number = tuple(map(int, version.split(".")))
    if number >= (2, 11):
        made["color"] = made["entries"][0]["color"] = "blue"
        return made
    if number == (2, 9):
        made["nccl_version"] = made.pop("comm_lib_version", made.get("nccl_version"))
    if number < (2, 9):
        made.pop("comm_lib_version", made.pop("nccl_version", None))
    if number < (2, 4):
        del made["pg_status"]
    for entry in made["entries"]:
        gone = ["thread_id", "thread_name"] if number < (2, 9) else []
        gone += ["timeout_ms"] if number < (2, 4) else []
        if number < (2, 1):
            gone += ["process_group", "p2p_seq_id", "is_p2p", "input_dtypes", "output_dtypes", "collective_seq_id"]
            entry["seq_id"] = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        for field in gone:
            entry.pop(field)
    return made


def as_json(dump: dict[str, Any]) -> bytes:
    """The recorder's JSON format: no stacks, counts as strings, 0 for an unset time, no list if it is empty."""
    made = copy.deepcopy(dump)
    made["nccl_comm_state"] = {}
    for counts in made.get("pg_status", {}).values():
        counts.update({field: str(count) for field, count in counts.items()})
    for entry in made["entries"]:
        entry.pop("frames", None)
        for field in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            entry[field] = entry[field] or 0
    if not made["entries"]:
        del made["entries"]
    return json.dumps(made).encode()
