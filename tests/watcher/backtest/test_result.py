"""The committed result of the back test: it is what a fresh run gives, and it is good enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from wattwatch.watcher.backtest.report import backtest_object
from wattwatch.watcher.backtest.run import BacktestResult, run_backtest
from wattwatch.watcher.backtest.score import LeftOut, ProgressKnowledge

DATA = Path(__file__).parents[2] / "data" / "backtest"
CORPUS = Path(__file__).parents[4] / "shared" / "corpus" / "cases"
ENOUGH_CASES = 10
MOST_OFF = 0.15 + 1e-9


@pytest.fixture(scope="module")
def fresh() -> BacktestResult:
    return run_backtest(DATA, tuple(ProgressKnowledge))


def test_the_committed_result_is_what_a_fresh_run_gives(fresh: BacktestResult) -> None:
    committed: Any = orjson.loads((DATA / "result.json").read_bytes())
    assert committed == orjson.loads(orjson.dumps(backtest_object(fresh))), (
        "run `make backtest`, and look at what changed"
    )


def good_enough(test: BacktestResult) -> None:
    none, word = test.cases[ProgressKnowledge.NONE], test.cases[ProgressKnowledge.WORD]
    assert (none.plain.exact.rate or 0) >= 0.82
    assert (word.plain.exact.rate or 0) >= 0.96
    assert none.plain.hangs.found.right >= 9
    assert (none.plain.claims.rate or 0) >= 0.93
    assert none.plain.claims.of >= 0.55 * none.plain.exact.of
    assert word.plain.hangs.found.right == word.plain.hangs.found.of == 14
    for result in (none, word):
        assert result.plain.hangs.false == 0
        assert all(score.hangs.false == 0 for score in result.left_out.values())
        assert result.overconfident == ()
        for each in result.plain.reliability:
            assert each.right.of < ENOUGH_CASES or each.off <= MOST_OFF, each


def test_samples_alone_find_most_hangs_and_with_progress_all_and_none_is_false(
    fresh: BacktestResult,
) -> None:
    good_enough(fresh)


def test_without_the_profile_of_its_model_or_without_its_source_no_case_is_judged_much_worse(
    fresh: BacktestResult,
) -> None:
    for result in fresh.cases.values():
        assert set(result.left_out) == {LeftOut.MODEL, LeftOut.SOURCE}
        for score in result.left_out.values():
            assert (score.exact.rate or 0) >= (result.plain.exact.rate or 0) - 0.03
            assert score.hangs.found.right >= result.plain.hangs.found.right - 1


def test_the_figures_do_not_rest_on_the_source_with_the_most_cases(fresh: BacktestResult) -> None:
    """24 of the cases are of one repository, and nearly all of them are right."""
    by_source = fresh.cases[ProgressKnowledge.NONE].plain.by_source
    assert (by_source.sources, by_source.largest) == (23, "grantwilkins/training_profile")
    assert (by_source.without_largest.rate or 0) >= 0.74
    assert (by_source.mean_rate or 0) >= 0.69


def test_every_incident_of_the_logs_is_reported_and_nothing_else(fresh: BacktestResult) -> None:
    assert {i.state for each in fresh.series for i in each.incidents} == {"hang", "starvation", "gpu_fault"}
    for each in fresh.series:
        assert all(incident.delay_seconds is not None for incident in each.incidents), each.name
        assert each.false_alarms == (), each.name


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of public reports is not laid beside this checkout")
def test_the_reports_themselves_give_the_same() -> None:
    good_enough(run_backtest(CORPUS, tuple(ProgressKnowledge)))
