"""A listing of a checkpoint directory -> `CheckpointSample`. Completion rules are data (checkpoint_layouts.toml).

The listing is made on the node by the probe, or here by `list_checkpoint_directory` with the same function. `complete`
is True, False, or None: the layout has no completion marker and the files have not been unchanged for long enough.
A safetensors file states its own length, so one that is truncated or still growing is detected without a marker.
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
    """One folder in the checkpoint directory, with everything in it."""

    bytes: int
    files: int
    changed_seconds: float  # newest change, on the file server's wall clock
    sizes: Mapping[str, int]  # relative name -> bytes; bulk files may be left out
    index_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # index -> files that it refers to
    # Safetensors files whose size is not what their header says.
    stated_bytes: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RootFile:
    """A file beside the folders: pointer, link, marker, or a checkpoint that is a single file."""

    kind: str  # "file", "link"
    bytes: int
    changed_seconds: float
    text: str  # a small file's content; a link's target


@dataclass(frozen=True, slots=True)
class CheckpointListing:
    """Content of a checkpoint directory: files directly in it, and the newest folders. `error`: why it is
    unreadable."""

    root: Mapping[str, RootFile]
    folders: Mapping[str, CheckpointFolder]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """How one trainer lays out a checkpoint. checkpoint_layouts.toml explains the fields."""

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


def parse_folder(folder: Mapping[str, Any]) -> CheckpointFolder:
    """A folder as the probe sends it. Raises TypeError, ValueError or KeyError on anything else."""
    return CheckpointFolder(
        int(folder["bytes"]),
        int(folder["count"]),
        float(folder["mtime"]),
        {str(name): int(size) for name, size in folder["files"]},
        {str(index): tuple(map(str, names)) for index, names in folder.get("index", {}).items()},
        {str(name): int(size) for name, size in folder.get("short", {}).items()},
        folder.get("error"),
    )


def parse_root_files(root: Mapping[str, Any]) -> dict[str, RootFile]:
    return {
        str(name): RootFile(str(kind), int(size), float(changed), str(text))
        for name, (kind, size, changed, text) in root.items()
    }


def list_checkpoint_directory(directory: str) -> tuple[CheckpointListing, dict[str, float]]:
    """The listing of a local directory, and for each entry the seconds since its newest change."""
    raw = list_checkpoints(directory)
    listing = CheckpointListing(
        parse_root_files(raw["root"]),
        {name: parse_folder(folder) for name, folder in raw["entries"].items()},
        raw["error"],
    )
    return listing, ages_from_mtime(listing, time.time())


def ages_from_mtime(listing: CheckpointListing, wall_seconds: float) -> dict[str, float]:
    """Ages by modification time. The file server's clock may differ: prefer the time at which a change was noticed."""
    ages = {name: max(0.0, wall_seconds - folder.changed_seconds) for name, folder in listing.folders.items()}
    ages.update({name: max(0.0, wall_seconds - file.changed_seconds) for name, file in listing.root.items()})
    return ages


def read_checkpoints(
    directory: str, listing: CheckpointListing, ages_seconds: Mapping[str, float], listing_age_seconds: float = 0.0
) -> CheckpointSample:
    """The checkpoints in `listing`, oldest first. `ages_seconds`: entry name -> seconds since it changed."""
    entries = []
    for name, folder in listing.folders.items():
        found = find_layout(name, folder)
        if found is not None:
            entries.append(classify_folder(found, name, folder, listing, ages_seconds.get(name)))
    for name, file in listing.root.items():
        entry = classify_single_file(name, file, listing, ages_seconds.get(name))
        if entry is not None:
            entries.append(entry)
    # By step, not by time: copying or touching a directory changes times. Names without a step come first.
    entries.sort(key=lambda entry: (-1 if entry.step is None else entry.step, -(entry.age_seconds or 0.0)))
    return CheckpointSample(directory, tuple(entries), listing_age_seconds, listing.error)


def find_layout(name: str, folder: CheckpointFolder) -> CheckpointLayout | None:
    """Of the layouts whose name matches, the one with most of its typical files; the first of the table on a tie."""
    best, best_score = None, -1
    for layout in LAYOUTS:
        if layout.single_file or not layout.name.search(name):
            continue
        score = sum(any(pattern.search(file) for file in folder.sizes) for pattern in layout.holds)
        if score > best_score:
            best, best_score = layout, score
    return best


