"""Real components that tests run against: absent ones skip with a reason, or fail where all must be there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


def require_tool(name: str) -> str:
    """Path of a system program. Skips the test where it is missing; fails it under WATTWATCH_REQUIRE_ALL_TOOLS=1."""
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        reason = f"{name} is not installed: .ci/run names the package that brings it"
        if os.environ.get("WATTWATCH_REQUIRE_ALL_TOOLS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return str(Path(path))
