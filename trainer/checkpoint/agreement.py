"""One word of every rank to every rank: a save goes on when nobody has failed, and ends everywhere otherwise."""

from __future__ import annotations

import errno
import platform
from typing import Any, Final, TypeVar

import torch.distributed as dist

T = TypeVar("T")
NAMED_AT_ONCE: Final = 3
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SaveFailed(Exception):
    """No checkpoint came of it, on any rank. Its text is what the user reads, whole.

    The job may be started again: it goes on from the last complete checkpoint.
    """


def reason_of(error: Exception, rank: int) -> str:
    """What a rank tells the others of its failure: who, where, what, and what to do."""
    who = f"rank {rank} on {platform.node()}"
    if not isinstance(error, OSError):
        return f"{who}: {type(error).__name__}: {error}"
    what = f"{who}: {error.filename or 'a file'}: {error.strerror or error}"
    if error.errno in NO_ROOM:
        return f"{what}; make room (or lower checkpoint.keep) and start again"
    return what


def agree(group: dist.ProcessGroup, reason: str | None, word: T) -> list[T]:
    """Every rank's `word`, in order. Raises SaveFailed on all ranks where one came with a reason.

    Every rank must come here, whatever has happened to it; one that does not lets the others wait for the group's
    timeout.
    """
    answers: list[Any] = [None] * group.size()
    dist.all_gather_object(answers, (reason, word), group=group)
    if reasons := [reason for reason, _ in answers if reason]:
        more = f" (and {len(reasons) - NAMED_AT_ONCE} more ranks)" if len(reasons) > NAMED_AT_ONCE else ""
        raise SaveFailed("; ".join(reasons[:NAMED_AT_ONCE]) + more)
    return [word for _, word in answers]
