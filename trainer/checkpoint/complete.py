"""Is a checkpoint whole? COMPLETE.json, and everything that it and the files say of themselves.

Standard library only: gate and launcher ask before torch is there. Writers have left truncated files that looked
finished (NeMo-RL#3624), and a "latest" before what it names (Megatron-Bridge#5746): nothing here trusts a name.
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

COMPLETION_VERSION: Final = 1
HASH_THREADS: Final = 8
MARKER: Final = "COMPLETE.json"
INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
CONFIG_FILE: Final = "config.json"
DIRECTORY_NAME: Final = re.compile(r"step-(\d+)")  # RunDirectory.checkpoint
STAGED_NAME: Final = re.compile(r"step-\d+\.tmp-.*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Completion:
    """COMPLETE.json: of which moment of which job, and every other file of the directory."""

    v: int
    run: str
    step: int  # steps done
    steps: int  # of the whole run
    epoch: int
    tokens: int  # trained on so far, by all ranks
    world: int
    gate_id: str
    blocks_sha256: str  # of all ranks' manifests: the data that `step` counts through
    optimizer: bool  # an exact resume is possible
    t_wall: float  # seconds since 1970
    files: dict[str, FileRecord]  # by path below the directory
    warm_from: int = 0  # the step where the optimizer's moments, and the last warm-up, began


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The newest complete checkpoint, and why newer ones are not."""

    directory: Path | None
    completion: Completion | None = None
    skipped: tuple[str, ...] = ()


class _IncompleteError(Exception):
    """Why a checkpoint is not complete."""


def optimizer_file(rank: int) -> str:
    return f"optimizer/rank-{rank:05d}.safetensors"


def completion_text(completion: Completion) -> str:
    """No newline ends it: what is cut anywhere is no JSON."""
    return json.dumps(asdict(completion), indent=1)


def read_completion(directory: Path) -> Completion:
    """What COMPLETE.json says; the files themselves are not looked at. Raises Refusal."""
    try:
        return _read_marker(directory)
    except _IncompleteError as error:
        raise UserError(f"{error}; resume from another checkpoint") from None


def why_incomplete(directory: Path, deep: bool = False) -> str | None:
    """Why `directory` is not a complete checkpoint, as a sentence that names the file; None: it is.

    Reads the marker, the index and the headers of safetensors files. `deep` reads and hashes every byte: only that
    finds bytes that changed in place.
    """
    try:
        if STAGED_NAME.fullmatch(directory.name):
            raise _IncompleteError(f"{directory}: still staged, its save did not end")
        completion = _read_marker(directory)
        _check_names(directory, completion)
        for name, fact in completion.files.items():
            _check_size(directory / name, fact)
        _check_weights(directory, completion)
        if deep:
            _check_bytes(directory, completion)
    except _IncompleteError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or directory}: {error.strerror or error}"
    return None


def find_newest_complete(checkpoints: Path, deep: bool = False) -> NewestCheckpoint:
    """By step, of all that are not staged. A directory that does not exist holds none.

    Raises Refusal where `checkpoints` cannot be read: a run must not start anew because a mount is ill.
    """
    try:
        names = os.listdir(checkpoints)
    except FileNotFoundError:
        return NewestCheckpoint(None)
    except OSError as error:
        raise UserError(f"{checkpoints}: {error.strerror or error}; checkpoints cannot be looked for") from None
    found = [(int(match[1]), name) for name in names if (match := DIRECTORY_NAME.fullmatch(name))]
    skipped: list[str] = []
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
        raise _IncompleteError(f"{path}: missing, the save did not end") from None
    except OSError as error:
        raise _IncompleteError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise _IncompleteError(f"{path}: cut or changed, it is not JSON") from None
    version = data.get("v") if isinstance(data, dict) else None
    if isinstance(version, int) and version != COMPLETION_VERSION:
        raise _IncompleteError(f"{path}: version {version}, this program reads {COMPLETION_VERSION}")
    try:
        return parse_dataclass(Completion, data)
    except InvalidDataError as error:
        raise _IncompleteError(f"{path}: {error}") from None


