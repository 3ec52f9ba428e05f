"""The child that touches paths for the gate: a hung mount holds this process, and the gate goes on without it.

One request as a line of JSON comes in, lines of JSON go out. It imports next to nothing: it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from array import array
from collections.abc import Iterator
from typing import Any, Final

from trainer.gate.beats import beats_in
from trainer.gate.weights import Shapes, first_difference, parameters, shapes_in

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

    `write` is a name to leave for the others, `expect` the name and content that rank 0 has left; `rate_bytes` are
    written and timed, where they are not 0; `beats` is a directory of heartbeats, or "".
    """
    directory, name = request["directory"], request["write"]
    rate_file = f"{directory}/{name}.rate"
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
        if request["rate_bytes"]:
            answer["write_bytes_per_second"] = write_rate(rate_file, request["rate_bytes"])
    except OSError as error:
        answer["trouble"] = why(error)
    if request["beats"]:
        with contextlib.suppress(OSError):  # a directory that cannot be read is told of above, or is nobody's
            answer["beats"] = beats_in(request["beats"])
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


def write_rate(path: str, count: int) -> float:
    """Bytes a second of one file, synced as a checkpoint's are. Raises OSError."""
    data = memoryview(os.urandom(count))  # nothing that a file system could compress
    begun = time.monotonic()
    try:
        with open(path, "wb", buffering=0) as file:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        return count / max(time.monotonic() - begun, 1e-6)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def write_through(path: str, text: str) -> None:
    from trainer.publish import publish_text

    publish_text(path, text)


def model(request: Answer) -> Iterator[Answer]:
    """Configuration, tokenizer and weights of the model; the checkpoint to resume from."""
    answer: Answer = {}
    config: Answer = {}
    shapes: Shapes = {}
    try:
        if request["config"]:
            with open(request["config"], "rb") as file:
                answer["config_sha256"] = hashlib.sha256(file.read(MAX_TEXT_BYTES)).hexdigest()
        if request["model"]:
            config = model_config(request["model"])
            answer |= model_files(request["model"], config)
            if request["weights"]:
                shapes = shapes_in(request["model"])
                answer["parameters"] = parameters(shapes)
    except (OSError, ValueError) as error:
        answer["trouble"] = why(error) if isinstance(error, OSError) else str(error)
    if request["resume"]:
        answer["resume"] = resumed(request["resume"], shapes, config)
    yield answer


def resumed(directory: str, model_shapes: Shapes, config: Answer) -> Answer:
    """What a ResumeLook holds."""
    from pathlib import Path  # both are slow to import, and seldom needed

    from trainer.checkpoint.complete import incomplete, read_completion

    if trouble := incomplete(Path(directory)):
        return {"directory": directory, "trouble": trouble}
    said = read_completion(Path(directory))
    try:
        other_shape = first_difference(shapes_in(directory), model_shapes, config)
    except (OSError, ValueError) as error:
        return {"directory": directory, "trouble": why(error) if isinstance(error, OSError) else str(error)}
    facts = {name: getattr(said, name) for name in ("step", "tokens", "world", "optimizer", "blocks_sha256")}
    return {"directory": directory, "other_shape": other_shape, **facts}


def model_config(directory: str) -> Answer:
    try:
        with open(f"{directory}/config.json", encoding="utf-8") as file:
            config = json.load(file)
    except ValueError as error:
        raise ValueError(f"{directory}/config.json: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{directory}/config.json: not an object")
    text = config.get("text_config")
    return {**text, **config} if isinstance(text, dict) else config


def model_files(directory: str, config: Answer) -> Answer:
    from trainer.pack.manifest import meaning_sha256

    vocab_size = config.get("vocab_size")
    answer: Answer = {"vocab_size": vocab_size if type(vocab_size) is int else None}
    if os.path.exists(f"{directory}/tokenizer.json"):
        with open(f"{directory}/tokenizer.json", "rb") as binary:
            data = binary.read()
        answer["tokenizer_file_sha256"] = hashlib.sha256(data).hexdigest()
        answer["tokenizer_meaning_sha256"] = meaning_sha256(data)
    weights = [entry.stat().st_size for entry in os.scandir(directory) if entry.name.endswith(".safetensors")]
    answer["weights_bytes"] = sum(weights) or None
    return answer


KINDS: Final = {"shards": shards, "checkpoint": checkpoint, "model": model}
