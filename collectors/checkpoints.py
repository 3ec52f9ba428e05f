"""A listing of a checkpoint directory -> `CheckpointSample`. Completion rules are data (checkpoint_layouts.toml).

The listing is made on the node by the probe, or here by `list_checkpoint_directory` with the same function. `complete`
is True, False, or None: the layout is not recognized, or it has no completion marker and the files have not been
unchanged for long enough. A folder's name is not enough to recognize a layout: many trainers name folders alike.

Some files show without any marker that a save is unfinished, whoever wrote it: safetensors headers state the file's
length, zip archives (torch.save) end with a fixed record, names such as model-00001-of-00014 or world_size_4_rank_0
state how many there are, and torch.distributed.checkpoint writes .metadata last.
"""

from __future__ import annotations

import re
import time
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any, Final

from wattwatch.collectors.probe.node_probe import (
    EMPTY,
    NO_END,
    NO_HEADER,
    NOT_SHOWN,
    WEIGHTS,
    WRONG_LENGTH,
    list_checkpoints,
)
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
    indexed_files: Mapping[str, int] = field(default_factory=dict)  # index -> number of files that it refers to
    damaged: Mapping[str, int] = field(default_factory=dict)  # name -> code, see DAMAGE
    checked_files: int = 0  # safetensors files that were seen to be as long as their header says

    cut: bool = False  # the folder has so many files that not all were looked at

    @property
    def lists_all(self) -> bool:
        return len(self.sizes) >= self.files

    @property
    def lists_all_markers(self) -> bool:
        """The probe lists weights last: where it lists any, it has listed every other file."""
        return self.lists_all or (not self.cut and any(name.endswith(WEIGHTS) for name in self.sizes))


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
    damaged: Mapping[str, int] = field(default_factory=dict)  # of the files directly in it, as in CheckpointFolder


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
    beside: tuple[str, ...] = ()
    last: tuple[re.Pattern[str], ...] = ()


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
        {str(index): int(count) for index, count in folder.get("named", {}).items()},
        parse_damage(folder),
        int(folder.get("checked", 0)),
        bool(folder.get("cut", False)),
    )


def parse_damage(news: Mapping[str, Any]) -> dict[str, int]:
    return {str(name): int(code) for name, code in news.get("bad", {}).items()}


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
        parse_damage(raw),
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
    layouts = identify_layouts(listing)
    most_last: dict[int, int] = defaultdict(int)  # per layout: most of the files written last in one folder
    for name, layout in layouts.items():
        if layout is not None and layout.last:
            most_last[id(layout)] = max(most_last[id(layout)], count_last(layout, listing.folders[name]))
    entries = [
        classify_folder(layout, name, listing.folders[name], listing, ages_seconds.get(name), most_last[id(layout)])
        for name, layout in layouts.items()
    ]
    entries += classify_single_files(listing, ages_seconds, may_be_any=not any(layouts.values()))
    # By step, not by time: copying or touching a directory changes times. Names without a step come first.
    entries.sort(key=lambda entry: (-1 if entry.step is None else entry.step, -(entry.age_seconds or 0.0)))
    return CheckpointSample(directory, tuple(entries), listing_age_seconds, listing.error)


def identify_layouts(listing: CheckpointListing) -> dict[str, CheckpointLayout | None]:
    """Every folder that is named like a checkpoint, with its layout; None: not recognized.

    A layout is recognized by files that only its trainer writes. Where a folder has none of them yet, the layout of the
    other checkpoints in the directory is assumed: one directory is written by one trainer.
    """
    named = {
        name: [each for each in LAYOUTS if not each.single_file and each.name.search(name)] for name in listing.folders
    }
    found = {
        name: recognize_layout(candidates, listing.folders[name], listing)
        for name, candidates in named.items()
        if candidates
    }
    known = list({id(layout): layout for layout in found.values() if layout is not None}.values())
    for name, layout in found.items():
        alike = [each for each in known if each in named[name]]
        if layout is None and len(alike) == 1:
            found[name] = alike[0]
    return found


def recognize_layout(
    candidates: Sequence[CheckpointLayout], folder: CheckpointFolder, listing: CheckpointListing
) -> CheckpointLayout | None:
    """The layout with most of its own files in the folder, or a file of its own beside it; the first on a tie."""
    best, most = None, 0
    names = "\n".join(folder.sizes)
    for layout in candidates:
        beside = any(name in listing.root or name in listing.folders for name in layout.beside)
        score = count_kinds(layout.holds, names) + beside
        if score > most:
            best, most = layout, score
    return best


