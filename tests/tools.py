"""What all tests share: the limit that ends a hung test, and real components (absent ones skip with a reason)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

DEADLINE_SECONDS: Final = 600.0
"""How long a test waits for what must happen. It only ends a test that hangs: no result depends on the speed."""


def require_tool(name: str) -> str:
    """Path of a system program. Skips the test where it is missing; fails it under WATTWATCH_REQUIRE_ALL_TOOLS=1."""
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        import pytest  # here: programs that a test starts need only the limit above, and are to start quickly

        reason = f"{name} is not installed: .ci/run names the package that brings it"
        if os.environ.get("WATTWATCH_REQUIRE_ALL_TOOLS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return str(Path(path))
