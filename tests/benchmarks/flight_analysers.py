"""Who is named by `torchfrtrace`, PyTorch's own analyser of flight records, and who by wattwatch, on the same sets.

    python -m tests.benchmarks.flight_analysers

Needs torch (the trainer extra). Each set is given to torchfrtrace as it lies and once for each rank whose file the
directory lists first: the analyser takes the first file as the truth, so the order decides whom it blames. The order is
forced by wrapping os.walk in the process that runs it; on tmpfs it comes about by itself. What it loads are pickles,
and it executes what is in them: here they are the ones in tests/data.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from wattwatch.watcher.diagnosis.collectives.analysis import analyze_collectives
from wattwatch.watcher.diagnosis.flight_recorder.loader import read_flight_records

SETS: Final = Path(__file__).parents[1] / "data" / "flight_recorder"
TRUTH: Final = {
    "gloo_213_barrier_r3": {3},
    "gloo_213_early_r3": {3},
    "gloo_213_missing_r2": {2},
    "nc_early_r3": {3},
    "nc_missing_r2": {2},
}
# Runs the installed analyser with the named file listed first.
ORDERED: Final = """
import os, sys
first, walk = sys.argv.pop(1), os.walk
def ordered(top, *args, **kwargs):
    for directory, folders, files in walk(top, *args, **kwargs):
        yield directory, folders, sorted(files, key=lambda name: (name != first, name))
os.walk = ordered
from torch.distributed.flight_recorder.fr_trace import main
main()
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """`named`: in collectives, as culprit or as missing. `trouble`: how it failed."""

    named: frozenset[int]
    trouble: str = ""

    def __str__(self) -> str:
        return self.trouble or (", ".join(map(str, sorted(self.named))) or "nobody")


def truth_of(name: str) -> set[int]:
    if name in TRUTH:
        return TRUTH[name]
    told = re.search(r"Fault ranks: (\[.*\])", (SETS / name / "fault_injection.log").read_text())
    assert told is not None
    return set(json.loads(told[1]))


def torchfrtrace(directory: Path, prefix: str, first: str) -> Answer:
    command = [sys.executable, "-c", ORDERED, first, str(directory), "-p", prefix]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = ran.stdout + ran.stderr
    if ran.returncode:
        error = re.findall(r"^(\w*(?:Error|Exception))\b", said, re.MULTILINE)
        return Answer(frozenset(), error[-1] if error else f"exit {ran.returncode}")
    named = {int(rank) for rank in re.findall(r"Culprit rank (\d+)", said)}
    for block in re.split(r"(?=Not all ranks joining)", said):
        missing = re.search(r"missing ranks: \{([\d, ]*)\}", block)
        # Its rows on send and recv list whoever is not of the pair: no accusation.
        if missing and not re.search(r"collective: \w+:(send|recv)", block):
            named |= {int(rank) for rank in missing[1].split(",") if rank.strip()}
    return Answer(frozenset(named))


@dataclass(frozen=True, slots=True)
class Comparison:
    name: str
    truth: frozenset[int]
    ours: frozenset[int]
    theirs: dict[Answer, tuple[str, ...]]  # answer -> the files that were listed first

    def lines(self) -> list[str]:
        theirs = [f"{answer} (first: {', '.join(first)})" for answer, first in self.theirs.items()]
        return [
            f"{self.name:<22} {Answer(self.truth)!s:<7} {Answer(self.ours)!s:<7} {theirs[0]}",
            *(f"{'':<38} {other}" for other in theirs[1:]),
        ]


def compare(name: str) -> Comparison:
    files = sorted(path for path in (SETS / name).iterdir() if path.suffix not in (".log", ".json"))
    prefix = re.sub(r"\d+$", "", files[0].name)
    reading = analyze_collectives(*read_flight_records(files))
    theirs: dict[Answer, tuple[str, ...]] = {}
    with tempfile.TemporaryDirectory() as copy:
        for path in files:
            Path(copy, path.name).write_bytes(path.read_bytes())
        for path in files:
            answer = torchfrtrace(Path(copy), prefix, path.name)
            theirs[answer] = (*theirs.get(answer, ()), path.name.removeprefix(prefix))
    return Comparison(name, frozenset(truth_of(name)), frozenset(reading.culprits), theirs)


def main() -> int:
    if importlib.util.find_spec("torch") is None:
        sys.stdout.write("skipped: torch is not installed (pip install '.[trainer]')\n")
        return 0
    sys.stdout.write(f"{'set':<22} {'truth':<7} {'ours':<7} torchfrtrace\n")
    wrong = False
    for directory in sorted(SETS.iterdir()):
        if directory.name in TRUTH or (directory / "fault_injection.log").exists():
            comparison = compare(directory.name)
            wrong |= comparison.ours != comparison.truth
            sys.stdout.write("\n".join(comparison.lines()) + "\n")
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
