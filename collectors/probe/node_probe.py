"""The probe that runs on a node: prints one JSON line per interval, as long as the control host keeps listening.

Standard library only, Python 3.8 and later. It is sent over the SSH channel's stdin and never written to disk;
README.md in this folder describes the line. It reports raw facts and interprets nothing: nvidia-smi's output is sent as
printed, NVML's values as numbers and return codes, logs as text.

Three rules shape it. A call that may hang (driver, NFS) runs in its own `CollectorThread`, a daemon thread with one
call in flight, so the line is printed on time and names what hangs. A GPU query is never killed with SIGKILL and never
runs beside another one (https://github.com/NVIDIA/dcgm-exporter/issues/84: SIGKILL froze the GPU). The probe ends when
its stdin closes, or when no line has been written to it for LEASE_SECONDS, because a cut network closes nothing.

All timing goes through `time.sleep`, `time.monotonic` and `time.time` by attribute: a simulated node replaces those.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import heapq
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time

TYPE_CHECKING = False  # importing typing would cost a tenth of the start-up
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LEASE_SECONDS = 60.0
LINE_BUDGET_BYTES = 32_000  # the reader drops lines over 64 KB: what does not fit waits for the next line
TAIL_BYTES = 8192
MAX_HEARTBEATS = 64
MAX_LOGS = 16
MAX_PROCESSES = 128
MAX_WORKERS = 64
WORKER_SCAN_SECONDS = 5.0
EXITED_SECONDS = 120.0  # for how long an exit is repeated: a line may be lost
DISCOVERY_SECONDS = 10.0
KERNEL_HISTORY_SECONDS = 300.0  # a fault shortly before we (re)connected is still worth reporting

ROOT = os.environ.get("WATTWATCH_NODE_ROOT", "")
"""Directory that replaces / in the paths of /proc, /sys and /dev/kmsg. Only a simulated node sets this variable, to
show its own processes and kernel log. Paths of jobs, logs and checkpoints never get this prefix."""

TOOL_PATH = os.environ.get("PATH", "") + ":/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/nvidia/bin:/opt/bin"
"""Where to look for nvidia-smi: sshd starts commands with a short PATH, and container runtimes mount nvidia-smi
elsewhere."""

FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED = 13, 15, 16  # nvml.h, enum nvmlReturn_t

KERNEL_FAULT = re.compile(r"NVRM: Xid|[Oo]ut of memory|oom-kill|oom_reaper|segfault at|general protection fault")
CHILDREN: set[int] = set()  # process groups to terminate when we exit


def encodable_text(text: str) -> str:
    """The text without lone surrogates: a file name with invalid UTF-8 would make the whole line unreadable."""
    return text.encode("utf-8", "replace").decode("utf-8")


def exit_probe(*_: object) -> None:
    """Exit at once. Children get SIGTERM once and never SIGKILL: see the rule on GPU queries above."""
    for group in list(CHILDREN):
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGTERM)
    os._exit(0)  # not sys.exit: threads may be stuck in the driver, and nothing needs cleaning up


def run_tool(argv: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout, stderr. Waits without limit: only the caller's own thread is blocked."""
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,  # our own stdin carries the lease
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a process group to terminate with its children
            env=dict(os.environ, PATH=TOOL_PATH, LC_ALL="C"),
        )
    except OSError as error:
        return 127, "", f"{argv[0]}: {os.strerror(error.errno or errno.ENOENT)}"
    CHILDREN.add(child.pid)
    try:
        out, err = child.communicate()
    finally:
        CHILDREN.discard(child.pid)
    return child.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")