@lru_cache(maxsize=4096)  # every node lists the same directory, again and again
def count_kinds(patterns: tuple[re.Pattern[str], ...], names: str) -> int:
    """How many of the patterns match at least one of the names, one a line."""
    return sum(pattern.search(names) is not None for pattern in patterns)


def classify_folder(
    layout: CheckpointLayout | None,
    name: str,
    folder: CheckpointFolder,
    listing: CheckpointListing,
    age_seconds: float | None,
    most_last: int,
) -> CheckpointEntry:
    step = step_from_name(layout, name)
    complete, why = judge_folder(layout, name, step, folder, listing, age_seconds, most_last)
    if layout is None:
        text = f"layout not recognized: {why}"
    else:
        text = f"{layout.framework} layout: {why}" + (f"; {layout.trap}" if layout.trap else "")
    return CheckpointEntry(name, step, complete, folder.bytes, age_seconds, text)


def judge_folder(
    layout: CheckpointLayout | None,
    name: str,
    step: int | None,
    folder: CheckpointFolder,
    listing: CheckpointListing,
    age_seconds: float | None,
    most_last: int,
) -> tuple[bool | None, str]:
    """Whether it is complete, and why. The order of the checks matters for the message only: the most telling first."""
    if folder.error is not None:
        return None, f"the folder cannot be read: {folder.error}"
    if STAGING.search(name):
        return False, "the save has not finished: the folder still has a temporary name"
    if layout is not None:
        for path in layout.absent:
            if path in folder.sizes:
                return False, f"{path} exists"
        beside = "" if layout.absent_beside is None else layout.absent_beside.format(name=name)
        if beside in listing.root:
            return False, f"{beside} exists"
    unfinished = describe_damage(folder) or describe_size_mismatch(folder) or describe_missing_files(folder)
    if unfinished:
        return False, unfinished
    if folder.files == 0:
        return False, "the folder is empty"
    if layout is None:
        quiet = "" if age_seconds is None else f" and has not changed for {age_seconds:.0f} s"
        listed = "" if folder.lists_all else f" (only {len(folder.sizes)} of them were listed)"
        return None, (
            f"the folder has {folder.files:,} file{'s'[: folder.files != 1]}{listed}{quiet}; its files do not show "
            "whether the save is complete"
        )
    for path in layout.needs:
        if path not in folder.sizes:
            if folder.lists_all_markers:
                return False, f"{path} does not exist yet"
            return None, (
                f"only {len(folder.sizes)} of {folder.files:,} files were listed, and {path} is not one of them"
            )
    pointed, pointer = check_pointer(layout, name, step, listing) if layout.pointers else (False, "")
    if layout.pointers and not pointed and not layout.quiet_seconds:
        return False, pointer
    if layout.last and not pointed and folder.lists_all:
        written = count_last(layout, folder)
        if not written:
            expected = " or ".join(pattern.pattern for pattern in layout.last)
            return False, f"no file that is written last ({expected}) exists yet"
        if written < most_last:
            return None, (
                f"{written} of the files that are written last exist, and another checkpoint has {most_last}: whether "
                "more will follow is not known"
            )
    if layout.pointers and not pointed and any(each in listing.root for each in layout.pointers):
        return None, f"{pointer}, so it is not known whether the save has finished"
    if not pointed and layout.quiet_seconds and (age_seconds is None or age_seconds < layout.quiet_seconds):
        quiet_seconds = 0.0 if age_seconds is None else age_seconds
        return None, (
            f"the folder has not changed for {quiet_seconds:.0f} s; a checkpoint of this layout counts as complete "
            f"after {layout.quiet_seconds:.0f} s without a change"
        )
    return True, describe_completion(layout, folder, pointer if pointed else "", age_seconds)


def count_last(layout: CheckpointLayout, folder: CheckpointFolder) -> int:
    return sum(any(pattern.search(name) for pattern in layout.last) for name in folder.sizes)


