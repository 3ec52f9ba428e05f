"""Checkpoint directories as rank 0 alone makes, renames and removes them.

Rank 0 decides and tells: on NFS two ranks may see different things for a while (KempnerForge#49).
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from wattwatch.trainer.atomic_files import atomic_write_text, fsync_directory
from wattwatch.trainer.checkpoint.complete import (
    DIRECTORY_NAME,
    MARKER,
    STAGED_NAME,
    Completion,
    completion_text,
    optimizer_file,
    why_incomplete,
)
from wattwatch.trainer.checkpoint.safetensors_writer import write_and_sync
from wattwatch.trainer.run_directory import RunDirectory


def create_staging_directory(run: RunDirectory, step: int, with_optimizer: bool) -> Path:
    """A new directory to write into, beside its later name. Raises OSError."""
    staged = run.checkpoints / f"{run.checkpoint(step).name}.tmp-{secrets.token_hex(4)}"
    staged.mkdir(parents=True)
    if with_optimizer:
        (staged / optimizer_file(0)).parent.mkdir()
    return staged


def publish_checkpoint(run: RunDirectory, staged: Path, completion: Completion) -> Path:
    """Marks `staged` as complete and gives it its name. Raises OSError; then it is still staged.

    A directory of the same step is replaced: it is broken, or of the same step trained once more.
    """
    write_and_sync(staged / MARKER, [completion_text(completion).encode()])
    for directory in {(staged / name).parent for name in completion.files} | {staged}:
        fsync_directory(str(directory))
    target = run.checkpoint(completion.step)
    replaced = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}") if os.path.lexists(target) else None
    if replaced:
        os.rename(target, replaced)
    try:
        os.rename(staged, target)
    except OSError:
        if replaced:
            os.rename(replaced, target)
        raise
    fsync_directory(str(run.checkpoints))
    return target


def clean_up_after_save(run: RunDirectory, published: Path, keep: int) -> tuple[str, ...]:
    """After a save: `latest`, and room for the next. What could not be done is told: the checkpoint itself is safe."""
    warnings: list[str] = []
    try:
        atomic_write_text(str(run.latest), published.name + "\n")
    except OSError as error:
        warnings.append(f"{run.latest}: {error.strerror or error}; it names an older checkpoint, or none")
    try:
        warnings += _prune(run, _step_number(published), keep)
    except OSError as error:
        warnings.append(f"{run.checkpoints}: {error.strerror or error}; older checkpoints stay")
    return tuple(warnings + remove_staged(run))


def _prune(run: RunDirectory, step: int, keep: int) -> list[str]:
    """Leaves the newest `keep` complete ones up to `step`, and the broken ones between them."""
    names = [name for name in os.listdir(run.checkpoints) if DIRECTORY_NAME.fullmatch(name)]
    listed = sorted(((_step_number(run.checkpoints / name), run.checkpoints / name) for name in names), reverse=True)
    warnings = [
        f"{path} is of a later step than this save, and would be resumed from before it; move it away"
        for number, path in listed
        if number > step and why_incomplete(path) is None
    ]
    complete = 0
    for _, path in (item for item in listed if item[0] <= step):
        if complete >= keep:
            warnings += remove_checkpoint(path)
        elif why_incomplete(path) is None:
            complete += 1
    return warnings


def remove_staged(run: RunDirectory) -> list[str]:
    """What saves left that did not end. Returns what could not be removed, and why."""
    try:
        names = os.listdir(run.checkpoints)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{run.checkpoints}: {error.strerror or error}"]
    return [word for name in names if STAGED_NAME.fullmatch(name) for word in remove_checkpoint(run.checkpoints / name)]


def remove_checkpoint(directory: Path) -> list[str]:
    """Removes; a checkpoint is renamed first, so that one that is half removed does not look complete.

    Returns why it is still there, where it is.
    """
    try:
        if not STAGED_NAME.fullmatch(directory.name):
            staged = directory.with_name(f"{directory.name}.tmp-{secrets.token_hex(4)}")
            os.rename(directory, staged)
            directory = staged
        shutil.rmtree(directory)
    except OSError as error:
        return [f"{directory} could not be removed: {error.strerror or error}"]
    return []


def _step_number(directory: Path) -> int:
    match = DIRECTORY_NAME.fullmatch(directory.name)
    assert match is not None
    return int(match[1])
