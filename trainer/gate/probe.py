"""The child process that accesses paths for the gate: a mount that hangs blocks this process, not the gate.

It reads one request, a line of JSON, from standard input, and prints its answers as lines of JSON. It runs without
site-packages and imports as little as possible, since it has to start in milliseconds.
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

MAX_PIECE_BYTES: Final = 64 * 1024  # head and tail of a token file, as hashed by wattwatch.trainer.pack.manifest
MAX_PIECES: Final = 64  # a manifest lists 18 at most; a damaged one may list more
MAX_TEXT_BYTES: Final = 8 * 1024 * 1024  # manifests and configuration files are far smaller
MAX_HEADER_BYTES: Final = 100_000_000  # the safetensors library's own limit
EMBEDDING_DIMENSIONS: Final = ("hidden_size", "vocab_size")  # of config.json; an embedding is vocab_size x hidden_size
VOCABULARY_TENSORS: Final = ("lm_head.weight", "model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
JsonObject = dict[str, Any]
TensorShapes = dict[str, tuple[int, ...]]


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
    """Type of the file system that contains `path`, such as "xfs" or "nfs4"; "" if it cannot be determined."""
    path, longest, kind = os.path.realpath(path), "", ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                mount_point = before.split()[4].replace("\\040", " ")  # spaces are written in octal
                inside = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
                # >=: of two mounts on the same point, the later one hides the earlier one
                if inside and len(mount_point) >= len(longest):
                    longest, kind = mount_point, after.split()[0]
    except OSError:
        return ""
    return kind


def probe_shards(request: JsonObject) -> Iterator[JsonObject]:
    """Each rank's token file and manifest. One answer per rank, so that those before a path that hangs get through."""
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
        # Even without a manifest: its size alone decides whether the block count is known.
        try:
            answer |= inspect_token_file(path, answer.get("manifest_text", "{}"))
        except (OSError, ValueError, TypeError, KeyError) as error:
            answer["trouble"] = "no such file" if isinstance(error, FileNotFoundError) else describe_error(error)
        yield answer


def inspect_token_file(path: str, manifest_text: str) -> JsonObject:
    """Size of a token file, which of its hashed pieces differ from the manifest, and the range of ids in them.

    At most 192 KiB are read, however large the file: the gate has to be quick on a full node.
    """
    try:
        samples = [(s["offset"], s["bytes"], s["sha256"]) for s in json.loads(manifest_text).get("samples", [])]
    except (ValueError, TypeError, KeyError, AttributeError):
        samples = []  # the gate parses the manifest itself and reports what is wrong with it
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        ids = array("i")
        differing = []
        # Head and tail even without a manifest; & ~3 keeps the offset on a whole id.
        edges = [(0, MAX_PIECE_BYTES, None), (max(0, size - MAX_PIECE_BYTES) & ~3, MAX_PIECE_BYTES, None)]
        for offset, length, sha256 in [*samples[:MAX_PIECES], *edges]:
            data = os.pread(file.fileno(), min(length, MAX_PIECE_BYTES), offset)
            if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
                differing.append(offset)
            ids.frombytes(data[: len(data) & ~3])
    if sys.byteorder == "big":  # token files are little-endian
        ids.byteswap()
    return {
        "size_bytes": size,
        "differing_offsets": differing,
        "min_id": min(ids, default=None),
        "max_id": max(ids, default=None),
    }


def probe_checkpoint(request: JsonObject) -> Iterator[JsonObject]:
    """Writes a file as a save would: under a temporary name, synced, renamed.

    `write` and `content` are the file's name and content. With `hold` (rank 0) it remains, as a mark for the other
    nodes, until standard input ends; then gate.json may follow as a second request. `expect` is the name and content
    of rank 0's mark. `rate_bytes` are written and timed unless 0. `beats` is the heartbeat directory, or "".
    """
    directory, name = request["directory"], request["write"]
    answer: JsonObject = {}
    written = None
    try:
        if request["create"]:
            os.makedirs(directory, exist_ok=True)
        answer["filesystem"] = filesystem_type(directory)
        space = os.statvfs(directory)
        answer["free_bytes"] = space.f_bavail * space.f_frsize  # f_bavail: without the blocks reserved for root
        if request["expect"]:
            answer["sees_rank_0"] = reads_mark(directory, *request["expect"])
        write_atomically(f"{directory}/{name}", request["content"])
        written = f"{directory}/{name}"
        if request["rate_bytes"]:
            answer["write_bytes_per_second"] = measure_write_rate(f"{directory}/{name}.rate", request["rate_bytes"])
    except OSError as error:
        answer["trouble"] = describe_error(error)
    if request["beats"]:
        from dataclasses import asdict

        from wattwatch.trainer.run_directory import find_live_heartbeats  # slow to import, and only needed here

        with contextlib.suppress(OSError):  # an unreadable run directory was reported above, or contains no ranks
            answer["beats"] = [asdict(heartbeat) for heartbeat in find_live_heartbeats(request["beats"])]
    # Other nodes only prove that they can write; their files would pile up in the run directory.
    if not request["hold"] and written:
        os.unlink(written)
        written = None
    try:
        yield answer
        while request["hold"] and (line := sys.stdin.readline()):
            publication = json.loads(line)
            try:
                write_atomically(publication["path"], publication["text"])
                yield {"published": publication["path"]}
            except OSError as error:
                yield {"trouble": describe_error(error)}
    finally:  # also if the gate is killed: then standard input ends, and the mark goes
        if written:
            with contextlib.suppress(OSError):
                os.unlink(written)


