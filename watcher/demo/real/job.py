"""The real job of the demo, as its owner would run it on two nodes: inputs, pack, gate, torchrun.

The trainer runs in processes of its own; nothing of it is imported. The programs of a node start with that node's host
name (SimulatedNode.environment); everything else about them is this machine's.

The inputs are made on the spot. One word is one token, so that the number of blocks of each rank can be chosen: one
rank has shorter records, as rank 3 had in the paper (arXiv 2608.05944, section 5: 53 blocks, or 7 steps of 8 blocks).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any, Final

from wattwatch.collectors.simulated.cluster import SimulatedNode, describe_busy_machine
from wattwatch.watcher.demo.runner import DemoError

SEQUENCE_LENGTH: Final = 64
VOCABULARY_SIZE: Final = 500
MEAN_RECORD_WORDS: Final = 64
SHORT_RANK: Final = 3
EOS: Final = "<eos>"
RANKS_PER_NODE: Final = 2


@dataclass(frozen=True, slots=True)
class JobSize:
    """The size of the job. The number of steps is chosen so that it trains for 10 to 25 s before it deadlocks."""

    nodes: int = 2
    ranks_per_node: int = RANKS_PER_NODE
    short_steps: int = 20  # of the rank that runs out of data first
    spread_steps: int = 7  # how many more the others have

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def cores(self) -> int:
        """Cores that all ranks share, so that steps take about as long on a large machine as on a small one."""
        return self.nodes * max(1, self.ranks_per_node // 4)

    @property
    def accumulation(self) -> int:
        """Blocks per step and rank. All ranks share this machine: the more there are, the less each of them does."""
        return max(1, 32 // self.world)


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The files of the job, laid out as a user would."""

    directory: Path

    @property
    def corpus(self) -> Path:
        return self.directory / "corpus.jsonl"

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def blocks(self) -> Path:
        return self.directory / "blocks"

    @property
    def current(self) -> Path:
        """A link to the run directory of the latest start; the watcher is configured with this path."""
        return self.directory / "current"

    def run(self, evenness: str) -> Path:
        """Each start has its own run directory: the gate rejects one with recent heartbeats."""
        return self.directory / f"run-{evenness}"

    @property
    def job(self) -> Path:
        return self.directory / "job.toml"


def write_inputs(files: JobFiles, shape: JobSize) -> None:
    """Writes corpus, tokenizer and model."""
    write_corpus(files.corpus, shape)
    files.model.mkdir()
    write_tokenizer(files.model)
    write_model(files.model)


def write_corpus(path: Path, shape: JobSize) -> None:
    """Writes records of random length, in the order of ranks; those of SHORT_RANK are shorter."""
    dice = random.Random(53)
    blocks = (shape.short_steps + shape.spread_steps) * shape.accumulation + shape.accumulation // 2
    rows = blocks * SEQUENCE_LENGTH // (MEAN_RECORD_WORDS + 1)
    short = MEAN_RECORD_WORDS * shape.short_steps / (shape.short_steps + shape.spread_steps)
    with path.open("w", encoding="utf-8") as file:
        for rank in range(shape.world):
            mean = short if rank == SHORT_RANK else MEAN_RECORD_WORDS
            for _ in range(rows):
                count = round(mean * dice.uniform(0.6, 1.4))
                text = " ".join(f"w{dice.randrange(VOCABULARY_SIZE)}" for _ in range(count))
                file.write(json.dumps({"text": text}) + "\n")


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer that splits at spaces, one id per word, in the format of the tokenizers library."""
    vocabulary = {EOS: 0} | {f"w{number}": number + 1 for number in range(VOCABULARY_SIZE)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 0,
                "content": EOS,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": EOS},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def write_model(directory: Path) -> None:
    """Writes the configuration of a Qwen3 with the same parts as the paper's 32 B, but tiny."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config), "utf-8")


def write_job(files: JobFiles, shape: JobSize, name: str, evenness: str) -> Path:
    """Writes job.toml and creates its run directory, which is returned. TOML strings are written as JSON."""
    run = files.run(evenness)
    run.mkdir()
    text = f"""\
name = {json.dumps(name)}
run = {json.dumps(str(run))}
data = {json.dumps(str(files.blocks))}
model = {json.dumps(str(files.model))}

[train]
evenness = {json.dumps(evenness)}
micro_batch = 1
accumulation = {shape.accumulation}
random_weights = true
precision = "fp32"
learning_rate = 1e-3
warmup_steps = 5
step_timeout_seconds = 600.0

[checkpoint]
save_every = 500
"""
    files.job.write_text(text, "utf-8")
    return run


