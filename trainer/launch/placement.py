"""The nodes of a job, how each is reached, and what is run there: pure, from settings and Slurm's variables."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from wattwatch.trainer.dataclass_json import parse_dataclass
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.settings import JobFile, LaunchMethod, LaunchSettings

NODE_MODULE: Final = "wattwatch.trainer.launch.node"
TORCHRUN_MODULE: Final = "wattwatch.trainer.launch.torchrun"
LOOPBACK: Final = "127.0.0.1"
# A node that has gone silently is noticed after a minute; a shared connection would outlive ours, and the job with it.
SSH_OPTIONS: Final = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
    *("-o", "ControlMaster=no", "-o", "ControlPath=none"),
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Nodes in rank order, and where the first is reached by the others."""

    via: LaunchMethod
    nodes: tuple[str, ...]
    ranks_per_node: int
    address: str
    port: int

    @property
    def world(self) -> int:
        return len(self.nodes) * self.ranks_per_node

    @property
    def ports(self) -> tuple[int, ...]:
        """Where the first node listens: torch's, and the gate's where nodes meet."""
        return (self.port, self.port + 1) if len(self.nodes) > 1 else (self.port,)

    def node_of(self, rank: int) -> str:
        return self.nodes[rank // self.ranks_per_node]

    def ranks(self, index: int) -> range:
        return range(index * self.ranks_per_node, (index + 1) * self.ranks_per_node)


@dataclass(frozen=True, slots=True)
class NodeTransport:
    """A process that reaches `indices` of the nodes."""

    command: tuple[str, ...]
    indices: tuple[int, ...]
    spread: bool  # one order for all of them, each finds itself


def resolve_placement(launch: LaunchSettings, environment: Mapping[str, str]) -> Placement:
    """Raises Refusal where the nodes' names are none, or do not fit how they are reached."""
    via = LaunchMethod(launch.via)
    nodes = expand_node_list(launch.nodes)
    if via is LaunchMethod.SRUN:
        allocated = environment.get("SLURM_JOB_NODELIST")
        if not allocated:
            raise UserError('launch.via is "srun", and this is no Slurm allocation: start it with sbatch or salloc')
        if launch.nodes == LaunchSettings().nodes:
            nodes = expand_node_list(allocated)
        elif outside := sorted(set(nodes) - set(expand_node_list(allocated))):
            raise UserError(f"launch.nodes: {', '.join(outside)} not in this allocation, {allocated}")
    if via is LaunchMethod.LOCAL and len(nodes) > 1:
        raise UserError(f'launch.nodes names {len(nodes)} nodes and launch.via is "local": set it to "ssh" or "srun"')
    address = launch.address or (LOOPBACK if via is LaunchMethod.LOCAL else nodes[0])
    return Placement(via, nodes, launch.ranks_per_node, address, launch.port)


def expand_node_list(text: str) -> tuple[str, ...]:
    """`gpu-[01-16],old-3`: names in the order written. Raises Refusal."""
    try:
        nodes = list(
            dict.fromkeys(name for part in split_names(text) for name in NodeSet(part, resolver=RESOLVER_NOGROUP))
        )
    except NodeSetException as error:
        raise UserError(f"launch.nodes: {text!r}: {error}") from None
    if not nodes:
        raise UserError("launch.nodes: empty")
    if bad := [name for name in nodes if name.startswith("-") or "/" in name or any(c.isspace() for c in name)]:
        raise UserError(f"launch.nodes: {bad[0]!r} is no name of a node")
    return tuple(nodes)


def split_names(text: str) -> list[str]:
    """At commas outside brackets: a NodeSet of all would sort them, and rank 0's node is the first written."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in (*parts, text[start:])]


def node_connections(here: Placement, launch: LaunchSettings) -> tuple[NodeTransport, ...]:
    program = (launch.python or sys.executable, "-m", NODE_MODULE)
    if here.via is LaunchMethod.LOCAL:
        return (NodeTransport(program, (0,), False),)
    if here.via is LaunchMethod.SSH:
        return tuple(
            NodeTransport(
                ("ssh", *SSH_OPTIONS, *launch.ssh_options, node, f"exec {shlex.join(program)}"), (index,), False
            )
            for index, node in enumerate(here.nodes)
        )
    count = len(here.nodes)
    step = (
        "srun",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(here.nodes)}",
    )
    # --overlap: the batch script holds the node's resources; --cpu-bind=none: a task's cores are all of its node's.
    options = ("--kill-on-bad-exit=1", "--input=all", "--overlap", "--cpu-bind=none", "--job-name=wattwatch-train")
    return (NodeTransport((*step, *options, *program), tuple(range(count)), True),)


def gate_commands(here: Placement, job: JobFile, run: str, resume: str | None) -> tuple[tuple[str, ...], ...]:
    """`wattwatch-train gate` for each node: one process for all its ranks, met one port above torch's. `run` is the
    job's own, or a smoke test's below it."""
    launch = job.settings.launch
    common = [
        *("--job", job.path, "--run", run, "--rendezvous", format_address(here.address, here.port + 1)),
        *(("--resume", resume) if resume else ()),
    ]
    commands = []
    for index, node in enumerate(here.nodes):
        ranks = here.ranks(index)
        own = ("--ranks", f"{ranks[0]}-{ranks[-1]}", "--node", node)
        commands.append((launch.python or sys.executable, "-m", "wattwatch.trainer.cli", "gate", *common, *own))
    return tuple(commands)


def rank_commands(
    here: Placement, launch: LaunchSettings, run_id: str, program: tuple[str, ...], torchrun: str = TORCHRUN_MODULE
) -> tuple[tuple[str, ...], ...]:
    """torchrun for each node. `program` is what it starts for each rank, as it would be typed."""
    head = (launch.python or sys.executable, "-m", torchrun, f"--nnodes={len(here.nodes)}")
    # Restarts are ours: a restart by torchrun passes no gate.
    common = (
        *(
            f"--nproc-per-node={here.ranks_per_node}",
            "--max-restarts=0",
            "--rdzv-backend=static",
            f"--rdzv-id={run_id}",
        ),
        *(f"--master-addr={here.address}", f"--master-port={here.port}", "--no-python"),
    )
    return tuple((*head, f"--node-rank={index}", *common, *program) for index in range(len(here.nodes)))


def rank_program(job: JobFile, resume: str | None, smoke: str | None) -> tuple[str, ...]:
    python = job.settings.launch.python or sys.executable
    options = (*(("--resume", resume) if resume else ()), *(("--smoke", smoke) if smoke else ()))
    return (python, "-m", "wattwatch.trainer.cli", "run", job.path, *options)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# The environment of ranks and gate: what the table says, and above it what the job's owner says.

TorchVersion = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VariableAlias:
    """Of a variable, in the torch releases from `since` to before `until`; "" is no bound."""

    name: str
    since: str = ""
    until: str = ""

    def known(self, torch: TorchVersion | None) -> bool:
        if torch is None:
            return True
        return (not self.since or parse_torch_version(self.since) <= torch) and (
            not self.until or torch < parse_torch_version(self.until)
        )


@dataclass(frozen=True, slots=True)
class EnvironmentVariable:
    """A row of environment.toml. All names mean the same to a torch that knows them."""

    names: tuple[VariableAlias, ...]
    value: str
    why: str
    source: str


@cache
def environment_variables() -> tuple[EnvironmentVariable, ...]:
    text = resources.files("wattwatch.trainer.launch").joinpath("environment.toml").read_text()
    return tuple(parse_dataclass(EnvironmentVariable, row) for row in tomllib.loads(text)["variable"])


def parse_torch_version(text: str) -> TorchVersion:
    """`2.13.0+cpu` and `2.13.0a0` are (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def installed_torch_version() -> TorchVersion | None:
    """Here, which the gate compares with the nodes'; None: this host has none, and the nodes' is not known."""
    try:
        return parse_torch_version(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return None


def rank_environment(owner: Mapping[str, str], flight: str, torch: TorchVersion | None) -> dict[str, str]:
    """`owner` is [launch.environment]; `flight` the prefix of flight-recorder dumps.

    torch reads the new name first: had we set that one, the owner's old one would mean nothing. So a name that the
    owner sets rules its row.
    """
    found: dict[str, str] = {}
    for row in environment_variables():
        given = next((owner[one.name] for one in row.names if one.name in owner), row.value.replace("{flight}", flight))
        found |= {one.name: given for one in row.names if one.known(torch)}
    return found | dict(owner)
