"""Checkpoint directories: created, published, pruned and removed by rank 0 alone.

Rank 0 decides and tells the others: on NFS, two ranks may see different directories for a while (KempnerForge#49).
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
    """A new directory to write into, beside its final name: a rename within one directory is atomic. Raises OSError."""
    staged = run.checkpoints / f"{run.checkpoint(step).name}.tmp-{secrets.token_hex(4)}"
    staged.mkdir(parents=True)
    if with_optimizer:
        (staged / optimizer_file(0)).parent.mkdir()
    return staged


def publish_checkpoint(run: RunDirectory, staged: Path, completion: Completion) -> Path:
    """Writes the marker into `staged` and renames it to its final name. Raises OSError; then it is still staged.

    A directory with that name is replaced: it is broken, or the same step trained once more.
    """
    # The marker last, after all ranks have synced their files; then the directories, so that no file's name is lost in
    # a power failure; only then the rename. In any other order a crash could leave a checkpoint that looks complete.
    write_and_sync(staged / MARKER, [completion_text(completion).encode()])
    for directory in {(staged / name).parent for name in completion.files} | {staged}:
        fsync_directory(str(directory))
    target = run.checkpoint(completion.step)
    replaced = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}") if os.path.lexists(target) else None
    if replaced:  # rename cannot replace a directory that is not empty
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
    """Updates `latest` and removes old checkpoints.

    Returns what could not be done as warnings, and raises nothing: the checkpoint itself is safe.
    """
    warnings: list[str] = []
    try:
        atomic_write_text(str(run.latest), published.name + "\n")
    except OSError as error:
        warnings.append(
            f"{run.latest} was not updated: {error.strerror or error}; it may still refer to an older checkpoint"
        )
    try:
        warnings += _prune(run, _step_number(published), keep)
    except OSError as error:
        warnings.append(f"older checkpoints in {run.checkpoints} were not removed: {error.strerror or error}")
    return tuple(warnings + remove_staged(run))


def _prune(run: RunDirectory, step: int, keep: int) -> list[str]:
    """Keeps the newest `keep` complete checkpoints up to `step`, and broken ones between them.

    Broken ones do not count, so `keep` complete ones always remain.
    """
    names = [name for name in os.listdir(run.checkpoints) if DIRECTORY_NAME.fullmatch(name)]
    listed = sorted(((_step_number(run.checkpoints / name), run.checkpoints / name) for name in names), reverse=True)
    warnings = [
        f"{path} is from a later step than the checkpoint just saved, so the next attempt would resume from it; move "
        f"{path.name} to another directory"
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
    """Removes what unfinished saves left. Returns what could not be removed, and why."""
    try:
        names = os.listdir(run.checkpoints)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{run.checkpoints}: {error.strerror or error}"]
    return [text for name in names if STAGED_NAME.fullmatch(name) for text in remove_checkpoint(run.checkpoints / name)]


def remove_checkpoint(directory: Path) -> list[str]:
    """Removes a directory. Renames it to a staged name first, so that it never looks complete when half removed.

    Returns [], or the reason why it still exists.
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