class CollectorThread(threading.Thread):
    """A thread for one kind of call that may hang: at most one call in flight, whatever it does."""

    def __init__(self, name: str, call: Callable[[CollectorThread], None], every_seconds: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.doing = name  # reported while it is busy; a call with several stages changes it
        self.call = call
        self.every_seconds = every_seconds  # 0: for each line
        self.busy_since: float | None = None
        self.took_seconds = 0.0
        self.due = 0.0
        self.error = ""
        self.turn = threading.Semaphore(0)
        self.start()

    def trigger(self, now: float) -> None:
        """Start the call if it is due and the previous one has returned."""
        if self.busy_since is None and now >= self.due:
            self.busy_since = now
            self.turn.release()

    def run(self) -> None:
        while True:
            self.turn.acquire()
            started = time.monotonic()
            try:
                self.call(self)
                self.error = ""
            except Exception as error:  # noqa: BLE001 - whatever the node holds: report it and go on
                self.error = encodable_text(f"{self.doing}: {type(error).__name__}: {error}")
            self.took_seconds = time.monotonic() - started
            # A slow file system is asked less often: periodic calls take at most a twentieth of the time.
            self.due = started + max(self.every_seconds, 20 * self.took_seconds) if self.every_seconds else 0.0
            self.busy_since = None


class PendingLine:
    """Content of the next line. Items that are sent only when they change wait here until they fit into a line."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}
        self.queue: list[tuple[str, Any, int]] = []
        self.lock = threading.Lock()

    def put(self, key: str, item: Any) -> None:
        """Append `item` to the list `key` of one of the next lines."""
        with self.lock:
            self.queue.append((key, item, len(json.dumps(item))))

    def set(self, key: str, value: Any) -> None:
        """Set the value of `key` in the next line."""
        with self.lock:
            self.latest[key] = value

    def take(self) -> dict[str, Any]:
        with self.lock:
            line, self.latest = self.latest, {}
            budget = LINE_BUDGET_BYTES
            while self.queue and (budget >= self.queue[0][2] or budget == LINE_BUDGET_BYTES):
                key, item, size = self.queue.pop(0)
                budget -= size
                if size < LINE_BUDGET_BYTES:
                    line.setdefault(key, []).append(item)
            return line


# GPUs ---------------------------------------------------------------------------------------------------------------


class NvmlReader:
    """Reads every GPU through NVML: one row of values per GPU in the order of `columns`, failures as return codes.

    `readings`: (column, alternative calls, part of the result, steady), as `GpuSample` on the control host declares
    them. Readings that come from the same call share it.
    """

    def __init__(self, nvml: Any, readings: list[Any]) -> None:
        self.nvml = nvml
        nvml.nvmlInit()
        self.count = nvml.nvmlDeviceGetCount()
        self.columns = ["index"] + [column for column, _, _, _ in readings]
        self.handles: dict[int, Any] = {}
        self.held_by: dict[int, list[int]] = {}  # index -> pids, as last listed
        self.steady: dict[int, tuple[float, list[Any], dict[str, int]]] = {}  # index -> when read, values, errors
        self.steady_calls = self.plan([reading for reading in readings if reading[3]])
        self.live_calls = self.plan([reading for reading in readings if not reading[3]])

    def plan(self, readings: list[Any]) -> list[tuple[list[Any], list[Any]]]:
        """Calls as ([(function, arguments), ...], [(place in the row, column, part of the result), ...])."""
        calls: dict[Any, tuple[list[Any], list[Any]]] = {}
        for column, alternatives, part, _ in readings:
            if alternatives not in calls:
                known = [(getattr(self.nvml, name, None), arguments) for name, *arguments in alternatives]
                found = []
                for function, arguments in known:
                    values = [getattr(self.nvml, one, None) if isinstance(one, str) else one for one in arguments]
                    if function is not None and None not in values:  # an older pynvml lacks some
                        found.append((function, values))
                calls[alternatives] = (found, [])
            calls[alternatives][1].append((self.columns.index(column), column, part))
        return list(calls.values())

    def read(self, now: float) -> list[Any]:
        self.count = self.nvml.nvmlDeviceGetCount()
        return [self.row(index, now) for index in range(self.count)]

    def row(self, index: int, now: float) -> list[Any]:
        """[values] or [values, {column: return code}]; a GPU whose handle cannot be opened has only its index."""
        nothing = [index] + [None] * (len(self.columns) - 1)
        handle = self.handles.get(index)
        if handle is None:
            try:
                handle = self.handles[index] = self.nvml.nvmlDeviceGetHandleByIndex(index)
            except self.nvml.NVMLError as error:
                return [nothing, {"handle": error.value}]
        known = self.steady.get(index)
        if known is None or now - known[0] > DISCOVERY_SECONDS:
            known = self.steady[index] = (now, nothing, {})
            self.call_all(self.steady_calls, handle, known[1], known[2])
        values, errors = list(known[1]), dict(known[2])
        self.call_all(self.live_calls, handle, values, errors)
        if GPU_IS_LOST in errors.values() or RESET_REQUIRED in errors.values():  # a new handle may work again
            self.handles.pop(index, None)
            self.steady.pop(index, None)
        return [values, errors] if errors else [values]

    def call_all(self, calls: list[Any], handle: Any, values: list[Any], errors: dict[str, int]) -> None:
        for alternatives, readings in calls:
            code, result = FUNCTION_NOT_FOUND, None
            for function, arguments in alternatives:
                try:
                    code, result = 0, function(handle, *arguments)
                    break
                except self.nvml.NVMLError as error:
                    code = error.value
                except (AttributeError, TypeError):  # an older pynvml takes no version, for example
                    code = FUNCTION_NOT_FOUND
            for place, column, part in readings:
                if code:
                    errors[column] = code
                else:
                    values[place] = part_of(result, part)

    def driver_version(self) -> str:
        try:
            return str(part_of(self.nvml.nvmlSystemGetDriverVersion(), None))
        except self.nvml.NVMLError:
            return ""

    def holders(self) -> tuple[dict[int, list[Any]], bool]:
        """pid -> indexes of the GPUs on which it holds a compute context, and whether every GPU could be asked.

        A GPU that cannot be asked keeps the processes of its last answer: an error does not end them.
        """
        complete = True
        for index in range(self.count):
            handle = self.handles.get(index)
            try:
                processes = None if handle is None else self.nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except self.nvml.NVMLError:
                processes = None
            if processes is None:
                complete = False
            else:
                self.held_by[index] = [int(process.pid) for process in processes]
        found: dict[int, list[Any]] = {}
        for index, pids in sorted(self.held_by.items()):
            for pid in pids:
                found.setdefault(pid, []).append(index)
        return found, complete


def part_of(result: Any, part: Any) -> Any:
    """An attribute or an item of what NVML returned, or all of it; bytes of an older pynvml become text."""
    if isinstance(part, str):
        result = getattr(result, part)
    elif part is not None and isinstance(result, (list, tuple)):
        result = result[part]
    return result.decode("utf-8", "replace") if isinstance(result, bytes) else result


class GpuCollector:
    """Reads the GPUs: through NVML if possible, else with nvidia-smi. Never more than one query of either at a time."""

    def __init__(
        self, outbox: PendingLine, query: list[str], form: str, nvml_readings: list[Any], nvml_source: str
    ) -> None:
        self.outbox = outbox
        self.query = query
        self.form = form
        self.nvml_readings = nvml_readings
        self.nvml_source = nvml_source
        self.nvml_module: Any = None
        self.reader: NvmlReader | None = None
        self.nvml_retry = 0.0
        self.init_code: int | None = None
        self.holders: dict[int, list[Any]] | None = None  # pid -> GPUs; None: never known
        self.holders_complete = False  # the last attempt to list them could ask every GPU
        self.holders_due = 0.0
        self.smi_due = 0.0
        self.reads = 0
        self.driver: str | None = None
        self.driver_due = 0.0

    def __call__(self, thread: CollectorThread) -> None:
        now = time.monotonic()
        if self.reader is None and now >= self.nvml_retry:
            thread.doing = "nvml"
            self.open(now)
        if now >= self.driver_due:
            self.driver_due = now + DISCOVERY_SECONDS
            self.driver = driver_version(self.reader)
        if self.reader is not None:
            thread.doing = "nvml"
            if self.read_nvml(self.reader):
                return
        if now >= self.smi_due:
            thread.doing = "nvidia-smi"
            self.read_smi()

    def open(self, now: float) -> None:
        self.nvml_retry = now + 30.0  # NVML may come back: a driver update, a container that gets its devices
        try:
            if self.nvml_module is None:
                self.nvml_module = load_nvml(self.nvml_source)
            if self.nvml_module is not None:
                self.reader = NvmlReader(self.nvml_module, self.nvml_readings)
                self.nvml_source = ""
                self.init_code = None
        except Exception as error:  # noqa: BLE001 - the class NVMLError is not known before the module is loaded
            self.init_code = getattr(error, "value", 999)
            self.close()

    def close(self) -> None:
        self.reader = None
        with contextlib.suppress(Exception):  # it may not be initialized
            self.nvml_module.nvmlShutdown()

    def read_nvml(self, reader: NvmlReader) -> bool:
        now = time.monotonic()
        try:
            rows = reader.read(now)
            if now >= self.holders_due:
                self.holders_due = now + 5.0
                self.holders, self.holders_complete = reader.holders()
        except Exception as error:  # noqa: BLE001 - the driver was unloaded or reloaded: nvidia-smi prints why
            self.init_code = getattr(error, "value", 999)
            self.nvml_retry = now + 5.0
            self.close()
            return False
        self.reads += 1
        answer: dict[str, Any] = {"src": "nvml", "t": round(now, 4), "columns": reader.columns, "rows": rows}
        if self.driver is not None:
            answer["driver"] = self.driver
        self.outbox.set("gpu", answer)
        return True

    def read_smi(self) -> None:
        now = time.monotonic()
        code, out, err = 0, "", ""
        while self.query:
            code, out, err = run_tool(["nvidia-smi", "--query-gpu=" + ",".join(self.query), "--format=" + self.form])
            # An older driver prints the field that it does not know and exits with 2: ask again without it.
            unknown = re.search(r'Field "([^"]+)" is not a valid field', out + err) if code == 2 else None
            if unknown is None or unknown.group(1) not in self.query:
                break
            self.query.remove(unknown.group(1))
        self.reads += 1
        answer: dict[str, Any] = {"src": "nvidia-smi", "t": round(now, 4), "rc": code, "out": out[:24_000]}
        answer["fields"] = list(self.query)
        if err:
            answer["err"] = err[:4000]
        if self.init_code is not None:
            answer["nvml"] = self.init_code
        if self.driver is not None:
            answer["driver"] = self.driver
        self.outbox.set("gpu", answer)
        if code == 127:
            self.smi_due = now + 10.0  # not installed: do not start a process every second to learn that again
        elif now >= self.holders_due:
            self.holders_due = now + DISCOVERY_SECONDS
            code, out, _ = run_tool(["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"])
            self.holders_complete = code == 0
            if code == 0:
                pairs = re.findall(r"(?m)^\s*(\d+)\s*,\s*(\S+)", out)
                holders: dict[int, list[Any]] = {}
                for pid, uuid in pairs:
                    holders.setdefault(int(pid), []).append(uuid)
                self.holders = holders


def driver_version(reader: NvmlReader | None) -> str | None:
    """Version of the loaded kernel module, e.g. "580.95.05": from /proc, else from NVML."""
    try:
        text = read_text(ROOT + "/proc/driver/nvidia/version")
    except OSError:
        text = "" if reader is None else reader.driver_version()
    found = re.search(r"\b\d{2,}\.\d+(\.\d+)*\b", text)
    return None if found is None else found.group()


def load_nvml(source: str) -> Any:
    """The pynvml that was sent with us. None where there is no NVML library: then there is no need to compile it."""
    loaded = sys.modules.get("pynvml")  # a simulated node has it loaded already
    if loaded is not None or not source:
        return loaded
    import ctypes
    import types

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    module = sys.modules["pynvml"] = types.ModuleType(
        "pynvml"
    )  # pynvml looks itself up in sys.modules while it is executed
    exec(compile(source, "pynvml.py", "exec"), module.__dict__)  # our own payload
    return module


# Processes, load ----------------------------------------------------------------------------------------------------


def read_text(path: str, most: int = 4096) -> str:
    with open(path, "rb", buffering=0) as file:
        return (file.read(most) or b"").decode("utf-8", "replace")


ENDED_STATES = frozenset("ZXx")  # exited, and not yet reaped by its parent


def read_process(pid: int, ticks: float) -> list[Any] | None:
    """[pid, start, state, comm, cpu seconds] from stat only: reading the cmdline of a stuck process may hang. None
    where there is no such process; an OSError where it cannot be read."""
    try:
        text = read_text(f"{ROOT}/proc/{pid}/stat")
        opened, closed = text.index("("), text.rindex(")")
        rest = text[closed + 2 :].split()
        cpu = (int(rest[11]) + int(rest[12])) / ticks
        return [pid, round(int(rest[19]) / ticks, 2), rest[0], encodable_text(text[opened + 1 : closed]), round(cpu, 2)]
    except (FileNotFoundError, ProcessLookupError, ValueError, IndexError):  # it may exit while it is read
        return None


def read_wait_channel(pid: int, state: str) -> str | None:
    """The kernel function in which a process in state D sleeps: it distinguishes a file server from a driver. Reading
    it never blocks."""
    if state != "D":
        return None
    try:
        name = encodable_text(read_text(f"{ROOT}/proc/{pid}/wchan", 64).strip("\0\n "))
    except OSError:
        return None
    return None if name in ("", "0") else name


def read_workers(parent: int, ticks: float) -> list[list[Any]]:
    """[parent, pid, start, state, comm, cpu seconds, wait channel] of the children of a rank: loader workers."""
    try:
        pids = read_text(f"{ROOT}/proc/{parent}/task/{parent}/children").split()
    except OSError:
        return []  # a kernel without CONFIG_PROC_CHILDREN
    rows = []
    for pid in pids[:MAX_WORKERS]:
        with contextlib.suppress(OSError):
            row = read_process(int(pid), ticks)
            if row is not None:
                rows.append([parent, *row, read_wait_channel(row[0], row[2])])
    return rows


class ProcessCollector:
    """Processes of the job: those with a GPU context, those that wrote a heartbeat, those whose comm matches."""

    def __init__(
        self, outbox: PendingLine, gpu: GpuCollector, heartbeats: list[HeartbeatCollector], pattern: str | None
    ) -> None:
        self.outbox = outbox
        self.gpu = gpu
        self.heartbeats = heartbeats
        self.pattern_text = pattern
        self.pattern: re.Pattern[str] | None = None
        self.matched: set[int] = set()
        self.seen: set[tuple[int, float]] = set()  # (pid, start) of those that were listed and have not exited
        self.exited: dict[tuple[int, float], float] = {}  # (pid, start) -> when it was first gone
        self.scan_due = 0.0
        self.workers_due = 0.0
        self.ticks = float(os.sysconf("SC_CLK_TCK"))

    def __call__(self, _: CollectorThread) -> None:
        now = time.monotonic()
        if self.pattern_text is not None and self.pattern is None:
            with contextlib.suppress(re.error):
                self.pattern = re.compile(self.pattern_text)
        if self.pattern is not None and now >= self.scan_due:
            self.scan_due = now + 5.0
            self.matched = self.scan(self.pattern)
        holders = self.gpu.holders
        pids = set(holders or ()) | self.matched
        for heartbeat in self.heartbeats:
            pids |= heartbeat.pids
        rows: list[Any] = []
        unreadable: set[int] = set()
        for pid in sorted(pids)[:MAX_PROCESSES]:
            try:
                row = read_process(pid, self.ticks)
            except OSError:
                unreadable.add(pid)
                continue
            if row is not None:
                waits_in = read_wait_channel(pid, row[2])
                row.append((holders or {}).get(pid, []))
                rows.append(row if waits_in is None else [*row, waits_in])
        # An empty list says that nobody is there. In a container, NVML reports pids of the host's namespace: that none
        # exists here does not mean that nobody is.
        incomplete = bool(unreadable) or (holders is not None and not self.gpu.holders_complete)
        unknown = not rows and (holders or incomplete or (holders is None and self.pattern is None and not pids))
        self.outbox.set("proc", None if unknown else rows)
        unlisted = self.follow_exits(rows, now)
        self.outbox.set("exited", [list(process) for process in self.exited])
        if unlisted:
            self.outbox.set("unlisted", unlisted)
        self.outbox.set("load", read_load())
        if now >= self.workers_due:
            self.workers_due = now + WORKER_SCAN_SECONDS
            ranks = {row[0] for row in rows}
            workers = [worker for pid in sorted(ranks) for worker in read_workers(pid, self.ticks)]
            self.outbox.set("work", [worker for worker in workers if worker[1] not in ranks][:MAX_WORKERS])
        if self.pattern_text is not None and self.pattern is None:
            re.compile(self.pattern_text)  # reported as this thread's error, after everything that does not need it

    def follow_exits(self, rows: list[Any], now: float) -> list[list[float]]:
        """Move processes that were listed before, and that /proc does not have any more, to `exited`: that is proof
        of an exit, and needs no driver. Returns [pid, start] of those that live on, though nothing lists them."""
        listed = {(row[0], row[1]) for row in rows if row[2] not in ENDED_STATES}
        unlisted = []
        for process in [process for process in self.seen if process not in listed]:
            try:
                row = read_process(process[0], self.ticks)
            except OSError:
                row = [*process, "?"]  # it is there, and cannot be read now
            if row is None or row[1] != process[1] or row[2] in ENDED_STATES:
                self.seen.discard(process)
                self.exited[process] = now
            else:
                unlisted.append(list(process))
        self.seen |= listed
        newest = sorted(self.exited, key=self.exited.__getitem__)[-MAX_PROCESSES:]
        self.exited = {each: self.exited[each] for each in newest if now - self.exited[each] <= EXITED_SECONDS}
        return unlisted[:MAX_PROCESSES]

    def scan(self, pattern: re.Pattern[str]) -> set[int]:
        found = set()
        for name in os.listdir(ROOT + "/proc"):
            if name.isdigit() and int(name) != os.getpid():
                try:
                    if pattern.search(read_text(f"{ROOT}/proc/{name}/comm", 64).rstrip("\n")):
                        found.add(int(name))
                except OSError:
                    pass
        return found


def read_load() -> list[float | None]:
    """[load over 1 min, CPUs, pressure of cpu, io and memory (some avg10), available, total and swapped memory in
    bytes]; None where the kernel does not have it."""
    load: list[float | None] = []
    try:
        load.append(float(read_text(ROOT + "/proc/loadavg").split()[0]))
    except (OSError, ValueError, IndexError):
        load.append(None)
    load.append(os.cpu_count())
    for kind in ("cpu", "io", "memory"):
        try:
            found = re.search(r"some avg10=([\d.]+)", read_text(f"{ROOT}/proc/pressure/{kind}"))
            load.append(float(found.group(1)) if found else None)
        except (OSError, ValueError):
            load.append(None)
    return load + read_memory()


def read_memory() -> list[float | None]:
    """Bytes available, bytes in total, bytes swapped out."""
    try:
        found = dict(re.findall(r"(?m)^(\w+):\s+(\d+) kB", read_text(ROOT + "/proc/meminfo")))
    except OSError:
        found = {}
    kept = [int(found[name]) * 1024 if name in found else None for name in ("MemAvailable", "MemTotal")]
    swap = (found.get("SwapTotal"), found.get("SwapFree"))
    return [*kept, None if None in swap else (int(swap[0] or 0) - int(swap[1] or 0)) * 1024]


def node_host_name() -> str:
    try:
        return read_text(ROOT + "/proc/sys/kernel/hostname").strip() or os.uname().nodename
    except OSError:
        return os.uname().nodename


# Progress -----------------------------------------------------------------------------------------------------------


class HeartbeatCollector:
    """RUN/heartbeat/rank-*.json: those of this host, or up to MAX_HEARTBEATS if none names it. Sent when they
    change."""

    def __init__(self, outbox: PendingLine, directory: str, host: str) -> None:
        self.outbox = outbox
        self.directory = os.path.join(directory, "heartbeat")
        self.host = host.split(".")[0]
        self.mine: list[str] = []
        self.elsewhere: set[str] = (
            set()
        )  # of other hosts: not read again, or every node would read a thousand files every ten seconds
        self.forget_due = 0.0
        self.pids: set[int] = set()
        self.pid_of: dict[str, int] = {}
        self.sent: dict[str, str] = {}
        self.discovery_due = 0.0

    def __call__(self, _: CollectorThread) -> None:
        now = time.monotonic()
        if now >= self.discovery_due:
            self.discovery_due = now + (DISCOVERY_SECONDS if self.mine else 2.0)
            self.discover()
        for name in self.mine:
            self.read(name)
        self.pids = set(self.pid_of.values())

    def discover(self) -> None:
        try:
            names = sorted(n for n in os.listdir(self.directory) if n.startswith("rank-") and n.endswith(".json"))
        except FileNotFoundError:
            names = []
        now = time.monotonic()
        if not self.pid_of and now >= self.forget_due:  # none of ours: the ranks may have moved here in a restart
            self.forget_due = now + 60.0
            self.elsewhere.clear()
        here, unread = [], []
        for name in names:
            if name in self.pid_of:
                here.append(name)
                continue
            if name in self.elsewhere:
                unread.append(name)
                continue
            try:
                written_by = str(json.loads(read_text(os.path.join(self.directory, name))).get("host", ""))
            except (OSError, ValueError, AttributeError):
                unread.append(name)
                continue
            if written_by.split(".")[0] == self.host:
                here.append(name)
            else:
                unread.append(name)
                self.elsewhere.add(name)
        self.mine = (here or unread)[:MAX_HEARTBEATS]
        for name in set(self.sent) - set(self.mine):
            del self.sent[name]
            self.pid_of.pop(name, None)
            self.outbox.put("beat", [encodable_text(os.path.join(self.directory, name)), 0, None])

    def read(self, name: str) -> None:
        path = os.path.join(self.directory, name)
        try:
            with open(path, "rb", buffering=0) as file:
                changed = os.fstat(file.fileno()).st_mtime
                text = (file.read(4096) or b"").decode("utf-8", "replace")
        except FileNotFoundError:
            self.discovery_due = 0.0
            return
        if self.sent.get(name) == text:
            return
        self.sent[name] = text
        self.outbox.put("beat", [encodable_text(path), round(changed, 3), text])
        try:
            heartbeat = json.loads(text)
            if str(heartbeat["host"]).split(".")[0] == self.host:
                self.pid_of[name] = int(heartbeat["pid"])
                return
        except (ValueError, KeyError, TypeError):
            pass
        if self.pid_of.pop(name, None) is not None:  # it was ours: the job was restarted on other hosts
            self.elsewhere.clear()
            self.discovery_due = 0.0


class LogCollector:
    """Log files of one shell pattern: what was appended, or the last TAIL_BYTES if the file is new or was rewritten."""

    def __init__(self, outbox: PendingLine, source: int, pattern: str) -> None:
        self.outbox = outbox
        self.source = source
        self.pattern = pattern
        self.paths: list[str] = []
        self.seen: dict[str, tuple[int, int, float]] = {}  # path -> inode, size, mtime
        self.last: dict[str, bytes] = {}  # path -> its last bytes, to detect a rewritten file
        self.discovery_due = 0.0

    def __call__(self, _: CollectorThread) -> None:
        now = time.monotonic()
        if now >= self.discovery_due:
            self.discovery_due = now + (DISCOVERY_SECONDS if self.paths else 2.0)
            self.discover()
        for path in self.paths:
            with contextlib.suppress(FileNotFoundError):  # rotated: it reappears soon, or the next discovery drops it
                self.read(path)

    def discover(self) -> None:
        found = []
        for path in glob.glob(self.pattern, recursive=True):
            try:
                status = os.stat(path)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime, path))
        self.paths = [path for _, path in sorted(found)[-MAX_LOGS:]]
        for path in set(self.seen) - set(self.paths):
            del self.seen[path]
            self.last.pop(path, None)
            self.outbox.put("log", [self.source, encodable_text(path), None, 0, 0, ""])

    def read(self, path: str) -> None:
        status = os.stat(path)
        now = (status.st_ino, status.st_size, status.st_mtime)
        before = self.seen.get(path)
        if now == before:  # nothing was appended: not even opened
            return
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - TAIL_BYTES)
            appended = False
            if before is not None and before[0] == now[0] and start <= before[1] < size:
                known_end = self.last.get(path, b"")
                file.seek(before[1] - len(known_end))
                appended = file.read(len(known_end)) == known_end
            if appended and before is not None:
                start = before[1]
            file.seek(start)
            data = file.read(min(TAIL_BYTES, size - start)) or b""
        self.seen[path] = (now[0], start + len(data), now[2])
        self.last[path] = (self.last.get(path, b"") + data if appended else data)[-32:]
        text = data.decode("utf-8", "replace")
        self.outbox.put("log", [self.source, encodable_text(path), start, start + len(data), round(now[2], 3), text])


# Checkpoints --------------------------------------------------------------------------------------------------------

MAX_CHECKPOINTS = 8
MAX_FILES = 96
MAX_SCANNED_FILES = 4096
MAX_SMALL_FILE_BYTES = 256
MAX_HEADER_BYTES = 4 * 1024 * 1024
SAFETENSORS_MAX_HEADER_BYTES = 100_000_000  # the library reads none that is longer
MAX_ARCHIVES = 256  # of a checkpoint, whose ends are read
MAX_REMEMBERED_FILES = 8192
MANY_ENTRIES = 512  # of a directory with more, only the newest and some of the others are looked at again
MAX_REMEMBERED_FOLDERS = 1024
LOOKS = 16  # after so many, all of them were
ONE_FILE = (".pt", ".pth", ".ckpt", ".safetensors", ".pth.tar", ".keras", ".h5")
NO_HEADER, NO_END, EMPTY, WRONG_LENGTH, NOT_SHOWN = (
    1,
    2,
    3,
    4,
    5,
)  # what is wrong with a file: the codes of `bad` in the line
WEIGHTS = (".safetensors", ".distcp", ".pt", ".pth", ".bin", ".pkl", ".ckpt")
ARCHIVES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")  # what torch.save writes is a zip archive since torch 1.6
_headers: dict[tuple[str, int], tuple[int, int]] = {}  # (path, inode) -> stated length, last size
_whole_archives: set[tuple[str, int, int, float]] = set()  # path, inode, size, time of the last change
_listings: dict[str, DirectoryListing] = {}
_scans: dict[str, dict[str, Any]] = {}  # folder -> what was found in it at the last look
_large: set[str] = set()  # folders with so many files that not all of them are read again each time


class BadHeaderError(ValueError):
    """A safetensors file without a valid header."""


def safetensors_bytes(path: str, inode: int, size: int) -> int | None:
    """Length of the file according to its header: 8 bytes of header length, the header, the end of the last tensor.
    None: the header is too long to be read here. Raises BadHeaderError if there is none.

    Format: https://huggingface.co/docs/safetensors
    """
    stated, before = _headers.get((path, inode), (-1, -1))
    if size == stated or before < size < stated:
        _headers[path, inode] = (stated, size)  # whole, or still growing: the header is not read again
        return stated
    with open(path, "rb", buffering=0) as file:
        first = file.read(8) or b""
        header = int.from_bytes(first, "little")
        if len(first) < 8 or not 2 <= header <= SAFETENSORS_MAX_HEADER_BYTES:
            raise BadHeaderError
        if size < 8 + header:
            return 8 + header
        if header > MAX_HEADER_BYTES:
            return None
        try:
            tensors = json.loads(file.read(header) or b"")
            ends = [int(entry["data_offsets"][1]) for name, entry in tensors.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            raise BadHeaderError from None
    if len(_headers) >= MAX_REMEMBERED_FILES:
        _headers.clear()
    stated = 8 + header + max(ends, default=0)
    _headers[path, inode] = (stated, size)
    return stated


def archive_lacks_end(path: str, status: os.stat_result) -> bool:
    """It begins as a zip archive, and the record with which every zip archive ends is missing: it was cut off.

    Format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.16: 22 bytes, then a comment of at most
    65,535 bytes.
    """
    key = (path, status.st_ino, status.st_size, status.st_mtime)
    if key in _whole_archives:
        return False
    with open(path, "rb", buffering=0) as file:
        if file.read(4) == b"PK\x03\x04":
            for length in (22, 22 + 65535):
                file.seek(max(0, status.st_size - length))
                end = file.read(length) or b""
                end = end[end.rfind(b"PK\x05\x06") :]
                if len(end) >= 22:
                    break
            else:
                return True
    if len(_whole_archives) >= MAX_REMEMBERED_FILES:
        _whole_archives.clear()
    _whole_archives.add(key)
    return False


def file_problem(path: str, status: os.stat_result) -> int:
    """What is wrong with a checkpoint that is one file: a code, 0 if its content shows that it is whole."""
    if status.st_size == 0:
        return EMPTY
    try:
        if path.endswith(".safetensors"):
            stated = safetensors_bytes(path, status.st_ino, status.st_size)
            return NOT_SHOWN if stated is None else 0 if stated == status.st_size else WRONG_LENGTH
        if archive_lacks_end(path, status):
            return NO_END
        with open(path, "rb", buffering=0) as file:
            return 0 if file.read(4) == b"PK\x03\x04" else NOT_SHOWN
    except BadHeaderError:
        return NO_HEADER
    except OSError:
        return NOT_SHOWN


def index_files(path: str) -> list[str]:
    """Names of the files that a model.safetensors.index.json refers to."""
    with open(path, "rb") as file:
        return sorted(
            {encodable_text(str(name)) for name in json.loads(file.read(2 * MAX_HEADER_BYTES))["weight_map"].values()}
        )


class DirectoryListing:
    """What is in a directory. Where there are many entries, only new names, folders, the newest files, and in turn some
    of the others are looked at again: what is being written is new or among the newest."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.statuses: dict[str, os.stat_result] = {}
        self.changed = True  # in the last look
        self._again: set[str] = set()
        self.turn = 0

    def look(self) -> None:
        known, found = self.statuses, {}
        names = os.listdir(self.path)
        again, self.turn = self._again.union(names[self.turn % LOOKS :: LOOKS]), self.turn + 1
        few = len(names) <= MANY_ENTRIES
        self.changed = len(names) != len(known)
        for name in names:
            status = known.get(name)
            if status is None or few or name in again:
                try:
                    now = os.lstat(self.path + "/" + name)
                except FileNotFoundError:
                    continue  # renamed or deleted in the meantime
                if status is None or identity(now) != identity(status):
                    status, self.changed = now, True
            found[name] = status
        self.statuses = found
        if self.changed and not few:
            self._again = {name for name, status in found.items() if stat.S_ISDIR(status.st_mode)}
            self._again.update(heapq.nlargest(MAX_FILES, found, key=lambda name: found[name].st_mtime))


def identity(status: os.stat_result) -> tuple[float, int, int]:
    return status.st_mtime, status.st_size, status.st_ino


def directory_listing(path: str) -> DirectoryListing:
    """A new look at the directory."""
    if len(_listings) > MAX_REMEMBERED_FOLDERS:
        _listings.clear()
    listing = _listings.setdefault(path, DirectoryListing(path))
    try:
        listing.look()
    except OSError:
        _listings.pop(path, None)
        raise
    return listing


def scan_entry(path: str) -> dict[str, Any]:
    """All files of one checkpoint: totals, and MAX_FILES of them. Weights are listed last, large ones at the very end,
    so that markers are never cut off."""
    total, count, newest = 0, 0, os.stat(path).st_mtime
    files: list[tuple[int, int, str, int]] = []
    indexes: dict[str, list[str]] = {}
    short: dict[str, int] = {}
    bad: dict[str, int] = {}
    checked = archives = 0
    left = [(path, "", 0)]
    looked: list[tuple[DirectoryListing, str, int]] = []
    changed = False
    while left and count < MAX_SCANNED_FILES:
        folder, prefix, depth = left.pop()
        listing = directory_listing(folder)
        changed = changed or listing.changed
        looked.append((listing, prefix, depth))
        left += [
            (folder + "/" + name, prefix + encodable_text(name) + "/", depth + 1)
            for name, status in listing.statuses.items()
            if stat.S_ISDIR(status.st_mode) and depth < 3
        ]
        count += len(listing.statuses)
    if not changed and path in _scans:
        return _scans[path]
    count = 0
    for listing, prefix, depth in looked:
        for base, status in listing.statuses.items():
            newest = max(newest, status.st_mtime)
            if stat.S_ISDIR(status.st_mode):
                continue
            name = prefix + encodable_text(base)
            total, count = total + status.st_size, count + 1
            weights = 0 if not name.endswith(WEIGHTS) else 1 if status.st_size <= 65536 else 2
            files.append((weights, depth, name, status.st_size))
            if not stat.S_ISREG(status.st_mode):
                continue
            try:
                if name.endswith(".safetensors"):
                    stated = safetensors_bytes(listing.path + "/" + base, status.st_ino, status.st_size)
                    if stated is not None and stated != status.st_size:
                        short[name] = stated
                    checked += stated == status.st_size
                elif name.endswith(ARCHIVES) and archives < MAX_ARCHIVES:
                    archives += 1
                    if archive_lacks_end(listing.path + "/" + base, status):
                        bad[name] = NO_END
                elif name.endswith(".safetensors.index.json"):
                    indexes[name] = index_files(listing.path + "/" + base)
            except BadHeaderError:
                bad[name] = NO_HEADER
            except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
                pass  # being written: its size and age show that
    listed = [[name, size] for _, _, name, size in heapq.nsmallest(MAX_FILES, files)]
    facts: dict[str, Any] = {"bytes": total, "count": count, "mtime": round(newest, 3), "files": listed}
    if indexes and not left:  # else a file that was not seen may exist
        known = {name for _, _, name, _ in files}
        facts["index"] = {index: missing_files(index, names, known) for index, names in indexes.items()}
        facts["named"] = {index: len(names) for index, names in indexes.items()}
    more = {"short": short, "bad": bad, "checked": checked, "cut": bool(left)}
    if len(_scans) > MAX_REMEMBERED_FOLDERS:
        _scans.clear()
    _scans[path] = {**facts, **{key: value for key, value in more.items() if value}}
    return _scans[path]


def missing_files(index: str, names: list[str], known: set[str]) -> list[str]:
    """The files that an index refers to and that are not there, at most MAX_FILES."""
    folder = index.rpartition("/")[0]
    return [name for name in names if (folder + "/" + name if folder else name) not in known][:MAX_FILES]


def list_root_file(path: str, name: str, root: dict[str, list[Any]], bad: dict[str, int]) -> None:
    """A link, or a file beside the folders: its size, its text if it is short, and what is wrong with its content."""
    status = os.lstat(path)
    changed = round(status.st_mtime, 3)
    if stat.S_ISLNK(status.st_mode):
        root[name] = ["link", 0, changed, encodable_text(os.readlink(path))]
    elif stat.S_ISREG(status.st_mode):
        root[name] = ["file", status.st_size, changed, ""]
        if name.endswith(ONE_FILE):
            problem = file_problem(path, status)
            if problem:
                bad[name] = problem
        elif status.st_size <= MAX_SMALL_FILE_BYTES:
            root[name][3] = read_text(path, MAX_SMALL_FILE_BYTES) or ""


def list_checkpoints(directory: str, previous: dict[str, Any] | None = None, full: bool = False) -> dict[str, Any]:
    """{"error", "root": {name: [kind, size, mtime, text]}, "bad": {name: code}, "entries": {name: facts}}.

    The newest MAX_CHECKPOINTS folders, and the files beside them. `previous`: the last listing, of which only the
    newest three entries are scanned again unless `full`: older checkpoints do not change, and a scan may cost a file
    server much.
    """
    root: dict[str, list[Any]] = {}
    bad: dict[str, int] = {}
    folders: list[tuple[float, str]] = []
    files: list[tuple[float, str]] = []  # small ones may be pointers: many large ones must not push them out
    checkpoints: list[tuple[float, str]] = []
    try:
        listing = directory_listing(directory)
        for name, status in listing.statuses.items():
            mode = status.st_mode
            if stat.S_ISREG(mode) or stat.S_ISLNK(mode):  # opening a FIFO would block for ever
                (checkpoints if name.endswith(ONE_FILE) else files).append((status.st_mtime, name))
            elif stat.S_ISDIR(mode):
                folders.append((status.st_mtime, name))
        for _, name in heapq.nlargest(MAX_FILES // 2, files) + heapq.nlargest(MAX_FILES // 2, checkpoints):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                list_root_file(os.path.join(directory, name), encodable_text(name), root, bad)
    except OSError as error:
        return {"error": os.strerror(error.errno or 0), "root": {}, "bad": {}, "entries": {}}
    known = (previous or {}).get("entries", {})
    facts: dict[str, Any] = {}
    listed = heapq.nlargest(MAX_CHECKPOINTS, folders)
    large = [folder for _, folder in listed if os.path.join(directory, folder) in _large]
    turn = listing.turn
    for age, (_, folder) in enumerate(listed):
        name, path = encodable_text(folder), os.path.join(directory, folder)
        waits = folder in large and folder != large[turn % len(large)]  # a large one in each look
        if name in known and (waits or (age >= 3 and not full)):
            facts[name] = known[name]
            continue
        try:
            facts[name] = scan_entry(path)
            (_large.add if facts[name]["count"] > MAX_SCANNED_FILES // 4 else _large.discard)(path)
        except OSError as error:
            if error.errno != errno.ENOENT:
                facts[name] = {"error": os.strerror(error.errno or 0), "bytes": 0, "count": 0, "mtime": 0, "files": []}
    return {"error": None, "root": root, "bad": bad, "entries": facts}


class CheckpointCollector:
    """One checkpoint directory: the names of its entries, and the details of those that changed."""

    def __init__(self, outbox: PendingLine, directory: str) -> None:
        self.outbox = outbox
        self.directory = directory
        self.listing: dict[str, Any] | None = None
        self.listed_at: float | None = None
        self.full_due = 0.0

    def __call__(self, _: CollectorThread) -> None:
        now = time.monotonic()
        before = self.listing
        full = now >= self.full_due
        if full:
            self.full_due = now + 60.0
        listing = list_checkpoints(self.directory, before, full)
        self.listed_at = now
        if before is not None and listing == before:
            return
        old = {} if before is None else before["entries"]
        changed = {name: facts for name, facts in listing["entries"].items() if old.get(name) != facts}
        news = {
            "dir": encodable_text(self.directory),
            "t": round(now, 3),
            "w": round(time.time(), 3),
            "error": listing["error"],
        }
        news["names"] = sorted(listing["entries"])
        if before is None or (before["root"], before["bad"]) != (listing["root"], listing["bad"]):
            news["root"] = listing["root"]
            if listing["bad"]:
                news["bad"] = listing["bad"]
        self.outbox.put("ckpt", dict(news, entries={}) if changed else news)
        for name, facts in changed.items():
            self.outbox.put("ckpt", {"dir": news["dir"], "t": news["t"], "w": news["w"], "entries": {name: facts}})
        self.listing = listing


def filesystem_kind(path: str) -> str | None:
    """Type of the mount that contains the path ("nfs4", "lustre", "ext4"), from the mount table: a hung file server is
    not asked."""
    best, kind = "", None
    try:
        mounts = read_text("/proc/self/mounts", 1 << 20).splitlines()
    except OSError:
        return None
    for mount in mounts:
        words = mount.split(" ")
        if len(words) < 3:
            continue
        point = words[1].replace("\\040", " ").rstrip("/")
        if (path == point or path.startswith(point + "/")) and len(point) >= len(best):
            best, kind = point, encodable_text(words[2])
    return kind


class FilesystemCollector:
    """Free space of one path: statvfs blocks while a file server hangs, so each path has its own thread."""

    def __init__(self, outbox: PendingLine, path: str) -> None:
        self.outbox = outbox
        self.path = path
        self.sent: list[Any] = []

    def __call__(self, _: CollectorThread) -> None:
        kind = filesystem_kind(self.path)
        try:
            facts = os.statvfs(self.path)
            size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
            row: list[Any] = [encodable_text(self.path), free, size, None, kind]
        except OSError as error:
            row = [encodable_text(self.path), None, None, os.strerror(error.errno or 0), kind]
        if row != self.sent:
            self.sent = row
            self.outbox.put("fs", row)


# Kernel log ---------------------------------------------------------------------------------------------------------


class KernelLogCollector:
    """Fault lines of the kernel log as [age, text]: from /dev/kmsg, else dmesg, else journalctl; else reports once
    why."""

    def __init__(self, outbox: PendingLine) -> None:
        self.outbox = outbox
        self.descriptor: int | None = None
        self.rest = b""
        self.caught_up = False
        self.tools = [["dmesg"], ["journalctl", "-k", "-b", "-o", "short-monotonic", "-n", "400", "--no-pager"]]
        self.newest = time.monotonic() - KERNEL_HISTORY_SECONDS
        self.failures: list[str] = []
        try:
            self.descriptor = os.open(ROOT + "/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            self.failures.append(f"/dev/kmsg: {os.strerror(error.errno or 0)}")

    def __call__(self, thread: CollectorThread) -> None:
        if self.descriptor is not None:
            self.read_device(self.descriptor)
        elif self.tools and not ROOT:
            thread.every_seconds = DISCOVERY_SECONDS
            thread.doing = self.tools[0][0]
            self.read_tool()

    def read_device(self, descriptor: int) -> None:
        while True:
            try:
                data = os.read(descriptor, 8192)  # one record; on a simulated node a plain file with many lines
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten before we read it: continue with the oldest record
                    continue
                if error.errno == errno.EAGAIN:
                    break
                raise
            if not data:
                break
            *lines, self.rest = (self.rest + data).split(b"\n")
            for line in lines:
                self.read_record(line.decode("utf-8", "replace"))
        self.caught_up = True

    def read_record(self, record: str) -> None:
        """A record "6,3964,206764307,-;text": priority, sequence, microseconds since boot. Continuation lines begin
        with a space."""
        head, found, text = record.partition(";")
        if not found or not KERNEL_FAULT.search(text):
            return
        age = 0.0
        if not self.caught_up:
            try:
                age = max(0.0, time.monotonic() - int(head.split(",")[2]) / 1e6)
            except (ValueError, IndexError):
                age = KERNEL_HISTORY_SECONDS
        if age <= KERNEL_HISTORY_SECONDS:
            self.outbox.put("kmsg", [round(age, 1), text[:1000]])

    def read_tool(self) -> None:
        code, out, err = run_tool(self.tools[0])
        if code != 0 or not out.strip():
            self.failures.append(f"{self.tools.pop(0)[0]}: {(err.strip() or 'nothing printed')[:200]}")
            if not self.tools:
                self.outbox.set("kmsg_error", "the kernel log cannot be read: " + "; ".join(self.failures))
            return
        now = time.monotonic()
        newest = self.newest
        for seconds, text in re.findall(r"(?m)^\[\s*(\d+\.\d+)\]\s*(.*)$", out):
            stamp = float(seconds)
            if stamp > self.newest and KERNEL_FAULT.search(text):
                self.outbox.put("kmsg", [round(max(0.0, now - stamp), 1), text[:1000]])
            newest = max(newest, stamp)
        self.newest = newest


# Main loop ----------------------------------------------------------------------------------------------------------


class LeaseWatchdog:
    """Exits when stdin closes or no line has arrived for LEASE_SECONDS, also while the main thread is stuck in a
    write."""

    def __init__(self) -> None:
        self.renewed = time.monotonic()
        for target in (self.read_stdin, self.check):
            threading.Thread(target=target, daemon=True).start()

    def read_stdin(self) -> None:
        while True:
            try:
                data = os.read(0, 4096)
            except OSError:
                data = b""
            if not data:
                exit_probe()
            self.renewed = time.monotonic()

    def check(self) -> None:
        while time.monotonic() - self.renewed < LEASE_SECONDS:
            time.sleep(5.0)
        exit_probe()


def write_line(line: dict[str, Any]) -> None:
    data = memoryview(json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n")
    while data:
        try:
            data = data[os.write(1, data) :]
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            exit_probe()


def wait_until_idle(threads: list[CollectorThread], seconds: float) -> None:
    """Wait until all of them have returned, at most `seconds`."""
    end = time.monotonic() + seconds
    nap = 0.001
    while any(thread.busy_since is not None for thread in threads) and time.monotonic() < end:
        time.sleep(nap)
        nap = min(nap * 1.5, 0.02)


def sleep_to_boundary(interval: float) -> None:
    """Sleep to the next multiple of the interval on the wall clock, so that all nodes sample at the same time."""
    wall = time.time()
    target = ((wall + 0.1 * interval) // interval + 1) * interval
    time.sleep(min(max(target - wall, 0.0), 2 * interval))


def main(request: dict[str, Any], nvml_readings: list[Any], nvml_source: str = "") -> None:
    for name in ("SIGHUP", "SIGTERM", "SIGINT"):
        signal.signal(getattr(signal, name), exit_probe)
    threading.stack_size(256 * 1024)  # a node with many paths has a thread for each
    LeaseWatchdog()
    interval = float(request["interval"])
    host = node_host_name()
    outbox = PendingLine()
    gpu = GpuCollector(outbox, list(request["query"]), request["form"], nvml_readings, nvml_source)
    heartbeats = [HeartbeatCollector(outbox, directory, host) for directory in request["runs"]]
    gpu_thread = CollectorThread("nvml", gpu)
    prompt = [CollectorThread("read " + each.directory, each) for each in heartbeats]
    prompt += [CollectorThread("read " + p, LogCollector(outbox, i, p)) for i, p in enumerate(request["logs"])]
    prompt.append(CollectorThread("read kernel log", KernelLogCollector(outbox)))
    listings = [CheckpointCollector(outbox, directory) for directory in request["checkpoints"]]
    processes = CollectorThread("read /proc", ProcessCollector(outbox, gpu, heartbeats, request["processes"]))
    threads = [gpu_thread, *prompt, processes]
    threads += [CollectorThread("list " + listing.directory, listing, 2.0) for listing in listings]
    threads += [
        CollectorThread("statvfs " + path, FilesystemCollector(outbox, path), DISCOVERY_SECONDS)
        for path in sorted({*request["runs"], *request["checkpoints"]})
    ]
    outbox.set("hello", {"host": host, "python": f"{sys.version_info[0]}.{sys.version_info[1]}", "pid": os.getpid()})
    sequence = 0
    errors: list[str] = []
    while True:
        now = time.monotonic()
        for thread in threads:
            if thread is not processes:
                thread.trigger(now)
        wait_until_idle(prompt, 0.1 * interval)
        # A GPU query faster than half an interval is waited for; the answer of a slower one is in the next line.
        if sequence == 0:
            wait_until_idle([gpu_thread], 2.0)
        elif gpu_thread.took_seconds < 0.5 * interval:
            wait_until_idle([gpu_thread], 0.6 * interval)
        processes.trigger(now)  # last: GPUs and heartbeats have now been read, and say which processes matter
        wait_until_idle([processes], 0.1 * interval)
        now = time.monotonic()
        line = {"v": 1, "seq": sequence, "t": round(now, 4), "w": round(time.time(), 4), **outbox.take()}
        busy = [(thread, thread.busy_since) for thread in threads]
        waiting = [[encodable_text(thread.doing), round(now - since, 2)] for thread, since in busy if since is not None]
        if waiting:
            line["busy"] = waiting
        listed = [
            [encodable_text(one.directory), round(one.listed_at, 3)] for one in listings if one.listed_at is not None
        ]
        if listed:
            line["listed"] = listed
        failed = [thread.error for thread in threads if thread.error]
        if failed != errors:
            line["warn"] = errors = failed
        write_line(line)
        sequence += 1
        sleep_to_boundary(interval)
