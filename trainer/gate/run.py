"""The gate on one node, in its order: look at everything at once, meet the others, judge, record.

Whatever fails here is put into the report and still reaches the gather: a process that died before it would leave all
others waiting.
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
    GateSettings,
    GateVerdict,
    ModelReport,
    NodeReport,
    ShardReport,
)
from wattwatch.trainer.pack.manifest import blocks_sha256, manifest_file, read_manifest, starts_file, token_file
from wattwatch.trainer.run_directory import exclude_dead

GATE_SCHEMA_VERSION: Final = 1
WRITE_TEST_BYTES: Final = 4 * 1024 * 1024  # written to measure, where there is a timeout to compare with
LOCAL_RANK_VARIABLES: Final = ("LOCAL_RANK", "SLURM_LOCALID")


@dataclass(frozen=True, slots=True)
class GateProcess:
    """What this process speaks for, and where its things lie."""

    node: str
    ranks: tuple[int, ...]
    data: str  # directory of the packed blocks, the node's own
    run: str  # the run directory, shared
    model: str | None
    resume: str | None
    config: str | None
    path_seconds: float  # the longest that a path or the driver may keep silent

    @property
    def checkpoints(self) -> str:
        return f"{self.run}/checkpoints"

    @property
    def heartbeats(self) -> str:
        """To be read by one process a node: there is a file for each rank of the world. "" for the others."""
        place = next((os.environ[name] for name in LOCAL_RANK_VARIABLES if os.environ.get(name)), "0")
        return f"{self.run}/heartbeat" if place == "0" else ""


@dataclass(frozen=True, slots=True)
class GateResult:
    """How it went. `record` is gate.json."""

    verdict: GateVerdict
    reports: tuple[NodeReport, ...]
    record: dict[str, Any]
    unrecorded: str | None  # why rank 0 did not write gate.json


@dataclass(slots=True)
class _PartTimer:
    """Times and troubles of the parts, since this process began its work."""

    begun: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
            self.troubles.append(f"{name}: {type(error).__name__}: {error}")
        self.seconds[name] = round(time.monotonic() - self.begun, 4)


def run_gate(
    settings: GateSettings, here: GateProcess, rendezvous: Rendezvous | None, wait_seconds: float
) -> GateResult:
    """All six checks over all ranks; without a rendezvous this process must speak for all of them.

    Raises Refusal where rank 0 cannot listen.
    """
    with contextlib.ExitStack() as stack:
        parts = _PartTimer()
        until = parts.begun + wait_seconds
        is_host = 0 in here.ranks
        listener = stack.enter_context(open_gather_listener(rendezvous)) if rendezvous and is_host else None
        looks = _NodeProbes(here, settings, parts, stack)
        mark = (f".gate-{secrets.token_hex(8)}", secrets.token_hex(16))
        note, member = "", None
        welcome: dict[str, Any] = {"gate_id": secrets.token_hex(6), "mark": None}
        if is_host:
            looks.checkpoint(create=True, write=mark, expect=None)
            if looks.checkpoint_look and not looks.checkpoint_look.trouble:
                welcome["mark"] = list(mark)
        elif rendezvous:
            try:
                member = stack.enter_context(contextlib.closing(GatherMember(rendezvous, until)))
                welcome = member.welcome()
            except GatherError as trouble:
                note, member = str(trouble), None
            parts.seconds["rendezvous"] = round(time.monotonic() - parts.begun, 4)
            looks.checkpoint(create=False, write=mark, expect=_parse_mark(welcome.get("mark")))
        report = looks.report()
        reports = [report]
        if listener and rendezvous:
            reports = gather_reports(listener, rendezvous, welcome, report, until)
            note = f"waited {time.monotonic() - parts.begun:.0f} s"
        elif member:
            try:
                reports = member.exchange(report)
            except GatherError as trouble:
                note = str(trouble)
        parts.seconds["gather"] = round(time.monotonic() - parts.begun, 4)
        verdict = run_checks(reports, note)
        reports[0] = replace(reports[0], seconds=dict(parts.seconds)) if is_host else reports[0]
        record = build_gate_record(str(welcome.get("gate_id", "")), verdict, reports)
        unrecorded = None
        if is_host and has_live_ranks(reports):
            unrecorded = "the one that is there is the living job's"
        elif is_host:
            unrecorded = looks.publish(f"{here.run}/gate.json", record)
        return GateResult(verdict, tuple(reports), record, unrecorded)


def has_live_ranks(reports: list[NodeReport]) -> bool:
    """Has any node found ranks in this run directory, of which their own node does not say that they are gone?"""
    return bool(exclude_dead([beat for report in reports if report.checkpoint for beat in report.checkpoint.beats]))


def build_gate_record(gate_id: str, verdict: GateVerdict, reports: list[NodeReport]) -> dict[str, Any]:
    """gate.json: what was looked at, what was said of it, when, and hashes by which a trainer knows its own gate."""
    settings, even = reports[0].settings, verdict.evenness
    manifests = {s.rank: s.manifest.sha256 for r in reports for s in r.shards if s.manifest is not None}
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
        "global_min_blocks": even.global_min_blocks if even else None,
        "spread": even.spread if even else None,
        "steps": even.steps if even else None,
        "lost_share": even.lost_share if even else None,
        "blocks": even.blocks if even else None,
        "checks": [{"name": check.name, "level": check.level, **_check_fields(check)} for check in verdict.checks],
        "settings": asdict(settings),
        "reports": [asdict(report) for report in reports],
    }


def _check_fields(check: Any) -> dict[str, Any]:
    return {"summary": check.summary, "problems": [asdict(problem) for problem in check.problems]}


def _parse_mark(mark: object) -> tuple[str, str] | None:
    """The mark that rank 0 says it has left: a plain file name and its content."""
    match mark:
        case [str(name), str(content)] if name.startswith(".gate-") and "/" not in name:
            return name, content
    return None


class _NodeProbes:
    """The children at work on this node, and what they have answered by the deadline."""

    def __init__(
        self, here: GateProcess, settings: GateSettings, parts: _PartTimer, stack: contextlib.ExitStack
    ) -> None:
        self._here, self._settings, self._parts, self._stack = here, settings, parts, stack
        self._checkpoint: ChildProcess | None = None
        self.checkpoint_look: CheckpointReport | None = None
        files = [
            (rank, token_file(here.data, rank), manifest_file(here.data, rank), starts_file(here.data, rank))
            for rank in here.ranks
        ]
        self._shards = self._start({"kind": "shards", "directory": here.data, "files": files})
        self._model = None
        if here.model or here.resume or here.config:
            paths = {"model": here.model, "resume": here.resume, "config": here.config}
            self._model = self._start({"kind": "model", "weights": not settings.random_weights, **paths})
        self._devices = stack.enter_context(contextlib.closing(NvidiaSmiProbe()))

    def _start(self, request: dict[str, Any]) -> ChildProcess:
        return self._stack.enter_context(contextlib.closing(start_path_probe(request)))

    def _deadline(self) -> float:
        return time.monotonic() + self._here.path_seconds

    def checkpoint(self, create: bool, write: tuple[str, str], expect: tuple[str, str] | None) -> None:
        """Rank 0's child stays, with its mark in the directory, until all have looked."""
        with self._parts.part("checkpoint"):
            directory = self._here.checkpoints
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
                    "beats": self._here.heartbeats,
                }
            )
            answer = self._answer(self._checkpoint, directory)
            self.checkpoint_look = parse_dataclass(CheckpointReport, {"directory": directory, **answer})

    def report(self) -> NodeReport:
        here, settings, parts = self._here, self._settings, self._parts
        report = NodeReport(node=here.node, ranks=here.ranks, settings=settings, checkpoint=self.checkpoint_look)
        with parts.part("surroundings"):
            report = replace(
                report, versions=library_versions(), environment=communication_environment(), code_sha256=code_sha256()
            )
        with parts.part("shards"):
            report = replace(report, shards=self._shard_looks())
        if self._model:
            with parts.part("model"):
                named = " or ".join(path for path in (here.model, here.resume, here.config) if path)
                report = replace(report, model=parse_dataclass(ModelReport, self._answer(self._model, named)))
        with parts.part("devices"):
            report = replace(report, devices=self._devices.look(self._deadline()))
        return replace(report, troubles=tuple(parts.troubles), seconds=dict(parts.seconds), wall=time.time())

    def _shard_looks(self) -> tuple[ShardReport, ...]:
        until, looks, hung = self._deadline(), [], False
        for rank in self._here.ranks:
            path = token_file(self._here.data, rank)
            line = None if hung else self._shards.line(until)
            if line is None:
                trouble = f"not looked at: {self._here.data} hangs" if hung else self._silence(self._shards)
                looks.append(ShardReport(rank, path, trouble=trouble))
                hung = True
            else:
                looks.append(parse_shard_report(path, json.loads(line)))
        return tuple(looks)

    def _answer(self, child: ChildProcess, named: str) -> dict[str, Any]:
        line = child.line(self._deadline())
        if line is None:
            return {"trouble": f"{named}: {self._silence(child)}"}
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def _silence(self, child: ChildProcess) -> str:
        return "the probe ended without an answer" if child.ended else f"no answer in {self._here.path_seconds:g} s"

    def publish(self, path: str, record: dict[str, Any]) -> str | None:
        """Has the checkpoint's child write `path`; why it could not, or None."""
        if self._checkpoint is None:
            return "the checkpoint directory was not looked at"
        order = {"path": path, "text": json.dumps(record, indent=1) + "\n"}
        self._checkpoint.send(order, self._deadline())
        answer = self._answer(self._checkpoint, path)
        self._checkpoint.close(patience_seconds=1.0)
        trouble = answer.get("trouble")
        return None if trouble is None else str(trouble)


def parse_shard_report(path: str, answer: dict[str, Any]) -> ShardReport:
    """A probe's answer, with the manifest decoded or the reason why it cannot be."""
    text = answer.pop("manifest_text", None)
    look = parse_dataclass(ShardReport, {"path": path, **answer})
    if text is None:
        return look
    try:
        return replace(look, manifest=read_manifest(text))
    except InvalidDataError as error:
        return replace(look, trouble=look.trouble or f"its manifest is not one: {error}")


def node_name(given: str | None) -> str:
    return given or socket.gethostname()


# What must be the same on every node without being data: versions, code, and the environment that NCCL reads.

LIBRARIES: Final = ("torch", "transformers", "datasets", "tokenizers", "numpy", "safetensors", "wattwatch")
ENVIRONMENT_PREFIXES: Final = ("NCCL_", "TORCH_", "GLOO_")


def library_versions() -> dict[str, str]:
    """Of Python and of the libraries that ranks must share, from their metadata: nothing is imported."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def communication_environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT_PREFIXES)}


def code_sha256() -> str:
    """Of this package's own files."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
