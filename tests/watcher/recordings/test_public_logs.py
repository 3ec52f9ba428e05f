"""Public logs of healthy jobs, in every form in which people have logs: nothing untrue is said of any of them.

Needs the public logs beside the checkout. More of the same: `python -m tests.watcher.recordings.log_stress`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.watcher.recordings.log_stress import all_variations, judge, read_logs
from wattwatch.watcher.recordings.inputs import read_input_file
from wattwatch.watcher.recordings.replay import replay

LOGS = Path(__file__).parents[4] / "shared" / "corpus" / "timeseries"
MOST_CHANGES = 40

pytestmark = pytest.mark.skipif(not LOGS.is_dir(), reason="the public logs are not laid beside this checkout")


def test_nothing_untrue_is_said_of_any_form_of_a_public_log() -> None:
    untrue = []
    for name, variation in all_variations(read_logs(LOGS), seed=1, limit=120, count=30):
        outcome = judge(variation)
        untrue += [f"{name}, {variation.name}: {text}" for text in outcome.untrue]
        if len(outcome.result.changes) > MOST_CHANGES and variation.gpus is not None:
            untrue.append(f"{name}, {variation.name}: {len(outcome.result.changes)} changes of state")
    assert untrue == []


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.csv")), ids=lambda path: path.stem)
def test_states_of_a_public_log_do_not_flap(path: Path) -> None:
    source = read_input_file(path)
    result = replay(path.name, source)
    assert {episode.alert for episode in result.episodes} <= {"JobStarving"}
    assert len(result.changes) <= 5 + result.seconds / 15
