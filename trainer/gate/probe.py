"""Shapes in a directory of safetensors, from the files' headers: no tensor is read.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian, then JSON). Standard library only.
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
from math import prod
from typing import Any, Final

from wattwatch.trainer.run_directory import find_live_heartbeats

MAX_HEADER_BYTES: Final = 100_000_000  # the library's own limit
EMBEDDING_DIMENSIONS: Final = ("hidden_size", "vocab_size")
VOCABULARY_TENSORS: Final = ("lm_head.weight", "model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
TensorShapes = dict[str, tuple[int, ...]]


def read_tensor_shapes(directory: str) -> TensorShapes:
    """Of every tensor; {} where there are no weights. Raises OSError, and ValueError for a header that is none."""
    found: TensorShapes = {}
    for name in sorted(os.listdir(directory)):
        if name.endswith(".safetensors"):
            found |= _read_file_shapes(f"{directory}/{name}")
    return found


def _read_file_shapes(path: str) -> TensorShapes:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path}: not a safetensors file")
        data = file.read(length)
    try:
        header = json.loads(data)
        return {name: tuple(map(int, item["shape"])) for name, item in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{path}: cut or changed, it has no safetensors header") from None


def count_parameters(shapes: TensorShapes) -> int | None:
    return sum(map(prod, shapes.values())) or None


def first_shape_difference(saved: TensorShapes, model: TensorShapes, config: dict[str, Any]) -> str | None:
    """The first tensor of a checkpoint that is not as the model's; where that has no weights, as its config says.

    A head that is tied to the embedding may stand in one of the two only.
    """
    for name in sorted(saved.keys() | model.keys()) if model else ():
        mine, other = saved.get(name), model.get(name)
        if mine == other or (
            name == VOCABULARY_TENSORS[0] and config.get("tie_word_embeddings") and None in (mine, other)
        ):
            continue
        return f"{name} is {_describe_shape(mine)} there and {_describe_shape(other)} in the model"
    wanted = tuple(config.get(key) for key in reversed(EMBEDDING_DIMENSIONS))
    for name in VOCABULARY_TENSORS:
        if not model and name in saved and None not in wanted and saved[name] != wanted:
            return f"{name} is {_describe_shape(saved[name])} there, the model's config.json says {list(wanted)}"
    return None


def _describe_shape(shape: tuple[int, ...] | None) -> str:
    return "not" if shape is None else str(list(shape))


# The child that touches paths for the gate: a hung mount holds this process, and the gate goes on without it.
#
# One request as a line of JSON comes in, lines of JSON go out. It imports next to nothing: it starts in milliseconds.

MAX_PIECE_BYTES: Final = 64 * 1024
MAX_PIECES: Final = 64
MAX_TEXT_BYTES: Final = 8 * 1024 * 1024
JsonObject = dict[str, Any]


def main() -> None:
    request = json.loads(sys.stdin.readline())
    for answer in PROBES[request["kind"]](request):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def describe_error(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def filesystem_type(path: str) -> str:
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


def probe_shards(request: JsonObject) -> Iterator[JsonObject]:
    """Each rank's file and manifest, one answer a rank: those before a path that hangs are known."""
    kind = ""
    with contextlib.suppress(OSError):
        kind = filesystem_type(request["directory"])
    for rank, path, manifest, starts in request["files"]:
        answer: JsonObject = {"rank": rank, "filesystem": kind}
        try:
            with contextlib.suppress(FileNotFoundError):
                answer["starts_bytes"] = os.stat(starts).st_size
            with open(manifest, "rb") as file:
                answer["manifest_text"] = file.read(MAX_TEXT_BYTES).decode()
        except (OSError, ValueError) as error:
            answer["trouble"] = "no manifest" if isinstance(error, FileNotFoundError) else describe_error(error)
        try:
            answer |= inspect_token_file(path, answer.get("manifest_text", "{}"))
        except (OSError, ValueError, TypeError, KeyError) as error:
            answer["trouble"] = "no such file" if isinstance(error, FileNotFoundError) else describe_error(error)
        yield answer


def inspect_token_file(path: str, manifest_text: str) -> JsonObject:
    """Size of a token file, which of its hashed pieces differ, and the range of ids in them."""
    try:
        wanted = [(s["offset"], s["bytes"], s["sha256"]) for s in json.loads(manifest_text).get("samples", [])]
    except (ValueError, TypeError, KeyError, AttributeError):
        wanted = []  # whoever decodes the manifest says what is wrong with it
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        ids = array("i")
        differing = []
        edges = [(0, MAX_PIECE_BYTES, None), (max(0, size - MAX_PIECE_BYTES) & ~3, MAX_PIECE_BYTES, None)]
        for offset, length, sha256 in [*wanted[:MAX_PIECES], *edges]:
            data = os.pread(file.fileno(), min(length, MAX_PIECE_BYTES), offset)
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


