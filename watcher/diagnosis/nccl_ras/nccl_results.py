"""ncclResult_t codes in words. Data: `nccl_results.toml`."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Final

OK: Final = 0
REMOTE_ERROR: Final = 6  # another process failed, and this one noticed
IN_PROGRESS: Final = 7
UNKNOWN_RESULT: Final = -1

_RESULTS = tomllib.loads(files(__package__).joinpath("nccl_results.toml").read_text("utf-8"))["result"]
_WORDS: dict[int, str] = {result["code"]: result["words"] for result in _RESULTS}
_CODES: dict[str, int] = {result["text"].lower(): result["code"] for result in _RESULTS}


def describe_result(code: int) -> str:
    """`CUDA error (ncclResult 1)`"""
    if code == UNKNOWN_RESULT:
        return "unknown error"
    return f"{_WORDS.get(code, 'unknown result')} (ncclResult {code})"


def result_code(text: str) -> int:
    """The code for a phrase that RAS prints; UNKNOWN_RESULT for any other text."""
    return _CODES.get(text.strip().lower(), UNKNOWN_RESULT)


def is_error(code: int) -> bool:
    """Neither success nor in progress."""
    return code not in (OK, IN_PROGRESS)