def describe_completion(
    layout: CheckpointLayout, folder: CheckpointFolder | None, pointer: str, age_seconds: float | None
) -> str:
    marks = [f"{path} exists" for path in layout.needs]
    if pointer:
        marks.append(pointer)
    if folder is not None:
        marks += [
            f"{'the file' if count == 1 else f'all {count} files'} listed in {index} exist{'s'[: count == 1]}"
            for index, count in folder.indexed_files.items()
            if count
        ]
        if folder.checked_files == 1:
            marks.append("1 safetensors file has the length that its header says")
        elif folder.checked_files:
            marks.append(f"{folder.checked_files} safetensors files have the length that their headers say")
    if layout.quiet_seconds and not pointer and age_seconds is not None:
        marks.append(f"unchanged for {age_seconds:.0f} s")
    return ", ".join(marks) or "the checkpoint exists"


def describe_damage(folder: CheckpointFolder) -> str:
    """The first file whose content shows that it is damaged or unfinished; "" if there is none."""
    return next(
        (describe_damaged_file(name, code, folder.sizes.get(name)) for name, code in folder.damaged.items()), ""
    )


def describe_damaged_file(name: str, code: int, size: int | None) -> str:
    length = "" if size is None else f" ({size:,} bytes)"
    return f"{name}{length} is damaged or still being written: {DAMAGE.get(code, 'its content is not valid')}"


def describe_size_mismatch(folder: CheckpointFolder) -> str:
    """The first safetensors file whose size differs from its header; "" if there is none."""
    for name, stated in folder.stated_bytes.items():
        size = folder.sizes.get(name)
        if size != stated:
            kind = "not as long as its header says" if size is None else "too long"
            if size is not None and size < stated:
                kind = "truncated or still being written"
            has = "" if size is None else f"it has {size} bytes, but "
            return f"{name} is {kind}: {has}its header says {stated} bytes"
    return ""


