"""A real sshd with a fleet on it: one for all tests of a module, as a watcher has one for all its captures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collectors.ssh.real_sshd import site
from tests.collectors.ssh.running_fleet import RunningFleet, running_fleet


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with site(tmp_path_factory.mktemp("site")) as here:
        here.server()
        with running_fleet(here.settings()) as watch:
            watch.until_lines(1)
            yield watch
            assert watch.link().logins == 1, "no capture cost the connection"
