"""What the end-to-end tests share with those of the commands."""

from __future__ import annotations

from tests.watcher.conftest import shell as shell
