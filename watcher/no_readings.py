"""What a file is that holds no GPU readings, and what reads it: the fault is the file's, not the node's."""

from __future__ import annotations

from typing import Final

import orjson

from collectors.progress import read_progress

LOOKED_AT_BYTES: Final = 256 << 10
WANTED: Final = (
    "Give what nvidia-smi prints: its table, -q -x, or "
    "`nvidia-smi --query-gpu=index,name,power.draw,power.limit,utilization.gpu,memory.used --format=csv`"
)
RECORD_KEYS: Final = ({"n", "t", "line"}, {"n", "t", "link"})


def what_it_is(data: bytes) -> tuple[str, str]:
    """What it is ("": text that may be a GPU tool's, of a kind that we do not know), and what to do."""
    if not data.strip():
        return "it is empty: no output at all, of a query that printed nothing or never returned", f"{WANTED}."
    end = data[-LOOKED_AT_BYTES:]
    odd = sum(end.count(bytes((code,))) for code in (*range(7), *range(14, 27)))
    if b"\0" in end and odd * 20 > len(end):
        return "this is binary, not text", f"{WANTED}."
    return training_log(data) or ("", f"{WANTED}.")


def training_log(data: bytes) -> tuple[str, str] | None:
    """That it is a log of training steps, and what reads it; None where no step is told."""
    end = data[-LOOKED_AT_BYTES:]
    sample = read_progress(end.decode("utf-8", "replace"), cut=len(data) > len(end))
    if sample.step is None:
        return None
    return (
        f"this is a log of training steps ({sample.format}, step {sample.step:,}), not of GPUs",
        "`wattwatch progress FILE` reads it. For a verdict give what nvidia-smi prints, and say with --progress "
        "stalled or --progress advancing what the steps do.",
    )


def is_headless_recording(data: bytes) -> bool:
    """Records of a recording whose first line, which names the jobs, is gone."""
    lines = [line for line in data[: 4 << 20].split(b"\n", 3)[:3] if line]
    records = 0
    for line in lines:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # the first may be torn
        records += isinstance(record, dict) and any(keys <= record.keys() for keys in RECORD_KEYS)
    return records > 0
