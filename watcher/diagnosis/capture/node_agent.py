"""What runs on a node of a hung job, once: asks its ranks for flight records and stacks, and prints what it gets.

Standard library only, Python 3.8 and later; travels over stdin and writes nothing on the node. `run_agent(plan)` prints
frames: one JSON line, then as many bytes as its "bytes" says. README.md in this folder describes both.

The job must not notice: no signal, no ptrace, no lock of its own but those that torch's handlers take. A hung job often
hangs with its file system, so whatever touches files or sockets runs in a daemon thread that the main thread does not
wait for beyond its time; what was had is printed at once, and at the deadline the process ends whatever still waits.
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

FILES_SECONDS = 2.0  # for a directory of the job to answer
RECORD_SECONDS = 2.0
STACKS_SECONDS = 2.5  # needs the interpreter's lock: a rank that does not let go of it cannot answer
PY_SPY_SECONDS = 3.0
PIPE_SECONDS = 3.0  # for a dump that a FIFO asked for
CPU_SAMPLE_GAP_SECONDS = 0.5
FILE_POLL_SECONDS = 0.25
HEARTBEAT_BYTES = 65536
EXIT_REPORT_BYTES = 65536
LOG_TAIL_BYTES = 8192  # the end of it
MAX_DIRECTORY_ENTRIES = 4096  # names looked at
EXIT_GRACE_SECONDS = 2.0
ATTEMPT = re.compile(r"attempt-(\d{1,6})$")
BLOCKED_STATES = {"T": "is stopped by a signal", "t": "is stopped by a debugger", "D": "is stuck in the kernel"}
ROOT = os.environ.get("WATTWATCH_NODE_ROOT", "")  # of a simulated node, as for the probe
TOOL_PATH = os.environ.get("PATH", "") + ":/usr/local/bin:/usr/bin:/bin:/opt/conda/bin"


class Unavailable(Exception):
    """Something is not to be had; its text is a sentence for people."""


class NodeAgent:
    """One run. Threads put frames into `out`; the main thread prints them."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.ends = time.monotonic() + plan["deadline_seconds"]
        self.out: queue.Queue[tuple[dict[str, Any], bytes] | None] = queue.Queue()
        self.left = plan["node_bytes"]
        self.lock = threading.Lock()
        self.at = ""  # what it is at, for the case that it does not come back
        self.pids: dict[int, int | None] = {pid: rank for rank, pid in plan["processes"]}
        self.own: set[int] = set(plan["ranks"])
        self.others: set[int] = set()  # ranks that another host's heartbeats name
        self.phases: dict[int, str] = {}
        self.attempt: int | None = None
        self.looks: dict[int, tuple[float, str, float] | None] = {}
        self.recorded: set[int] = set()
        self.stacked: set[int] = set()
        self.owners = {os.geteuid(), 0}  # whose files and sockets are believed

    # What is told

    def say(self, frame: dict[str, Any], data: bytes = b"") -> None:
        self.out.put((dict(frame, bytes=len(data)), data))

    def missing(self, sentence: str) -> None:
        self.say({"missing": sentence[:500]})

    def keep(self, what: str, rank: int, data: bytes, **more: Any) -> None:
        """A file of one rank, if there is room for it."""
        with self.lock:
            fits = len(data) <= min(self.left, self.plan["rank_bytes"])
            self.left -= len(data) if fits else 0
        if fits:
            self.say(dict(more, file=what, rank=rank), data)
            if what in ("stacks", "recorder", "recorder.json"):
                (self.stacked if what == "stacks" else self.recorded).add(rank)
        else:
            self.missing(f"rank {rank}: {what} of {len(data):,} bytes: more than is allowed")

    def within(self, seconds: float, what: str, work: Callable[[], None]) -> bool:
        """Do it in a thread, and go on without it after that time. A failure is a sentence."""
        thread = threading.Thread(target=self.guarded, args=(what, work), daemon=True)
        thread.start()
        limit = max(0.0, min(seconds, self.ends - time.monotonic()))
        thread.join(limit)
        if thread.is_alive():
            self.missing(f"{what}: not done within {limit:.1f} s: a file system that hangs, or too many to ask")
        return not thread.is_alive()

    def guarded(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Unavailable as refused:
            self.missing(f"{what}: {refused}")
        except Exception as error:  # noqa: BLE001 - the last defence of a thread: one oddity costs one part
            self.missing(f"{what}: {exception_text(error)}")

    def each_rank(self, ranks: list[int], work: Callable[[int], None], what: str, seconds: float) -> None:
        """In parallel."""
        threads = [
            threading.Thread(target=self.guarded, args=(f"rank {rank}", lambda rank=rank: work(rank)), daemon=True)
            for rank in ranks
        ]
        for thread in threads:
            thread.start()
        ends = min(self.ends, time.monotonic() + seconds)
        for rank, thread in zip(ranks, threads):  # noqa: B905 - Python 3.8
            thread.join(max(0.0, ends - time.monotonic()))
            if thread.is_alive():
                self.missing(f"rank {rank}: {what} did not end in {seconds:g} s")

    # The order of things

    def gather(self) -> None:
        run = self.plan["run_directory"]
        self.look_at_processes()
        if run is not None:
            self.within(FILES_SECONDS, run, lambda: self.read_heartbeats(run))
            self.look_at_processes()
        began = time.monotonic()
        if run is not None:
            self.within(2 * FILES_SECONDS + RECORD_SECONDS + STACKS_SECONDS, run, lambda: self.ask_ranks(run))
        time.sleep(max(0.0, CPU_SAMPLE_GAP_SECONDS - (time.monotonic() - began)))
        self.tell_processes()
        if run is not None:
            self.within(FILES_SECONDS, os.path.join(run, "logs"), lambda: self.fetch_last_words(run))
        prefix = self.plan["recorder_files"]
        if self.plan["recorder_pipe"] is not None:
            self.within(PIPE_SECONDS + FILES_SECONDS, self.plan["recorder_pipe"], self.trigger)
        if run is not None:
            self.within(2 * FILES_SECONDS, os.path.join(run, "flight"), lambda: self.fetch_of_run(run))
        if prefix is not None:
            self.within(2 * FILES_SECONDS, prefix, lambda: self.fetch_by_prefix(prefix))
        if self.plan["py_spy"]:
            self.guarded("py-spy", self.spy)

    # Who is here

    def read_heartbeats(self, run: str) -> None:
        self.owners.add(os.stat(run).st_uid)
        host, directory = local_host_name(), os.path.join(run, "heartbeat")
        beats = []
        try:
            names = sorted(os.listdir(directory))[:MAX_DIRECTORY_ENTRIES]
        except FileNotFoundError:
            return
        for name in names:
            match = re.match(r"rank-(\d{1,6})\.json$", name)
            if match is None:
                continue
            try:
                beat = json.loads(read_owned_file(os.path.join(directory, name), HEARTBEAT_BYTES, self.owners)[0])
                beats.append((int(match.group(1)), str(beat["host"]), int(beat["pid"]), beat))
            except (Unavailable, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                self.missing(f"rank {int(match.group(1))}: heartbeat: {exception_text(error)}")
        attempts = [beat["restart"] + 1 for *_, beat in beats if isinstance(beat.get("restart"), int)]
        self.attempt = max(attempts) if attempts else None
        for rank, of, pid, beat in beats:
            if of == host:
                self.own.add(rank)
                self.pids[pid] = rank
                self.phases[rank] = str(beat.get("phase"))
            elif rank not in self.own:
                self.others.add(rank)

    def look_at_processes(self) -> None:
        """The first look: state and CPU time. /proc/PID/stat never waits for the process."""
        for pid in self.pids:
            if pid not in self.looks:
                self.looks[pid] = read_process_stat(pid)

    def tell_processes(self) -> None:
        rows = []
        for pid, rank in sorted(self.pids.items()):
            first, second = self.looks.get(pid), read_process_stat(pid)
            row: dict[str, Any] = {"rank": rank, "pid": pid, "state": second[1] if second else None}
            if second is not None:
                row["wait_channel"] = read_kernel_wait_channel(pid)
                stack = read_kernel_stack(pid)
                if stack:
                    row["kernel_stack"] = stack
            if first is not None and second is not None and second[0] > first[0]:
                row["cpu_percent"] = round(100.0 * (second[2] - first[2]) / (second[0] - first[0]), 1)
            rows.append(row)
            with contextlib.suppress(OSError):
                self.owners.add(os.stat(f"{ROOT}/proc/{pid}").st_uid)
        if rows:
            self.say({"file": "processes"}, json.dumps(rows).encode("utf-8"))
        else:
            self.missing("processes: neither heartbeats of this host nor the watcher name one")

    def standing(self, rank: int) -> str:
        """What is known of the rank's process, as an end of a sentence."""
        for pid, of in self.pids.items():
            if of == rank:
                seen = read_process_stat(pid)
                if seen is None or seen[1] in "ZX":
                    return f": its process {pid} has ended"
                return f": its process {pid} {BLOCKED_STATES.get(seen[1], f'is alive (state {seen[1]})')}"
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
                f"worker sockets: {directory} is open to the job's user only: log in as that user"
            ) from None
        found = {int(m.group(1)): m.group(0) for m in (re.match(r"rank-(\d{1,6})\.sock$", n) for n in names) if m}
        for rank in sorted(self.own - set(found)):
            self.missing(f"rank {rank}: no worker socket in {directory}{self.standing(rank)}")
        elsewhere: list[int] = []

        def ask(rank: int) -> None:
            self.ask_rank(rank, os.path.join(directory, found[rank]), elsewhere)

        asked = sorted(set(found) & self.own if self.own else set(found) - self.others)
        self.each_rank(asked, ask, "its worker socket", FILES_SECONDS + RECORD_SECONDS + STACKS_SECONDS)
        if elsewhere:
            self.say({"elsewhere": sorted(elsewhere)})

    def ask_rank(self, rank: int, name: str, elsewhere: list[int]) -> None:
        path = os.path.realpath(name)
        try:
            owner = self.owner_of_socket(path)
            self.ask_record(rank, path, name, owner)
        except (FileNotFoundError, ConnectionRefusedError):
            if rank in self.own:
                raise Unavailable("nobody serves its worker socket" + self.standing(rank)) from None
            elsewhere.append(rank)
            return
        except socket.timeout:  # noqa: UP041 - Python 3.8
            standing = self.standing(rank)
            self.missing(f"rank {rank}: its worker socket gave no flight record in {RECORD_SECONDS:g} s{standing}")
            if any(word in standing for word in BLOCKED_STATES.values()):
                return
        try:
            stacks = self.ask(path, "dump_traceback", STACKS_SECONDS)
        except socket.timeout:  # noqa: UP041 - Python 3.8
            raise Unavailable(
                f"its worker socket gave no stacks in {STACKS_SECONDS:g} s{self.standing(rank)}; "
                "what runs there may not let go of the interpreter's lock"
            ) from None
        self.keep("stacks", rank, stacks, source=name, owner_uid=owner)

    def ask_record(self, rank: int, path: str, name: str, owner: int) -> None:
        """NCCL has a recorder of its own beside that of all other backends; a job on GPUs has both."""
        general = self.ask(path, "fr_trace_json", RECORD_SECONDS)
        nccl = self.ask(path, "dump_nccl_trace_json", RECORD_SECONDS)
        if not general and not nccl:
            self.missing(f"rank {rank}: its worker socket has no handler for the flight record: a newer torch has")
        elif b'"entries"' in nccl:
            self.keep("recorder.json", rank, nccl, source=name, owner_uid=owner)
            if b'"entries"' in general:
                self.keep("recorder-cpu.json", rank, general, source=name, owner_uid=owner)
        else:
            self.keep("recorder.json", rank, general or nccl, source=name, owner_uid=owner)

    def owner_of_socket(self, path: str) -> int:
        found = os.lstat(path)
        if not stat.S_ISSOCK(found.st_mode):
            raise Unavailable(f"{path} is no socket")
        if found.st_uid not in self.owners:
            raise Unavailable(f"{path} belongs to user {found.st_uid}, who is not the job's")
        return found.st_uid

    def ask(self, path: str, handler: str, seconds: float) -> bytes:
        """The body of the answer; b"" where the handler is unknown. The limit is of the whole answer."""
        ends = time.monotonic() + seconds
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connect_unix(connection, path)
            head = f"POST /handler/{handler} HTTP/1.1\r\nHost: rank\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode("ascii"))  # without a length the server waits 5 s for a body
            answer = bytearray()
            while True:
                left = ends - time.monotonic()
                if left <= 0:
                    raise socket.timeout  # noqa: UP041
                connection.settimeout(left)
                part = connection.recv(65536)
                answer += part
                if len(answer) > self.plan["rank_bytes"] + 4096:
                    raise Unavailable(f"its worker socket sends more than {self.plan['rank_bytes']:,} bytes")
                if not part:
                    break
        top, _, body = bytes(answer).partition(b"\r\n\r\n")
        match = re.match(rb"HTTP/1\.[01] (\d{3})", top)
        if match is None:
            raise Unavailable(f"its worker socket answers {bytes(answer[:60])!r}, not as torch's")
        if match.group(1) == b"404":
            return b""
        length = re.search(rb"(?im)^content-length: *(\d{1,12})", top)
        if match.group(1) != b"200" or (length is not None and int(length.group(1)) != len(body)):
            raise Unavailable(f"its worker socket answers {top[:60]!r} with {len(body)} bytes")
        return body

    # How ranks ended

    def fetch_last_words(self, run: str) -> None:
        """Of ranks of this node, and of those whose node cannot be asked. The log only of one that does not answer."""
        newest = newest_attempt(os.path.join(run, "logs"))
        if newest is None:
            return
        directory = os.path.join(run, "logs", newest[1])
        if self.attempt is not None and newest[0] < self.attempt:
            self.missing(f"{directory}: the newest logs, and attempt {self.attempt} runs")
            return
        away = set(self.plan["stands_in_for"])
        for name in sorted(os.listdir(directory))[: 2 * MAX_DIRECTORY_ENTRIES]:
            match = re.match(r"rank-(\d{1,6})\.(ending\.json|log)$", name)
            rank = int(match.group(1)) if match else -1
            if match is None or not (rank in away or (rank in self.own if self.own else rank not in self.others)):
                continue
            if match.group(2) == "log" and rank in self.stacked:
                continue
            self.fetch_words(rank, os.path.join(directory, name), match.group(2))

    def fetch_words(self, rank: int, path: str, what: str) -> None:
        def work() -> None:
            if what == "log":
                data, found = read_owned_tail(path, LOG_TAIL_BYTES, self.owners)
            else:
                data, found = read_owned_file(path, EXIT_REPORT_BYTES, self.owners)
            age = round(max(0.0, time.time() - found.st_mtime), 1)
            if data:
                self.keep(what, rank, data, source=path, owner_uid=found.st_uid, age_seconds=age)

        self.guarded(f"rank {rank}: {path}", work)

    # Flight records that are files

    def trigger(self) -> None:
        """Ask for dumps through torch's FIFOs. They write a file, so only where the configuration says so."""
        if self.plan["saving"] or "save" in self.phases.values():
            raise Unavailable("no dump asked for through it: the job is saving a checkpoint")
        began, asked = time.time(), set()
        for rank in sorted(self.own - self.recorded):
            name = f"{self.plan['recorder_pipe']}{rank}.pipe"
            try:
                found = os.lstat(name)
                if not stat.S_ISFIFO(found.st_mode):
                    raise Unavailable(f"{name} is no FIFO")
                if found.st_uid not in self.owners:
                    raise Unavailable(f"{name} belongs to user {found.st_uid}, who is not the job's")
                descriptor = os.open(name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                        os.write(descriptor, b"1")
                        asked.add(rank)
                finally:
                    os.close(descriptor)
            except (Unavailable, OSError) as error:
                no_reader = isinstance(error, OSError) and error.errno == errno.ENXIO
                self.missing(f"rank {rank}: {name}: {'nobody reads it' if no_reader else exception_text(error)}")
        if asked:
            self.fetch_by_prefix(self.plan["recorder_files"], began, asked)

    def fetch_of_run(self, run: str) -> None:
        flight = os.path.join(run, "flight")
        found = newest_attempt(flight)
        if found is None:
            return
        newest, name_of_newest = found
        if self.attempt is not None and newest < self.attempt:
            self.missing(f"{flight}: its newest dumps are of attempt {newest}, and attempt {self.attempt} runs")
            return
        directory = os.path.join(flight, name_of_newest)
        candidates: dict[int, list[str]] = {}
        for name in sorted(os.listdir(directory))[:MAX_DIRECTORY_ENTRIES]:
            match = re.match(r"(recorder|rank|nccl)-0*(\d{1,6})(\.json)?$", name)
            if match is not None:
                candidates.setdefault(int(match.group(2)), []).append(os.path.join(directory, name))
        for rank, paths in sorted(candidates.items()):
            if self.wants(rank):
                # "recorder-3.json" is the only one without pickle, and sorts last.
                self.fetch(rank, sorted(paths, key=lambda path: not path.endswith(".json"))[0])

    def fetch_by_prefix(self, prefix: str, since: float = 0.0, awaited: Collection[int] = ()) -> None:
        """Files named prefix and rank. Those that are `awaited`: once they are younger than that and grow no more."""
        directory, start = os.path.split(prefix)
        pattern = re.compile(re.escape(start) + r"0*(\d{1,6})$")
        ends = time.monotonic() + (PIPE_SECONDS if since else 0.0)
        done: set[int] = set()
        sizes: dict[str, tuple[int, float]] = {}
        while True:
            for name in sorted(os.listdir(directory or "/"))[:MAX_DIRECTORY_ENTRIES]:
                match, path = pattern.match(name), os.path.join(directory, name)
                rank = int(match.group(1)) if match else -1
                if match is None or rank in done or not self.wants(rank):
                    continue
                found = os.lstat(path)
                grown = sizes.get(path) != (found.st_size, found.st_mtime)
                sizes[path] = (found.st_size, found.st_mtime)
                if since and (grown or found.st_mtime < since - 1.0 or not found.st_size):
                    continue
                done.add(rank)
                self.fetch(rank, path)
            if time.monotonic() >= ends or done.issuperset(awaited):
                break
            time.sleep(FILE_POLL_SECONDS)
        if not since:
            for rank in sorted(self.own - self.recorded - done):
                self.missing(f"rank {rank}: no dump {prefix}{rank}")

    def wants(self, rank: int) -> bool:
        return rank not in self.recorded and (rank in self.own if self.own else rank not in self.others)

    def fetch(self, rank: int, path: str) -> None:
        def work() -> None:
            data, found = read_owned_file(path, min(self.plan["rank_bytes"], self.left), self.owners)
            age = max(0.0, time.time() - found.st_mtime)
            what = "recorder.json" if data[:1] == b"{" else "recorder"
            self.keep(what, rank, data, source=path, owner_uid=found.st_uid, age_seconds=round(age, 1))

        self.guarded(f"rank {rank}: {path}", work)

    # Stacks from outside

    def spy(self) -> None:
        tool = shutil.which("py-spy", path=TOOL_PATH)
        wanted = {rank: pid for pid, rank in self.pids.items() if rank is not None and rank not in self.stacked}
        wanted = {rank: pid for rank, pid in wanted.items() if read_process_stat(pid) is not None}
        if tool is None or not wanted or ROOT:
            return

        def dump(rank: int) -> None:
            asked = [tool, "dump", "--nonblocking", "--pid", str(wanted[rank])]
            try:
                done = subprocess.run(
                    asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=PY_SPY_SECONDS, check=False
                )
            except subprocess.TimeoutExpired:
                raise Unavailable(f"py-spy did not end in {PY_SPY_SECONDS:g} s") from None
            if done.returncode == 0 and b"\nThread " in b"\n" + done.stdout:
                self.keep("stacks", rank, done.stdout, source=" ".join(asked))
            else:
                last = (done.stderr.decode("utf-8", "replace").strip() or "no stacks").splitlines()[-1]
                raise Unavailable(f"py-spy: {last[:200]}")

        self.each_rank(sorted(wanted), dump, "py-spy", PY_SPY_SECONDS + 0.5)


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
    """When, state, CPU seconds of all its threads; None: it is gone."""
    try:
        with open(f"{ROOT}/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return time.monotonic(), fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


def read_kernel_wait_channel(pid: int) -> str | None:
    """Kernel function that its main thread sleeps in. "0": it runs, or we may not know."""
    try:
        with open(f"{ROOT}/proc/{pid}/wchan") as file:
            name = file.read(100).strip()
    except OSError:
        return None
    return name if name not in ("", "0") else None


def read_kernel_stack(pid: int) -> list[str]:
    """For root only."""
    try:
        with open(f"{ROOT}/proc/{pid}/stack") as file:
            return [line.split("] ", 1)[-1] for line in file.read(4000).splitlines()]
    except OSError:
        return []


def newest_attempt(directory: str) -> tuple[int, str] | None:
    """Its number and the name of its directory; None where there is none. Raises OSError."""
    try:
        found = [(int(m.group(1)), m.group(0)) for m in map(ATTEMPT.match, os.listdir(directory)) if m]
    except FileNotFoundError:
        return None
    return max(found) if found else None


def open_owned_file(path: str, owners: set[int]) -> tuple[int, os.stat_result]:
    """A descriptor of a regular file that one of `owners` owns, reached through no link. Raises Refused, OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise Unavailable("a symbolic link, which is not followed") from None
        raise
    found = os.fstat(descriptor)
    why = None
    if not stat.S_ISREG(found.st_mode):
        why = "no regular file"
    elif found.st_uid not in owners:
        why = f"belongs to user {found.st_uid}, who is not the job's"
    if why is not None:
        os.close(descriptor)
        raise Unavailable(why)
    return descriptor, found


def read_owned_file(path: str, most: int, owners: set[int]) -> tuple[bytes, os.stat_result]:
    """The whole of it. Raises Refused, also where it is larger than `most`, and OSError."""
    descriptor, found = open_owned_file(path, owners)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Unavailable(f"{found.st_size:,} bytes: more than the {most:,} that are allowed")
    return data, found


def read_owned_tail(path: str, most: int, owners: set[int]) -> tuple[bytes, os.stat_result]:
    """Its last bytes, at most so many. Raises Refused, OSError."""
    descriptor, found = open_owned_file(path, owners)
    with os.fdopen(descriptor, "rb") as file:
        file.seek(max(0, found.st_size - most))
        return file.read(most), found


def connect_unix(connection: socket.socket, path: str) -> None:
    """Also where the path is longer than the name of a socket may be: through a descriptor of its directory."""
    if len(os.fsencode(path)) <= 107:
        connection.connect(path)
        return
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
    finally:
        os.close(directory)


def run_agent(plan: dict[str, Any]) -> None:
    # A write to a frozen peer waits for ever; the alarm's default is to end the process.
    signal.alarm(int(plan["deadline_seconds"] + EXIT_GRACE_SECONDS) + 1)
    capture = NodeAgent(plan)
    capture.say({"hello": 1, "host": local_host_name(), "uid": os.geteuid(), "python": sys.version.split()[0]})

    def gather() -> None:
        capture.guarded("capture", capture.gather)
        capture.out.put(None)

    threading.Thread(target=gather, daemon=True).start()
    stdout = sys.stdout.buffer
    while True:
        try:
            got = capture.out.get(timeout=max(0.0, capture.ends - time.monotonic()))
        except queue.Empty:
            got = {"missing": f"not all could be asked within {plan['deadline_seconds']:g} s", "bytes": 0}, b""
            capture.out.put(None)
        if got is None:
            break
        stdout.write(json.dumps(got[0]).encode("ascii") + b"\n" + got[1])
        stdout.flush()
    stdout.write(b'{"end": 1, "bytes": 0}\n')
    stdout.flush()
    os._exit(0)  # threads may wait for ever
