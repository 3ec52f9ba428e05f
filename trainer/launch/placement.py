"""Where a job runs: its nodes, how each is reached, the command lines and the environment there. Pure.

Inputs are JOB.toml and Slurm's environment variables.
"""

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
COMMAND_MODULE: Final = "wattwatch.trainer.cli"
LOOPBACK: Final = "127.0.0.1"
# A node that stops responding is noticed after a minute (15 s, four times). No connection sharing: a shared connection
# outlives our ssh process, and then the node program's standard input would never end.
SSH_OPTIONS: Final = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
    *("-o", "ControlMaster=no", "-o", "ControlPath=none"),
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Nodes in rank order, and the address at which the others reach the first."""

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
        """Ports that the first node listens on: torch's store, and the gate's gather if there is more than one node."""
        return (self.port, self.port + 1) if len(self.nodes) > 1 else (self.port,)

    def node_of(self, rank: int) -> str:
        return self.nodes[rank // self.ranks_per_node]

    def ranks(self, index: int) -> range:
        """Ranks of the node with this index."""
        return range(index * self.ranks_per_node, (index + 1) * self.ranks_per_node)


@dataclass(frozen=True, slots=True)
class NodeTransport:
    """A local process that starts the node program on one node, or on several."""

    command: tuple[str, ...]
    indices: tuple[int, ...]  # of the nodes
    spread: bool  # srun copies standard input to all of its nodes, so each has to find its own index


def resolve_placement(launch: LaunchSettings, environment: Mapping[str, str]) -> Placement:
    """`environment` is the launcher's. Raises UserError for node names that are invalid or do not fit launch.via."""
    via = LaunchMethod(launch.via)
    nodes = expand_node_list(launch.nodes)
    if via is LaunchMethod.SRUN:
        allocated = environment.get("SLURM_JOB_NODELIST")
        if not allocated:
            raise UserError(
                'launch.via is "srun", but this command is not running in a Slurm allocation: start it with '
                "sbatch or salloc"
            )
        if launch.nodes == LaunchSettings().nodes:
            nodes = expand_node_list(allocated)
        elif outside := sorted(set(nodes) - set(expand_node_list(allocated))):
            raise UserError(f"launch.nodes has nodes outside this Slurm allocation ({allocated}): {', '.join(outside)}")
    if via is LaunchMethod.LOCAL and len(nodes) > 1:
        raise UserError(
            f'launch.nodes lists {len(nodes)} nodes, but launch.via is "local": set launch.via to "ssh" or "srun"'
        )
    # A single host must work without name resolution, and without its name leading to another interface.
    address = launch.address or (LOOPBACK if via is LaunchMethod.LOCAL else nodes[0])
    return Placement(via, nodes, launch.ranks_per_node, address, launch.port)


def expand_node_list(text: str) -> tuple[str, ...]:
    """`gpu-[01-16],old-3`: node names, in the order in which they are written. Raises UserError."""
    try:
        nodes = list(
            # dict.fromkeys removes duplicates and keeps the order.
            dict.fromkeys(name for part in split_names(text) for name in NodeSet(part, resolver=RESOLVER_NOGROUP))
        )
    except NodeSetException as error:
        raise UserError(f"launch.nodes: {text!r}: {error}") from None
    if not nodes:
        raise UserError("launch.nodes: empty")
    # A name becomes an argument of ssh: one that starts with "-" would be read as an option.
    if bad := [name for name in nodes if name.startswith("-") or "/" in name or any(c.isspace() for c in name)]:
        raise UserError(f"launch.nodes: {bad[0]!r} is not a valid node name")
    return tuple(nodes)


