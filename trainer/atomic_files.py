"""Files that readers see complete or not at all: written under a temporary name, synced, renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO


def fsync_directory(path: str) -> None:
    """Makes renames in the directory `path` survive a power failure. Raises OSError.

    fsync of a file alone does not sync its directory entry, see fsync(2).
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_write(path: str) -> Iterator[BinaryIO]:
    """A file to write into. It replaces `path` when the block succeeds; if the block raises, `path` is untouched.

    Raises OSError (disk full, not writable). A process that is killed leaves `path` as it was, and beside it a file
    that ends in `.tmp`, which the next attempt overwrites.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            # Before the rename: ext4 and XFS may otherwise keep the new name with no data after a power failure.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    fsync_directory(os.path.dirname(path) or ".")


def atomic_write_text(path: str, text: str) -> None:
    """Replaces `path` by `text` in UTF-8, as `atomic_write` does. Raises OSError."""
    with atomic_write(path) as file:
        file.write(text.encode())
