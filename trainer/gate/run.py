"""The gate process on one node: start all probes at once, meet the other nodes, check, write gate.json.

Whatever fails here becomes part of the report and still reaches the gather: a process that exited before it would leave
all others waiting until their deadline, without a reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from wattwatch.trainer.dataclass_json import InvalidDataError, parse_dataclass
from wattwatch.trainer.gate.checks import run_checks
from wattwatch.trainer.gate.child_process import ChildProcess, start_path_probe
from wattwatch.trainer.gate.devices import NvidiaSmiProbe
from wattwatch.trainer.gate.gather import GatherError, GatherMember, Rendezvous, gather_reports, open_gather_listener
from wattwatch.trainer.gate.model import (
    CheckpointReport,
    GateCheck,
    GateSettings,
    GateVerdict,
    ModelReport,
    NodeReport,
    ShardReport,
)
from wattwatch.trainer.pack.manifest import blocks_sha256, manifest_file, read_manifest, starts_file, token_file
from wattwatch.trainer.run_directory import exclude_dead

GATE_SCHEMA_VERSION: Final = 1  # of gate.json
# Written and timed to estimate the duration of a save. Chosen: large enough to leave caches of a network file system,
# small enough to cost a slow one well under a second.
WRITE_TEST_BYTES: Final = 4 * 1024 * 1024
LOCAL_RANK_VARIABLES: Final = ("LOCAL_RANK", "SLURM_LOCALID")
LIBRARIES: Final = ("torch", "transformers", "datasets", "tokenizers", "numpy", "safetensors", "wattwatch")
ENVIRONMENT_PREFIXES: Final = ("NCCL_", "TORCH_", "GLOO_")
CLOSE_SECONDS: Final = 1.0  # for the checkpoint probe to remove rank 0's mark


@dataclass(frozen=True, slots=True)
class GateProcess:
    """The ranks that this process represents, and where the job's files are on this node."""

    node: str
    ranks: tuple[int, ...]
    data: str  # directory of the packed blocks, local to the node
    run: str  # the run directory, shared
    model: str | None
    resume: str | None
    config: str | None
    path_seconds: float  # how long a path or the driver may take to respond

    @property
    def checkpoints(self) -> str:
        return f"{self.run}/checkpoints"

    @property
    def heartbeats(self) -> str:
        """The heartbeat directory, for one process per node; "" for the node's other processes.

        It has a file for each rank of the world: with one process per rank the reads would grow with its square.
        """
        local_rank = next((os.environ[name] for name in LOCAL_RANK_VARIABLES if os.environ.get(name)), "0")
        return f"{self.run}/heartbeat" if local_rank == "0" else ""


@dataclass(frozen=True, slots=True)
class GateResult:
    """The verdict and what it was computed from. `record` is gate.json."""

    verdict: GateVerdict
    reports: tuple[NodeReport, ...]
    record: dict[str, Any]
    unrecorded: str | None  # why rank 0 did not write gate.json


@dataclass(slots=True)
class _PartTimer:
    """When each part was finished, and what went wrong in it."""

    begun: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it has to get into the report
            self.troubles.append(f"{name}: {type(error).__name__}: {error}")
        self.seconds[name] = round(time.monotonic() - self.begun, 4)


def run_gate(
    settings: GateSettings, process: GateProcess, rendezvous: Rendezvous | None, wait_seconds: float
) -> GateResult:
    """All six checks over all ranks. Without a rendezvous this process must represent all of them.

    Raises UserError if rank 0's process cannot listen at the rendezvous.
    """
    with contextlib.ExitStack() as stack:
        timer = _PartTimer()
        until = timer.begun + wait_seconds
        is_host = 0 in process.ranks
        listener = stack.enter_context(open_gather_listener(rendezvous)) if rendezvous and is_host else None
        probes = _NodeProbes(process, settings, timer, stack)
        # Rank 0's node leaves a file with a random name and content; a node that cannot read it has another directory
        # mounted under the same path. Then its checkpoint would be missing files, found at the first resume.
        mark = (f".gate-{secrets.token_hex(8)}", secrets.token_hex(16))
        note, member = "", None
        welcome: dict[str, Any] = {"gate_id": secrets.token_hex(6), "mark": None}
        if is_host:
            probes.checkpoint(create=True, write=mark, expect=None)
            if probes.checkpoint_report and not probes.checkpoint_report.trouble:
                welcome["mark"] = list(mark)
        elif rendezvous:
            try:
                member = stack.enter_context(contextlib.closing(GatherMember(rendezvous, until)))
                welcome = member.welcome()
            except GatherError as error:
                note, member = str(error), None
            timer.seconds["rendezvous"] = round(time.monotonic() - timer.begun, 4)
            # Only after the welcome: it names the mark, which exists by then.
            probes.checkpoint(create=False, write=mark, expect=_parse_mark(welcome.get("mark")))
        report = probes.report()
        reports = [report]
        if listener and rendezvous:
            reports = gather_reports(listener, rendezvous, welcome, report, until)
            note = f"rank 0's process waited {time.monotonic() - timer.begun:.0f} s"
        elif member:
            try:
                reports = member.exchange(report)
            except GatherError as error:
                note = str(error)
        timer.seconds["gather"] = round(time.monotonic() - timer.begun, 4)
        verdict = run_checks(reports, note)
        # The time of the gather is only known now, after the report was sent.
        reports[0] = replace(reports[0], seconds=dict(timer.seconds)) if is_host else reports[0]
        record = build_gate_record(str(welcome.get("gate_id", "")), verdict, reports)
        unrecorded = None
        if is_host and has_live_ranks(reports):
            # The ranks of the running job compare their gate id with the file when they start.
            unrecorded = "the existing file belongs to a job that is still running"
        elif is_host:
            unrecorded = probes.publish(f"{process.run}/gate.json", record)
        return GateResult(verdict, tuple(reports), record, unrecorded)


