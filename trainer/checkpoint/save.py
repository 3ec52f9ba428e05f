"""A checkpoint, from the staged directory to the new name: what the training loop calls after its barrier.

stage ─► agree ─► gather, write ─► agree ─► mark, sync, rename ─► agree ─► latest, prune
rank 0    all      all ranks        all       rank 0               all      rank 0
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
from wattwatch.trainer.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class SavePoint:
    """Where a job stands: the loop's part of Completion, equal on all ranks."""

    run: str
    step: int  # steps done
    steps: int
    epoch: int
    tokens: int
    gate_id: str
    blocks_sha256: str
    warm_from: int = 0  # where the optimizer's moments began


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A save that ended well, equal on all ranks but `seconds`."""

    directory: Path
    seconds: float
    bytes: int
    files: int
    writers: int  # ranks that wrote weights
    peak_bytes: int  # the most weights that any rank held in memory for it
    warnings: tuple[str, ...]  # of what lies around the checkpoint: `latest`, older ones


class CheckpointSaver:
    """Saves checkpoints of one job; made and called by all ranks together, at the same step.

    Its collectives run on a group of its own, with its own timeout, so that a slow disk does not count against a step,
    nor a step's collective match one of a save.
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

        Raises Refusal on all ranks where rank 0 cannot read `source_model`.
        """
        self.run = run
        self.keep = keep
        self.file_bytes = file_bytes
        self.ranks_per_node = ranks_per_node
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
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

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, moment: SavePoint) -> SaveReport:
        """Returns when the checkpoint is complete and named, on all ranks; an optimizer makes it one for exact resumes.

        Raises SaveFailed on all ranks, the staged directory removed; where a rank has died, on those that are left, and
        the next Saver removes it. Raises Refusal for a model that cannot be saved.
        """
        begun = time.monotonic()
        tensors = tensors_to_save(model)
        files = plan_weights_files(describe_tensors(tensors), self.file_bytes, self.world, self.ranks_per_node)
        try:
            staged, gathering = self._prepare(moment.step, files, tensors, optimizer)
            try:
                words = self._write(staged, gathering, model, tensors, files, optimizer)
                completion = self._completion(moment, [facts for facts, _ in words], optimizer is not None)
                self._publish(staged, completion)
            except SaveError:
                if self.rank == 0:  # all ranks have agreed: nobody writes there any more
                    remove_checkpoint(staged)
                raise
            directory = self.run.checkpoint(moment.step)
            warnings = exchange_results(
                self.group, None, clean_up_after_save(self.run, directory, self.keep) if self.rank == 0 else ()
            )[0]
        except RuntimeError as error:  # of gloo, NCCL or CUDA: somebody did not come, or a connection broke
            raise SaveError(f"rank {self.rank}: the save of step {moment.step} broke off: {error}") from error
        return SaveReport(
            directory=directory,
            seconds=time.monotonic() - begun,
            bytes=sum(fact.bytes for fact in completion.files.values()),
            files=len(completion.files),
            writers=len({file.owner for file in files}),
            peak_bytes=max(peak for _, peak in words),
            warnings=warnings,
        )

    def _prepare(
        self,
        step: int,
        files: tuple[WeightsFile, ...],
        tensors: dict[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
    ) -> tuple[Path, TensorGatherer]:
        """Rank 0's new directory, and every rank's scratch memory; nobody has weights that are no numbers."""
        staged, gathering, reason = None, None, None
        try:
            if self.rank == 0:
                remove_staged(self.run)
                staged = create_staging_directory(self.run, step, optimizer is not None)
            if broken := find_non_finite(tensors):
                reason = f"rank {self.rank}: {broken} is not finite; nothing is saved of it. Lower train.learning_rate"
            device = next(iter(tensors.values())).device
            gathering = TensorGatherer(self.group, device, max(file.layout.tensor_bytes for file in files))
        except (OSError, RuntimeError) as error:  # RuntimeError: no memory on the device
            reason = describe_rank_error(error, self.rank)
        try:
            word = exchange_results(self.group, reason, str(staged))[0]
        except SaveError:
            if staged:
                remove_checkpoint(staged)
            raise
        assert gathering is not None
        return Path(word), gathering

    def _write(
        self,
        staged: Path,
        gathering: TensorGatherer,
        model: nn.Module,
        tensors: dict[str, torch.Tensor],
        files: tuple[WeightsFile, ...],
        optimizer: torch.optim.Optimizer | None,
    ) -> list[tuple[dict[str, FileRecord], int]]:
        """All files but the marker. Returns of every rank what it wrote, and the most weights that it held."""
        writing = RankFileWriter(staged, self.rank)
        try:
            for file in files:
                memory = writing.room(file)
                places = {} if memory is None else file.layout.views(memory)
                for tensor in file.layout.tensors:
                    gathering.gather(tensors[tensor.name], places.get(tensor.name))
                if memory is not None:
                    writing.send(file, memory)
            if self.rank == 0:
                companions = self.companions | {CONFIG_FILE: config_for_checkpoint(self.companions[CONFIG_FILE], model)}
                for name, data in (companions | build_index_file(files)).items():
                    writing.write(name, [data])
            if optimizer is not None:
                writing.write(optimizer_file(self.rank), optimizer_file_chunks(model, optimizer, self.rank, self.world))
        finally:
            writing.close()
        return exchange_results(self.group, writing.reason, (writing.facts, writing.peak_bytes))

    def _completion(self, moment: SavePoint, facts: list[dict[str, FileRecord]], optimizer: bool) -> Completion:
        files = dict(sorted(item for of_rank in facts for item in of_rank.items()))
        return Completion(
            v=COMPLETION_VERSION,
            world=self.world,
            optimizer=optimizer,
            t_wall=time.time(),
            files=files,
            **asdict(moment),
        )

    def _publish(self, staged: Path, completion: Completion) -> None:
        reason = None
        if self.rank == 0:
            try:
                publish_checkpoint(self.run, staged, completion)
            except OSError as error:
                reason = describe_rank_error(error, self.rank)
        exchange_results(self.group, reason, None)


# A rank's own files of one save: one in memory, written by a thread while the other ranks' files are gathered.


class RankFileWriter:
    """What one rank has written, or why it cannot. Never raises for that: peers wait in the next collective.

    After a first failure nothing more is written; the rank only goes on taking part.
    """

    def __init__(self, staged: Path, rank: int) -> None:
        self.staged = staged
        self.rank = rank
        self.facts: dict[str, FileRecord] = {}
        self.reason: str | None = None
        self.peak_bytes = 0  # of weights in this rank's memory at any time
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def room(self, file: WeightsFile) -> torch.Tensor | None:
        """Memory for the tensors of `file`, once the file before has left it. None: they are not wanted here."""
        self._wait()
        memory: list[torch.Tensor] = []
        if file.owner == self.rank:
            self.attempt(lambda: memory.append(torch.empty(file.layout.tensor_bytes, dtype=torch.uint8)))
            self.peak_bytes = max(self.peak_bytes, file.layout.tensor_bytes)
        return memory[0] if memory else None

    def send(self, file: WeightsFile, memory: torch.Tensor) -> None:
        """Begins to write; `memory` is the thread's from here on."""

        def write() -> None:
            self.facts[file.name] = write_and_sync(self.staged / file.name, [file.layout.header, host_bytes(memory)])

        self._pending = self._thread.submit(self.attempt, write)

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """A file beside the weights, at once."""

        def write() -> None:
            self.facts[name] = write_and_sync(self.staged / name, pieces)

        self.attempt(write)

    def attempt(self, work: Callable[[], object]) -> None:
        """Does `work` unless something has failed before; keeps why it failed."""
        if self.reason is not None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it and not wait
            self.reason = describe_rank_error(error, self.rank)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """Returns when all is on the disk."""
        self._wait()
        self._thread.shutdown()


