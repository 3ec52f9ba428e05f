"""The step in a log of an unknown trainer: one integer that grows by a steady amount. A guess, and marked as one.

A counter is a number after a word such as step or iteration, or the first number of "[n/N]" and "n/N". Of all counters
in the log the one that grows most steadily counts; a global counter beats one that starts again in each epoch. Lines of
evaluation, validation and test are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from wattwatch.collectors.log_values import TIMESTAMPS, line_timestamp, parse_count
from wattwatch.collectors.progress_bars import EVALUATION, PREPARATION, TRAINING

MAX_GUESS_CHARS: Final = 1000
LABEL_WORDS: Final = 3
MIN_SUGGESTED_LINES: Final = 3
MAX_PLACES: Final = 6  # numbers of one line that may be the counter
MAX_CONTEXT_CHARS: Final = 24
_INTEGER: Final = r"\d{1,3}(?:,\d{3})+|\d+"
# A count: not a part of a date, time, size, address, version or decimal number. "81.000" is the count 81.
_NO_UNIT: Final = r"(?!\s*(?:%|[KMG]?i?B\b|m?s\b|secs?\b|seconds?\b|min\b|h\b|it/s|s/))"
_N: Final = rf"(?P<n>{_INTEGER})(?:\.0+)?(?!\.?\d)(?![:\-]\d){_NO_UNIT}"
_QUALIFIER: Final = (
    r"(?:train(?:ing|er)?[/_ ]|optim(?:izer)?[_ ]|completed[_ ]|current[_ ]|num[_ ]|acc[_ ]|global[_ -]?)?"
)
_COUNTER: Final = r"(?:it|steps?|iter(?:ation)?s?|itr|updates?|mini-?batch(?:es)?|batch(?:es|_idx|_id)?|global_?steps?)"
KEYED: Final = re.compile(
    rf"(?<![\w.-])(?P<key>{_QUALIFIER}{_COUNTER})(?:/(?:max|total|num)_steps)?(?:\s+(?:no\.?|number|#|id|idx))?['\"]?"
    rf"(?:\s*[:=#|]\s*|\s*\[\s*|\s*\(\s*|\s+|)['\"]?[\[(]?\s*{_N}"
    rf"(?:\s*(?:/|of|out of)\s*(?P<total>{_INTEGER})(?![\d.]))?",
    re.I,
)
SLASHED: Final = re.compile(
    rf"(?<![\d./:,-])(?P<n>{_INTEGER})\s*/\s*(?P<total>{_INTEGER})(?![\d/.:]|\s*(?:[KMG]i?B|GB|MB|%)\b)"
)
# "[1,  2000] loss: 2.2": epoch and batch
BRACKETED: Final = re.compile(r"\[\s*(?P<epoch>\d+),\s*(?P<n>\d+)\](?P<total>(?!))?")
ANY_LOSS: Final = re.compile(
    r"(?<!eval[_/ ])(?<!val[_/ ])(?<!test[_/ ])(?<!valid[_/ ])loss(?!_scale| scale|less)", re.I
)
EPOCH: Final = re.compile(
    r"(?<![A-Za-z])epochs?\b(?:\(train\)|\s*(?:no\.?|number))?['\"]?\s*[:=#]?\s*['\"]?[\[(]?\s*(?P<epoch>\d+)(?!\.[1-9])(?:\.0+)?\]?"
    r"(?:\s*(?:/|of|out of)\s*(?P<epochs>\d+)(?![\d.]))?",
    re.I,
)
# "Train: 3 [ 500/1251 (40%)]", "Epoch [3][50/7330]": the number before a bracketed count is the epoch.
BEFORE_BRACKET: Final = re.compile(
    r"(?:\[(?P<a>\d+)\]|\bTrain:\s+(?P<b>\d+)(?:/(?P<epochs>\d+) \(\s*\d+%\))?)\s*\[\s*$", re.I
)
PRIORITY: Final = {"global": 6, "step": 4, "batch": 3, "slashed": 2, "epoch": 1}
MIN_STEADY_SHARE: Final = 0.5  # of all increments, those of the most common size (within a factor of 2)
MAX_BACKWARD_SHARE: Final = 0.25
WORDS: Final = re.compile(r"(?<![\w/.-])[A-Za-z]+(?![\w/.-])|\b(?:val|eval|test|valid)(?=[_-])")


@dataclass(slots=True)
class CounterValue:
    """One value of one counter. `line`: index in the lines of the text."""

    line: int
    step: int
    groups: dict[str, str]
    stamp: float | None
    has_loss: bool


@dataclass(slots=True)
class CounterSeries:
    """All values of one counter, in order."""

    key: str
    priority: int
    values: list[CounterValue] = field(default_factory=list)

    @property
    def label(self) -> str:
        """What stands before the number in the log."""
        return self.key.removeprefix("n/N ").replace("_", " ") or "n/N"

    @property
    def restarts_each_epoch(self) -> bool:
        """Whether lines name the epoch and the counter starts again in each, or may: its total is far from a run's."""
        if self.priority == PRIORITY["global"] or not all("epoch" in value.groups for value in self.values):
            return False
        by_epoch = [(value.groups["epoch"], value.step) for value in self.values]
        return not any(a[0] != b[0] and b[1] > a[1] for a, b in pairwise(by_epoch))