def probe_checkpoint(request: JsonObject) -> Iterator[JsonObject]:
    """Writes as a save would: beside, synced, renamed. Holds rank 0's mark until standard input ends.

    `write` is a name to leave for the others, `expect` the name and content that rank 0 has left; `rate_bytes` are
    written and timed, where they are not 0; `beats` is a directory of heartbeats, or "".
    """
    directory, name = request["directory"], request["write"]
    rate_file = f"{directory}/{name}.rate"
    answer: JsonObject = {}
    written = None
    try:
        if request["create"]:
            os.makedirs(directory, exist_ok=True)
        answer["filesystem"] = filesystem_type(directory)
        space = os.statvfs(directory)
        answer["free_bytes"] = space.f_bavail * space.f_frsize
        if request["expect"]:
            answer["sees_rank_0"] = reads_mark(directory, *request["expect"])
        write_atomically(f"{directory}/{name}", request["content"])
        written = f"{directory}/{name}"
        if request["rate_bytes"]:
            answer["write_bytes_per_second"] = measure_write_rate(rate_file, request["rate_bytes"])
    except OSError as error:
        answer["trouble"] = describe_error(error)
    if request["beats"]:
        with contextlib.suppress(OSError):  # a directory that cannot be read is told of above, or is nobody's
            answer["beats"] = find_live_heartbeats(request["beats"])
    if not request["hold"] and written:
        os.unlink(written)
        written = None
    try:
        yield answer
        while request["hold"] and (line := sys.stdin.readline()):
            order = json.loads(line)
            try:
                write_atomically(order["path"], order["text"])
                yield {"published": order["path"]}
            except OSError as error:
                yield {"trouble": describe_error(error)}
    finally:
        if written:
            with contextlib.suppress(OSError):
                os.unlink(written)


def reads_mark(directory: str, name: str, content: str) -> bool:
    # A name never asked for before: an NFS client has no cached "not there" for it (KempnerForge#49).
    try:
        with open(f"{directory}/{name}", encoding="utf-8") as file:
            return file.read(4096) == content
    except FileNotFoundError:
        return False


def measure_write_rate(path: str, count: int) -> float:
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


def write_atomically(path: str, text: str) -> None:
    from wattwatch.trainer.atomic_files import atomic_write_text

    atomic_write_text(path, text)


def probe_model(request: JsonObject) -> Iterator[JsonObject]:
    """Configuration, tokenizer and weights of the model; the checkpoint to resume from."""
    answer: JsonObject = {}
    config: JsonObject = {}
    shapes: TensorShapes = {}
    try:
        if request["config"]:
            with open(request["config"], "rb") as file:
                answer["config_sha256"] = hashlib.sha256(file.read(MAX_TEXT_BYTES)).hexdigest()
        if request["model"]:
            config = read_model_config(request["model"])
            answer |= inspect_model_files(request["model"], config)
            if request["weights"]:
                shapes = read_tensor_shapes(request["model"])
                answer["parameters"] = count_parameters(shapes)
    except (OSError, ValueError) as error:
        answer["trouble"] = describe_error(error) if isinstance(error, OSError) else str(error)
    if request["resume"]:
        answer["resume"] = probe_resume(request["resume"], shapes, config)
    yield answer


def probe_resume(directory: str, model_shapes: TensorShapes, config: JsonObject) -> JsonObject:
    """What a ResumeLook holds."""
    from pathlib import Path  # both are slow to import, and seldom needed

    from wattwatch.trainer.checkpoint.complete import read_completion, why_incomplete

    if trouble := why_incomplete(Path(directory)):
        return {"directory": directory, "trouble": trouble}
    said = read_completion(Path(directory))
    try:
        other_shape = first_shape_difference(read_tensor_shapes(directory), model_shapes, config)
    except (OSError, ValueError) as error:
        return {"directory": directory, "trouble": describe_error(error) if isinstance(error, OSError) else str(error)}
    facts = {name: getattr(said, name) for name in ("step", "tokens", "world", "optimizer", "blocks_sha256")}
    return {"directory": directory, "other_shape": other_shape, **facts}


def read_model_config(directory: str) -> JsonObject:
    try:
        with open(f"{directory}/config.json", encoding="utf-8") as file:
            config = json.load(file)
    except ValueError as error:
        raise ValueError(f"{directory}/config.json: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{directory}/config.json: not an object")
    text = config.get("text_config")
    return {**text, **config} if isinstance(text, dict) else config


def inspect_model_files(directory: str, config: JsonObject) -> JsonObject:
    from wattwatch.trainer.pack.manifest import canonical_tokenizer_sha256

    vocab_size = config.get("vocab_size")
    answer: JsonObject = {"vocab_size": vocab_size if type(vocab_size) is int else None}
    if os.path.exists(f"{directory}/tokenizer.json"):
        with open(f"{directory}/tokenizer.json", "rb") as binary:
            data = binary.read()
        answer["tokenizer_file_sha256"] = hashlib.sha256(data).hexdigest()
        answer["tokenizer_meaning_sha256"] = canonical_tokenizer_sha256(data)
    weights = [entry.stat().st_size for entry in os.scandir(directory) if entry.name.endswith(".safetensors")]
    answer["weights_bytes"] = sum(weights) or None
    return answer


PROBES: Final = {"shards": probe_shards, "checkpoint": probe_checkpoint, "model": probe_model}
