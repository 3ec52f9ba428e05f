"""Saving a checkpoint: what the training loop calls, on all ranks, after its barrier.

create directory ─► agree ─► gather, write ─► agree ─► marker, sync, rename ─► agree ─► latest, prune
rank 0              all      all ranks        all       rank 0                 all      rank 0

A rank whose disk is full or whose tensor is NaN still takes part in every collective up to the next "agree", where all
ranks learn that the save has failed. If it raised at once, the others would wait for it until the timeout.
"""

from __future__ import annotations

import errno
import json
import platform
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from wattwatch.trainer.checkpoint.complete import (
    COMPLETION_VERSION,
    CONFIG_FILE,
    Completion,
    FileRecord,
    optimizer_file,
)
from wattwatch.trainer.checkpoint.directories import (
    clean_up_after_save,
    create_staging_directory,
    publish_checkpoint,
    remove_checkpoint,
    remove_staged,
)
from wattwatch.trainer.checkpoint.gather import TensorGatherer, describe_tensors, find_non_finite, tensors_to_save
from wattwatch.trainer.checkpoint.optimizer import optimizer_file_chunks
from wattwatch.trainer.checkpoint.safetensors_writer import (
    WeightsFile,
    build_index_file,
    host_bytes,
    plan_weights_files,
    write_and_sync,
)
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.formatting import format_count
from wattwatch.trainer.run_directory import RunDirectory

T = TypeVar("T")
MAX_REASONS_SHOWN: Final = 3  # chosen: a shared disk that is full fails on every rank at once
NO_SPACE_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Names of tokenizer files differ by type: BPE, unigram, tiktoken, Mistral's tekken.
COMPANION_PATTERNS: Final = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)