def reads_mark(directory: str, name: str, content: str) -> bool:
    # The name is new and random: an NFS client cannot have cached that it does not exist (KempnerForge#49).
    try:
        with open(f"{directory}/{name}", encoding="utf-8") as file:
            return file.read(4096) == content
    except FileNotFoundError:
        return False


def measure_write_rate(path: str, count: int) -> float:
    """Bytes per second of one file of `count` bytes, synced as a checkpoint's files are. Raises OSError."""
    data = memoryview(os.urandom(count))  # random: a file system that compresses would be measured too fast
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
    """The model's configuration, tokenizer and weights, and the checkpoint to resume from: fields of a ModelReport."""
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
    """The fields of a ResumeReport."""
    from pathlib import Path  # this and the next are slow to import, and only needed for a resume

    from wattwatch.trainer.checkpoint.complete import read_completion, why_incomplete

    if trouble := why_incomplete(Path(directory)):
        return {"directory": directory, "trouble": trouble}
    completion = read_completion(Path(directory))
    try:
        other_shape = first_shape_difference(read_tensor_shapes(directory), model_shapes, config)
    except (OSError, ValueError) as error:
        return {"directory": directory, "trouble": describe_error(error) if isinstance(error, OSError) else str(error)}
    fields = {name: getattr(completion, name) for name in ("step", "tokens", "world", "optimizer", "blocks_sha256")}
    return {"directory": directory, "other_shape": other_shape, **fields}


def read_model_config(directory: str) -> JsonObject:
    """config.json; the language model's part of a multimodal one (`text_config`) is merged into it."""
    try:
        with open(f"{directory}/config.json", encoding="utf-8") as file:
            config = json.load(file)
    except ValueError as error:
        raise ValueError(f"{directory}/config.json: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{directory}/config.json: not a JSON object")
    text_config = config.get("text_config")
    return {**text_config, **config} if isinstance(text_config, dict) else config


def inspect_model_files(directory: str, config: JsonObject) -> JsonObject:
    from wattwatch.trainer.pack.manifest import canonical_tokenizer_sha256

    vocab_size = config.get("vocab_size")
    answer: JsonObject = {"vocab_size": vocab_size if type(vocab_size) is int else None}
    if os.path.exists(f"{directory}/tokenizer.json"):
        with open(f"{directory}/tokenizer.json", "rb") as file:
            data = file.read()
        answer["tokenizer_file_sha256"] = hashlib.sha256(data).hexdigest()
        answer["tokenizer_meaning_sha256"] = canonical_tokenizer_sha256(data)
    weights = [entry.stat().st_size for entry in os.scandir(directory) if entry.name.endswith(".safetensors")]
    answer["weights_bytes"] = sum(weights) or None
    return answer


# Tensor shapes from the headers of safetensors files, without reading a tensor.
# Format: https://huggingface.co/docs/safetensors (header length in 8 bytes little-endian, then the header as JSON).


def read_tensor_shapes(directory: str) -> TensorShapes:
    """Shape of every tensor in `directory`; {} if there are no weights.

    Raises OSError, and ValueError for a file that is not safetensors.
    """
    shapes: TensorShapes = {}
    for name in sorted(os.listdir(directory)):
        if name.endswith(".safetensors"):
            shapes |= _read_file_shapes(f"{directory}/{name}")
    return shapes


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
        raise ValueError(f"{path}: no valid safetensors header: the file is truncated or damaged") from None


def count_parameters(shapes: TensorShapes) -> int | None:
    return sum(map(prod, shapes.values())) or None


def first_shape_difference(saved: TensorShapes, model: TensorShapes, config: JsonObject) -> str | None:
    """The first tensor of a checkpoint whose shape is not the model's.

    If the model has no weights, the embeddings are compared with its config.json. An output layer that shares its
    weights with the embedding may be stored in only one of the two.
    """
    for name in sorted(saved.keys() | model.keys()) if model else ():
        ours, theirs = saved.get(name), model.get(name)
        is_tied = name == VOCABULARY_TENSORS[0] and config.get("tie_word_embeddings") and None in (ours, theirs)
        if ours == theirs or is_tied:
            continue
        return f"tensor {name} {_describe_shape(ours)} in the checkpoint, but {_describe_shape(theirs)} in the model"
    expected = tuple(config.get(key) for key in reversed(EMBEDDING_DIMENSIONS))
    for name in VOCABULARY_TENSORS:
        if not model and name in saved and None not in expected and saved[name] != expected:
            shape = _format_shape(saved[name])
            return (
                f"tensor {name} has shape {shape} in the checkpoint, but the model's config.json says "
                f"{_format_shape(expected)}"
            )
    return None


def _describe_shape(shape: tuple[int, ...] | None) -> str:
    return "is missing" if shape is None else f"has shape {_format_shape(shape)}"


def _format_shape(shape: tuple[int | None, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


PROBES: Final = {"shards": probe_shards, "checkpoint": probe_checkpoint, "model": probe_model}