def _check_names(directory: Path, completion: Completion) -> None:
    """What the marker must list, and nothing that would be loaded without being listed."""
    marker = directory / MARKER
    if (match := DIRECTORY_NAME.fullmatch(directory.name)) and int(match[1]) != completion.step:
        raise _IncompleteError(f"{marker}: of step {completion.step}, in a directory of another name")
    for name in completion.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or "\0" in name:
            raise _IncompleteError(f"{marker}: {name!r} is no file of this directory")
    needed = [CONFIG_FILE]
    if completion.optimizer:
        needed += [optimizer_file(rank) for rank in range(completion.world)]
    if absent := [name for name in needed if name not in completion.files]:
        raise _IncompleteError(f"{marker}: does not list {absent[0]}")
    for name in sorted(os.listdir(directory)):
        if name.endswith((".safetensors", ".index.json")) and name not in completion.files:
            raise _IncompleteError(f"{directory / name}: not of this checkpoint, {MARKER} does not list it")


def _check_size(path: Path, fact: FileRecord) -> None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise _IncompleteError(f"{path}: missing") from None
    if not stat.S_ISREG(found.st_mode):
        raise _IncompleteError(f"{path}: not a file")
    if found.st_size != fact.bytes:
        how = "cut short" if found.st_size < fact.bytes else "longer than written"
        raise _IncompleteError(f"{path}: {how}, {found.st_size:,} bytes where {fact.bytes:,} were written")


def _check_weights(directory: Path, completion: Completion) -> None:
    """Headers agree with sizes, and the index with the headers."""
    tensors: dict[str, frozenset[str]] = {}
    for name, fact in completion.files.items():
        if name.endswith(".safetensors"):
            try:
                tensors[name] = read_tensor_names(directory / name, fact.bytes)
            except InvalidHeaderError as error:
                raise _IncompleteError(f"{directory / name}: {error}") from None
    weights = {name: names for name, names in tensors.items() if "/" not in name}
    if INDEX_FILE in completion.files:
        _check_index(directory / INDEX_FILE, weights)
    elif list(weights) != [SINGLE_FILE]:
        raise _IncompleteError(f"{directory / MARKER}: lists neither {INDEX_FILE} nor {SINGLE_FILE} alone")


def _check_index(path: Path, weights: Mapping[str, frozenset[str]]) -> None:
    try:
        mapping = json.loads(path.read_bytes())["weight_map"]
        pairs = {(str(tensor), str(name)) for tensor, name in mapping.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _IncompleteError(f"{path}: cut or changed, it has no weight_map") from None
    for tensor, name in sorted(pairs):
        if name not in weights:
            raise _IncompleteError(f"{path}: names {name}, which is not of this checkpoint")
        if tensor not in weights[name]:
            raise _IncompleteError(f"{path}: says that {tensor} is in {name}, and it is not")
    if more := sorted({(tensor, name) for name, tensors in weights.items() for tensor in tensors} - pairs):
        tensor, name = more[0]
        raise _IncompleteError(f"{path}: does not name {tensor} of {name}")


def _check_bytes(directory: Path, completion: Completion) -> None:
    with ThreadPoolExecutor(HASH_THREADS) as threads:  # hashlib lets go of the interpreter
        digests = threads.map(_sha256, [directory / name for name in completion.files])
        for (name, fact), digest in zip(completion.files.items(), digests, strict=True):
            if digest != fact.sha256:
                raise _IncompleteError(f"{directory / name}: other bytes than were written, its sha256 differs")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# What a safetensors file says of its own length: 8 bytes of header size, the header, the tensors without gaps.
#
# Format: https://huggingface.co/docs/safetensors (8 bytes little-endian, JSON, data_offsets counted after the header).

MAX_HEADER_BYTES: Final = 100_000_000  # the library's own limit


class InvalidHeaderError(ValueError):
    """What a header says and the file is not."""


def read_tensor_names(path: Path, size_bytes: int) -> frozenset[str]:
    """The tensors of a file of `size_bytes`. Raises BadHeader where its header tells of another size, and OSError."""
    with open(path, "rb") as file:
        if size_bytes < 8:
            raise InvalidHeaderError(f"{size_bytes} bytes are no safetensors file")
        header_bytes = int.from_bytes(file.read(8), "little")
        if size_bytes < 8 + header_bytes or header_bytes > MAX_HEADER_BYTES:
            raise InvalidHeaderError(f"its header would be {header_bytes:,} bytes, the file is {size_bytes:,}")
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        spans = sorted((int(begin), int(end)) for begin, end in (item["data_offsets"] for item in header.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidHeaderError("its header is not that of a safetensors file") from None
    reached = 0
    for begin, end in spans:
        if begin != reached or end < begin:
            raise InvalidHeaderError(f"its header leaves a gap or an overlap at byte {reached:,} of the tensors")
        reached = end
    if (stated := 8 + header_bytes + reached) != size_bytes:
        raise InvalidHeaderError(f"its header tells of {stated:,} bytes, the file is {size_bytes:,}")
    return frozenset(header)