@dataclass(frozen=True, slots=True)
class SavePoint:
    """What the training loop contributes to the completion marker, the same on all ranks."""

    run: str
    step: int  # steps done
    steps: int
    epoch: int
    tokens: int
    gate_id: str
    blocks_sha256: str
    warm_from: int = 0  # the step at which the optimizer's moments began


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A successful save. The same on all ranks, except `seconds`."""

    directory: Path
    seconds: float
    bytes: int
    files: int
    writers: int  # ranks that wrote weights
    peak_bytes: int  # the most bytes of weights that any rank held in memory for the save
    warnings: tuple[str, ...]  # about `latest` and older checkpoints, see clean_up_after_save


class SaveError(Exception):
    """The save failed, on all ranks. The message is what the user reads.

    A new attempt resumes from the last complete checkpoint.
    """


class CheckpointSaver:
    """Saves the checkpoints of one job. Created and called by all ranks together, at the same step.

    Its collectives run on a process group of its own. That has its own timeout, so that a slow disk does not count
    against a step; and a rank that is still in a step cannot take part in a collective of the save by mistake.
    """

    def __init__(
        self,
        run: RunDirectory,
        source_model: Path,
        *,
        keep: int,
        file_bytes: int,
        timeout_seconds: float,
        ranks_per_node: int,
    ) -> None:
        """Reads the model's tokenizer and configuration, and removes what a killed save has left.

        Raises UserError on all ranks if rank 0 cannot read `source_model`.
        """
        self.run = run
        self.keep = keep
        self.file_bytes = file_bytes
        self.ranks_per_node = ranks_per_node
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # Created once and kept: new_group is itself a collective of all ranks.
        group = dist.new_group(timeout=timedelta(seconds=timeout_seconds))
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        self.companions: dict[str, bytes] = {}
        reason = None
        if self.rank == 0:
            remove_staged(run)
            try:
                self.companions = read_companions(source_model)
            except UserError as error:
                reason = str(error)
        try:
            exchange_results(self.group, reason, None)
        except SaveError as error:
            raise UserError(str(error)) from None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, point: SavePoint) -> SaveReport:
        """Returns on all ranks when the checkpoint has its final name. With the optimizer, training can resume exactly.

        Raises SaveError on all ranks, with the staged directory removed. If a rank has died, the others raise SaveError
        after the timeout, and the next CheckpointSaver removes the directory. Raises UserError for a model that cannot
        be saved.
        """
        begun = time.monotonic()
        tensors = tensors_to_save(model)
        files = plan_weights_files(describe_tensors(tensors), self.file_bytes, self.world, self.ranks_per_node)
        try:
            staged, gatherer = self._prepare(point.step, files, tensors, optimizer)
            try:
                written = self._write(staged, gatherer, model, tensors, files, optimizer)
                completion = self._completion(point, [records for records, _ in written], optimizer is not None)
                self._publish(staged, completion)
            except SaveError:
                if self.rank == 0:  # all ranks have agreed that the save failed, so none writes there any more
                    remove_checkpoint(staged)
                raise
            directory = self.run.checkpoint(point.step)
            warnings = clean_up_after_save(self.run, directory, self.keep) if self.rank == 0 else ()
            # Also the last barrier: without it a rank could exit while rank 0 still removes old checkpoints.
            warnings = exchange_results(self.group, None, warnings)[0]
        except RuntimeError as error:  # of gloo, NCCL or CUDA: another rank did not come, or a connection broke
            raise SaveError(f"rank {self.rank}: the save of step {point.step} failed: {error}") from error
        return SaveReport(
            directory=directory,
            seconds=time.monotonic() - begun,
            bytes=sum(record.bytes for record in completion.files.values()),
            files=len(completion.files),
            writers=len({file.owner for file in files}),
            peak_bytes=max(peak for _, peak in written),
            warnings=warnings,
        )

    def _prepare(
        self,
        step: int,
        files: tuple[WeightsFile, ...],
        tensors: dict[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
    ) -> tuple[Path, TensorGatherer]:
        """Creates rank 0's staging directory and every rank's scratch memory; checks that all weights are finite.

        NaN weights are not worth a checkpoint: pruning would remove a good one for it.
        """
        staged, gatherer, reason = None, None, None
        try:
            if self.rank == 0:
                remove_staged(self.run)
                staged = create_staging_directory(self.run, step, optimizer is not None)
            if name := find_non_finite(tensors):
                reason = f"rank {self.rank}: {name} contains NaN or infinity; nothing was saved. "
                reason += "Lower train.learning_rate"
            # Allocated before anything is written: a GPU without free memory fails here, on all ranks, at once.
            device = next(iter(tensors.values())).device
            gatherer = TensorGatherer(self.group, device, max(file.layout.tensor_bytes for file in files))
        except (OSError, RuntimeError) as error:  # RuntimeError: the device has no memory left
            reason = describe_rank_error(error, self.rank)
        try:
            # Rank 0's path for all: its random suffix is not known to the others.
            rank_0_path = exchange_results(self.group, reason, str(staged))[0]
        except SaveError:
            if staged:
                remove_checkpoint(staged)
            raise
        assert gatherer is not None
        return Path(rank_0_path), gatherer

    def _write(
        self,
        staged: Path,
        gatherer: TensorGatherer,
        model: nn.Module,
        tensors: dict[str, torch.Tensor],
        files: tuple[WeightsFile, ...],
        optimizer: torch.optim.Optimizer | None,
    ) -> list[tuple[dict[str, FileRecord], int]]:
        """Writes all files except the marker. Returns, by rank, the files written and the peak memory in bytes."""
        writer = RankFileWriter(staged, self.rank)
        try:
            # Every rank goes through all files and tensors in the same order, also those that it does not write: each
            # gather is a collective.
            for file in files:
                memory = writer.allocate(file)
                views = {} if memory is None else file.layout.views(memory)
                for tensor in file.layout.tensors:
                    gatherer.gather(tensors[tensor.name], views.get(tensor.name))
                if memory is not None:
                    writer.write_in_background(file, memory)
            if self.rank == 0:
                companions = self.companions | {CONFIG_FILE: config_for_checkpoint(self.companions[CONFIG_FILE], model)}
                for name, data in (companions | build_index_file(files)).items():
                    writer.write(name, [data])
            if optimizer is not None:
                writer.write(optimizer_file(self.rank), optimizer_file_chunks(model, optimizer, self.rank, self.world))
        finally:
            # All files are on disk before the ranks agree; only then may rank 0 write the marker.
            writer.close()
        return exchange_results(self.group, writer.reason, (writer.records, writer.peak_bytes))

    def _completion(self, point: SavePoint, records: list[dict[str, FileRecord]], optimizer: bool) -> Completion:
        files = dict(sorted(item for of_rank in records for item in of_rank.items()))
        return Completion(
            v=COMPLETION_VERSION,
            world=self.world,
            optimizer=optimizer,
            t_wall=time.time(),
            files=files,
            **asdict(point),
        )

    def _publish(self, staged: Path, completion: Completion) -> None:
        reason = None
        if self.rank == 0:
            try:
                publish_checkpoint(self.run, staged, completion)
            except OSError as error:
                reason = describe_rank_error(error, self.rank)
        exchange_results(self.group, reason, None)


class RankFileWriter:
    """Writes one rank's files of a save: one in memory, written by a thread while the next ones are gathered.

    Never raises: the other ranks wait in the next collective. After the first error, which is kept in `reason`, nothing
    more is written, and the rank only takes part in the collectives.
    """

    def __init__(self, staged: Path, rank: int) -> None:
        self.staged = staged
        self.rank = rank
        self.records: dict[str, FileRecord] = {}
        self.reason: str | None = None
        self.peak_bytes = 0  # of weights in this rank's memory at any time
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def allocate(self, file: WeightsFile) -> torch.Tensor | None:
        """Memory for the tensors of `file`, once the previous file is written. None: this rank does not write it."""
        self._wait()
        memory: list[torch.Tensor] = []
        if file.owner == self.rank:
            self._attempt(lambda: memory.append(torch.empty(file.layout.tensor_bytes, dtype=torch.uint8)))
            # One file at a time: the memory of the previous one is free once its thread has finished.
            self.peak_bytes = max(self.peak_bytes, file.layout.tensor_bytes)
        return memory[0] if memory else None

    def write_in_background(self, file: WeightsFile, memory: torch.Tensor) -> None:
        """Starts writing. `memory` belongs to the thread from here on."""

        def write() -> None:
            self.records[file.name] = write_and_sync(self.staged / file.name, [file.layout.header, host_bytes(memory)])

        self._pending = self._thread.submit(self._attempt, write)

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Writes a file now."""

        def write() -> None:
            self.records[name] = write_and_sync(self.staged / name, pieces)

        self._attempt(write)

    def _attempt(self, work: Callable[[], object]) -> None:
        """Calls `work` unless something has failed before; keeps the reason if it fails."""
        if self.reason is not None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must not wait for this one
            self.reason = describe_rank_error(error, self.rank)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """Returns when everything is on disk."""
        self._wait()
        self._thread.shutdown()