def has_live_ranks(reports: list[NodeReport]) -> bool:
    """Whether any node found ranks running in this run directory, except those that their own node knows are gone."""
    return bool(exclude_dead(beat for report in reports if report.checkpoint for beat in report.checkpoint.beats))


def build_gate_record(gate_id: str, verdict: GateVerdict, reports: list[NodeReport]) -> dict[str, Any]:
    """gate.json: what the trainer relies on first, the full reports last.

    `inputs_sha256` is over settings, configuration and shards: two gates over the same inputs have the same.
    """
    settings, counts = reports[0].settings, verdict.evenness
    manifests = {
        shard.rank: shard.manifest.sha256 for report in reports for shard in report.shards if shard.manifest is not None
    }
    config = next((r.model.config_sha256 for r in reports if r.model and r.model.config_sha256), None)
    inputs = {"settings": asdict(settings), "config_sha256": config, "shards": sorted(manifests.items())}
    return {
        "v": GATE_SCHEMA_VERSION,
        "gate_id": gate_id,
        "level": verdict.level,
        "t_wall": time.time(),
        "seconds": reports[0].seconds.get("gather"),
        "world": settings.world,
        "config_sha256": config,
        "blocks_sha256": blocks_sha256(manifests) if len(manifests) == settings.world else None,
        "inputs_sha256": hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest(),
        "global_min_blocks": counts.global_min_blocks if counts else None,
        "spread": counts.spread if counts else None,
        "steps": counts.steps if counts else None,
        "lost_share": counts.lost_share if counts else None,
        "blocks": counts.blocks if counts else None,
        "checks": [_check_record(check) for check in verdict.checks],
        "settings": asdict(settings),
        "reports": [asdict(report) for report in reports],
    }


def _check_record(check: GateCheck) -> dict[str, Any]:
    problems = [asdict(problem) for problem in check.problems]
    return {"name": check.name, "level": check.level, "summary": check.summary, "problems": problems}


def _parse_mark(mark: object) -> tuple[str, str] | None:
    """Rank 0's mark, (file name, content). It came over the network: anything but a plain file name is ignored."""
    match mark:
        case [str(name), str(content)] if name.startswith(".gate-") and "/" not in name:
            return name, content
    return None