def classify_folder(
    layout: CheckpointLayout, name: str, folder: CheckpointFolder, listing: CheckpointListing, age_seconds: float | None
) -> CheckpointEntry:
    step = step_from_name(layout, name)

    def entry(complete: bool | None, why: str) -> CheckpointEntry:
        text = f"{layout.framework}: {why}" + (f"; {layout.trap}" if layout.trap else "")
        return CheckpointEntry(name, step, complete, folder.bytes, age_seconds, text)

    if folder.error is not None:
        return entry(None, f"cannot be read: {folder.error}")
    # The order of the checks matters for the message only: the most telling reason first.
    if STAGING.search(name):
        return entry(False, "the save has not finished: the folder still has a temporary name")
    for path in layout.absent:
        if path in folder.sizes:
            return entry(False, f"{path} exists")
    if layout.absent_beside is not None and layout.absent_beside.format(name=name) in listing.root:
        return entry(False, f"{layout.absent_beside.format(name=name)} exists")
    for path in layout.needs:
        if path not in folder.sizes:
            return entry(False, f"{path} does not exist yet")
    mismatch = describe_size_mismatch(folder)
    if mismatch:
        return entry(False, mismatch)
    if layout.index is not None:
        missing = describe_missing_shard(folder)
        if missing:
            return entry(False, missing)
    if layout.pointers:
        verdict = check_pointer(layout, name, step, listing)
        if verdict is not None:
            return entry(*verdict)
    if folder.files == 0:
        return entry(False, "the folder is empty")
    if layout.quiet_seconds and (age_seconds is None or age_seconds < layout.quiet_seconds):
        quiet = 0.0 if age_seconds is None else age_seconds
        return entry(
            None,
            f"the folder has not changed for {quiet:.0f} s, and counts as complete after {layout.quiet_seconds:.0f} s "
            "without a change",
        )
    return entry(True, describe_completion(layout, age_seconds))


def describe_completion(layout: CheckpointLayout, age_seconds: float | None) -> str:
    marks = [f"{path} exists" for path in layout.needs]
    if layout.pointers:
        marks.append(f"{' or '.join(layout.pointers)} points to it")
    if layout.index is not None:
        marks.append("all files listed in the index are complete")
    if layout.quiet_seconds and age_seconds is not None:
        marks.append(f"unchanged for {age_seconds:.0f} s")
    return ", ".join(marks) or "it exists"


def describe_size_mismatch(folder: CheckpointFolder) -> str:
    """The first safetensors file whose size differs from its header; "" if there is none."""
    for name, stated in folder.stated_bytes.items():
        size = folder.sizes.get(name)
        if size is not None and size != stated:
            kind = "truncated or still being written" if size < stated else "too long"
            return f"{name} is {kind}: it has {size} bytes, but its header says {stated} bytes"
    return ""


def describe_missing_shard(folder: CheckpointFolder) -> str:
    for index, names in folder.index_files.items():
        parent = index.rpartition("/")[0]
        for name in names:
            path = f"{parent}/{name}" if parent else name
            if path not in folder.sizes:
                return f"{index} lists {name}, which does not exist yet"
    return ""


def check_pointer(
    layout: CheckpointLayout, name: str, step: int | None, listing: CheckpointListing
) -> tuple[bool | None, str] | None:
    """None where a pointer refers to this checkpoint or a later one; else (False, why it does not count as
    complete)."""
    expected = layout.points_to.format(name=name, step=step)
    for pointer in layout.pointers:
        file = listing.root.get(pointer)
        if file is None:
            continue
        target = file.text.strip().rstrip("/").rpartition("/")[2]
        # "release" is what Megatron-LM's tracker contains for a converted checkpoint without an iteration.
        if target in (expected, "release"):
            return None
        later = re.search(r"(\d+)\D*$", target)
        if later is not None and step is not None and int(later.group(1)) > step:
            return None  # the pointer has moved on, so it referred to this one before
        return False, f"{pointer} points to {target or 'nothing'}"
    return False, f"the pointer file {' or '.join(layout.pointers)} does not exist yet"


def classify_single_file(
    name: str, file: RootFile, listing: CheckpointListing, age_seconds: float | None
) -> CheckpointEntry | None:
    """A checkpoint that is a single file: Lightning's .ckpt, Composer's rank files."""
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
