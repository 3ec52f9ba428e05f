"""How a rank can be inspected while it hangs, and what it leaves when a collective fails.

The worker socket answers requests for stacks and for the flight recorder although the main thread is inside a
collective. The flight record is a dump of that recorder: only NCCL's watchdog writes one by itself, gloo never does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from wattwatch.trainer.atomic_files import atomic_write
from wattwatch.trainer.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _WorkerServer

MAX_SOCKET_PATH_BYTES: Final = 107  # unix(7): 108 with the terminating zero
CLOSE_SECONDS: Final = 5.0
PRIVATE_DIRECTORY_PREFIX: Final = "wattwatch-worker-"
DUMP_SECONDS: Final = 10.0  # the file system may be what hangs


@contextmanager
def worker_socket(directory: RunDirectory, rank: int, log: Callable[[str], None]) -> Iterator[Path | None]:
    """Runs torch's worker server at `directory.worker_socket(rank)` until the block ends.

    The server (torch/csrc/distributed/c10d/control_plane) handles POST /handler/dump_traceback and
    /handler/fr_trace_json. It has no authentication, and creates its socket with mode 0755, so the directory around it
    is 0700. A Unix socket only works on its own host.

    Yields the socket's own path. If no socket can be created in the run directory (a path that is too long, a file
    system without sockets), its name there is a symbolic link to a private directory below the temporary directory.
    Yields None if there is no server: the reason goes to `log`, and the job runs without.
    """
    link = directory.worker_socket(rank)
    server, path = None, None
    try:
        server, path = _start_server(link)
    except Exception as error:  # noqa: BLE001 - a rank that cannot be inspected can still train
        log(f"cannot create worker socket {link}: {error}; stacks and flight record of this rank will not be available")
    try:
        yield path
    finally:
        if server is not None:
            # In a thread: shutdown may hang if the server has only just begun to listen.
            closing = threading.Thread(target=server.shutdown, name="worker socket", daemon=True)
            closing.start()
            closing.join(CLOSE_SECONDS)
            _remove_socket(link)


def _start_server(link: Path) -> tuple[_WorkerServer, Path]:
    """Raises OSError, or torch's RuntimeError."""
    link.parent.mkdir(parents=True, exist_ok=True)
    # The server executes requests of anybody who can connect; stacks may show data.
    link.parent.chmod(0o700)
    _remove_socket(link)  # of an attempt that was killed: torch fails if the name exists
    if len(os.fsencode(link)) <= MAX_SOCKET_PATH_BYTES:
        # RuntimeError is how torch reports a file system without sockets, such as some network file systems.
        with contextlib.suppress(RuntimeError):
            return _worker_server(link), link
    private = Path(tempfile.mkdtemp(prefix=PRIVATE_DIRECTORY_PREFIX))  # mode 0700
    try:
        path = private / link.name
        server = _worker_server(path)
        link.symlink_to(path)
    except BaseException:
        shutil.rmtree(private, ignore_errors=True)
        raise
    return server, path


def _worker_server(path: Path) -> _WorkerServer:
    from torch._C._distributed_c10d import _WorkerServer

    return _WorkerServer(str(path))


def _remove_socket(link: Path) -> None:
    """Removes the socket, and the private directory if the name is a link into one of ours."""
    with contextlib.suppress(OSError):
        target = Path(os.readlink(link))
        # Only our own: anybody who can write to the run directory could have created the link.
        if target.parent.name.startswith(PRIVATE_DIRECTORY_PREFIX) and target.parent.stat().st_uid == os.getuid():
            shutil.rmtree(target.parent, ignore_errors=True)
    with contextlib.suppress(OSError):
        link.unlink()


def write_flight_record(directory: RunDirectory, attempt: int, rank: int, log: Callable[[str], None]) -> None:
    """Writes this rank's flight record, twice: pickled as rank-00003, and as JSON as recorder-00003.json.

    `torchfrtrace RUN/flight/attempt-02 --prefix rank-` reads the first; it opens every file whose name begins with the
    prefix, so the JSON files have another. Never raises, and waits for a limited time: it runs while an error is being
    handled that matters more. `log` receives where the record is, or why there is none.
    """
    records = directory.flight_records(attempt)
    path = records / f"rank-{rank:05d}"
    result = [f"flight record {path} was not written within {DUMP_SECONDS:.0f} s"]

    def write() -> None:
        try:
            _write_dumps(records, rank)
            result[0] = f"flight record: {path}"
        except Exception as error:  # noqa: BLE001 - see above
            result[0] = f"flight record {path} could not be written: {error}"

    thread = threading.Thread(target=write, name="flight recorder", daemon=True)
    thread.start()
    thread.join(DUMP_SECONDS)
    log(result[0])


def _write_dumps(records: Path, rank: int) -> None:
    from torch._C import _distributed_c10d as recorder

    os.makedirs(records, exist_ok=True)
    for name, dump in (
        (f"rank-{rank:05d}", recorder._dump_fr_trace),  # type: ignore[attr-defined]  # torch's stubs lack both
        (f"recorder-{rank:05d}.json", recorder._dump_fr_trace_json),  # type: ignore[attr-defined]
    ):
        with atomic_write(str(records / name)) as file:
            file.write(dump())
