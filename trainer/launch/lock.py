"""One launch in a run directory: two that start in one second would each find nobody, and end each other's ranks."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.refusal import Refusal
from trainer.run_directory import RunDirectory


@contextmanager
def only_launch(run: RunDirectory) -> Iterator[None]:
    """Holds the run directory, which must exist, until the block ends or this process dies. Raises Refusal.

    On a file system without locks nobody is kept out: the gate still looks for living ranks.
    """
    try:
        held = open(run.launch_lock, "a+", encoding="utf-8")  # noqa: SIM115 - closed below, by the with
    except OSError as error:
        raise Refusal(f"{error.filename}: {error.strerror or error}; nothing is started") from None
    with held as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            raise Refusal(f"{run.path}: {holder} launches there already; nothing is started") from None
        except OSError:
            yield
            return
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