def block_counts(files: JobFiles, shape: JobSize) -> tuple[int, ...]:
    """The packed blocks of each rank. Raises OSError, ValueError or KeyError if a manifest is missing or broken."""
    manifests = [files.blocks / f"rank-{rank:05d}.json" for rank in range(shape.world)]
    return tuple(int(json.loads(path.read_text("utf-8"))["blocks"]) for path in manifests)


# The programs

REQUIRED_PACKAGES: Final = ("torch", "transformers", "datasets", "tokenizers", "safetensors")
PACK_SECONDS: Final = 600.0
GATE_SECONDS: Final = 300.0
END_SECONDS: Final = 30.0
LOOPBACK: Final = "127.0.0.1"
MAX_LINES_SHOWN: Final = 5  # of a program that failed


def missing_packages() -> tuple[str, ...]:
    """Packages of the extra [trainer] that are not installed. Imports none of them."""
    return tuple(name for name in REQUIRED_PACKAGES if util.find_spec(name) is None)


@dataclass(frozen=True, slots=True)
class GateOutput:
    """What the gate printed and recorded."""

    lines: tuple[str, ...]
    level: str
    spread: int | None
    shortest_blocks: int | None
    gate_id: str


@dataclass(frozen=True, slots=True)
class DemoHeartbeat:
    """The parts of a rank's heartbeat that the demo needs."""

    rank: int
    phase: str
    step: int