# What a model directory holds besides weights, so that a checkpoint is used like the model that it came from.

# Names of tokenizers' own files differ by their kind: BPE, unigram, tiktoken, Mistral's tekken.
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


def read_companions(source_model: Path) -> dict[str, bytes]:
    """Configuration, tokenizer, chat templates and generation settings of `source_model`, by name. Raises Refusal.

    Read once, when a job starts: a model directory that goes away later must not cost a checkpoint.
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
            f"{error.filename or source_model}: {error.strerror or error}; is it a model's directory?"
        ) from None
    except ValueError:
        raise UserError(f"{source_model / CONFIG_FILE}: not a JSON object") from None
    return found


def config_for_checkpoint(source: bytes, model: nn.Module) -> bytes:
    """`source` with the precision of the saved weights; every other key stays as its makers wrote it, so that whatever
    reads the model reads the checkpoint."""
    config = json.loads(source)
    known = "torch_dtype" if "torch_dtype" in config else "dtype"  # transformers before 4.56, and since
    config[known] = "bfloat16"
    if not config.get("architectures"):
        config["architectures"] = [_model_class_name(model)]
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _model_class_name(model: nn.Module) -> str:
    """fully_shard puts a class of its own before the model's."""
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


# One word of every rank to every rank: a save goes on when nobody has failed, and ends everywhere otherwise.

T = TypeVar("T")
MAX_REASONS_SHOWN: Final = 3
NO_SPACE_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SaveError(Exception):
    """No checkpoint came of it, on any rank. Its text is what the user reads, whole.

    The job may be started again: it goes on from the last complete checkpoint.
    """


def describe_rank_error(error: Exception, rank: int) -> str:
    """What a rank tells the others of its failure: who, where, what, and what to do."""
    who = f"rank {rank} on {platform.node()}"
    if not isinstance(error, OSError):
        return f"{who}: {type(error).__name__}: {error}"
    what = f"{who}: {error.filename or 'a file'}: {error.strerror or error}"
    if error.errno in NO_SPACE_ERRNOS:
        return f"{what}; make room (or lower checkpoint.keep) and start again"
    return what


def exchange_results(group: dist.ProcessGroup, reason: str | None, word: T) -> list[T]:
    """Every rank's `word`, in order. Raises SaveFailed on all ranks where one came with a reason.

    Every rank must come here, whatever has happened to it; one that does not lets the others wait for the group's
    timeout.
    """
    answers: list[Any] = [None] * group.size()
    dist.all_gather_object(answers, (reason, word), group=group)
    if reasons := [reason for reason, _ in answers if reason]:
        more = f" (and {len(reasons) - MAX_REASONS_SHOWN} more ranks)" if len(reasons) > MAX_REASONS_SHOWN else ""
        raise SaveError("; ".join(reasons[:MAX_REASONS_SHOWN]) + more)
    return [word for _, word in answers]
