"""A listing of a checkpoint directory -> `CheckpointSample`. What marks completion is data (checkpoint_layouts.toml).

The listing is made on the node by the probe, or here by `list_directory` with the same function. Complete is True,
False, or None: the layout leaves no mark and the files have not been quiet for long enough.
A safetensors file states its own length, so one that is cut short, or still grows, shows without any mark.
"""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final

from wattwatch.collectors.probe.node_probe import list_checkpoints
from wattwatch.collectors.samples import CheckpointEntry, CheckpointSample


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """One folder below the checkpoint directory, with all that lies in it."""

    bytes: int
    files: int
    changed_seconds: float  # newest change, wall clock of whoever keeps the files
    sizes: Mapping[str, int]  # relative name -> bytes; bulk files may be left out
    index_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # index -> files it counts as its own
    stated_bytes: Mapping[str, int] = field(default_factory=dict)  # safetensors whose size is not what they state
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RootFile:
    """What lies beside the folders: pointers, links, markers, checkpoints that are one file."""

    kind: str  # "file", "link"
    bytes: int
    changed_seconds: float
    text: str  # a small file's content; a link's target


@dataclass(frozen=True, slots=True)
class CheckpointListing:
    root: Mapping[str, RootFile]
    folders: Mapping[str, CheckpointFolder]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """How one trainer lays out a checkpoint. See checkpoint_layouts.toml for the meaning of each field."""

    framework: str
    name: re.Pattern[str]
    holds: tuple[re.Pattern[str], ...] = ()
    needs: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    absent_beside: str | None = None
    index: str | None = None
    pointers: tuple[str, ...] = ()
    points_to: str = "{name}"
    single_file: bool = False
    quiet_seconds: float = 0.0
    trap: str = ""


def parse_folder(facts: Mapping[str, Any]) -> CheckpointFolder:
    """As the probe ships it. Raises TypeError, ValueError or KeyError on anything else."""
    return CheckpointFolder(
        int(facts["bytes"]),
        int(facts["count"]),
        float(facts["mtime"]),
        {str(name): int(size) for name, size in facts["files"]},
        {str(index): tuple(map(str, names)) for index, names in facts.get("index", {}).items()},
        {str(name): int(size) for name, size in facts.get("short", {}).items()},
        facts.get("error"),
    )


def parse_root_files(root: Mapping[str, Any]) -> dict[str, RootFile]:
    return {
        str(name): RootFile(str(kind), int(size), float(changed), str(text))
        for name, (kind, size, changed, text) in root.items()
    }


def list_checkpoint_directory(directory: str) -> tuple[CheckpointListing, dict[str, float]]:
    """The listing of a local directory, and each entry's age in seconds since its newest change."""
    raw = list_checkpoints(directory)
    listing = CheckpointListing(
        parse_root_files(raw["root"]),
        {name: parse_folder(facts) for name, facts in raw["entries"].items()},
        raw["error"],
    )
    return listing, ages_from_mtime(listing, time.time())


def ages_from_mtime(listing: CheckpointListing, wall_seconds: float) -> dict[str, float]:
    """Ages from the files' own stamps. A file server's clock may differ: better is to have seen the change."""
    ages = {name: max(0.0, wall_seconds - facts.changed_seconds) for name, facts in listing.folders.items()}
    ages.update({name: max(0.0, wall_seconds - file.changed_seconds) for name, file in listing.root.items()})
    return ages


def read_checkpoints(
    directory: str, listing: CheckpointListing, ages_seconds: Mapping[str, float], listing_age_seconds: float = 0.0
) -> CheckpointSample:
    """The checkpoints that `listing` shows, oldest first. `ages_seconds`: entry name -> seconds since it changed."""
    entries = []
    for name, facts in listing.folders.items():
        found = find_layout(name, facts)
        if found is not None:
            entries.append(classify_folder(found, name, facts, listing, ages_seconds.get(name)))
    for name, file in listing.root.items():
        entry = classify_single_file(name, file, listing, ages_seconds.get(name))
        if entry is not None:
            entries.append(entry)
    entries.sort(key=lambda entry: (-1 if entry.step is None else entry.step, -(entry.age_seconds or 0.0)))
    return CheckpointSample(directory, tuple(entries), listing_age_seconds, listing.error)


def find_layout(name: str, facts: CheckpointFolder) -> CheckpointLayout | None:
    """The layout whose name fits and whose files are there most; among equals the first of the table."""
    best, best_score = None, -1
    for layout in LAYOUTS:
        if layout.single_file or not layout.name.search(name):
            continue
        score = sum(any(pattern.search(file) for file in facts.sizes) for pattern in layout.holds)
        if score > best_score:
            best, best_score = layout, score
    return best


