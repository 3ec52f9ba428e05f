"""The program that runs once on a node of a hung job: it collects flight records, stacks and logs of the ranks there.

Standard library only, Python 3.8 and later. It arrives over stdin, and writes nothing on the node. `run_agent(request)`
prints frames: one line of JSON, then as many bytes as its "bytes" says. README.md in this folder describes the frames.

The job must not notice: the agent sends no signal, attaches with no ptrace, and takes no locks but those of
torch's own handlers. A job often hangs together with its file system, so everything that touches
files or sockets runs in a daemon thread, for which the main thread waits only for a limited time. Results are printed
at once, and at the deadline the process exits, whatever is still blocked.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

# Limits are chosen, not measured, so that all of them together fit into the deadline of a capture.
FILES_SECONDS = 2.0  # for listing and reading a directory of the job
RECORD_SECONDS = 2.0
STACKS_SECONDS = 2.5  # the handler needs the GIL: a rank that holds it cannot answer
PY_SPY_SECONDS = 3.0
PIPE_SECONDS = 3.0  # for a dump that was requested through a FIFO
CPU_SAMPLE_GAP_SECONDS = 0.5
FILE_POLL_SECONDS = 0.25
HEARTBEAT_BYTES = 65536
EXIT_REPORT_BYTES = 65536
LOG_TAIL_BYTES = 8192
MAX_DIRECTORY_ENTRIES = 4096
EXIT_GRACE_SECONDS = 2.0  # after the deadline, before the alarm ends the process
ATTEMPT = re.compile(r"attempt-(\d{1,6})$")
BLOCKED_STATES = {"T": "is stopped by a signal", "t": "is stopped by a debugger", "D": "is in uninterruptible sleep"}
ROOT = os.environ.get("WATTWATCH_NODE_ROOT", "")  # prefix of /proc on a simulated node
TOOL_PATH = os.environ.get("PATH", "") + ":/usr/local/bin:/usr/bin:/bin:/opt/conda/bin"


class Unavailable(Exception):
    """Something cannot be collected; the text says why, in a sentence for people."""


class NodeAgent:
    """One run. Threads put frames into `out`, the main thread prints them."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.deadline = time.monotonic() + request["deadline_seconds"]
        self.out: queue.Queue[tuple[dict[str, Any], bytes] | None] = queue.Queue()
        self.bytes_left = request["node_bytes"]
        self.lock = threading.Lock()
        self.pids: dict[int, int | None] = {pid: rank for rank, pid in request["processes"]}
        self.own_ranks: set[int] = set(request["ranks"])  # ranks on this host
        self.other_ranks: set[int] = set()  # ranks whose heartbeats name another host
        self.phases: dict[int, str] = {}
        self.attempt: int | None = None
        self.first_samples: dict[int, tuple[float, str, float] | None] = {}
        self.with_record: set[int] = set()
        self.with_stacks: set[int] = set()
        self.trusted_uids = {os.geteuid(), 0}  # owners of files and sockets that are read

    # Output

    def send(self, frame: dict[str, Any], data: bytes = b"") -> None:
        self.out.put((dict(frame, bytes=len(data)), data))

    def report_missing(self, sentence: str) -> None:
        self.send({"missing": sentence[:500]})

    def send_file(self, what: str, rank: int, data: bytes, **more: Any) -> None:
        """Sends a file of one rank, unless it would exceed the limits."""
        with self.lock:
            fits = len(data) <= min(self.bytes_left, self.request["rank_bytes"])
            self.bytes_left -= len(data) if fits else 0
        if fits:
            self.send(dict(more, file=what, rank=rank), data)
            if what in ("stacks", "recorder", "recorder.json"):
                (self.with_stacks if what == "stacks" else self.with_record).add(rank)
        else:
            self.report_missing(f"rank {rank}: {what} ({len(data):,} bytes) was left out because of the size limit")

    def run_within(self, seconds: float, what: str, work: Callable[[], None]) -> bool:
        """Runs `work` in a thread, and continues without it after `seconds`. A failure becomes a sentence."""
        thread = threading.Thread(target=self.run_guarded, args=(what, work), daemon=True)
        thread.start()
        limit = max(0.0, min(seconds, self.deadline - time.monotonic()))
        thread.join(limit)
        if thread.is_alive():
            self.report_missing(
                f"{what}: not finished within {limit:.1f} s: the file system may not respond, or there "
                "may be too many ranks"
            )
        return not thread.is_alive()

    def run_guarded(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Unavailable as reason:
            self.report_missing(f"{what}: {reason}")
        except Exception as error:  # noqa: BLE001 - one unexpected file must cost only itself
            self.report_missing(f"{what}: {exception_text(error)}")

    def for_each_rank(self, ranks: list[int], work: Callable[[int], None], what: str, seconds: float) -> None:
        """Calls `work` for all ranks in parallel."""
        threads = [
            threading.Thread(target=self.run_guarded, args=(f"rank {rank}", lambda rank=rank: work(rank)), daemon=True)
            for rank in ranks
        ]
        for thread in threads:
            thread.start()
        deadline = min(self.deadline, time.monotonic() + seconds)
        for rank, thread in zip(ranks, threads):  # noqa: B905 - Python 3.8
            # One deadline for all of them: a hundred hung ranks must not take a hundred times as long as one.
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self.report_missing(f"rank {rank}: {what} returned no result within {seconds:g} s")

    # The steps, in order

    def collect(self) -> None:
        run = self.request["run_directory"]
        # Sockets before files: they need a live process. CPU use is measured while the sockets answer, so that it costs
        # no extra time.
        self.sample_processes()
        if run is not None:
            self.run_within(FILES_SECONDS, run, lambda: self.read_heartbeats(run))
            # Again, because heartbeats may name processes that the watcher does not know.
            self.sample_processes()
        began = time.monotonic()
        if run is not None:
            self.run_within(2 * FILES_SECONDS + RECORD_SECONDS + STACKS_SECONDS, run, lambda: self.ask_ranks(run))
        time.sleep(max(0.0, CPU_SAMPLE_GAP_SECONDS - (time.monotonic() - began)))
        self.send_processes()
        if run is not None:
            self.run_within(FILES_SECONDS, os.path.join(run, "logs"), lambda: self.fetch_exit_reports_and_logs(run))
        prefix = self.request["recorder_files"]
        if self.request["recorder_pipe"] is not None:
            self.run_within(PIPE_SECONDS + FILES_SECONDS, self.request["recorder_pipe"], self.request_dumps)
        if run is not None:
            self.run_within(2 * FILES_SECONDS, os.path.join(run, "flight"), lambda: self.fetch_run_dumps(run))
        if prefix is not None:
            self.run_within(2 * FILES_SECONDS, prefix, lambda: self.fetch_by_prefix(prefix))
        if self.request["py_spy"]:
            self.run_guarded("py-spy", self.run_py_spy)

    # Which ranks and processes are on this host

    def read_heartbeats(self, run: str) -> None:
        # The owner of the run directory may own the files in it.
        self.trusted_uids.add(os.stat(run).st_uid)
        host, directory = local_host_name(), os.path.join(run, "heartbeat")
        heartbeats = []
        try:
            names = sorted(os.listdir(directory))[:MAX_DIRECTORY_ENTRIES]
        except FileNotFoundError:
            return
        for name in names:
            match = re.match(r"rank-(\d{1,6})\.json$", name)
            if match is None:
                continue
            try:
                heartbeat = json.loads(
                    read_owned_file(os.path.join(directory, name), HEARTBEAT_BYTES, self.trusted_uids)[0]
                )
                heartbeats.append((int(match.group(1)), str(heartbeat["host"]), int(heartbeat["pid"]), heartbeat))
            except (Unavailable, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                self.report_missing(f"rank {int(match.group(1))}: heartbeat: {exception_text(error)}")
        # Restarts are counted from 0, attempts in directory names from 1.
        attempts = [
            heartbeat["restart"] + 1 for *_, heartbeat in heartbeats if isinstance(heartbeat.get("restart"), int)
        ]
        self.attempt = max(attempts) if attempts else None
        for rank, rank_host, pid, heartbeat in heartbeats:
            if rank_host == host:
                self.own_ranks.add(rank)
                self.pids[pid] = rank
                self.phases[rank] = str(heartbeat.get("phase"))
            elif rank not in self.own_ranks:
                self.other_ranks.add(rank)

    def sample_processes(self) -> None:
        """First sample of state and CPU time. Reading /proc/PID/stat never waits for the process."""
        for pid in self.pids:
            if pid not in self.first_samples:
                self.first_samples[pid] = read_process_stat(pid)

    def send_processes(self) -> None:
        rows = []
        for pid, rank in sorted(self.pids.items()):
            first, second = self.first_samples.get(pid), read_process_stat(pid)
            row: dict[str, Any] = {"rank": rank, "pid": pid, "state": second[1] if second else None}
            if second is not None:
                row["wait_channel"] = read_kernel_wait_channel(pid)
                stack = read_kernel_stack(pid)
                if stack:
                    row["kernel_stack"] = stack
            if first is not None and second is not None and second[0] > first[0]:
                row["cpu_percent"] = round(100.0 * (second[2] - first[2]) / (second[0] - first[0]), 1)
            rows.append(row)
            # The user of a process of the job may own files of the job, too.
            with contextlib.suppress(OSError):
                self.trusted_uids.add(os.stat(f"{ROOT}/proc/{pid}").st_uid)
        if rows:
            self.send({"file": "processes"}, json.dumps(rows).encode("utf-8"))
        else:
            self.report_missing(
                "the processes of the job on this node are unknown: neither the watcher nor a heartbeat gives a "
                "process ID"
            )

    def process_state(self, rank: int) -> str:
        """The state of the rank's process, as the end of a sentence; empty if unknown."""
        for pid, pid_rank in self.pids.items():
            if pid_rank == rank:
                now = read_process_stat(pid)
                if now is None or now[1] in "ZX":
                    return f": its process {pid} has exited"
                return f": its process {pid} {BLOCKED_STATES.get(now[1], f'is alive (state {now[1]})')}"
        return ""

    # Worker sockets

    def ask_ranks(self, run: str) -> None:
        directory = os.path.join(run, "worker")
        try:
            names = sorted(os.listdir(directory))[:MAX_DIRECTORY_ENTRIES]
        except FileNotFoundError:
            names = []
        except PermissionError:
            raise Unavailable(
                f"no permission to list the worker sockets in {directory}: let the watcher log in as the job's user"
            ) from None
        found = {int(m.group(1)): m.group(0) for m in (re.match(r"rank-(\d{1,6})\.sock$", n) for n in names) if m}
        for rank in sorted(self.own_ranks - set(found)):
            self.report_missing(f"rank {rank}: no worker socket in {directory}{self.process_state(rank)}")
        unserved: list[int] = []

        def ask(rank: int) -> None:
            self.ask_rank(rank, os.path.join(directory, found[rank]), unserved)

        # Without any heartbeat of this host, every socket may be of a rank here, unless a heartbeat names another host.
        asked = sorted(set(found) & self.own_ranks if self.own_ranks else set(found) - self.other_ranks)
        self.for_each_rank(asked, ask, "its worker socket", FILES_SECONDS + RECORD_SECONDS + STACKS_SECONDS)
        if unserved:
            self.send({"elsewhere": sorted(unserved)})

    def ask_rank(self, rank: int, name: str, unserved: list[int]) -> None:
        path = os.path.realpath(name)
        try:
            owner = self.owner_of_socket(path)
            self.ask_record(rank, path, name, owner)
        except (FileNotFoundError, ConnectionRefusedError):
            if rank in self.own_ranks:
                raise Unavailable("nothing listens on its worker socket" + self.process_state(rank)) from None
            unserved.append(rank)
            return
        except socket.timeout:  # noqa: UP041 - Python 3.8
            process_state = self.process_state(rank)
            self.report_missing(
                f"rank {rank}: its worker socket returned no flight record within {RECORD_SECONDS:g} s{process_state}"
            )
            # A stopped process answers nothing: do not wait for its stacks as well.
            if any(words in process_state for words in BLOCKED_STATES.values()):
                return
        try:
            stacks = self.ask(path, "dump_traceback", STACKS_SECONDS)
        except socket.timeout:  # noqa: UP041 - Python 3.8
            raise Unavailable(
                f"its worker socket returned no stacks within {STACKS_SECONDS:g} s{self.process_state(rank)}; "
                "its code may be holding the GIL"
            ) from None
        self.send_file("stacks", rank, stacks, source=name, owner_uid=owner)

    def ask_record(self, rank: int, path: str, name: str, owner: int) -> None:
        """NCCL has a flight recorder of its own beside the one of all other backends; a job on GPUs has both."""
        general = self.ask(path, "fr_trace_json", RECORD_SECONDS)
        nccl = self.ask(path, "dump_nccl_trace_json", RECORD_SECONDS)
        if not general and not nccl:
            self.report_missing(
                f"rank {rank}: its torch version cannot return flight records through the worker socket; newer "
                "versions can"
            )
        elif b'"entries"' in nccl:
            self.send_file("recorder.json", rank, nccl, source=name, owner_uid=owner)
            if b'"entries"' in general:
                self.send_file("recorder-cpu.json", rank, general, source=name, owner_uid=owner)
        else:
            self.send_file("recorder.json", rank, general or nccl, source=name, owner_uid=owner)

    def owner_of_socket(self, path: str) -> int:
        found = os.lstat(path)
        if not stat.S_ISSOCK(found.st_mode):
            raise Unavailable(f"{path} is not a socket")
        if found.st_uid not in self.trusted_uids:
            raise Unavailable(f"{path} belongs to user {found.st_uid}, not to the job's user")
        return found.st_uid

    def ask(self, path: str, handler: str, seconds: float) -> bytes:
        """The body of the response; b"" if the server has no such handler. `seconds` limits the whole exchange."""
        deadline = time.monotonic() + seconds
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connect_unix(connection, path)
            head = f"POST /handler/{handler} HTTP/1.1\r\nHost: rank\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode("ascii"))  # without Content-Length, the server waits 5 s for a body
            answer = bytearray()
            while True:
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0:
                    raise socket.timeout  # noqa: UP041
                connection.settimeout(seconds_left)
                part = connection.recv(65536)
                answer += part
                # 4096 bytes for the HTTP headers.
                if len(answer) > self.request["rank_bytes"] + 4096:
                    raise Unavailable(f"its worker socket sent more than {self.request['rank_bytes']:,} bytes")
                if not part:
                    break
        top, _, body = bytes(answer).partition(b"\r\n\r\n")
        match = re.match(rb"HTTP/1\.[01] (\d{3})", top)
        if match is None:
            raise Unavailable(
                f"its worker socket answered {bytes(answer[:60])!r}, which is not a response of torch's worker server"
            )
        if match.group(1) == b"404":
            return b""
        length = re.search(rb"(?im)^content-length: *(\d{1,12})", top)
        if match.group(1) != b"200" or (length is not None and int(length.group(1)) != len(body)):
            raise Unavailable(
                f"its worker socket returned an error or an incomplete answer: {top[:60]!r}, then {len(body):,} bytes"
            )
        return body

    # Exit reports and logs

    def fetch_exit_reports_and_logs(self, run: str) -> None:
        """For the ranks on this node, and those whose node cannot be asked. Logs only of ranks without stacks."""
        newest = newest_attempt(os.path.join(run, "logs"))
        if newest is None:
            return
        directory = os.path.join(run, "logs", newest[1])
        if self.attempt is not None and newest[0] < self.attempt:
            self.report_missing(
                f"{directory}: ignored, because attempt {self.attempt} is running and these logs are older"
            )
            return
        away = set(self.request["stands_in_for"])
        for name in sorted(os.listdir(directory))[: 2 * MAX_DIRECTORY_ENTRIES]:
            match = re.match(r"rank-(\d{1,6})\.(ending\.json|log)$", name)
            rank = int(match.group(1)) if match else -1
            if match is None or not (
                rank in away or (rank in self.own_ranks if self.own_ranks else rank not in self.other_ranks)
            ):
                continue
            if match.group(2) == "log" and rank in self.with_stacks:
                continue
            self.fetch_exit_report_or_log(rank, os.path.join(directory, name), match.group(2))

    def fetch_exit_report_or_log(self, rank: int, path: str, what: str) -> None:
        def work() -> None:
            if what == "log":
                data, found = read_owned_tail(path, LOG_TAIL_BYTES, self.trusted_uids)
            else:
                data, found = read_owned_file(path, EXIT_REPORT_BYTES, self.trusted_uids)
            age = round(max(0.0, time.time() - found.st_mtime), 1)
            if data:
                self.send_file(what, rank, data, source=path, owner_uid=found.st_uid, age_seconds=age)

        self.run_guarded(f"rank {rank}: {path}", work)

    # Flight records in files

    def request_dumps(self) -> None:
        """Requests dumps through torch's FIFOs. A dump writes a file, so only if the configuration allows it."""
        if self.request["saving"] or "save" in self.phases.values():
            raise Unavailable("no dump was requested, because the job is saving a checkpoint")
        began, asked = time.time(), set()
        for rank in sorted(self.own_ranks - self.with_record):
            name = f"{self.request['recorder_pipe']}{rank}.pipe"
            try:
                found = os.lstat(name)
                if not stat.S_ISFIFO(found.st_mode):
                    raise Unavailable(f"{name} is not a FIFO")
                if found.st_uid not in self.trusted_uids:
                    raise Unavailable(f"{name} belongs to user {found.st_uid}, not to the job's user")
                descriptor = os.open(name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                        os.write(descriptor, b"1")
                        asked.add(rank)
                finally:
                    os.close(descriptor)
            # ENXIO: no process has the FIFO open for reading. O_NONBLOCK makes that an error instead of a wait.
            except (Unavailable, OSError) as error:
                no_reader = isinstance(error, OSError) and error.errno == errno.ENXIO
                self.report_missing(
                    f"rank {rank}: {name}: {'nothing reads it' if no_reader else exception_text(error)}"
                )
        if asked:
            self.fetch_by_prefix(self.request["recorder_files"], began, asked)

    def fetch_run_dumps(self, run: str) -> None:
        flight = os.path.join(run, "flight")
        found = newest_attempt(flight)
        if found is None:
            return
        newest, name_of_newest = found
        if self.attempt is not None and newest < self.attempt:
            self.report_missing(
                f"{flight}: ignored, because attempt {self.attempt} is running and the dumps are from attempt {newest}"
            )
            return
        directory = os.path.join(flight, name_of_newest)
        candidates: dict[int, list[str]] = {}
        for name in sorted(os.listdir(directory))[:MAX_DIRECTORY_ENTRIES]:
            match = re.match(r"(recorder|rank|nccl)-0*(\d{1,6})(\.json)?$", name)
            if match is not None:
                candidates.setdefault(int(match.group(2)), []).append(os.path.join(directory, name))
        for rank, paths in sorted(candidates.items()):
            if self.needs_record(rank):
                # JSON first: it is the only format that is not a pickle.
                self.fetch(rank, sorted(paths, key=lambda path: not path.endswith(".json"))[0])

    def fetch_by_prefix(self, prefix: str, since: float = 0.0, awaited: Collection[int] = ()) -> None:
        """Fetches the files named prefix + rank.

        With `since`, only files written after it that no longer grow; waits until all `awaited` ranks have one.
        """
        directory, start = os.path.split(prefix)
        pattern = re.compile(re.escape(start) + r"0*(\d{1,6})$")
        deadline = time.monotonic() + (PIPE_SECONDS if since else 0.0)
        done: set[int] = set()
        sizes: dict[str, tuple[int, float]] = {}
        while True:
            for name in sorted(os.listdir(directory or "/"))[:MAX_DIRECTORY_ENTRIES]:
                match, path = pattern.match(name), os.path.join(directory, name)
                rank = int(match.group(1)) if match else -1
                if match is None or rank in done or not self.needs_record(rank):
                    continue
                found = os.lstat(path)
                grown = sizes.get(path) != (found.st_size, found.st_mtime)
                sizes[path] = (found.st_size, found.st_mtime)
                # A second of tolerance: the clock of a file server may differ from ours, and some store whole seconds.
                if since and (grown or found.st_mtime < since - 1.0 or not found.st_size):
                    continue
                done.add(rank)
                self.fetch(rank, path)
            if time.monotonic() >= deadline or done.issuperset(awaited):
                break
            time.sleep(FILE_POLL_SECONDS)
        if not since:
            for rank in sorted(self.own_ranks - self.with_record - done):
                self.report_missing(f"rank {rank}: the dump file {prefix}{rank} does not exist")

    def needs_record(self, rank: int) -> bool:
        return rank not in self.with_record and (
            rank in self.own_ranks if self.own_ranks else rank not in self.other_ranks
        )

    def fetch(self, rank: int, path: str) -> None:
        def work() -> None:
            data, found = read_owned_file(path, min(self.request["rank_bytes"], self.bytes_left), self.trusted_uids)
            age = max(0.0, time.time() - found.st_mtime)
            what = "recorder.json" if data[:1] == b"{" else "recorder"
            self.send_file(what, rank, data, source=path, owner_uid=found.st_uid, age_seconds=round(age, 1))

        self.run_guarded(f"rank {rank}: {path}", work)

    # Stacks through py-spy

    def run_py_spy(self) -> None:
        tool = shutil.which("py-spy", path=TOOL_PATH)
        wanted = {rank: pid for pid, rank in self.pids.items() if rank is not None and rank not in self.with_stacks}
        wanted = {rank: pid for rank, pid in wanted.items() if read_process_stat(pid) is not None}
        # On a simulated node (ROOT), the pids are not those of this machine.
        if tool is None or not wanted or ROOT:
            return

        def dump(rank: int) -> None:
            asked = [tool, "dump", "--nonblocking", "--pid", str(wanted[rank])]
            try:
                done = subprocess.run(
                    asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=PY_SPY_SECONDS, check=False
                )
            except subprocess.TimeoutExpired:
                raise Unavailable(f"py-spy did not finish within {PY_SPY_SECONDS:g} s") from None
            if done.returncode == 0 and b"\nThread " in b"\n" + done.stdout:
                self.send_file("stacks", rank, done.stdout, source=" ".join(asked))
            else:
                last = (done.stderr.decode("utf-8", "replace").strip() or "no stacks").splitlines()[-1]
                raise Unavailable(f"py-spy: {last[:200]}")

        self.for_each_rank(sorted(wanted), dump, "py-spy", PY_SPY_SECONDS + 0.5)


def local_host_name() -> str:
    try:
        with open(ROOT + "/proc/sys/kernel/hostname") as file:
            return file.read().strip() or os.uname().nodename
    except OSError:
        return os.uname().nodename


def exception_text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def read_process_stat(pid: int) -> tuple[float, str, float] | None:
    """Monotonic time, state, and CPU seconds of all its threads; None: it no longer exists."""
    try:
        with open(f"{ROOT}/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return time.monotonic(), fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


def read_kernel_wait_channel(pid: int) -> str | None:
    """The kernel function that its main thread sleeps in; None: it runs, or we may not read it (the file says "0")."""
    try:
        with open(f"{ROOT}/proc/{pid}/wchan") as file:
            name = file.read(100).strip()
    except OSError:
        return None
    return name if name not in ("", "0") else None


def read_kernel_stack(pid: int) -> list[str]:
    """Innermost function first; only root may read it."""
    try:
        with open(f"{ROOT}/proc/{pid}/stack") as file:
            return [line.split("] ", 1)[-1] for line in file.read(4000).splitlines()]
    except OSError:
        return []


def newest_attempt(directory: str) -> tuple[int, str] | None:
    """Number and name of the newest attempt-NN directory; None: there is none. Raises OSError."""
    try:
        found = [(int(m.group(1)), m.group(0)) for m in map(ATTEMPT.match, os.listdir(directory)) if m]
    except FileNotFoundError:
        return None
    return max(found) if found else None


def open_owned_file(path: str, trusted_uids: set[int]) -> tuple[int, os.stat_result]:
    """Opens a regular file owned by one of `owners`; follows no symbolic link. Raises Unavailable, OSError.

    The run directory belongs to the job's user: a link in it could point anywhere, and we may be root. O_NONBLOCK,
    because opening a FIFO would wait for a writer.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise Unavailable("it is a symbolic link, and links are not followed") from None
        raise
    found = os.fstat(descriptor)
    why = None
    if not stat.S_ISREG(found.st_mode):
        why = "it is not a regular file"
    elif found.st_uid not in trusted_uids:
        why = f"it belongs to user {found.st_uid}, not to the job's user"
    if why is not None:
        os.close(descriptor)
        raise Unavailable(why)
    return descriptor, found


def read_owned_file(path: str, most: int, trusted_uids: set[int]) -> tuple[bytes, os.stat_result]:
    """The whole file. Raises Unavailable, also if it is larger than `most` bytes, and OSError."""
    descriptor, found = open_owned_file(path, trusted_uids)
    with os.fdopen(descriptor, "rb") as file:
        # One byte more than allowed shows that the file is larger, also if it grows while it is read.
        data = file.read(most + 1)
    if len(data) > most:
        raise Unavailable(f"it has {found.st_size:,} bytes, more than the limit of {most:,} bytes")
    return data, found


def read_owned_tail(path: str, most: int, trusted_uids: set[int]) -> tuple[bytes, os.stat_result]:
    """At most the last `most` bytes. Raises Unavailable, OSError."""
    descriptor, found = open_owned_file(path, trusted_uids)
    with os.fdopen(descriptor, "rb") as file:
        file.seek(max(0, found.st_size - most))
        return file.read(most), found


def connect_unix(connection: socket.socket, path: str) -> None:
    """Connects also if the path is longer than the 107 bytes that a socket address holds, through /proc/self/fd."""
    if len(os.fsencode(path)) <= 107:
        connection.connect(path)
        return
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
    finally:
        os.close(directory)


def run_agent(request: dict[str, Any]) -> None:
    # A write to a connection whose peer is frozen blocks forever; SIGALRM then ends the process.
    signal.alarm(int(request["deadline_seconds"] + EXIT_GRACE_SECONDS) + 1)
    capture = NodeAgent(request)
    capture.send({"hello": 1, "host": local_host_name(), "uid": os.geteuid(), "python": sys.version.split()[0]})

    def collect() -> None:
        capture.run_guarded("capture", capture.collect)
        capture.out.put(None)

    # The main thread only prints: it never touches a file or socket that could hang.
    threading.Thread(target=collect, daemon=True).start()
    stdout = sys.stdout.buffer
    while True:
        try:
            got = capture.out.get(timeout=max(0.0, capture.deadline - time.monotonic()))
        except queue.Empty:
            got = (
                {"missing": f"not everything could be captured within {request['deadline_seconds']:g} s", "bytes": 0},
                b"",
            )
            capture.out.put(None)
        if got is None:
            break
        # Each frame is flushed: what was sent is safe if the connection or the node dies.
        stdout.write(json.dumps(got[0]).encode("ascii") + b"\n" + got[1])
        stdout.flush()
    stdout.write(b'{"end": 1, "bytes": 0}\n')
    stdout.flush()
    os._exit(0)  # without waiting for threads, which may be blocked forever
