"""This rank's flight recorder, written down when a collective failed: only NCCL writes its own, gloo never does.

RUN/flight/attempt-02/rank-00003 is what `torchfrtrace RUN/flight/attempt-02 --prefix rank-` reads; recorder-00003.json
is the same without pickle. The JSON's name shares no prefix with the other: torchfrtrace opens every file that does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trainer.publish import published
from trainer.run_directory import RunDirectory

WAIT_SECONDS: Final = 10.0  # the file system may be what hangs


def write_flight_record(directory: RunDirectory, attempt: int, rank: int, log: Callable[[str], None]) -> None:
    """Never raises, and waits for a bounded time: it runs on the way out of an error that matters more.

    `log` hears where the record lies, or why there is none.
    """
    records = directory.flight_records(attempt)
    path = records / f"rank-{rank:05d}"
    outcome = [f"no flight recorder at {path}: not written within {WAIT_SECONDS:.0f} s"]

    def write() -> None:
        try:
            _write(records, rank)
            outcome[0] = f"flight recorder: {path}"
        except Exception as error:  # noqa: BLE001 - see above
            outcome[0] = f"no flight recorder at {path}: {error}"

    thread = threading.Thread(target=write, name="flight recorder", daemon=True)
    thread.start()
    thread.join(WAIT_SECONDS)
    log(outcome[0])


def _write(records: Path, rank: int) -> None:
    from torch._C import _distributed_c10d as recorder

    os.makedirs(records, exist_ok=True)
    for name, dump in (
        (f"rank-{rank:05d}", recorder._dump_fr_trace),  # type: ignore[attr-defined]  # torch's stubs lack both
        (f"recorder-{rank:05d}.json", recorder._dump_fr_trace_json),  # type: ignore[attr-defined]
    ):
        with published(str(records / name)) as file:
            file.write(dump())
