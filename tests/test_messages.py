"""Every text says what its numbers and quantities are of: message_templates.py has the rules.

Texts are checked as templates in the source, and as people read them: rendered from the labelled pictures and the
captures in tests/data. The suite of faults checks those of the alerts that it provokes.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.message_templates import (
    html_templates,
    problems,
    python_templates,
    rendered_problems,
    templates,
    toml_templates,
)
from tests.watcher.alerting.test_messages import opened_episode
from wattwatch.watcher.alerting.episode import NoticeKind, NotifyReason
from wattwatch.watcher.alerting.message import compose_message
from wattwatch.watcher.backtest.cases import read_labeled_data
from wattwatch.watcher.backtest.score import LeftOut, ProgressKnowledge, judge_cases
from wattwatch.watcher.diagnosis.diagnose import diagnose
from wattwatch.watcher.diagnosis.loading.evidence import load_evidence
from wattwatch.watcher.diagnosis.signals.signal import LOGS

TEMPLATES = tuple(templates())
DATA = Path(__file__).parent / "data"


def test_the_texts_of_the_product_are_found() -> None:
    folders = {each.place.split("/")[1] for each in TEMPLATES if each.place.startswith("watcher/")}
    assert {"alerting", "cli", "detection", "diagnosis", "recordings", "web"} <= folders
    endings = {re.split(r"[: ]", each.place)[0].rpartition(".")[2] for each in TEMPLATES}
    assert endings == {"py", "toml", "html"}


def test_every_number_has_a_unit_and_every_quantity_its_count() -> None:
    wrong = [f"{each.place}: {problem}: {each.text!r}" for each in TEMPLATES for problem in problems(each)]
    assert not wrong, "\n".join(wrong)


def planted(source: str) -> list[str]:
    return [problem for each in python_templates("planted.py", source) for problem in problems(each)]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('f"median power is {watts:.0f} and falls"', "the number {watts} without a unit or noun"),
        ('f"the node used {used_bytes} in total"', "the number {used_bytes} without a unit or noun"),
        ('f"it was seen {len(samples)}, then it was gone"', "the number {len(samples)} without a unit or noun"),
        ('"All GPUs are evenly busy"', "'All GPUs' without the count it was computed from"),
        ('f"{job} hangs: nobody stands out"', "'nobody' without the count it was computed from"),
        ('"the hang is real: no rank made a step"', "'no rank' without the count it was computed from"),
        ('f"{job} has ended: every other node is silent"', "'every other node' without the count it was computed from"),
        ('f"none of the ranks differs ({job})"', "'none of the ranks' without the count it was computed from"),
    ],
)  # fmt: skip
def test_a_planted_mistake_is_found(source: str, problem: str) -> None:
    assert planted(f"text = {source}") == [problem]
    assert planted(f"def f():\n    return g(summary={source})") == [problem]


@pytest.mark.parametrize(
    "source",
    [
        'f"median power is {watts:.0f} W and falls"',
        'f"{low:.0f}-{high:.0f} W on {seen:,} of {total:,} GPUs"',
        'f"All {count} GPUs are evenly busy"',
        'f"none of {count} ranks differs from the others"',
        'f"rank {rank:d} stopped at step {step:,}"',
        'f"the report of {node} names no rank"',
        'f"no process of the job is running on {nodes}"',
        '"the job no longer makes steps at all"',
        'f"expected a whole number, got {value:,}"',
    ],
)
def test_a_right_text_passes(source: str) -> None:
    assert planted(f"text = {source}") == []


def test_texts_outside_python_are_checked_alike() -> None:
    table = {"kind": {"text": "all ranks wait for the disk", "advice": "restart all ranks of the job"}}
    (found,) = [problem for each in toml_templates("t.toml", table) for problem in problems(each)]
    assert found.startswith("'all ranks'")
    (right,) = toml_templates("t.toml", {"text": "{count} ranks wait for it"})
    assert right.values == (("count", ""),)
    assert not list(problems(right))
    (found,) = [p for each in html_templates("t.html", "<p>No GPU is seen: {{ x }}</p>") for p in problems(each)]
    assert found.startswith("'No GPU'")


def test_instructions_and_docstrings_are_not_statements() -> None:
    assert (
        planted('def f():\n    """All ranks of the job."""\n    return g(advice="restart all ranks of the job")') == []
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8 GPUs at 611-618 W, median 615 W, 62 % of the power limit", 0),
        ("rank 3 on node-1 GPU 3 left at 10:31:02 UTC after 3 h 9 min", 0),
        ("power fell to 190 and all ranks wait", 2),
    ],
)
def test_texts_are_checked_as_they_are_read(text: str, count: int) -> None:
    assert len(list(rendered_problems(text))) == count


@pytest.mark.parametrize("knowledge", ProgressKnowledge)
def test_a_verdict_says_what_its_numbers_are_of(knowledge: ProgressKnowledge) -> None:
    cases = read_labeled_data(DATA / "backtest").cases
    texts = [each.verdict.why for each in judge_cases(cases, knowledge, LeftOut.NOTHING)]
    assert len(texts) == len(cases) > 50
    wrong = [f"{problem}: {text}" for text in texts for problem in rendered_problems(text)]
    assert not wrong, "\n".join(wrong)


def test_a_diagnosis_says_what_its_numbers_are_of() -> None:
    texts = []
    for directory in sorted(path for path in (DATA / "captures").iterdir() if path.is_dir()):
        diagnosis = diagnose(load_evidence(directory))
        texts += [each.text for each in diagnosis.signals if each.source != LOGS]  # logs are quoted
        if diagnosis.collectives is not None:
            texts.append(diagnosis.collectives.why)
    assert texts
    wrong = [f"{problem}: {text}" for text in texts for problem in rendered_problems(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("notice", "reason"), list(itertools.product(NoticeKind, NotifyReason)))
def test_a_message_says_when_it_was_true(notice: NoticeKind, reason: NotifyReason) -> None:
    text = compose_message(opened_episode(), notice, reason, 95.0, 1_786_000_000.0, None).timing
    assert re.search(r"(?:ago, as of|until|monitored after) \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\.$", text), text