def guess_counter(lines: Sequence[str]) -> CounterSeries | None:
    """The counter that is most likely the training step; None if none grows steadily. `lines`: complete ones only."""
    series: dict[str, CounterSeries] = {}
    for index, line in enumerate(lines):
        if not any(letter.isdigit() for letter in line):
            continue
        line = line[:MAX_GUESS_CHARS]
        for key, priority, value in _counters(line, index):
            series.setdefault(key, CounterSeries(key, priority)).values.append(value)
    candidates = []
    for each in series.values():
        with_loss = [value for value in each.values if value.has_loss]
        if with_loss and len(with_loss) < len(each.values):
            each.values = with_loss  # validation rows of the same file have none
        score = _score(each)
        if score > 0:
            candidates.append((score, each))
    if not candidates:
        return None
    return max(candidates, key=lambda scored: (scored[0], len(scored[1].values)))[1]


def suggest_pattern(lines: Sequence[str]) -> str | None:
    """A regular expression for log_pattern that reads a growing integer in these lines; None if there is none.

    For a log whose counter has no name that is known here. The pattern is the text before the number and the number.
    """
    series: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for line in lines:
        line = line[:MAX_GUESS_CHARS]
        if _is_evaluation(line):
            continue
        clean = _without_time(line)
        shape = re.sub(r"\d+", "0", clean)
        for place, found in enumerate(re.finditer(rf"(?<![\w./:,-]){_N}", clean)):
            if place >= MAX_PLACES:
                break
            number = parse_count(found["n"])
            if number is not None:
                series.setdefault((shape, place), []).append((number, clean[: found.start("n")]))
    best: tuple[int, str] | None = None
    for values in series.values():
        numbers = [number for number, _ in values]
        grown = [after - before for before, after in pairwise(numbers)]
        if len(numbers) < MIN_SUGGESTED_LINES or min(grown) < 0 or max(grown) == 0:
            continue
        before = re.split(r"\d", values[-1][1])[-1][-MAX_CONTEXT_CHARS:].lstrip()
        if not before or (best is not None and len(numbers) <= best[0]):
            continue
        best = (len(numbers), re.sub(r"(?:\\ )+|\\\t", r"\\s+", re.escape(before)) + r"(?P<step>\d+)")
    return None if best is None else best[1]


def _without_time(line: str) -> str:
    for pattern in TIMESTAMPS:
        line = pattern.sub("", line)
    return re.sub(r"\d+:\d\d(?::\d\d)?(?:[.,]\d+)?", "", line)


