"""Files that are there whole or not at all: written beside, synced, renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO


def fsync_directory(path: str) -> None:
    """Makes a rename in `path` last through a power cut. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_write(path: str) -> Iterator[BinaryIO]:
    """A file to write into; `path` is replaced by it when the block ends well, and untouched when it does not.

    Raises OSError (disk full, not writable). A process that is killed leaves `path` as it was, and beside it a file
    that ends in `.tmp`, which the next attempt writes over.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    fsync_directory(os.path.dirname(path) or ".")


def atomic_write_text(path: str, text: str) -> None:
    """`published`, for a text at hand."""
    with atomic_write(path) as file:
        file.write(text.encode())
