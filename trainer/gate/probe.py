"""The child that touches paths for the gate: a hung mount holds this process, and the gate goes on without it.

One request as a line of JSON comes in, lines of JSON go out. It imports next to nothing: it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from array import array
from collections.abc import Iterator
from typing import Any, Final

EDGE_BYTES: Final = 64 * 1024
MAX_PIECES: Final = 64
MAX_TEXT_BYTES: Final = 8 * 1024 * 1024
Answer = dict[str, Any]


def main() -> None:
    request = json.loads(sys.stdin.readline())
    for answer in KINDS[request["kind"]](request):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def why(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def filesystem(path: str) -> str:
    """Type of the mount that `path` is on; "" where nobody says."""
    path, best, kind = os.path.realpath(path), "", ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                point = before.split()[4].replace("\\040", " ")
                inside = path == point or path.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):  # the last of equals lies on top
                    best, kind = point, after.split()[0]
    except OSError:
        return ""
    return kind


def shards(request: Answer) -> Iterator[Answer]:
    """Each rank's file and manifest, one answer a rank: those before a path that hangs are known."""
    kind = ""
    with contextlib.suppress(OSError):
        kind = filesystem(request["directory"])
    for rank, path, manifest, starts in request["files"]:
        answer: Answer = {"rank": rank, "filesystem": kind}
        try:
            with contextlib.suppress(FileNotFoundError):
                answer["starts_bytes"] = os.stat(starts).st_size
            with open(manifest, "rb") as file:
                answer["manifest_text"] = file.read(MAX_TEXT_BYTES).decode()
        except (OSError, ValueError) as error:
            answer["trouble"] = "no manifest" if isinstance(error, FileNotFoundError) else why(error)
        try:
            answer |= pieces(path, answer.get("manifest_text", "{}"))
        except (OSError, ValueError, TypeError, KeyError) as error:
            answer["trouble"] = "no such file" if isinstance(error, FileNotFoundError) else why(error)
        yield answer


def pieces(path: str, manifest_text: str) -> Answer:
    """Size of a token file, which of its hashed pieces differ, and the range of ids in them."""
    try:
        wanted = [(s["offset"], s["bytes"], s["sha256"]) for s in json.loads(manifest_text).get("samples", [])]
    except (ValueError, TypeError, KeyError, AttributeError):
        wanted = []  # whoever decodes the manifest says what is wrong with it
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        ids = array("i")
        differing = []
        edges = [(0, EDGE_BYTES, None), (max(0, size - EDGE_BYTES) & ~3, EDGE_BYTES, None)]
        for offset, length, sha256 in [*wanted[:MAX_PIECES], *edges]:
            data = os.pread(file.fileno(), min(length, EDGE_BYTES), offset)
            if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
                differing.append(offset)
            ids.frombytes(data[: len(data) & ~3])
    if sys.byteorder == "big":
        ids.byteswap()
    return {
        "size_bytes": size,
        "differing_offsets": differing,
        "min_id": min(ids, default=None),
        "max_id": max(ids, default=None),
    }


def checkpoint(request: Answer) -> Iterator[Answer]:
    """Writes as a save would: beside, synced, renamed. Holds rank 0's mark until standard input ends.

    `write` is a name to leave for the others, `expect` the name and content that rank 0 has left.
    """
    directory, name = request["directory"], request["write"]
    answer: Answer = {}
    written = None
    try:
        if request["create"]:
            os.makedirs(directory, exist_ok=True)
        answer["filesystem"] = filesystem(directory)
        space = os.statvfs(directory)
        answer["free_bytes"] = space.f_bavail * space.f_frsize
        if request["expect"]:
            answer["sees_rank_0"] = sees(directory, *request["expect"])
        write_through(f"{directory}/{name}", request["content"])
        written = f"{directory}/{name}"
    except OSError as error:
        answer["trouble"] = why(error)
    if not request["hold"] and written:
        os.unlink(written)
        written = None
    try:
        yield answer
        while request["hold"] and (line := sys.stdin.readline()):
            order = json.loads(line)
            try:
                write_through(order["path"], order["text"])
                yield {"published": order["path"]}
            except OSError as error:
                yield {"trouble": why(error)}
    finally:
        if written:
            with contextlib.suppress(OSError):
                os.unlink(written)