def split_names(text: str) -> list[str]:
    """Splits at commas outside brackets. A NodeSet of the whole text would sort the names, and rank 0's node is the
    first one written."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [part.strip() for part in (*parts, text[start:])]


def python_module(launch: LaunchSettings, module: str) -> tuple[str, ...]:
    """`python -P -m MODULE` with the nodes' interpreter.

    -P keeps the working directory out of sys.path: a `wattwatch.py` there must not replace our package.
    """
    return (launch.python or sys.executable, "-P", "-m", module)


def node_connections(placement: Placement, launch: LaunchSettings) -> tuple[NodeTransport, ...]:
    """How to start the node program: once, once per node over SSH, or once for all nodes with srun."""
    program = python_module(launch, NODE_MODULE)
    if placement.via is LaunchMethod.LOCAL:
        return (NodeTransport(program, (0,), False),)
    if placement.via is LaunchMethod.SSH:
        # exec: sshd's signals then reach the node program, not a shell around it.
        command = f"exec {shlex.join(program)}"
        return tuple(
            NodeTransport(("ssh", *SSH_OPTIONS, *launch.ssh_options, node, command), (index,), False)
            for index, node in enumerate(placement.nodes)
        )
    count = len(placement.nodes)
    step = (
        "srun",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(placement.nodes)}",
    )
    # --overlap: the batch script's own step holds the node's resources, and this one would wait for them.
    # --cpu-bind=none: a task would otherwise be bound to one core, and with it all ranks of the node.
    # --input=all: standard input is copied to every node.
    options = ("--kill-on-bad-exit=1", "--input=all", "--overlap", "--cpu-bind=none", "--job-name=wattwatch-train")
    return (NodeTransport((*step, *options, *program), tuple(range(count)), True),)


def gate_commands(placement: Placement, job: JobFile, run: str, resume: str | None) -> tuple[tuple[str, ...], ...]:
    """`wattwatch-train gate` for each node: one process for all ranks of the node.

    They meet one port above torch's. `run` is the job's run directory, or that of a smoke test below it.
    """
    launch = job.settings.launch
    common = [
        *("--job", job.path, "--run", run, "--rendezvous", format_address(placement.address, placement.port + 1)),
        *(("--resume", resume) if resume else ()),
    ]
    commands = []
    for index, node in enumerate(placement.nodes):
        ranks = placement.ranks(index)
        own = ("--ranks", f"{ranks[0]}-{ranks[-1]}", "--node", node)
        commands.append((*python_module(launch, COMMAND_MODULE), "gate", *common, *own))
    return tuple(commands)


def rank_commands(
    placement: Placement,
    launch: LaunchSettings,
    run_id: str,
    program: tuple[str, ...],
    torchrun: str = TORCHRUN_MODULE,
) -> tuple[tuple[str, ...], ...]:
    """torchrun for each node. `program` is the command line that it starts for each rank."""
    head = (*python_module(launch, torchrun), f"--nnodes={len(placement.nodes)}")
    common = (
        f"--nproc-per-node={placement.ranks_per_node}",
        # Restarts are the launcher's: one by torchrun itself would not pass the gate again.
        "--max-restarts=0",
        # The launcher knows all nodes and their order, so no rendezvous service has to find out.
        "--rdzv-backend=static",
        f"--rdzv-id={run_id}",
        *(f"--master-addr={placement.address}", f"--master-port={placement.port}", "--no-python"),
    )
    return tuple((*head, f"--node-rank={index}", *common, *program) for index in range(len(placement.nodes)))


def rank_program(job: JobFile, resume: str | None, smoke: str | None) -> tuple[str, ...]:
    """The command line of one rank."""
    options = (*(("--resume", resume) if resume else ()), *(("--smoke", smoke) if smoke else ()))
    return (*python_module(job.settings.launch, COMMAND_MODULE), "run", job.path, *options)


def format_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# The environment of ranks and gate: the table environment.toml, overridden by the job's [launch.environment].

TorchVersion = tuple[int, ...]  # (major, minor)


@dataclass(frozen=True, slots=True)
class VariableAlias:
    """A variable's name in the torch releases from `since` up to, but not including, `until`; "" is no bound."""

    name: str
    since: str = ""
    until: str = ""

    def known(self, torch: TorchVersion | None) -> bool:
        """Whether that torch release reads the name. None, an unknown release, counts as yes."""
        if torch is None:
            return True
        is_too_old = bool(self.since) and torch < parse_torch_version(self.since)
        return not is_too_old and (not self.until or torch < parse_torch_version(self.until))


@dataclass(frozen=True, slots=True)
class EnvironmentVariable:
    """A row of environment.toml: one variable under all names that torch releases have given it."""

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
    """The release on this host; the gate checks that the nodes have the same. None if torch is not installed here."""
    try:
        return parse_torch_version(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return None


def rank_environment(owner: Mapping[str, str], flight: str, torch: TorchVersion | None) -> dict[str, str]:
    """Variables for gate and ranks. `owner` is [launch.environment]; `flight` the path prefix of flight recorder dumps.

    A variable that the owner sets under any of its names gets the owner's value under all of them: torch reads the new
    name first, so our default under the new name would otherwise override the owner's value under the old one.
    """
    found: dict[str, str] = {}
    for row in environment_variables():
        given = next((owner[one.name] for one in row.names if one.name in owner), row.value.replace("{flight}", flight))
        found |= {one.name: given for one in row.names if one.known(torch)}
    return found | dict(owner)
