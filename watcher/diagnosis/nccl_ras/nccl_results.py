"""ncclResult in words."""

from __future__ import annotations

import tomllib
from importlib.resources import files

OK = 0
REMOTE_ERROR = 6  # another process failed: this one is a witness
IN_PROGRESS = 7
UNKNOWN_RESULT = -1

_RESULTS = tomllib.loads(files(__package__).joinpath("nccl_results.toml").read_text("utf-8"))["result"]
_WORDS: dict[int, str] = {result["code"]: result["words"] for result in _RESULTS}
_CODES: dict[str, int] = {result["text"].lower(): result["code"] for result in _RESULTS}


def describe_result(code: int) -> str:
    """What an ncclResult means, with its number."""
    if code == UNKNOWN_RESULT:
        return "an error without a known name"
    return f"{_WORDS.get(code, 'an unknown result')} (ncclResult {code})"


def result_code(text: str) -> int:
    """The ncclResult of the words that RAS prints; UNKNOWN for others."""
    return _CODES.get(text.strip().lower(), UNKNOWN_RESULT)


def is_error(code: int) -> bool:
    return code not in (OK, IN_PROGRESS)