class RealJob:
    """One job, started once or more, each time in a new run directory. Leaving it as a context manager ends it."""

    def __init__(self, name: str, shape: JobSize, files: JobFiles, nodes: Sequence[SimulatedNode]) -> None:
        self.name = name
        self.shape = shape
        self.files = files
        self._nodes = tuple(nodes)
        self._run = files.current  # the run directory of the latest start
        self._launchers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> RealJob:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def prepare(self) -> tuple[int, ...]:
        """Writes the inputs and packs them; returns the block count of each rank. Raises DemoError."""
        write_inputs(self.files, self.shape)
        arguments = ["pack", str(self.files.corpus), "-o", str(self.files.blocks)]
        arguments += ["--tokenizer", str(self.files.model), "--world", str(self.shape.world)]
        arguments += ["--seq-len", str(SEQUENCE_LENGTH), "--workers", "1"]
        try:
            packed = subprocess.run(
                [*trainer_command(), *arguments], capture_output=True, text=True, timeout=PACK_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise DemoError(
                f"wattwatch-train pack did not finish within {PACK_SECONDS:.0f} s.{blame_machine()}"
            ) from None
        if packed.returncode:
            raise DemoError(f"wattwatch-train pack failed: {last_lines(packed.stderr or packed.stdout)}")
        try:
            return block_counts(self.files, self.shape)
        except (OSError, ValueError, KeyError) as error:
            raise DemoError(f"wattwatch-train pack left no valid manifest: {error}") from None

    def pass_gate(self, evenness: str) -> GateOutput:
        """Writes job.toml and runs the gate on both nodes at once. Raises DemoError if the gate rejects the job."""
        self._run = write_job(self.files, self.shape, self.name, evenness)
        arguments = ["gate", "--run", str(self._run), "--data", str(self.files.blocks)]
        arguments += ["--world", str(self.shape.world), "--accumulation", str(self.shape.accumulation)]
        arguments += ["--model", str(self.files.model), "--config", str(self.files.job)]
        arguments += ["--rendezvous", f"{LOOPBACK}:{free_port()}"]
        gates = [
            subprocess.Popen(
                [*trainer_command(), *arguments, "--ranks", self._ranks(place)],
                env={**os.environ, **FLIGHT_RECORDER_ENVIRONMENT, **node.environment(with_gpus=True)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for place, node in enumerate(self._nodes)
        ]
        try:
            outputs = [gate.communicate(timeout=GATE_SECONDS) for gate in gates]
        except subprocess.TimeoutExpired:
            raise DemoError(
                f"wattwatch-train gate did not finish within {GATE_SECONDS:.0f} s.{blame_machine()}"
            ) from None
        finally:
            for gate in gates:
                gate.kill()
                gate.communicate()
        if any(gate.returncode not in (0, 1) for gate in gates):
            raise DemoError(
                f"wattwatch-train gate rejected the job: {' / '.join(last_lines(out + err) for out, err in outputs)}"
            )
        try:
            record = json.loads((self._run / "gate.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise DemoError(f"wattwatch-train gate passed the job but left no valid gate.json: {error}") from None
        return GateOutput(
            lines=tuple(outputs[0][0].splitlines()),
            level=record["level"],
            spread=record.get("spread"),
            shortest_blocks=record.get("global_min_blocks"),
            gate_id=record["gate_id"],
        )

    def start(self, gate: GateOutput) -> None:
        """Starts torchrun on each node, and points the link that the watcher follows to the new run directory."""
        staged = self.files.directory / "next"
        staged.symlink_to(self._run)
        staged.replace(self.files.current)
        self._launchers.clear()
        port = free_port()
        names = ",".join(node.name for node in self._nodes)
        job = {
            "WATTWATCH_ATTEMPT": "1",
            "WATTWATCH_GATE_ID": gate.gate_id,
            "WATTWATCH_NODES": names,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            # torchrun builds the ranks' command line without -P, so that a wattwatch.py here could replace our package.
            "PYTHONSAFEPATH": "1",
        }
        rank = ["wattwatch.trainer.cli", "run", str(self.files.job)]
        for place, node in enumerate(self._nodes):
            arguments = ["--nnodes", str(len(self._nodes)), "--node-rank", str(place)]
            arguments += ["--nproc-per-node", str(self.shape.ranks_per_node)]
            arguments += ["--master-addr", LOOPBACK, "--master-port", str(port)]
            with self._launcher_log(place).open("wb") as log:
                launcher = subprocess.Popen(
                    [sys.executable, "-P", "-m", "torch.distributed.run", *arguments, "-m", *rank],
                    env={
                        **os.environ,
                        **FLIGHT_RECORDER_ENVIRONMENT,
                        **job,
                        **node.environment(),
                        "WATTWATCH_NODE": node.name,
                    },
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C goes to the demo alone, which then ends the job
                )
            self._launchers.append(launcher)
            # Inherited by the ranks. On a large machine the steps would be over before a second sample is taken.
            os.sched_setaffinity(launcher.pid, sorted(os.sched_getaffinity(0))[-self.shape.cores :])

    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit codes of the launchers of the latest start; None: still running."""
        return tuple(launcher.poll() for launcher in self._launchers)

    def heartbeats(self) -> tuple[DemoHeartbeat, ...]:
        """Heartbeats of the latest start, in order of ranks."""
        found = []
        for rank in range(self.shape.world):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                heartbeat = json.loads((self._run / "heartbeat" / f"rank-{rank:05d}.json").read_text("utf-8"))
                found.append(DemoHeartbeat(rank, heartbeat["phase"], heartbeat["step"]))
        return tuple(found)

    def socket_of(self, rank: int) -> Path:
        return self._run / "worker" / f"rank-{rank:05d}.sock"

    def checkpoint(self) -> str:
        """Name of the latest complete checkpoint; "" if there is none."""
        try:
            name = (self._run / "checkpoints" / "latest").read_text("utf-8").strip()
        except OSError:
            return ""
        return name if (self._run / "checkpoints" / name / "COMPLETE.json").exists() else ""

    def end(self) -> tuple[int, ...]:
        """Kills the ranks and waits for their launchers. Returns the pids of the ranks, none if nothing runs."""
        running = [launcher for launcher in self._launchers if launcher.poll() is None]
        ranks = [pid for launcher in running for pid in child_pids(launcher.pid)]
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in self._launchers:
            try:
                launcher.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
        self._launchers.clear()
        return tuple(ranks)

    def last_output(self) -> str:
        """The last output of the ranks and launchers of the latest start, for the error message."""
        outputs = [self._ending(rank) for rank in range(self.shape.world)]
        words = [f"rank {rank}: {why}" for rank, why in enumerate(outputs) if why]
        if not words:
            words = [last_lines(self._launcher_log(place).read_text("utf-8", "replace")) for place in (0, 1)]
        return "; ".join(words)

    def _ending(self, rank: int) -> str:
        path = self._run / "logs" / "attempt-01" / f"rank-{rank:05d}.ending.json"
        try:
            ending: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            return ""
        return "" if ending.get("code") == 0 else str(ending.get("why", ""))

    def _launcher_log(self, place: int) -> Path:
        return self.files.directory / f"{self._run.name}-{self._nodes[place].name}.log"

    def _ranks(self, place: int) -> str:
        first = place * self.shape.ranks_per_node
        return f"{first}-{first + self.shape.ranks_per_node - 1}"


# Kept small: 2,000 collectives per rank. torch 2.9 renamed the variable, so both names are set.
FLIGHT_RECORDER_ENVIRONMENT: Final = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}


def blame_machine() -> str:
    """What to add to the message about a timeout; "" if this machine is not busy."""
    busy = describe_busy_machine()
    return f" This machine is busy ({busy}), which makes everything slow: try again when it is idle." if busy else ""


def trainer_command() -> list[str]:
    return [sys.executable, "-P", "-m", "wattwatch.trainer.cli"]


def child_pids(pid: int) -> tuple[int, ...]:
    """Child processes of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return tuple(found)


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


def last_lines(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-MAX_LINES_SHOWN:]) or "it printed nothing"
