"""Is a checkpoint complete? Checks COMPLETE.json and everything that it and the files themselves imply.

Standard library only: gate and launcher ask before torch is loaded. No file name is trusted: other savers have left
truncated files that looked finished (NeMo-RL#3624), and a "latest" file before the checkpoint that it names
(Megatron-Bridge#5746).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from wattwatch.trainer.dataclass_json import InvalidDataError, parse_dataclass
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.formatting import format_count

COMPLETION_VERSION: Final = 1
HASH_THREADS: Final = 8  # chosen: one thread hashes about 1 GB/s, a fast disk reads several
MARKER: Final = "COMPLETE.json"
INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
CONFIG_FILE: Final = "config.json"
DIRECTORY_NAME: Final = re.compile(r"step-(\d+)")  # see RunDirectory.checkpoint
STAGED_NAME: Final = re.compile(r"step-\d+\.tmp-.*", re.DOTALL)
# The advice where a run cannot resume. In the same run directory the launcher would find the checkpoint again.
START_FROM_WEIGHTS: Final = "to start with its weights, set `model` to the checkpoint and `run` to a new directory"
MAX_HEADER_BYTES: Final = 100_000_000  # the safetensors library's own limit


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Completion:
    """COMPLETE.json: the point of the job that was saved, and every other file of the directory."""

    v: int
    run: str
    step: int  # steps done
    steps: int  # of the whole run
    epoch: int
    tokens: int  # used so far, by all ranks
    world: int
    gate_id: str
    blocks_sha256: str  # over the token files of all ranks: the data whose blocks `step` counts
    optimizer: bool  # contains optimizer state: an exact resume is possible
    t_wall: float  # Unix seconds
    files: dict[str, FileRecord]  # by path below the directory
    warm_from: int = 0  # the step at which the optimizer's moments, and the last warm-up, began


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The newest complete checkpoint, and why newer ones are not complete."""

    directory: Path | None
    completion: Completion | None = None
    skipped: tuple[str, ...] = ()


class _IncompleteError(Exception):
    """The message says why a checkpoint is not complete."""


class InvalidHeaderError(ValueError):
    """The header of a safetensors file and the file's size do not agree, or there is no header."""


def optimizer_file(rank: int) -> str:
    return f"optimizer/rank-{rank:05d}.safetensors"


def completion_text(completion: Completion) -> str:
    """Without a newline at the end: a file that is truncated anywhere is then not valid JSON."""
    return json.dumps(asdict(completion), indent=1)


def read_completion(directory: Path) -> Completion:
    """What COMPLETE.json says, without checking the files. Raises UserError."""
    try:
        return _read_marker(directory)
    except _IncompleteError as error:
        raise UserError(f"{error}; resume from another checkpoint") from None


def why_incomplete(directory: Path, deep: bool = False) -> str | None:
    """Why `directory` is not a complete checkpoint, as a sentence that names the file. None: it is complete.

    Reads the marker, the index, and the headers of safetensors files. `deep` also hashes every byte: only that finds
    bytes that have changed in place.
    """
    try:
        if STAGED_NAME.fullmatch(directory.name):
            raise _IncompleteError(f"{directory} is the temporary directory of a save that did not finish")
        completion = _read_marker(directory)
        _check_names(directory, completion)
        for name, record in completion.files.items():
            _check_size(directory / name, record)
        _check_weights(directory, completion)
        if deep:
            _check_bytes(directory, completion)
    except _IncompleteError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or directory}: {error.strerror or error}"
    return None


def find_newest_complete(checkpoints: Path, deep: bool = False) -> NewestCheckpoint:
    """The complete checkpoint with the most steps. A directory that does not exist has none.

    Raises UserError if `checkpoints` cannot be read: a job must not start from the beginning because a mount is broken.
    """
    try:
        names = os.listdir(checkpoints)
    except FileNotFoundError:
        return NewestCheckpoint(None)
    except OSError as error:
        raise UserError(f"{checkpoints}: cannot list the checkpoints: {error.strerror or error}") from None
    found = [(int(match[1]), name) for name in names if (match := DIRECTORY_NAME.fullmatch(name))]
    skipped: list[str] = []
    # By step number, not by the `latest` file or by time: both may lie after a crash or a copy.
    for _, name in sorted(found, reverse=True):
        directory = checkpoints / name
        if (reason := why_incomplete(directory, deep)) is None:
            return NewestCheckpoint(directory, read_completion(directory), tuple(skipped))
        skipped.append(reason)
    return NewestCheckpoint(None, None, tuple(skipped))


def _read_marker(directory: Path) -> Completion:
    path = directory / MARKER
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        if not directory.is_dir():
            raise _IncompleteError(f"{directory}: no such directory") from None
        raise _IncompleteError(f"{path} is missing: the save did not finish") from None
    except OSError as error:
        raise _IncompleteError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise _IncompleteError(f"{path} is not valid JSON: the file is truncated or damaged") from None
    # Before the fields: another version may have other ones, and "unknown field" would hide the real reason.
    version = data.get("v") if isinstance(data, dict) else None
    if isinstance(version, int) and version != COMPLETION_VERSION:
        raise _IncompleteError(
            f"{path} has format version {version}, but this program reads version {COMPLETION_VERSION}"
        )
    try:
        return parse_dataclass(Completion, data)
    except InvalidDataError as error:
        raise _IncompleteError(f"{path}: {error}") from None


