"""A socket at which a rank tells its stacks and its flight recorder while its main thread hangs in a collective.

Torch's worker server (torch/csrc/distributed/c10d/control_plane): POST /handler/dump_traceback, /handler/fr_trace_json.
It has no authentication and its socket comes out with mode 0755, so the directory around it is 0700. A unix socket
answers on its own host only; the run directory's name of it is where to look.
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


MAX_SOCKET_PATH_BYTES: Final = 107  # of a unix socket's name: unix(7), 108 with its end
CLOSE_SECONDS: Final = 5.0
PRIVATE_DIRECTORY_PREFIX: Final = "wattwatch-worker-"


@contextmanager
def worker_socket(directory: RunDirectory, rank: int, log: Callable[[str], None]) -> Iterator[Path | None]:
    """Serves at `directory.worker_socket(rank)` until the block ends; yields the socket's own path.

    Where no socket can be made there (a long path, a file system without sockets), that name is a symbolic link to one
    in a directory of our own below the temporary directory: resolve it before connecting. None where there is no
    server: `log` heard why, and the job goes on without.
    """
    link = directory.worker_socket(rank)
    server, path = None, None
    try:
        server, path = _start_server(link)
    except Exception as error:  # noqa: BLE001 - a rank that cannot be questioned can still train
        log(f"no worker socket at {link}: {error}; stacks and flight recorder of this rank cannot be asked for")
    try:
        yield path
    finally:
        if server is not None:
            # It may wait for ever where the server has hardly begun to listen: not the rank's business.
            closing = threading.Thread(target=server.shutdown, name="worker socket", daemon=True)
            closing.start()
            closing.join(CLOSE_SECONDS)
            _remove_socket(link)


def _start_server(link: Path) -> tuple[_WorkerServer, Path]:
    """Raises OSError, or RuntimeError of torch's."""
    link.parent.mkdir(parents=True, exist_ok=True)
    link.parent.chmod(0o700)
    _remove_socket(link)  # of an attempt that was killed: torch refuses a name that exists
    if len(os.fsencode(link)) <= MAX_SOCKET_PATH_BYTES:
        # RuntimeError: torch's way to say that the file system makes no sockets.
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
    """The socket, and the private directory of ours that it may stand in."""
    with contextlib.suppress(OSError):
        target = Path(os.readlink(link))
        if target.parent.name.startswith(PRIVATE_DIRECTORY_PREFIX) and target.parent.stat().st_uid == os.getuid():
            shutil.rmtree(target.parent, ignore_errors=True)
    with contextlib.suppress(OSError):
        link.unlink()


# This rank's flight recorder, written down when a collective failed: only NCCL writes its own, gloo never does.
#
# RUN/flight/attempt-02/rank-00003 is what `torchfrtrace RUN/flight/attempt-02 --prefix rank-` reads; recorder-00003.json
# is the same without pickle. The JSON's name shares no prefix with the other: torchfrtrace opens every file that does.

DUMP_SECONDS: Final = 10.0  # the file system may be what hangs


def write_flight_record(directory: RunDirectory, attempt: int, rank: int, log: Callable[[str], None]) -> None:
    """Never raises, and waits for a bounded time: it runs on the way out of an error that matters more.

    `log` hears where the record lies, or why there is none.
    """
    records = directory.flight_records(attempt)
    path = records / f"rank-{rank:05d}"
    outcome = [f"no flight recorder at {path}: not written within {DUMP_SECONDS:.0f} s"]

    def write() -> None:
        try:
            _write_dumps(records, rank)
            outcome[0] = f"flight recorder: {path}"
        except Exception as error:  # noqa: BLE001 - see above
            outcome[0] = f"no flight recorder at {path}: {error}"

    thread = threading.Thread(target=write, name="flight recorder", daemon=True)
    thread.start()
    thread.join(DUMP_SECONDS)
    log(outcome[0])


def _write_dumps(records: Path, rank: int) -> None:
    from torch._C import _distributed_c10d as recorder

    os.makedirs(records, exist_ok=True)
    for name, dump in (
        (f"rank-{rank:05d}", recorder._dump_fr_trace),  # type: ignore[attr-defined]  # torch's stubs lack both
        (f"recorder-{rank:05d}.json", recorder._dump_fr_trace_json),  # type: ignore[attr-defined]
    ):
        with atomic_write(str(records / name)) as file:
            file.write(dump())
