"""A checkpoint, from the staged directory to the new name: what the training loop calls after its barrier.

stage ─► agree ─► gather, write ─► agree ─► mark, sync, rename ─► agree ─► latest, prune
rank 0    all      all ranks        all       rank 0               all      rank 0
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from trainer.checkpoint.agreement import SaveFailed, agree, reason_of
from trainer.checkpoint.companions import read_companions, saved_config
from trainer.checkpoint.complete import CONFIG, VERSION, Completion, FileFact, optimizer_file
from trainer.checkpoint.directories import discard, publish, remove_staged, stage, tidy
from trainer.checkpoint.gather import Gathering, not_finite, saved_tensors, tensor_facts
from trainer.checkpoint.optimizer import optimizer_pieces
from trainer.checkpoint.plan import WeightsFile, index_file, weights_files
from trainer.checkpoint.writing import Writing
from trainer.refusal import Refusal
from trainer.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Moment:
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


class Saver:
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
            except Refusal as error:
                reason = str(error)
        try:
            agree(self.group, reason, None)
        except SaveFailed as error:
            raise Refusal(str(error)) from None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, moment: Moment) -> SaveReport:
        """Returns when the checkpoint is complete and named, on all ranks; an optimizer makes it one for exact resumes.

        Raises SaveFailed on all ranks, the staged directory removed; where a rank has died, on those that are left, and
        the next Saver removes it. Raises Refusal for a model that cannot be saved.
        """
        begun = time.monotonic()
        tensors = saved_tensors(model)
        files = weights_files(tensor_facts(tensors), self.file_bytes, self.world, self.ranks_per_node)
        try:
            staged, gathering = self._prepare(moment.step, files, tensors, optimizer)
            try:
                words = self._write(staged, gathering, model, tensors, files, optimizer)
                completion = self._completion(moment, [facts for facts, _ in words], optimizer is not None)
                self._publish(staged, completion)
            except SaveFailed:
                if self.rank == 0:  # all ranks have agreed: nobody writes there any more
                    discard(staged)
                raise
            directory = self.run.checkpoint(moment.step)
            warnings = agree(self.group, None, tidy(self.run, directory, self.keep) if self.rank == 0 else ())[0]
        except RuntimeError as error:  # of gloo, NCCL or CUDA: somebody did not come, or a connection broke
            raise SaveFailed(f"rank {self.rank}: the save of step {moment.step} broke off: {error}") from error
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
    ) -> tuple[Path, Gathering]:
        """Rank 0's new directory, and every rank's scratch memory; nobody has weights that are no numbers."""
        staged, gathering, reason = None, None, None
        try:
            if self.rank == 0:
                remove_staged(self.run)
                staged = stage(self.run, step, optimizer is not None)
            if broken := not_finite(tensors):
                reason = f"rank {self.rank}: {broken} is not finite; nothing is saved of it. Lower train.learning_rate"
            device = next(iter(tensors.values())).device
            gathering = Gathering(self.group, device, max(file.layout.tensor_bytes for file in files))
        except (OSError, RuntimeError) as error:  # RuntimeError: no memory on the device
            reason = reason_of(error, self.rank)
        try:
            word = agree(self.group, reason, str(staged))[0]
        except SaveFailed:
            if staged:
                discard(staged)
            raise
        assert gathering is not None
        return Path(word), gathering

    def _write(
        self,
        staged: Path,
        gathering: Gathering,
        model: nn.Module,
        tensors: dict[str, torch.Tensor],
        files: tuple[WeightsFile, ...],
        optimizer: torch.optim.Optimizer | None,
    ) -> list[tuple[dict[str, FileFact], int]]:
        """All files but the marker. Returns of every rank what it wrote, and the most weights that it held."""
        writing = Writing(staged, self.rank)
        try:
            for file in files:
                memory = writing.room(file)
                places = {} if memory is None else file.layout.views(memory)
                for tensor in file.layout.tensors:
                    gathering.gather(tensors[tensor.name], places.get(tensor.name))
                if memory is not None:
                    writing.send(file, memory)
            if self.rank == 0:
                companions = self.companions | {CONFIG: saved_config(self.companions[CONFIG], model)}
                for name, data in (companions | index_file(files)).items():
                    writing.write(name, [data])
            if optimizer is not None:
                writing.write(optimizer_file(self.rank), optimizer_pieces(model, optimizer, self.rank, self.world))
        finally:
            writing.close()
        return agree(self.group, writing.reason, (writing.facts, writing.peak_bytes))

    def _completion(self, moment: Moment, facts: list[dict[str, FileFact]], optimizer: bool) -> Completion:
        files = dict(sorted(item for of_rank in facts for item in of_rank.items()))
        return Completion(
            v=VERSION, world=self.world, optimizer=optimizer, t_wall=time.time(), files=files, **asdict(moment)
        )

    def _publish(self, staged: Path, completion: Completion) -> None:
        reason = None
        if self.rank == 0:
            try:
                publish(self.run, staged, completion)
            except OSError as error:
                reason = reason_of(error, self.rank)
        agree(self.group, reason, None)
