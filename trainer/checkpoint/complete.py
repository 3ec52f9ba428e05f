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

from trainer.checkpoint.header import BadHeader, tensor_names
from trainer.plain import NotPlain, from_plain
from trainer.refusal import Refusal

VERSION: Final = 1
HASHED_AT_ONCE: Final = 8
MARKER: Final = "COMPLETE.json"
INDEX: Final = "model.safetensors.index.json"
ONE_FILE: Final = "model.safetensors"
CONFIG: Final = "config.json"
DIRECTORY_NAME: Final = re.compile(r"step-(\d+)")  # RunDirectory.checkpoint
STAGED_NAME: Final = re.compile(r"step-\d+\.tmp-.*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileFact:
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
    files: dict[str, FileFact]  # by path below the directory
    warm_from: int = 0  # the step where the optimizer's moments, and the last warm-up, began


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest complete checkpoint, and why newer ones are not."""

    directory: Path | None
    completion: Completion | None = None
    skipped: tuple[str, ...] = ()


class _Broken(Exception):
    """Why a checkpoint is not complete."""


def optimizer_file(rank: int) -> str:
    return f"optimizer/rank-{rank:05d}.safetensors"


def completion_text(completion: Completion) -> str:
    """No newline ends it: what is cut anywhere is no JSON."""
    return json.dumps(asdict(completion), indent=1)


def read_completion(directory: Path) -> Completion:
    """What COMPLETE.json says; the files themselves are not looked at. Raises Refusal."""
    try:
        return _marker(directory)
    except _Broken as error:
        raise Refusal(f"{error}; resume from another checkpoint") from None


def incomplete(directory: Path, deep: bool = False) -> str | None:
    """Why `directory` is not a complete checkpoint, as a sentence that names the file; None: it is.

    Reads the marker, the index and the headers of safetensors files. `deep` reads and hashes every byte: only that
    finds bytes that changed in place.
    """
    try:
        if STAGED_NAME.fullmatch(directory.name):
            raise _Broken(f"{directory}: still staged, its save did not end")
        completion = _marker(directory)
        _check_names(directory, completion)
        for name, fact in completion.files.items():
            _check_size(directory / name, fact)
        _check_weights(directory, completion)
        if deep:
            _check_bytes(directory, completion)
    except _Broken as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or directory}: {error.strerror or error}"
    return None


def newest_complete(checkpoints: Path, deep: bool = False) -> Newest:
    """By step, of all that are not staged. A directory that does not exist holds none.

    Raises Refusal where `checkpoints` cannot be read: a run must not start anew because a mount is ill.
    """
    try:
        names = os.listdir(checkpoints)
    except FileNotFoundError:
        return Newest(None)
    except OSError as error:
        raise Refusal(f"{checkpoints}: {error.strerror or error}; checkpoints cannot be looked for") from None
    found = [(int(match[1]), name) for name in names if (match := DIRECTORY_NAME.fullmatch(name))]
    skipped: list[str] = []
    for _, name in sorted(found, reverse=True):
        directory = checkpoints / name
        if (reason := incomplete(directory, deep)) is None:
            return Newest(directory, read_completion(directory), tuple(skipped))
        skipped.append(reason)
    return Newest(None, None, tuple(skipped))


def _marker(directory: Path) -> Completion:
    path = directory / MARKER
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        if not directory.is_dir():
            raise _Broken(f"{directory}: no such directory") from None
        raise _Broken(f"{path}: missing, the save did not end") from None
    except OSError as error:
        raise _Broken(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise _Broken(f"{path}: cut or changed, it is not JSON") from None
    version = data.get("v") if isinstance(data, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise _Broken(f"{path}: version {version}, this program reads {VERSION}")
    try:
        return from_plain(Completion, data)
    except NotPlain as error:
        raise _Broken(f"{path}: {error}") from None


def _check_names(directory: Path, completion: Completion) -> None:
    """What the marker must list, and nothing that would be loaded without being listed."""
    marker = directory / MARKER
    if (match := DIRECTORY_NAME.fullmatch(directory.name)) and int(match[1]) != completion.step:
        raise _Broken(f"{marker}: of step {completion.step}, in a directory of another name")
    for name in completion.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or "\0" in name:
            raise _Broken(f"{marker}: {name!r} is no file of this directory")
    needed = [CONFIG]
    if completion.optimizer:
        needed += [optimizer_file(rank) for rank in range(completion.world)]
    if absent := [name for name in needed if name not in completion.files]:
        raise _Broken(f"{marker}: does not list {absent[0]}")
    for name in sorted(os.listdir(directory)):
        if name.endswith((".safetensors", ".index.json")) and name not in completion.files:
            raise _Broken(f"{directory / name}: not of this checkpoint, {MARKER} does not list it")


def _check_size(path: Path, fact: FileFact) -> None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise _Broken(f"{path}: missing") from None
    if not stat.S_ISREG(found.st_mode):
        raise _Broken(f"{path}: not a file")
    if found.st_size != fact.bytes:
        how = "cut short" if found.st_size < fact.bytes else "longer than written"
        raise _Broken(f"{path}: {how}, {found.st_size:,} bytes where {fact.bytes:,} were written")


def _check_weights(directory: Path, completion: Completion) -> None:
    """Headers agree with sizes, and the index with the headers."""
    tensors: dict[str, frozenset[str]] = {}
    for name, fact in completion.files.items():
        if name.endswith(".safetensors"):
            try:
                tensors[name] = tensor_names(directory / name, fact.bytes)
            except BadHeader as error:
                raise _Broken(f"{directory / name}: {error}") from None
    weights = {name: names for name, names in tensors.items() if "/" not in name}
    if INDEX in completion.files:
        _check_index(directory / INDEX, weights)
    elif list(weights) != [ONE_FILE]:
        raise _Broken(f"{directory / MARKER}: lists neither {INDEX} nor {ONE_FILE} alone")


def _check_index(path: Path, weights: Mapping[str, frozenset[str]]) -> None:
    try:
        mapping = json.loads(path.read_bytes())["weight_map"]
        pairs = {(str(tensor), str(name)) for tensor, name in mapping.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _Broken(f"{path}: cut or changed, it has no weight_map") from None
    for tensor, name in sorted(pairs):
        if name not in weights:
            raise _Broken(f"{path}: names {name}, which is not of this checkpoint")
        if tensor not in weights[name]:
            raise _Broken(f"{path}: says that {tensor} is in {name}, and it is not")
    if more := sorted({(tensor, name) for name, tensors in weights.items() for tensor in tensors} - pairs):
        tensor, name = more[0]
        raise _Broken(f"{path}: does not name {tensor} of {name}")


def _check_bytes(directory: Path, completion: Completion) -> None:
    with ThreadPoolExecutor(HASHED_AT_ONCE) as threads:  # hashlib lets go of the interpreter
        digests = threads.map(_sha256, [directory / name for name in completion.files])
        for (name, fact), digest in zip(completion.files.items(), digests, strict=True):
            if digest != fact.sha256:
                raise _Broken(f"{directory / name}: other bytes than were written, its sha256 differs")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