def _counters(line: str, index: int) -> Iterator[tuple[str, int, CounterValue]]:
    """(key, priority, value) of every counter in a line."""
    stamp = line_timestamp(line, {})
    has_loss = ANY_LOSS.search(line) is not None
    epoch = EPOCH.search(line)
    epoch_groups = {}
    if epoch is not None:
        epoch_groups = {name: text for name, text in epoch.groupdict().items() if text is not None}
    used: list[tuple[int, int]] = [] if epoch is None else [epoch.span()]
    seen: Counter[str] = Counter()
    for pattern in (KEYED, SLASHED, BRACKETED):
        for found in pattern.finditer(line):
            step, prefix = parse_count(found["n"]), line[: found.start("n")]
            if step is None or _is_evaluation(prefix):
                continue
            if any(found.start("n") < b and a < found.end("n") for a, b in used):
                continue
            if pattern is KEYED and found["key"].lower() == "it" and prefix[: found.start("key")].strip(" |,;]:-")[-1:]:
                continue  # the pronoun
            if not has_loss and not _names_training(line, prefix, pattern is KEYED):
                continue
            used.append(found.span())
            groups = dict(epoch_groups)
            if found["total"] is not None:
                groups["total"] = found["total"]
            if pattern is KEYED:
                key = re.sub(r"[\s_/-]+", "_", found["key"].lower())
                is_global = re.search(r"global|num_up|acc_|optim|training_", key) is not None
                kind = "global" if is_global else "batch" if "batch" in key else "step"
            elif pattern is BRACKETED:
                if not has_loss:
                    continue
                kind, key, groups["epoch"] = "slashed", "[epoch, n]", found["epoch"]
            else:
                if step > (parse_count(found["total"]) or 0):
                    continue
                kind = "slashed"
                before = BEFORE_BRACKET.search(prefix)
                if before is not None and not epoch_groups:
                    groups["epoch"] = before["a"] or before["b"]
                    if before["epochs"]:
                        groups["epochs"] = before["epochs"]
                key = "n/N " + " ".join(re.sub(r"[\d.,:]+", "", prefix).split()[-LABEL_WORDS:])
            seen[key] += 1
            if seen[key] > 1:
                key = f"{key} #{seen[key]}"
            yield key, PRIORITY[kind], CounterValue(index, step, groups, stamp, has_loss)
    if epoch is not None and epoch_groups and not _is_evaluation(line[: epoch.start()]):
        number = parse_count(epoch_groups["epoch"])
        if number is not None:
            groups = {"total": epoch_groups["epochs"]} if "epochs" in epoch_groups else {}
            yield "epoch", PRIORITY["epoch"], CounterValue(index, number, groups, stamp, has_loss)


def _is_evaluation(prefix: str) -> bool:
    """Whether the text before a counter says that it counts an evaluation: "Test: [3/97]", "Validation step: 9/40"."""
    return any(word.lower() in EVALUATION for word in WORDS.findall(prefix))


def _names_training(line: str, prefix: str, keyed: bool) -> bool:
    """Whether a counter on a line without a loss may count training: "Loading layer 3/80" and "attempt 2/5" do not."""
    words = {word.lower() for word in WORDS.findall(line)}
    if words & PREPARATION:
        return False
    if keyed:
        return True
    before = [word.lower() for word in WORDS.findall(prefix)]
    return not before or bool(set(before[-4:]) & (TRAINING | {"progress"}))


def _score(series: CounterSeries) -> float:
    """0: not a counter of progress. Else higher for what is more surely the training step."""
    values = series.values
    steps = [value.step for value in values]
    has_loss = any(value.has_loss for value in values)
    if len(set(steps)) < 2:
        # One line: a word that names a step and a loss beside it, or a long-running global counter.
        named = series.priority >= PRIORITY["batch"]
        named |= series.priority == PRIORITY["slashed"] and "total" in values[-1].groups
        return series.priority + 0.5 if named and has_loss else 0.0
    grown: list[int] = []
    backward = 0
    for before, after in pairwise(values):
        difference = after.step - before.step
        epochs = (before.groups.get("epoch"), after.groups.get("epoch"))
        if difference < 0 and epochs[0] == epochs[1] and not _restarts(before, after):
            backward += 1
        elif difference > 0 and epochs[0] == epochs[1]:
            grown.append(difference)
    if not grown or backward > MAX_BACKWARD_SHARE * (len(values) - 1):
        return 0.0
    usual = sorted(grown)[len(grown) // 2]
    steady = sum(usual / 2 <= each <= usual * 2 for each in grown) / len(grown)
    if steady < MIN_STEADY_SHARE:
        return 0.0
    return series.priority + 2.0 * has_loss + min(1.0, len(values) / 10)


def _restarts(before: CounterValue, after: CounterValue) -> bool:
    """Whether the counter began again: it had reached its total, or is back near 0."""
    total = parse_count(before.groups.get("total"))
    return after.step <= max(1, before.step // 4) or (total is not None and before.step >= total - 1)
