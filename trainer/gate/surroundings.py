"""What must be the same on every node without being data: versions, code, and the environment that NCCL reads."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Final

LIBRARIES: Final = ("torch", "transformers", "datasets", "tokenizers", "numpy", "safetensors", "wattwatch")
PREFIXES: Final = ("NCCL_", "TORCH_", "GLOO_")


def versions() -> dict[str, str]:
    """Of Python and of the libraries that ranks must share, from their metadata: nothing is imported."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}


def code_sha256() -> str:
    """Of this package's own files."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