def exchange_results(group: dist.ProcessGroup, reason: str | None, result: T) -> list[T]:
    """A collective. Returns every rank's `result`, in order; raises SaveError on all ranks if any has a reason to fail.

    Every rank must call it, whatever has happened to it; if one does not, the others wait for the group's timeout.
    """
    answers: list[Any] = [None] * group.size()
    dist.all_gather_object(answers, (reason, result), group=group)
    if reasons := [reason for reason, _ in answers if reason]:
        hidden = len(reasons) - MAX_REASONS_SHOWN
        more = f" (and {format_count(hidden, 'more rank')})" if hidden > 0 else ""
        raise SaveError("; ".join(reasons[:MAX_REASONS_SHOWN]) + more)
    return [result for _, result in answers]


def describe_rank_error(error: Exception, rank: int) -> str:
    """What this rank tells the others about its error: rank and node, file, what happened, and what to do."""
    where = f"rank {rank} on {platform.node()}"
    if not isinstance(error, OSError):
        return f"{where}: {type(error).__name__}: {error}"
    text = f"{where}: {error.filename or 'a file'}: {error.strerror or error}"
    if error.errno in NO_SPACE_ERRNOS:
        return f"{text}; free some space (or lower checkpoint.keep) and start again"
    return text


# The files that a model directory has besides its weights, so that a checkpoint can be used like the original model.


def read_companions(source_model: Path) -> dict[str, bytes]:
    """Configuration, tokenizer, chat templates and generation settings of `source_model`, by name. Raises UserError.

    Read once, when the job starts: a model directory that disappears later must not make a save fail.
    """
    try:
        found = {CONFIG_FILE: (source_model / CONFIG_FILE).read_bytes()}
        for path in sorted([*source_model.iterdir(), *source_model.glob("additional_chat_templates/*")]):
            name = path.relative_to(source_model).as_posix()
            if any(fnmatch(name, pattern) for pattern in COMPANION_PATTERNS) and path.is_file():
                found[name] = path.read_bytes()
        if not isinstance(json.loads(found[CONFIG_FILE]), dict):
            raise ValueError
    except OSError as error:
        raise UserError(
            f"{error.filename or source_model}: {error.strerror or error}; is {source_model} a model directory?"
        ) from None
    except ValueError:
        raise UserError(f"{source_model / CONFIG_FILE}: not a JSON object") from None
    return found


def config_for_checkpoint(source: bytes, model: nn.Module) -> bytes:
    """`source` with the dtype of the saved weights. All other keys stay as they are, so that whatever can read the
    original model can read the checkpoint."""
    config = json.loads(source)
    dtype_key = "torch_dtype" if "torch_dtype" in config else "dtype"  # renamed in transformers 4.56
    config[dtype_key] = "bfloat16"
    if not config.get("architectures"):
        config["architectures"] = [_model_class_name(model)]
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _model_class_name(model: nn.Module) -> str:
    """fully_shard replaces the model's class by a subclass of it and FSDPModule."""
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