class _NodeProbes:
    """The child processes that inspect this node, and what they answered before their deadline."""

    def __init__(
        self, process: GateProcess, settings: GateSettings, timer: _PartTimer, stack: contextlib.ExitStack
    ) -> None:
        """Starts all probes but the checkpoint's; they work while this process waits for the others."""
        self._process, self._settings, self._timer, self._stack = process, settings, timer, stack
        self._checkpoint: ChildProcess | None = None
        self.checkpoint_report: CheckpointReport | None = None
        files = [
            (rank, token_file(process.data, rank), manifest_file(process.data, rank), starts_file(process.data, rank))
            for rank in process.ranks
        ]
        self._shards = self._start({"kind": "shards", "directory": process.data, "files": files})
        self._model = None
        if process.model or process.resume or process.config:
            paths = {"model": process.model, "resume": process.resume, "config": process.config}
            self._model = self._start({"kind": "model", "weights": not settings.random_weights, **paths})
        # nvidia-smi may take a second on a node with many GPUs, so it runs beside everything else.
        self._devices = stack.enter_context(contextlib.closing(NvidiaSmiProbe()))

    def _start(self, request: dict[str, Any]) -> ChildProcess:
        return self._stack.enter_context(contextlib.closing(start_path_probe(request)))

    def _deadline(self) -> float:
        return time.monotonic() + self._process.path_seconds

    def checkpoint(self, create: bool, write: tuple[str, str], expect: tuple[str, str] | None) -> None:
        """Probes the checkpoint directory. Rank 0's child stays, with its mark, until all nodes have reported."""
        with self._timer.part("checkpoint"):
            directory = self._process.checkpoints
            self._checkpoint = self._start(
                {
                    "kind": "checkpoint",
                    "directory": directory,
                    "create": create,
                    "write": write[0],
                    "content": write[1],
                    "expect": expect,
                    "hold": create,
                    "rate_bytes": 0 if self._settings.save_timeout_seconds is None else WRITE_TEST_BYTES,
                    "beats": self._process.heartbeats,
                }
            )
            answer = self._answer(self._checkpoint, directory)
            self.checkpoint_report = parse_dataclass(CheckpointReport, {"directory": directory, **answer})

    def report(self) -> NodeReport:
        process, settings, timer = self._process, self._settings, self._timer
        report = NodeReport(
            node=process.node, ranks=process.ranks, settings=settings, checkpoint=self.checkpoint_report
        )
        with timer.part("surroundings"):
            report = replace(
                report,
                versions=library_versions(),
                environment=communication_environment(),
                code_sha256=code_sha256(),
            )
        with timer.part("shards"):
            report = replace(report, shards=self._shard_reports())
        if self._model:
            with timer.part("model"):
                paths = " or ".join(path for path in (process.model, process.resume, process.config) if path)
                report = replace(report, model=parse_dataclass(ModelReport, self._answer(self._model, paths)))
        with timer.part("devices"):
            report = replace(report, devices=self._devices.report(self._deadline()))
        return replace(report, troubles=tuple(timer.troubles), seconds=dict(timer.seconds), wall=time.time())

    def _shard_reports(self) -> tuple[ShardReport, ...]:
        """The probe answers rank by rank, so that the first rank without an answer is the one whose path hangs."""
        # One deadline for all ranks of the node: with one per rank, a dead mount would take eight times as long.
        until, reports, hung = self._deadline(), [], False
        for rank in self._process.ranks:
            path = token_file(self._process.data, rank)
            line = None if hung else self._shards.line(until)
            if line is None:
                trouble = (
                    f"not inspected, because {self._process.data} does not respond"
                    if hung
                    else self._no_answer(self._shards)
                )
                reports.append(ShardReport(rank, path, trouble=trouble))
                hung = True
            else:
                reports.append(parse_shard_report(path, json.loads(line)))
        return tuple(reports)

    def _answer(self, child: ChildProcess, paths: str) -> dict[str, Any]:
        line = child.line(self._deadline())
        if line is None:
            return {"trouble": f"{paths}: {self._no_answer(child)}"}
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def _no_answer(self, child: ChildProcess) -> str:
        if child.ended:
            return "the probe process exited without an answer"
        return f"no answer in {self._process.path_seconds:g} s"

    def publish(self, path: str, record: dict[str, Any]) -> str | None:
        """Writes `path` through the checkpoint probe, since that file system may hang too; the reason if it failed."""
        if self._checkpoint is None:
            return "the checkpoint directory was not inspected"
        request = {"path": path, "text": json.dumps(record, indent=1) + "\n"}
        self._checkpoint.send(request, self._deadline())
        answer = self._answer(self._checkpoint, path)
        self._checkpoint.close(wait_seconds=CLOSE_SECONDS)
        trouble = answer.get("trouble")
        return None if trouble is None else str(trouble)


def parse_shard_report(path: str, answer: dict[str, Any]) -> ShardReport:
    """A probe's answer, with its manifest parsed, or with the reason why it cannot be."""
    text = answer.pop("manifest_text", None)
    report = parse_dataclass(ShardReport, {"path": path, **answer})
    if text is None:
        return report
    try:
        return replace(report, manifest=read_manifest(text))
    except InvalidDataError as error:
        return replace(report, trouble=report.trouble or f"its manifest is invalid: {error}")


def node_name(given: str | None) -> str:
    return given or socket.gethostname()


# What must be the same on all nodes besides the data: library versions, our code, and the communication settings.


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that ranks must share, from package metadata: importing takes seconds."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def communication_environment() -> dict[str, str]:
    """Variables that NCCL, gloo and torch read: ranks that differ in them may choose different algorithms and hang."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT_PREFIXES)}


def code_sha256() -> str:
    """Hash of this package's source files: versions alone do not show a node that was patched by hand."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
