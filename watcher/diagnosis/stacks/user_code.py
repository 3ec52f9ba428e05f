"""Which lines of a stack are the job's own code, and which belong to Python, torch or another library. Pure.

Used for the stacks in flight records, for the threads of a rank, and for tracebacks in logs.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import resources
from pathlib import PurePosixPath
from typing import Final, Protocol, TypeVar

LIBRARY_PATH: Final = re.compile(
    r"(^|/)(site-packages|dist-packages)/|(^|/)lib/(python3|python3\.\d+)/|<|\.so(\.\d+)*$"
    # torch built from source lies outside site-packages
    r"|(^|/)torch/(distributed|nn|autograd|utils|optim|multiprocessing|cuda|_\w+|serialization|functional|amp)\b"
)
STANDARD_LIBRARY_PATH: Final = re.compile(r"(^|/)lib/python3[^/]*/(?!(site|dist)-packages/)|<")
PATH_CACHE_SIZE: Final = 4096  # the stacks of a job hold a few hundred different paths, each thousands of times


class SourceLine(Protocol):
    """A frame of a stack or of a flight record."""

    @property
    def file(self) -> str: ...


FrameType = TypeVar("FrameType", bound=SourceLine)


@cache
def known_libraries() -> frozenset[str]:
    return frozenset(
        tomllib.loads(resources.files(__package__).joinpath("user_code.toml").read_text("utf-8"))["libraries"]
    )


@lru_cache(maxsize=PATH_CACHE_SIZE)
def is_library(file: str) -> bool:
    path = file.replace("\\", "/")
    return LIBRARY_PATH.search(path) is not None or _is_shortened_library_path(path)


def _is_shortened_library_path(path: str) -> bool:
    """py-spy removes the sys.path entry from paths: `threading.py`, `transformers/trainer.py`."""
    if path.startswith("/"):
        return False
    first, *rest = PurePosixPath(path).parts or ("",)
    name = first.removesuffix(".py")
    return (bool(rest) and first in known_libraries()) or (name in sys.stdlib_module_names and name != "test")


def innermost_user_frame(frames: Sequence[FrameType]) -> FrameType | None:
    """The innermost frame of the job's own code; `frames` innermost first.

    If all frames are in site-packages, the innermost one of a package that is not in user_code.toml: the training
    program was installed.
    """
    own = next((frame for frame in frames if not is_library(frame.file)), None)
    return own or next((frame for frame in frames if _may_be_installed_program(frame.file)), None)


@lru_cache(maxsize=PATH_CACHE_SIZE)
def _may_be_installed_program(file: str) -> bool:
    package = re.split(r"(?:site|dist)-packages/", file.replace("\\", "/"))[-1].partition("/")[0]
    known = package in known_libraries() or _is_shortened_library_path(file) or ".so" in file
    return not known and STANDARD_LIBRARY_PATH.search(file) is None
