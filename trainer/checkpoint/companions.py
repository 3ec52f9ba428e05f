"""What a model directory holds besides weights, so that a checkpoint is used like the model that it came from."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer.checkpoint.complete import CONFIG
from trainer.refusal import Refusal

# Names of tokenizers' own files differ by their kind: BPE, unigram, tiktoken, Mistral's tekken.
PATTERNS: Final = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)


def read_companions(source_model: Path) -> dict[str, bytes]:
    """Configuration, tokenizer, chat templates and generation settings of `source_model`, by name. Raises Refusal.

    Read once, when a job starts: a model directory that goes away later must not cost a checkpoint.
    """
    try:
        found = {CONFIG: (source_model / CONFIG).read_bytes()}
        for path in sorted([*source_model.iterdir(), *source_model.glob("additional_chat_templates/*")]):
            name = path.relative_to(source_model).as_posix()
            if any(fnmatch(name, pattern) for pattern in PATTERNS) and path.is_file():
                found[name] = path.read_bytes()
        if not isinstance(json.loads(found[CONFIG]), dict):
            raise ValueError
    except OSError as error:
        raise Refusal(
            f"{error.filename or source_model}: {error.strerror or error}; is it a model's directory?"
        ) from None
    except ValueError:
        raise Refusal(f"{source_model / CONFIG}: not a JSON object") from None
    return found


def saved_config(source: bytes, model: nn.Module) -> bytes:
    """`source` with the precision of the saved weights; every other key stays as its makers wrote it, so that whatever
    reads the model reads the checkpoint."""
    config = json.loads(source)
    known = "torch_dtype" if "torch_dtype" in config else "dtype"  # transformers before 4.56, and since
    config[known] = "bfloat16"
    if not config.get("architectures"):
        config["architectures"] = [_class_name(model)]
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _class_name(model: nn.Module) -> str:
    """fully_shard puts a class of its own before the model's."""
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