def sees(directory: str, name: str, content: str) -> bool:
    # A name never asked for before: an NFS client has no cached "not there" for it (KempnerForge#49).
    try:
        with open(f"{directory}/{name}", encoding="utf-8") as file:
            return file.read(4096) == content
    except FileNotFoundError:
        return False


def write_through(path: str, text: str) -> None:
    from trainer.publish import publish_text

    publish_text(path, text)


def model(request: Answer) -> Iterator[Answer]:
    """Configuration, tokenizer and size of the model; the checkpoint to resume from."""
    answer: Answer = {"resume": request["resume"]}
    try:
        if request["config"]:
            with open(request["config"], "rb") as file:
                answer["config_sha256"] = hashlib.sha256(file.read(MAX_TEXT_BYTES)).hexdigest()
        if request["model"]:
            answer |= model_files(request["model"])
    except (OSError, ValueError) as error:
        answer["trouble"] = why(error)
    if request["resume"]:
        try:
            incomplete(request["resume"])
        except (OSError, ValueError) as error:
            answer["resume_trouble"] = why(error) if isinstance(error, OSError) else str(error)
    yield answer


def model_files(directory: str) -> Answer:
    from trainer.manifest import meaning_sha256

    with open(f"{directory}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    if not isinstance(config, dict):
        raise ValueError(f"{directory}/config.json is not an object")
    text_config = config.get("text_config")
    vocab_size = config.get("vocab_size", text_config.get("vocab_size") if isinstance(text_config, dict) else None)
    answer: Answer = {"vocab_size": vocab_size if type(vocab_size) is int else None}
    if os.path.exists(f"{directory}/tokenizer.json"):
        with open(f"{directory}/tokenizer.json", "rb") as binary:
            data = binary.read()
        answer["tokenizer_file_sha256"] = hashlib.sha256(data).hexdigest()
        answer["tokenizer_meaning_sha256"] = meaning_sha256(data)
    weights = [entry.stat().st_size for entry in os.scandir(directory) if entry.name.endswith(".safetensors")]
    answer["weights_bytes"] = sum(weights) or None
    return answer


def incomplete(directory: str) -> None:
    """Raises OSError or ValueError with the reason why a checkpoint cannot be resumed from.

    A safetensors file states its own length: eight bytes, the header, the end of the last tensor.
    """
    if not os.path.exists(f"{directory}/COMPLETE.json"):
        raise ValueError(f"{directory}: no COMPLETE.json, the save did not end")
    names = {name for name in os.listdir(directory) if name.endswith(".safetensors")}
    index = f"{directory}/model.safetensors.index.json"
    if os.path.exists(index):
        with open(index, encoding="utf-8") as file:
            named = json.load(file)
        if not isinstance(named, dict) or not isinstance(named.get("weight_map"), dict):
            raise ValueError(f"{index}: no weight_map")
        names |= set(named["weight_map"].values())
    if not names:
        raise ValueError(f"{directory}: no safetensors file")
    for name in sorted(names):
        path = f"{directory}/{name}"
        with open(path, "rb") as binary:
            size = os.fstat(binary.fileno()).st_size
            length = int.from_bytes(binary.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError(f"{path}: {size:,} bytes, cut off in its header")
            header = json.loads(binary.read(length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        if size != 8 + length + max(ends, default=0):
            raise ValueError(f"{path}: {size:,} bytes, its header says {8 + length + max(ends, default=0):,}")


KINDS: Final = {"shards": shards, "checkpoint": checkpoint, "model": model}