def describe_missing_files(folder: CheckpointFolder) -> str:
    """Files that an index, or the names of other files, say must exist; "" if none is missing."""
    for index, names in folder.index_files.items():
        parent = index.rpartition("/")[0]
        missing = [name for name in names if (f"{parent}/{name}" if parent else name) not in folder.sizes]
        if missing and (index in folder.indexed_files or folder.lists_all):
            others = len(missing) - 1
            more = f" and {others} other file{'s'[: others != 1]} that do" if others else ", which does"
            return f"{index} lists {missing[0]}{more} not exist yet"
    if not folder.lists_all:
        return ""
    folders_of_shards = set()
    # Stem and suffix -> how many there should be -> the numbers that exist.
    numbered: dict[tuple[str, str], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in folder.sizes:
        if path.endswith(".distcp"):
            folders_of_shards.add(path.rpartition("/")[0])
        elif "-of-" in path or "_rank_" in path:
            base = path.rpartition("/")[2]
            found = NUMBERED.search(base)
            if found is not None and not SHARED_FILE.match(base):
                key = path[: len(path) - len(base) + found.start()], base[found.end() :]
                numbered[key][int(found["total"] or found["world"])].add(int(found["number"] or found["rank"]))
    for (stem, suffix), by_total in numbered.items():
        if not any(len(seen) >= total for total, seen in by_total.items()):
            total, seen = max(by_total.items())
            return f"{len(seen)} of the {total} files {stem}*{suffix} exist (the total is part of the file names)"
    for parent in sorted(folders_of_shards):
        path = f"{parent}/.metadata" if parent else ".metadata"
        if path not in folder.sizes:
            return f"{path} does not exist yet"
    return ""


def check_pointer(
    layout: CheckpointLayout, name: str, step: int | None, listing: CheckpointListing
) -> tuple[bool, str]:
    """Whether a pointer refers to this checkpoint or a later one, and what it points to."""
    expected = layout.points_to.format(name=name, step=step)
    for pointer in layout.pointers:
        file = listing.root.get(pointer)
        if file is None:
            continue
        target = file.text.strip().rstrip("/").rpartition("/")[2]
        # "release" is what Megatron-LM's tracker contains for a converted checkpoint without an iteration.
        if target in (expected, "release"):
            return True, f"{pointer} points to this checkpoint"
        later = re.search(r"(\d+)\D*$", target)
        if later is not None and step is not None and int(later.group(1)) > step:
            return True, f"{pointer} points to a later checkpoint, {target}"  # so it referred to this one before
        return False, f"{pointer} points to {target or 'nothing'}"
    return False, f"the pointer file {' or '.join(layout.pointers)} does not exist yet"


def classify_single_files(
    listing: CheckpointListing, ages_seconds: Mapping[str, float], may_be_any: bool
) -> list[CheckpointEntry]:
    """Checkpoints that are single files. Where folders are checkpoints, and in a directory that is itself one, only
    files of a known layout count: the others belong to those."""
    files = {name: file for name, file in listing.root.items() if file.kind == "file"}
    own = {
        name: next((each for each in LAYOUTS if each.single_file and each.name.search(name)), None) for name in files
    }
    may_be_any = may_be_any and not any(own.values()) and not any(PART.search(name) for name in files)
    shards: dict[tuple[str, str], list[str]] = defaultdict(list)
    entries = []
    for name, file in files.items():
        layout = own[name]
        shard = SHARD.search(name)
        if layout is None and shard is not None:
            shards[name[: shard.start()], shard["suffix"]].append(name)
        elif layout is not None or (may_be_any and SINGLE_FILE.search(name) and not NO_CHECKPOINT.search(name)):
            step, trap = (step_from_name(layout, name), "") if layout is not None else step_from_file_name(name)
            complete, why = judge_single_file(layout, name, step, file, listing)
            framework = "single file" if layout is None else f"{layout.framework} layout"
            text = f"{framework}: {why}{trap}"
            entries.append(CheckpointEntry(name, step, complete, file.bytes, ages_seconds.get(name), text))
    most = max(map(len, shards.values()), default=0)
    for (stem, suffix), names in shards.items():
        complete, why = judge_shards(names, most if len(shards) > 1 else None, listing)
        newest = [ages_seconds[name] for name in names if name in ages_seconds]
        step, trap = step_from_file_name(stem + suffix)
        size = sum(files[name].bytes for name in names)
        text = f"file shards: {why}{trap}"
        entries.append(CheckpointEntry(stem + suffix, step, complete, size, min(newest, default=None), text))
    return entries


def judge_single_file(
    layout: CheckpointLayout | None, name: str, step: int | None, file: RootFile, listing: CheckpointListing
) -> tuple[bool | None, str]:
    if STAGING.search(name):
        return False, "the save has not finished: the file still has a temporary name"
    code = listing.damaged.get(name)
    if code is not None and code != NOT_SHOWN:
        return False, describe_damaged_file(name, code, file.bytes)
    if layout is not None and layout.pointers:
        pointed, pointer = check_pointer(layout, name, step, listing)
        return (True, describe_completion(layout, None, pointer, None)) if pointed else (False, pointer)
    if code == NOT_SHOWN:
        return None, f"{DAMAGE[code]} ({file.bytes:,} bytes)"
    return True, "the file has the length that its header says" if name.endswith(".safetensors") else (
        "the file is whole: the end of its archive exists"
    )


def judge_shards(names: Sequence[str], most: int | None, listing: CheckpointListing) -> tuple[bool | None, str]:
    """Files that each rank wrote. Their names do not say how many there must be: other checkpoints do."""
    for name in names:
        if STAGING.search(name):
            return False, f"{name} still has a temporary name"
        code = listing.damaged.get(name)
        if code is not None and code != NOT_SHOWN:
            return False, describe_damaged_file(name, code, listing.root[name].bytes)
    if most is None:
        return None, f"{len(names)} exist, and there is no other checkpoint that shows how many there must be"
    if len(names) < most:
        return False, f"{len(names)} exist, and another checkpoint has {most}"
    if any(listing.damaged.get(name) == NOT_SHOWN for name in names):
        return None, f"all {len(names)} exist; {DAMAGE[NOT_SHOWN]}"
    return True, f"all {len(names)} exist, as many as in the other checkpoints, and each is whole"


def step_from_file_name(name: str) -> tuple[int | None, str]:
    """The step in the name of a single file, and what else there is to say of the number."""
    for pattern in STEP_IN_FILE_NAME:
        found = pattern.search(name)
        if found is not None:
            return int(found["step"]), ""
    found = EPOCH_IN_FILE_NAME.search(name)
    return (
        (None, "")
        if found is None
        else (int(found[found.lastindex or 0]), "; the number in the file name counts epochs")
    )


def step_from_name(layout: CheckpointLayout | None, name: str) -> int | None:
    """The number in the name; of an unrecognized layout, the same for every layout whose name matches."""
    for each in LAYOUTS if layout is None else (layout,):
        found = each.name.search(name)
        if found is not None and found.groupdict().get("step"):
            return int(found["step"])
    return None


def _load_layouts() -> tuple[CheckpointLayout, ...]:
    entries = tomllib.loads((resources.files(__package__) / "checkpoint_layouts.toml").read_text("utf-8"))["layouts"]
    return tuple(
        CheckpointLayout(
            entry["framework"],
            re.compile(entry["name"]),
            tuple(re.compile(pattern, re.MULTILINE) for pattern in entry.get("holds", [])),
            tuple(entry.get("needs", [])),
            tuple(entry.get("absent", [])),
            entry.get("absent_beside"),
            entry.get("index"),
            tuple(entry.get("pointers", [])),
            entry.get("points_to", "{name}"),
            entry.get("single_file", False),
            float(entry.get("quiet_seconds", 0)),
            entry.get("trap", ""),
            tuple(entry.get("beside", [])),
            tuple(re.compile(pattern, re.MULTILINE) for pattern in entry.get("last", [])),
        )
        for entry in entries
    )


STAGING: Final = re.compile(r"\.(?:tmp|staging|partial)(?:[-.]|$)|\.tmp-|\.orbax-checkpoint-tmp|^tmp[_.]")
# A checkpoint that is one file; a temporary name may follow.
SINGLE_FILE: Final = re.compile(r"\.(?:pt|pth|pth\.tar|ckpt|safetensors|keras|h5)(?:\.tmp.*)?$")
# Written beside checkpoints, or one part of a checkpoint.
NO_CHECKPOINT: Final = re.compile(
    r"^(?:optim|sched|lr_sched|rng|random_states|training_args|scaler|sampler|latest_train_state|vocab|tokenizer)|-of-\d"
)
# Such a file shows that the directory is itself a checkpoint, not a directory of checkpoints.
PART: Final = re.compile(
    r"^(?:\.metadata|COMPLETE\.json|trainer_state\.json|training_args\.bin|model_config\.json|CKPT\.yaml)$"
    r"|\.index\.json$|-of-\d+\.|\.distcp$|^hyperparameters\.yaml$|_states\.pt$|^random_states_"
)
# fairseq, metaseq: checkpoint_1_500-shard3.pt, checkpoint_500-model_part-2-shard0.pt.
SHARD: Final = re.compile(r"(?:-model_part-\d+)?-shard\d+(?P<suffix>\.pt)(?:\.tmp)?$")
STEP_IN_FILE_NAME: Final = (
    re.compile(r"(?i)(?<![a-z])(?:(?:global|train)?[-_]?step|iter|iteration|update|batch)s?[-_=]?(?P<step>\d+)"),
    re.compile(r"^checkpoint_\d+_(?P<step>\d+)(?=\.)"),  # fairseq: epoch, then update
    re.compile(r"^(?:checkpoint[-_]|model_|ckpt[-_])(?P<step>\d+)(?=\.(?!pth\.tar))"),
)
EPOCH_IN_FILE_NAME: Final = re.compile(
    r"(?i)(?<![a-z])(?:checkpoint_)?(?:epoch|ep)[-_=]?(?P<step>\d+)|^checkpoint-?(?P<fairseq>\d+)\.|^(?P<espnet>\d+)epoch\."
)
# "model-00001-of-00014.safetensors", "model_world_size_4_rank_0.pt".
NUMBERED: Final = re.compile(
    r"(?<!\d)(?P<number>\d{2,})-of-(?P<total>\d{2,})(?!\d)|world_size_(?P<world>\d+)_rank_(?P<rank>\d+)(?!\d)"
)
# "shard-00001-model-00002-of-00014": a rank's part of a file. Which ranks write a part of which file is not known.
SHARED_FILE: Final = re.compile(r"shard-\d+-")
DAMAGE: Final = {
    NO_HEADER: "it does not begin with a safetensors header",
    EMPTY: "it is empty",
    WRONG_LENGTH: "it is not as long as its header says",
    NOT_SHOWN: "the format of the file does not show whether it is whole",
    NO_END: "it begins like a zip archive from torch.save, but the end of the archive is missing",
}
LAYOUTS: Final = _load_layouts()
