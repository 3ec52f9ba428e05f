"""Progress bars in a log: which of them counts training steps.

A training log holds bars of many kinds: downloads, tokenization, loading of weights, evaluation, sampling. Only the
training's own bar counts steps. A bar is recognized by its description, by the unit
it counts ("examples/s" are no steps), or, without a description, by what surrounds it: a bar that starts while another
one is unfinished is nested in it, as an evaluation is in training.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from itertools import pairwise
from typing import Final

from wattwatch.collectors.log_values import NUMBER, parse_count, parse_number

# Literal text of each shape: a substring search is far cheaper than a regex that may begin at every character.
SHAPE_HINTS: Final = {
    "tqdm": "%|",
    "tqdm_endless": "/s",
    "ultralytics": "% ━",
    "rich": " • ",
    "keras": "/",
    "tqdm_loggable": "Progress on:",
}
_COUNT: Final = r"\d+(?:\.\d+)?[kMG]?"
_TIME: Final = r"(?:\d+ days?, )?[\d:]+s?|\?"
_RATE: Final = rf"(?P<rate>\?|{NUMBER}[kMG]?)\s*(?P<unit>[^\d,\]\s][^,\]]*?)"
SHAPES: Final = {
    # tqdm: "Train:  13%|█▎        | 500/3854 [41:14<4:36:38,  4.95s/it, loss=1.57]"; the end may be cut off
    "tqdm": re.compile(
        rf"(?P<label>.*?)(?P<percent>\d{{1,3}})%\|[^|]*\|\s*(?P<step>{_COUNT})/(?P<total>{_COUNT})\s"
        rf"(?:\s*\[(?P<elapsed>{_TIME})<(?P<remaining>{_TIME})(?:,\s*{_RATE})?(?P<postfix>,[^\]]*)?(?P<end>\]))?"
    ),
    # tqdm without a total: "Generating train split: 1000 examples [00:01, 820.1 examples/s]"
    "tqdm_endless": re.compile(
        rf"(?P<label>.*?)(?P<step>{_COUNT})\s?(?P<counted>[a-zA-Z]+) "
        rf"\[(?P<elapsed>{_TIME}),\s*{_RATE}(?P<postfix>,[^\]]*)?(?P<end>\])"
    ),
    # ultralytics: "3/100 4.21G 1.12 ... 640: 10% ━╸────── 12/120 5.1it/s 2.4s<21.2s"
    "ultralytics": re.compile(
        rf"(?P<label>.*?)(?P<percent>\d{{1,3}})% [━─╸╺]+ (?P<step>{_COUNT})/(?P<total>{_COUNT}) "
        rf"(?:(?P<rate>{NUMBER})(?P<unit>it/s|s/it) (?P<elapsed>[\d:.]+s?)(?:<(?P<remaining>[\d:.]+s?))?(?P<end>))?"
    ),
    # rich: "Epoch 0/2 ━━━━╸━━━ 4000/30832 0:41:14 • 4:36:38 1.62it/s v_num: 0 train_loss: 1.5"
    "rich": re.compile(
        rf"(?P<label>.*?)\s*[━╸╺]+\s+(?P<step>\d+)/(?P<total>\d+)\s+"
        rf"(?P<elapsed>{_TIME}|-:--:--) • (?P<remaining>{_TIME}|-:--:--)"
        rf"(?:\s+(?P<rate>{NUMBER})(?P<unit>it/s|s/it))?(?P<end>)"
    ),
    # Keras: "500/1875 [=====>.....] - ETA: 5s - loss: 0.27" and "500/1875 ━━━━━━━━━━ 5s 4ms/step - loss: 0.27"
    "keras": re.compile(
        rf"^(?P<label>\s*)(?P<step>\d+)/(?P<total>\d+|Unknown)\s+(?:\[[=>.]+\]|[━─╸╺]+|(?=- \d+m?s))"
        rf"(?P<postfix>.*?(?:(?P<rate>{NUMBER})(?P<unit>m?s/step))?)(?P<end>$|(?= - ))"
    ),
    # tqdm_loggable: "Progress on:train 1.50kit/10.0kit rate:1.6it/s remaining:1:28:32 elapsed:15:36 postfix:loss=2.31"
    "tqdm_loggable": re.compile(
        rf".*?Progress on:(?P<label>.*?)\s+(?P<step>{_COUNT}|-)(?P<counted>[a-zA-Z]*)/(?P<total>{_COUNT}|-)[a-zA-Z]*\s+"
        rf"rate:(?P<rate>{NUMBER}|-)\s*(?P<unit>[^\s]*)\s+remaining:(?P<remaining>\S+)\s+elapsed:(?P<elapsed>[\d:]+)(?P<end>)"
    ),
}
STEP_UNITS: Final = re.compile(r"^(?:s/|ms/)?(?:it|iter\w*|steps?|ba|batch(?:es)?|updates?|itr)(?:/s)?$")
SAMPLE_UNITS: Final = re.compile(r"^(?:s/)?(?:img|imgs|images?|samples?|seqs?|clips?)(?:/s)?$")
WORD: Final = re.compile(r"[A-Za-z]+")
_WORDS: Final = tomllib.loads((resources.files(__package__) / "progress_formats.toml").read_text("utf-8"))["bar_words"]
EVALUATION: Final = frozenset(_WORDS["evaluation"])
PREPARATION: Final = frozenset(_WORDS["preparation"])
TRAINING: Final = frozenset(_WORDS["training"])
EPOCH_LABEL: Final = re.compile(r"\bepoch\w*\W{0,3}(?P<epoch>\d+)(?:\s*(?:/|of)\s*(?P<epochs>\d+))?", re.I)
EPOCH_HEADER: Final = re.compile(r"\W*epoch:?\s*(?P<epoch>\d+)\s*(?:/|of)\s*(?P<epochs>\d+)\W*", re.I)
# A model is loaded when a run starts (and when the best one is loaded again at its end).
LOADS_MODEL: Final = re.compile(r"\bload(?:ing)?\b.*\b(?:weights|shards|checkpoint|model|pipeline)\b", re.I)
FOLLOWING_LINES: Final = 3  # HF's dictionary comes after empty lines that erase the bar
COUNTS_EPOCHS: Final = re.compile(r"\bepochs?\s*(?:\[[^\]]*\])?\s*:?\s*$", re.I)
# Of these keys, only a training prints a loss; "eval_loss" is another.
TRAINING_LOSS: Final = re.compile(r"(?<![\w/])['\"]?(?:train[_/ ])?(?:\w+/)?loss(?:/train/total)?['\"]?\s*[:=]")
EVALUATION_RESULT: Final = re.compile(r"['\"]?(?:eval|val|valid|test)[_/](?:loss|runtime|acc\w*|\w+_per_second)\b")


class BarRole(StrEnum):
    """What a progress bar counts."""

    TRAINING = "training"
    EPOCHS = "epochs"
    EVALUATION = "evaluation"
    PREPARATION = "preparation"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Bar:
    """One drawing of a progress bar; `line`: its index in the lines of the text."""

    line: int
    shape: str
    label: str
    step: int
    total: int | None
    groups: dict[str, str]
    role: BarRole
    loss_follows: bool = False
    result_follows: bool = False

    @property
    def key(self) -> tuple[str, int | None]:
        """The same for all drawings of one bar: its label without numbers, and its total."""
        return re.sub(r"[\d.]+", "", self.label), self.total


def find_bar(line: str, index: int, is_torn: bool) -> Bar | None:
    """The progress bar in a line, or None. A number that touches the end of an unfinished line may be cut off."""
    for shape, pattern in SHAPES.items():
        if SHAPE_HINTS[shape] not in line or (shape == "tqdm_endless" and " [" not in line):
            continue
        found = pattern.match(line)
        if found is None:
            continue
        end = len(line) if is_torn else None
        groups = {
            name: text
            for name, text in found.groupdict().items()
            if text is not None and (end is None or found.end(name) < end or name == "end")
        }
        step, total = parse_count(groups.get("step")), parse_count(groups.get("total"))
        if step is None or found["end"] is None or (total is None and "total" in found.groupdict() and is_torn):
            return Bar(index, shape, found["label"], -1, None, {}, BarRole.UNKNOWN)  # a bar that is cut off: no step
        groups.pop("end", None)
        return Bar(index, shape, found["label"].strip(), step, total, groups, bar_role(found["label"], groups))
    return None


def bar_role(label: str, groups: dict[str, str]) -> BarRole:
    """What the bar counts, by its description and unit."""
    words = {word.lower() for word in WORD.findall(re.sub(r"[\w./-]+\.py\S*", "", label))}
    unit = groups.get("unit", groups.get("counted", ""))
    counts_steps = not unit or STEP_UNITS.match(unit.strip()) is not None
    if words & EVALUATION or re.search(r"\bClass\s+Images\s+Instances\b", label):
        return BarRole.EVALUATION
    if words & PREPARATION:
        return BarRole.PREPARATION
    if not counts_steps and not (SAMPLE_UNITS.match(unit.strip()) and words & TRAINING):
        return BarRole.PREPARATION
    if COUNTS_EPOCHS.search(label):
        return BarRole.EPOCHS
    if words & TRAINING or "loss" in words or re.search(r"^\s*\d+/\d+\s+[\d.]+G?B?\s", label):
        return BarRole.TRAINING
    return BarRole.TRAINING if TRAINING_LOSS.search(groups.get("postfix", "")) else BarRole.UNKNOWN


def find_bars(lines: Sequence[str], torn: str | None, training_total: int | None = None) -> list[Bar]:
    """All bars, in order; each knows its role as far as the text shows it.

    `training_total`: the total of the training's bar, if the text before this one showed it unfinished.
    """
    bars: list[Bar] = []
    pieces = [*lines, *([] if torn is None else [torn])]
    header: dict[str, str] = {}
    header_is_new = False
    for index, line in enumerate(pieces):
        is_torn = torn is not None and index == len(lines)
        bar = find_bar(line, index, is_torn)
        if bar is not None:
            named = EPOCH_LABEL.search(bar.label)
            if named is not None:
                bar.groups.update({k: v for k, v in named.groupdict().items() if v is not None})
            elif not bar.label and header:
                bar.groups.update(header)
            if bar.shape == "keras":
                _set_keras_role(bar, bars, header_is_new, bool(header))
            header_is_new = False
            bars.append(bar)
            continue
        alone = EPOCH_HEADER.fullmatch(line)
        if alone is not None:
            header, header_is_new = dict(alone.groupdict()), True
        if bars and not is_torn:
            last = next((each for each in reversed(bars) if each.step >= 0), None)
            if last is not None and last.line >= index - FOLLOWING_LINES:
                last.result_follows |= EVALUATION_RESULT.search(line) is not None
                last.loss_follows |= not last.result_follows and TRAINING_LOSS.search(line) is not None
    run: list[Bar] = []
    runs = [run]
    for bar in bars:
        if bar.role is BarRole.PREPARATION and LOADS_MODEL.search(bar.label) and run:
            run = []  # another run in the same log
            runs.append(run)
        run.append(bar)
    evaluation: set[tuple[str, int | None]] = set()
    for run in runs:
        evaluation |= resolve_unknown(run, evaluation, training_total if run is runs[0] else None)
    return bars


def _set_keras_role(bar: Bar, before: Sequence[Bar], header_is_new: bool, any_header: bool) -> None:
    """Keras prints "Epoch 3/10" above each bar of fit(), and nothing above the bar of evaluate() and predict()."""
    last = next((each for each in reversed(before) if each.shape == "keras"), None)
    if last is not None and (last.key, bar.step >= last.step) == (bar.key, True):
        bar.role = last.role
    elif header_is_new:
        bar.role = BarRole.TRAINING
    elif any_header:
        bar.role = BarRole.EVALUATION


def resolve_unknown(
    bars: Sequence[Bar], known_evaluation: Set[tuple[str, int | None]], training_total: int | None
) -> set[tuple[str, int | None]]:
    """Tell training from evaluation among the bars of one run that have no telling description.

    What follows a bar comes first: a training loss or the results of an evaluation. Then nesting: a bar that starts
    while another one is unfinished is an evaluation within it. Of bars that follow each other, the last one counts,
    because preparation comes before training. Returns what is an evaluation.
    """
    unknown = [bar for bar in bars if bar.role is BarRole.UNKNOWN and bar.step >= 0]
    keys = list(dict.fromkeys(bar.key for bar in unknown))
    if any(bar.role is BarRole.TRAINING for bar in bars):
        _set_role(unknown, set(keys), BarRole.EVALUATION)
        return set(keys)
    with_loss = Counter(bar.key for bar in unknown if bar.loss_follows)
    with_result = Counter(bar.key for bar in unknown if bar.result_follows)
    evaluation = {key for key in keys if with_result[key] > with_loss[key]}
    training = {key for key in with_loss if key not in evaluation}
    for key in keys:
        nested = training_total is not None and key[1] != training_total
        if key not in training and (nested or key in known_evaluation or _is_nested(key, unknown)):
            evaluation.add(key)
    rest = [key for key in keys if key not in evaluation]
    if training:
        evaluation |= {key for key in rest if key not in training}
    elif rest:
        evaluation |= set(rest[:-1])
    _set_role(unknown, evaluation, BarRole.EVALUATION)
    _set_role(unknown, set(keys) - evaluation, BarRole.TRAINING)
    return evaluation


def _is_nested(key: tuple[str, int | None], bars: Sequence[Bar]) -> bool:
    """Whether this bar starts while another bar is unfinished: that one drew before, and has not reached its total."""
    before: Bar | None = None
    for bar in bars:
        if bar.key == key:
            if before is not None and before.total is not None and before.step < before.total:
                return True
        else:
            before = bar
    # Seen from its middle only (the tail of a long evaluation): the other one goes on after it.
    first, others = next(bar for bar in bars if bar.key == key), [bar for bar in bars if bar.key != key]
    restarts = sum(a.key == b.key == key and b.step < a.step for a, b in pairwise(bars))
    return bool(others) and restarts > 0 and first.line < others[0].line


def _set_role(bars: Sequence[Bar], keys: set[tuple[str, int | None]], role: BarRole) -> None:
    for bar in bars:
        if bar.key in keys:
            bar.role = role


def bar_rate(groups: dict[str, str]) -> float | None:
    """Seconds per step as the bar states it."""
    rate, unit = parse_number(groups.get("rate")), groups.get("unit", "")
    if not rate:
        return None
    if unit.startswith("ms/"):
        return rate / 1e3
    if unit.startswith("s/"):
        return rate
    return 1.0 / rate if STEP_UNITS.match(unit.strip()) else None
