"""Which ranks `torchfrtrace`, PyTorch's own analyzer of flight records, names as culprits, and which wattwatch names.

    python -m tests.benchmarks.flight_analyzers

Needs torch (the trainer extra). Both get the same sets of records. torchfrtrace is run once for each rank, with its
file listed first: it takes the first file as correct, so the order decides which rank it blames. The order is forced by
wrapping os.walk in the process that runs it; on tmpfs it occurs by itself. torchfrtrace unpickles the files and
executes whatever is in them: use it only with those in tests/data.
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
TRUE_CULPRITS: Final = {
    "gloo_213_barrier_r3": {3},
    "gloo_213_early_r3": {3},
    "gloo_213_missing_r2": {2},
    "nc_early_r3": {3},
    "nc_missing_r2": {2},
}
# Runs the installed analyzer with the given file listed first.
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
class NamedRanks:
    """Ranks that are named, as culprit or as missing in a collective. `failure`: how the analyzer failed."""

    named: frozenset[int]
    failure: str = ""

    def __str__(self) -> str:
        return self.failure or (", ".join(map(str, sorted(self.named))) or "none")


def true_culprits(name: str) -> set[int]:
    if name in TRUE_CULPRITS:
        return TRUE_CULPRITS[name]
    found = re.search(r"Fault ranks: (\[.*\])", (SETS / name / "fault_injection.log").read_text())
    assert found is not None
    return set(json.loads(found[1]))


def torchfrtrace(directory: Path, prefix: str, first: str) -> NamedRanks:
    command = [sys.executable, "-c", ORDERED, first, str(directory), "-p", prefix]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    output = ran.stdout + ran.stderr
    if ran.returncode:
        error = re.findall(r"^(\w*(?:Error|Exception))\b", output, re.MULTILINE)
        return NamedRanks(frozenset(), error[-1] if error else f"exit {ran.returncode}")
    named = {int(rank) for rank in re.findall(r"Culprit rank (\d+)", output)}
    for block in re.split(r"(?=Not all ranks joining)", output):
        missing = re.search(r"missing ranks: \{([\d, ]*)\}", block)
        # For send and recv it lists all ranks outside the pair as missing: that is not an accusation.
        if missing and not re.search(r"collective: \w+:(send|recv)", block):
            named |= {int(rank) for rank in missing[1].split(",") if rank.strip()}
    return NamedRanks(frozenset(named))


@dataclass(frozen=True, slots=True)
class Comparison:
    name: str
    culprits: frozenset[int]
    ours: frozenset[int]
    theirs: dict[NamedRanks, tuple[str, ...]]  # by answer: the files that were listed first

    def lines(self) -> list[str]:
        theirs = [f"{answer} (first: {', '.join(first)})" for answer, first in self.theirs.items()]
        return [
            f"{self.name:<22} {NamedRanks(self.culprits)!s:<7} {NamedRanks(self.ours)!s:<7} {theirs[0]}",
            *(f"{'':<38} {other}" for other in theirs[1:]),
        ]


def compare(name: str) -> Comparison:
    files = sorted(path for path in (SETS / name).iterdir() if path.suffix not in (".log", ".json"))
    prefix = re.sub(r"\d+$", "", files[0].name)
    analysis = analyze_collectives(*read_flight_records(files))
    theirs: dict[NamedRanks, tuple[str, ...]] = {}
    with tempfile.TemporaryDirectory() as copy:
        for path in files:
            Path(copy, path.name).write_bytes(path.read_bytes())
        for path in files:
            answer = torchfrtrace(Path(copy), prefix, path.name)
            theirs[answer] = (*theirs.get(answer, ()), path.name.removeprefix(prefix))
    return Comparison(name, frozenset(true_culprits(name)), frozenset(analysis.culprits), theirs)


def main() -> int:
    if importlib.util.find_spec("torch") is None:
        sys.stdout.write("skipped: torch is not installed (pip install '.[trainer]')\n")
        return 0
    sys.stdout.write(f"{'set':<22} {'true':<7} {'ours':<7} torchfrtrace\n")
    wrong = False
    for directory in sorted(SETS.iterdir()):
        if directory.name in TRUE_CULPRITS or (directory / "fault_injection.log").exists():
            comparison = compare(directory.name)
            wrong |= comparison.ours != comparison.culprits
            sys.stdout.write("\n".join(comparison.lines()) + "\n")
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