def classify_folder(
    layout: CheckpointLayout, name: str, facts: CheckpointFolder, listing: CheckpointListing, age_seconds: float | None
) -> CheckpointEntry:
    step = step_from_name(layout, name)

    def entry(complete: bool | None, why: str) -> CheckpointEntry:
        said = f"{layout.framework}: {why}" + (f"; {layout.trap}" if layout.trap else "")
        return CheckpointEntry(name, step, complete, facts.bytes, age_seconds, said)

    if facts.error is not None:
        return entry(None, f"cannot be read: {facts.error}")
    if STAGING.search(name):
        return entry(False, "still staged under a temporary name")
    for path in layout.absent:
        if path in facts.sizes:
            return entry(False, f"{path} is there")
    if layout.absent_beside is not None and layout.absent_beside.format(name=name) in listing.root:
        return entry(False, f"{layout.absent_beside.format(name=name)} is there")
    for path in layout.needs:
        if path not in facts.sizes:
            return entry(False, f"{path} is not there yet")
    trouble = describe_size_mismatch(facts)
    if trouble:
        return entry(False, trouble)
    if layout.index is not None:
        missing = describe_missing_shard(facts)
        if missing:
            return entry(False, missing)
    if layout.pointers:
        verdict = check_pointer(layout, name, step, listing)
        if verdict is not None:
            return entry(*verdict)
    if facts.files == 0:
        return entry(False, "the folder is empty")
    if layout.quiet_seconds and (age_seconds is None or age_seconds < layout.quiet_seconds):
        quiet = 0.0 if age_seconds is None else age_seconds
        return entry(None, f"quiet for {quiet:.0f} s of the {layout.quiet_seconds:.0f} s that would say it is finished")
    return entry(True, describe_completion(layout, age_seconds))


def describe_completion(layout: CheckpointLayout, age_seconds: float | None) -> str:
    marks = [f"{path} is there" for path in layout.needs]
    if layout.pointers:
        marks.append(f"{' or '.join(layout.pointers)} names it")
    if layout.index is not None:
        marks.append("all files of its index are whole")
    if layout.quiet_seconds and age_seconds is not None:
        marks.append(f"quiet for {age_seconds:.0f} s")
    return ", ".join(marks) or "it is there"


def describe_size_mismatch(facts: CheckpointFolder) -> str:
    """Which safetensors files are shorter, or longer, than they state."""
    for name, stated in facts.stated_bytes.items():
        size = facts.sizes.get(name)
        if size is not None and size != stated:
            kind = "cut short or still being written" if size < stated else "longer than its header says"
            return f"{name} is {kind}: {size} of {stated} bytes"
    return ""


def describe_missing_shard(facts: CheckpointFolder) -> str:
    for index, names in facts.index_files.items():
        folder = index.rpartition("/")[0]
        for name in names:
            path = f"{folder}/{name}" if folder else name
            if path not in facts.sizes:
                return f"{name} of {index} is not there yet"
    return ""


def check_pointer(
    layout: CheckpointLayout, name: str, step: int | None, listing: CheckpointListing
) -> tuple[bool | None, str] | None:
    """None where a pointer names this checkpoint, or a later one; else why it does not count as complete."""
    expected = layout.points_to.format(name=name, step=step)
    for pointer in layout.pointers:
        file = listing.root.get(pointer)
        if file is None:
            continue
        target = file.text.strip().rstrip("/").rpartition("/")[2]
        if target in (expected, "release"):
            return None
        later = re.search(r"(\d+)\D*$", target)
        if later is not None and step is not None and int(later.group(1)) > step:
            return None  # a pointer moves on: the older one was named before it
        return False, f"{pointer} names {target or 'nothing'}"
    return False, f"{' or '.join(layout.pointers)} is not there yet"


def classify_single_file(
    name: str, file: RootFile, listing: CheckpointListing, age_seconds: float | None
) -> CheckpointEntry | None:
    """A checkpoint that is one file: Lightning's .ckpt, Composer's rank files."""
    if file.kind != "file":
        return None
    for layout in LAYOUTS:
        if layout.single_file and layout.name.search(name):
            step = step_from_name(layout, name)
            verdict = check_pointer(layout, name, step, listing) if layout.pointers else None
            complete, why = (True, describe_completion(layout, age_seconds)) if verdict is None else verdict
            return CheckpointEntry(name, step, complete, file.bytes, age_seconds, f"{layout.framework}: {why}")
    return None


def step_from_name(layout: CheckpointLayout, name: str) -> int | None:
    found = layout.name.search(name)
    return int(found["step"]) if found is not None and found["step"] else None


def _load_layouts() -> tuple[CheckpointLayout, ...]:
    entries = tomllib.loads((resources.files(__package__) / "checkpoint_layouts.toml").read_text("utf-8"))["layouts"]
    return tuple(
        CheckpointLayout(
            entry["framework"],
            re.compile(entry["name"]),
            tuple(re.compile(pattern) for pattern in entry.get("holds", [])),
            tuple(entry.get("needs", [])),
            tuple(entry.get("absent", [])),
            entry.get("absent_beside"),
            entry.get("index"),
            tuple(entry.get("pointers", [])),
            entry.get("points_to", "{name}"),
            entry.get("single_file", False),
            float(entry.get("quiet_seconds", 0)),
            entry.get("trap", ""),
        )
        for entry in entries
    )


STAGING: Final = re.compile(r"\.(?:tmp|staging|partial)(?:[-.]|$)|\.tmp-")
LAYOUTS: Final = _load_layouts()