def _check_names(directory: Path, completion: Completion) -> None:
    """The marker lists what a checkpoint needs, and there is nothing that would be loaded without being listed."""
    marker = directory / MARKER
    if (match := DIRECTORY_NAME.fullmatch(directory.name)) and int(match[1]) != completion.step:
        raise _IncompleteError(f"{marker} says step {completion.step}, but the directory is named {directory.name}")
    for name in completion.files:
        # The names are joined to the directory below: a damaged or hostile marker must not lead outside of it.
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or "\0" in name:
            raise _IncompleteError(f"{marker} lists {name!r}, which is not a valid name of a file in this directory")
    needed = [CONFIG_FILE]
    if completion.optimizer:
        needed += [optimizer_file(rank) for rank in range(completion.world)]
    if missing := [name for name in needed if name not in completion.files]:
        raise _IncompleteError(f"{marker} does not list {missing[0]}, which the checkpoint needs")
    # transformers loads whatever it finds, so a stray model.safetensors would be loaded instead of the listed files.
    for name in sorted(os.listdir(directory)):
        if name.endswith((".safetensors", ".index.json")) and name not in completion.files:
            raise _IncompleteError(
                f"{directory / name} is not listed in {MARKER}, but would be loaded as part of the checkpoint"
            )


def _check_size(path: Path, record: FileRecord) -> None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise _IncompleteError(f"{path}: missing") from None
    if not stat.S_ISREG(found.st_mode):  # opening a named pipe would hang
        raise _IncompleteError(f"{path}: not a regular file")
    if found.st_size != record.bytes:
        what = "truncated" if found.st_size < record.bytes else "too long"
        raise _IncompleteError(
            f"{path} is {what}: it has {format_count(found.st_size, 'byte')}, but {record.bytes:,} were written"
        )


def _check_weights(directory: Path, completion: Completion) -> None:
    """The headers agree with the sizes, and the index with the headers."""
    tensors: dict[str, frozenset[str]] = {}
    for name, record in completion.files.items():
        if name.endswith(".safetensors"):
            try:
                tensors[name] = read_tensor_names(directory / name, record.bytes)
            except InvalidHeaderError as error:
                raise _IncompleteError(f"{directory / name}: {error}") from None
    weights = {name: names for name, names in tensors.items() if "/" not in name}
    if INDEX_FILE in completion.files:
        _check_index(directory / INDEX_FILE, weights)
    elif list(weights) != [SINGLE_FILE]:
        raise _IncompleteError(
            f"{directory / MARKER} must list {INDEX_FILE}, or {SINGLE_FILE} as the only weights file"
        )


def _check_index(path: Path, weights: Mapping[str, frozenset[str]]) -> None:
    try:
        mapping = json.loads(path.read_bytes())["weight_map"]
        pairs = {(str(tensor), str(name)) for tensor, name in mapping.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _IncompleteError(f"{path} has no valid weight_map: the file is truncated or damaged") from None
    for tensor, name in sorted(pairs):
        if name not in weights:
            raise _IncompleteError(f"{path} refers to {name}, which is not part of this checkpoint")
        if tensor not in weights[name]:
            raise _IncompleteError(f"{path} says that tensor {tensor} is in {name}, but that file does not contain it")
    if more := sorted({(tensor, name) for name, tensors in weights.items() for tensor in tensors} - pairs):
        tensor, name = more[0]
        raise _IncompleteError(f"{path} does not list tensor {tensor}, which is in {name}")


def _check_bytes(directory: Path, completion: Completion) -> None:
    with ThreadPoolExecutor(HASH_THREADS) as threads:  # hashlib releases the interpreter lock
        digests = threads.map(_file_sha256, [directory / name for name in completion.files])
        for (name, record), digest in zip(completion.files.items(), digests, strict=True):
            if digest != record.sha256:
                raise _IncompleteError(f"{directory / name}: the content does not match the SHA-256 in {MARKER}")


def _file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensor_names(path: Path, size_bytes: int) -> frozenset[str]:
    """The names of the tensors in a safetensors file of `size_bytes`, from its header.

    The format (https://huggingface.co/docs/safetensors) states its own length: 8 bytes with the header's length, the
    header as JSON, then the tensors without gaps. Raises InvalidHeaderError if that is not `size_bytes`, and OSError.
    """
    with open(path, "rb") as file:
        if size_bytes < 8:
            raise InvalidHeaderError(f"the file is too short for a safetensors file ({size_bytes} B)")
        header_bytes = int.from_bytes(file.read(8), "little")
        if size_bytes < 8 + header_bytes or header_bytes > MAX_HEADER_BYTES:
            raise InvalidHeaderError(
                f"the file says that its header has {format_count(header_bytes, 'byte')}, but the whole file has "
                f"{size_bytes:,}"
            )
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        # data_offsets count from the end of the header
        spans = sorted((int(begin), int(end)) for begin, end in (item["data_offsets"] for item in header.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidHeaderError("the file has no valid safetensors header") from None
    reached = 0
    for begin, end in spans:
        if begin != reached or end < begin:
            raise InvalidHeaderError(
                f"the file's header describes tensors with a gap or an overlap at byte {reached:,} of the data"
            )
        reached = end
    if (stated := 8 + header_bytes + reached) != size_bytes:
        raise InvalidHeaderError(
            f"according to its header, the file should have {format_count(stated, 'byte')}, but it has {size_bytes:,}"
        )
    return frozenset(header)
